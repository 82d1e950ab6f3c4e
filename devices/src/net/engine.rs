//! The network card without its thread: its queues, a backend, and what moves between them.
//!
//! Whoever owns an engine decides when to call it: the worker on notifications
//! and timers, a test on nothing but its own whim.

use std::sync::Arc;
use std::time::Instant;

use net::nic::{Backend, Link, Offloads, Stop};
use virtio_queue::Queue;
use vm_memory::{GuestAddressSpace, VolatileSlice};

use crate::net::counters::{Counters, count};
use crate::net::ctrl::{Change, CtrlQueue};
use crate::net::features::GUEST_OFFLOADS;
use crate::net::rx::{RxBurst, RxQueue};
pub use crate::net::scratch::Scratch;
use crate::net::scratch::recycle;
use crate::net::tx::TxQueue;
use crate::virtio::fault::DriverFault;
use crate::virtio::spec::{F_INDIRECT_DESC, NET_F_CTRL_VQ, NET_F_MRG_RXBUF};
use crate::virtio::vring::Vring;
use crate::virtio::{ActiveQueue, GuestRam, Interrupt};

/// Index of the receive queue.
pub const RX_QUEUE: u16 = 0;
/// Index of the transmit queue.
pub const TX_QUEUE: u16 = 1;
/// Index of the control queue: behind the one pair of the others (VIRTIO 1.3, 5.1.2).
pub const CTRL_QUEUE: u16 = 2;

/// A running network card.
pub struct NetEngine {
    ram: GuestRam,
    rx: RxQueue,
    tx: TxQueue,
    ctrl: Option<CtrlQueue>,
    features: u64,
    /// What the backend was told last.
    link: Link,
    backend: Box<dyn Backend>,
    interrupt: Arc<dyn Interrupt>,
    counters: Arc<Counters>,
    /// The backend has frames and the guest has no buffers.
    starved: bool,
    broken: bool,
}

/// What an engine is made from.
pub struct NetParts {
    /// Guest RAM.
    pub ram: GuestRam,
    /// Features that the driver accepted.
    pub features: u64,
    /// The offloads to start with: those of `features`, or what the driver had left of them when
    /// the card was suspended.
    pub offloads: Offloads,
    /// The receive queue.
    pub rx: ActiveQueue,
    /// The transmit queue.
    pub tx: ActiveQueue,
    /// The control queue, if the driver enabled it. Left alone unless CTRL_VQ was accepted.
    pub ctrl: Option<ActiveQueue>,
    /// The way back to the driver.
    pub interrupt: Arc<dyn Interrupt>,
    /// Where to count.
    pub counters: Arc<Counters>,
    /// The guest's MAC address.
    pub guest_mac: [u8; 6],
    /// Largest IP packet on the link.
    pub mtu: u16,
}

impl NetEngine {
    /// Starts the card: `backend` is configured with what the driver accepted.
    pub fn new(parts: NetParts, mut backend: Box<dyn Backend>) -> Self {
        let indirect = parts.features & F_INDIRECT_DESC != 0;
        let mergeable = parts.features & NET_F_MRG_RXBUF != 0;
        let link = Link {
            guest_mac: parts.guest_mac,
            mtu: parts.mtu,
            offloads: parts.offloads,
        };
        backend.configure(&link);
        let ctrl = parts
            .ctrl
            .filter(|_| parts.features & NET_F_CTRL_VQ != 0)
            .map(|ctrl| CtrlQueue::new(Vring::new(ctrl.queue, indirect), parts.features, 1));
        Self {
            ram: parts.ram,
            rx: RxQueue::new(Vring::new(parts.rx.queue, indirect), mergeable),
            tx: TxQueue::new(Vring::new(parts.tx.queue, indirect)),
            ctrl,
            features: parts.features,
            link,
            backend,
            interrupt: parts.interrupt,
            counters: parts.counters,
            starved: false,
            broken: false,
        }
    }

    /// Stops the card. The backend is told of the reset.
    pub fn into_backend(mut self) -> Box<dyn Backend> {
        self.backend.reset();
        self.backend
    }

    /// Stops the card without a reset: the backend, the RX and TX queues, and the control queue if
    /// it is in use; all with their indices.
    pub fn into_parts(self) -> (Box<dyn Backend>, [Queue; 2], Option<Queue>) {
        if self.tx.interrupt_deadline().is_some() {
            // Whoever goes on with the queue does not know of it.
            self.signal(TX_QUEUE);
        }
        let queues = [self.rx.into_vring(), self.tx.into_vring()];
        let ctrl = self.ctrl.map(|ctrl| ctrl.into_vring().into_queue());
        (self.backend, queues.map(Vring::into_queue), ctrl)
    }

    /// Features that the driver accepted.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// The offloads in use now.
    pub fn offloads(&self) -> Offloads {
        self.link.offloads
    }

    /// The backend.
    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// The backend's descriptor was watched and did not become readable.
    pub fn host_is_quiet(&mut self) {
        self.backend.host_is_quiet();
    }

    /// The counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The way back to the driver.
    pub fn interrupt(&self) -> Arc<dyn Interrupt> {
        self.interrupt.clone()
    }

    /// True when frames wait for the guest's buffers: what else comes from the host has time.
    pub fn is_starved(&self) -> bool {
        self.starved
    }

    /// True when the driver broke the specification; then nothing happens until the reset.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Takes one burst of frames from the guest; returns the number of chains that were in it.
    ///
    /// Notifications of the queue are off afterwards, until [`Self::arm_tx`]. The interrupt for its
    /// chains is left to [`Self::process_rx`], which may have a better reason to interrupt.
    pub fn process_tx(&mut self, scratch: &mut Scratch, now: Instant) -> usize {
        if self.broken {
            return 0;
        }
        let guard = self.ram.memory();
        let mut burst = std::mem::take(&mut scratch.tx).recycle();
        let result = self
            .tx
            .process(&guard, &mut burst, &mut *self.backend, &self.counters, now);
        scratch.tx = burst.recycle();
        match result {
            Ok(chains) => chains,
            Err(fault) => {
                // Frames before the fault may have been returned.
                self.signal(TX_QUEUE);
                self.fail(TX_QUEUE, &fault);
                0
            }
        }
    }

    /// Lets the backend work once, and deliver frames; true when it wants another turn soon.
    ///
    /// When the guest's buffers ran out, the notification of the queue is on afterwards.
    pub fn process_rx(&mut self, scratch: &mut Scratch, now: Instant) -> bool {
        if self.broken {
            return false;
        }
        let guard = self.ram.memory();
        let slices = recycle(std::mem::take(&mut scratch.rx));
        let sink = VolatileSlice::from(&mut *scratch.sink);
        let mut ring = RxBurst::new(&mut self.rx, &guard, slices, sink);
        let stop = self.backend.receive(&mut ring, now);
        let (result, slices) = ring.publish();
        scratch.rx = recycle(slices);
        let done = match result {
            Ok(done) => done,
            Err(fault) => {
                self.signal(RX_QUEUE);
                self.fail(RX_QUEUE, &fault);
                return false;
            }
        };
        if done.signal {
            self.signal(RX_QUEUE);
        }
        self.signal_tx(done.signal, now);
        // While the guest works on the burst.
        let more = self.backend.after_burst();
        let counters = &*self.counters;
        count(&counters.rx_frames, done.frames);
        count(&counters.rx_bytes, done.bytes);
        count(&counters.rx_bursts, u64::from(done.frames > 0));
        count(&counters.rx_undeliverable, done.undeliverable);
        count(&counters.rx_unfinished, done.unfinished);
        self.starved = stop == Stop::NoBuffers;
        match stop {
            Stop::Idle => more,
            Stop::Yield => true,
            Stop::NoBuffers => {
                count(&counters.rx_starved, 1);
                let more = self.rx.arm(&guard);
                // A backend that gives up without having asked gets no second turn at once.
                self.checked(RX_QUEUE, more) && done.starved
            }
        }
    }

    /// Carries out what the driver asks on the control queue; true when there is more of it.
    ///
    /// Does nothing without a control queue. Otherwise it is to be called when the queue is notified,
    /// and once at first: notifications of the queue are on afterwards. Frames delivered after a
    /// change of the offloads keep to it (VIRTIO 1.3, 5.1.6.5.6).
    pub fn process_ctrl(&mut self) -> bool {
        let Some(ctrl) = self.ctrl.as_mut().filter(|_| !self.broken) else {
            return false;
        };
        let guard = self.ram.memory();
        let (backend, link) = (&mut self.backend, &mut self.link);
        let result = ctrl.process(&guard, &mut |change| match change {
            Change::Offloads(offloads) => {
                link.offloads = (link.offloads - GUEST_OFFLOADS) | offloads;
                backend.set_offloads(link);
            }
            // One is all there is.
            Change::Pairs(_) => {}
        });
        match result {
            Ok(done) => {
                if done.signal {
                    self.interrupt.signal_queue(CTRL_QUEUE);
                }
                count(&self.counters.ctrl_commands, done.commands);
                count(&self.counters.ctrl_refused, done.refused);
                done.more
            }
            Err(fault) => {
                self.interrupt.signal_queue(CTRL_QUEUE);
                self.fail(CTRL_QUEUE, &fault);
                false
            }
        }
    }

    /// Interrupts the driver for chains of the TX queue if that cannot wait any longer.
    fn signal_tx(&mut self, woken: bool, now: Instant) {
        let guard = self.ram.memory();
        let due = self.tx.interrupt_due(&guard, woken, now);
        if self.checked(TX_QUEUE, due) {
            self.signal(TX_QUEUE);
        }
    }

    /// When [`Self::process_rx`] wants to be called although nothing happened.
    pub fn deadline(&self) -> Option<Instant> {
        if self.broken {
            return None;
        }
        let interrupt = self.tx.interrupt_deadline();
        [interrupt, self.backend.deadline()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Asks the guest to notify its next frame; true when there is one already.
    pub fn arm_tx(&mut self) -> bool {
        if self.broken {
            return false;
        }
        let guard = self.ram.memory();
        let more = self.tx.arm(&guard);
        self.checked(TX_QUEUE, more)
    }

    fn checked(&mut self, queue: u16, result: Result<bool, DriverFault>) -> bool {
        result.unwrap_or_else(|fault| {
            self.fail(queue, &fault);
            false
        })
    }

    fn signal(&self, queue: u16) {
        let counter = match queue {
            RX_QUEUE => &self.counters.rx_interrupts,
            _ => &self.counters.tx_interrupts,
        };
        count(counter, 1);
        self.interrupt.signal_queue(queue);
    }

    fn fail(&mut self, queue: u16, fault: &DriverFault) {
        // Once per reset, because nothing is processed after it.
        tracing::warn!(queue, %fault, "the network driver broke the virtio specification");
        count(&self.counters.driver_faults, 1);
        self.broken = true;
        self.interrupt.needs_reset();
    }
}
