//! A network card without its threads: one pair of queues, a backend, and what moves between them.
//!
//! A card has an engine for each pair; they share the receive queues (`Rings`) and are else alone.
//! The first one has the control queue. Whoever owns an engine decides when to call it: the worker on notifications
//! and timers, a test on nothing but its own whim.

use std::sync::Arc;
use std::time::Instant;

use net::nic::{Backend, Link, Offloads, Stop};
use virtio_queue::Queue;
use vm_memory::{GuestAddressSpace, VolatileSlice};

use crate::net::card::{rx_queue, tx_queue};
use crate::net::counters::{Counters, count};
use crate::net::ctrl::{Change, CtrlQueue};
use crate::net::features::GUEST_OFFLOADS;
use crate::net::rings::Rings;
use crate::net::rx::{RxBurst, RxQueue};
pub use crate::net::scratch::Scratch;
use crate::net::scratch::recycle;
use crate::net::tx::TxQueue;
use crate::virtio::fault::DriverFault;
use crate::virtio::spec::{F_INDIRECT_DESC, NET_F_CTRL_VQ, NET_F_MRG_RXBUF};
use crate::virtio::vring::Vring;
use crate::virtio::{ActiveQueue, GuestRam, Interrupt};

/// One pair of queues of a running network card.
pub struct NetEngine {
    ram: GuestRam,
    rings: Arc<Rings>,
    /// Number of the pair.
    pair: u16,
    /// `None` where the driver has no such queue; then only flows from before are served.
    tx: Option<TxQueue>,
    ctrl: Option<(u16, CtrlQueue)>,
    features: u64,
    /// What the backend was told last.
    link: Link,
    backend: Box<dyn Backend>,
    interrupt: Arc<dyn Interrupt>,
    counters: Arc<Counters>,
    /// The backend has frames and the guest has no buffers.
    starved: bool,
}

/// What the engines of a card are made from.
pub struct NetParts {
    /// Guest RAM.
    pub ram: GuestRam,
    /// Features that the driver accepted.
    pub features: u64,
    /// The offloads to start with: those of `features`, or what the driver had left of them when
    /// the card was suspended.
    pub offloads: Offloads,
    /// Pairs in use at first; clamped to those that there are.
    pub pairs: u16,
    /// The receive and the transmit queue of each pair that the driver has, at least one.
    pub queues: Vec<[ActiveQueue; 2]>,
    /// The control queue, if the driver enabled it. Left alone unless CTRL_VQ was accepted.
    pub ctrl: Option<ActiveQueue>,
    /// The way back to the driver.
    pub interrupt: Arc<dyn Interrupt>,
    /// The guest's MAC address.
    pub guest_mac: [u8; 6],
    /// Largest IP packet on the link.
    pub mtu: u16,
}

impl NetParts {
    /// Starts the card: an engine for each of `backends` (at least one, and not fewer than pairs),
    /// which are configured with what the driver accepted. `counters` are theirs, in order.
    pub fn into_engines(
        self,
        backends: Vec<Box<dyn Backend>>,
        counters: &[Arc<Counters>],
    ) -> Vec<NetEngine> {
        let indirect = self.features & F_INDIRECT_DESC != 0;
        let mergeable = self.features & NET_F_MRG_RXBUF != 0;
        let link = Link {
            guest_mac: self.guest_mac,
            mtu: self.mtu,
            offloads: self.offloads,
        };
        let (mut rx, mut tx) = (Vec::new(), Vec::new());
        for [of_rx, of_tx] in self.queues {
            rx.push(RxQueue::new(Vring::new(of_rx.queue, indirect), mergeable));
            tx.push(TxQueue::new(Vring::new(of_tx.queue, indirect)));
        }
        let pairs = self
            .pairs
            .clamp(1, u16::try_from(rx.len()).unwrap_or(1).max(1));
        let rings = Arc::new(Rings::new(rx, pairs, self.offloads));
        let mut ctrl = self
            .ctrl
            .filter(|_| self.features & NET_F_CTRL_VQ != 0)
            .map(|ctrl| {
                let vring = Vring::new(ctrl.queue, indirect);
                (
                    ctrl.index,
                    CtrlQueue::new(vring, self.features, rings.len()),
                )
            });
        let mut tx = tx.into_iter();
        let each = (0..).zip(backends).zip(counters);
        each.map(|((pair, mut backend), counters)| {
            backend.configure(&link);
            NetEngine {
                ram: self.ram.clone(),
                rings: rings.clone(),
                pair,
                tx: tx.next(),
                ctrl: ctrl.take(),
                features: self.features,
                link,
                backend,
                interrupt: self.interrupt.clone(),
                counters: counters.clone(),
                starved: false,
            }
        })
        .collect()
    }
}

impl NetEngine {
    /// Stops the card. The backend is told of the reset.
    pub fn into_backend(mut self) -> Box<dyn Backend> {
        self.backend.reset();
        self.backend
    }

    /// Stops the engine without a reset: the backend and the queues that it had alone, with their
    /// indices; the last engine of a card has the receive queues.
    pub fn into_parts(self) -> (Box<dyn Backend>, Vec<(u16, Queue)>) {
        let tx_index = tx_queue(self.pair);
        if let Some(tx) = &self.tx
            && tx.interrupt_deadline().is_some()
        {
            // Whoever goes on with the queue does not know of it.
            self.signal(tx_index);
        }
        let tx = self.tx.map(|queue| (tx_index, queue.into_vring()));
        let ctrl = self.ctrl.map(|(index, queue)| (index, queue.into_vring()));
        let rx = Arc::into_inner(self.rings).into_iter().flat_map(|rings| {
            let rings = (0..).zip(rings.into_queues());
            rings.map(|(pair, queue)| (rx_queue(pair), queue.into_vring()))
        });
        let queues = tx.into_iter().chain(ctrl).chain(rx);
        let queues = queues.map(|(index, vring)| (index, vring.into_queue()));
        (self.backend, queues.collect())
    }

    /// Number of the pair of queues.
    pub fn pair(&self) -> u16 {
        self.pair
    }

    /// Pairs of queues in use by the driver.
    pub fn pairs(&self) -> u16 {
        self.rings.pairs()
    }

    /// What the engines of the card share.
    pub(crate) fn rings(&self) -> &Arc<Rings> {
        &self.rings
    }

    /// Features that the driver accepted.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// The offloads in use now.
    pub fn offloads(&self) -> Offloads {
        self.rings.offloads()
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
        self.rings.is_broken()
    }

    /// Takes one burst of frames from the guest; returns the number of chains that were in it.
    ///
    /// Notifications of the queue are off afterwards, until [`Self::arm_tx`]. The interrupt for its
    /// chains is left to [`Self::process_rx`], which may have a better reason to interrupt.
    pub fn process_tx(&mut self, scratch: &mut Scratch, now: Instant) -> usize {
        let Some(tx) = self.tx.as_mut().filter(|_| !self.rings.is_broken()) else {
            return 0;
        };
        let guard = self.ram.memory();
        let mut burst = std::mem::take(&mut scratch.tx).recycle();
        let result = tx.process(&guard, &mut burst, &mut *self.backend, &self.counters, now);
        scratch.tx = burst.recycle();
        match result {
            Ok(chains) => chains,
            Err(fault) => {
                // Frames before the fault may have been returned.
                self.signal(tx_queue(self.pair));
                self.fail(tx_queue(self.pair), &fault);
                0
            }
        }
    }

    /// Lets the backend work once, and deliver frames; true when it wants another turn soon.
    ///
    /// When the guest's buffers ran out, the notification of the queue is on afterwards.
    pub fn process_rx(&mut self, scratch: &mut Scratch, now: Instant) -> bool {
        if self.is_broken() {
            return false;
        }
        let guard = self.ram.memory();
        let slices = recycle(std::mem::take(&mut scratch.rx));
        let sink = VolatileSlice::from(&mut *scratch.sink);
        let mut lent = self.rings.lend(self.pair);
        if self.rings.is_broken() {
            return false;
        }
        if lent.offloads != self.link.offloads {
            self.link.offloads = lent.offloads;
            self.backend.set_offloads(&self.link);
        }
        let (pair, rx) = (lent.pair, rx_queue(lent.pair));
        let mut ring = RxBurst::new(&mut lent.queue, &guard, slices, sink);
        let stop = self.backend.receive(&mut ring, now);
        let (result, slices) = ring.publish();
        let taken = lent.queue.taken();
        drop(lent);
        scratch.rx = recycle(slices);
        let done = match result {
            Ok(done) => done,
            Err(fault) => {
                self.signal(rx);
                self.fail(rx, &fault);
                return false;
            }
        };
        if done.signal {
            self.signal(rx);
        }
        // A driver that comes for a queue looks at the other one of the pair.
        self.signal_tx(done.signal && pair == self.pair, now);
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
                let mut lent = self.rings.lend(self.pair);
                let rx = rx_queue(lent.pair);
                let armed = lent.queue.arm(&guard);
                // Another worker may have brought buffers since, and not used them.
                let changed = lent.pair != pair || lent.queue.taken() != taken;
                let more = armed.map(|more| more || changed);
                drop(lent);
                // A backend that gives up without having asked gets no second turn at once.
                self.checked(rx, more) && done.starved
            }
        }
    }

    /// Carries out what the driver asks on the control queue; true when there is more of it.
    ///
    /// Does nothing without a control queue. Otherwise it is to be called when the queue is notified,
    /// and once at first: notifications of the queue are on afterwards. Frames delivered after a
    /// change of the offloads keep to it (VIRTIO 1.3, 5.1.6.5.6).
    pub fn process_ctrl(&mut self) -> bool {
        let ctrl = self.ctrl.as_mut().filter(|_| !self.rings.is_broken());
        let Some((index, ctrl)) = ctrl else {
            return false;
        };
        let index = *index;
        let guard = self.ram.memory();
        let (rings, backend, link) = (&self.rings, &mut self.backend, &mut self.link);
        let result = ctrl.process(&guard, &mut |change| match change {
            Change::Offloads(offloads) => {
                link.offloads = (link.offloads - GUEST_OFFLOADS) | offloads;
                rings.set_offloads(link.offloads);
                backend.set_offloads(link);
            }
            Change::Pairs(pairs) => rings.set_pairs(pairs),
        });
        match result {
            Ok(done) => {
                if done.signal {
                    self.interrupt.signal_queue(index);
                }
                count(&self.counters.ctrl_commands, done.commands);
                count(&self.counters.ctrl_refused, done.refused);
                done.more
            }
            Err(fault) => {
                self.interrupt.signal_queue(index);
                self.fail(index, &fault);
                false
            }
        }
    }

    /// Interrupts the driver for chains of the TX queue if that cannot wait any longer.
    fn signal_tx(&mut self, woken: bool, now: Instant) {
        let Some(tx) = &mut self.tx else { return };
        let due = tx.interrupt_due(&self.ram.memory(), woken, now);
        if self.checked(tx_queue(self.pair), due) {
            self.signal(tx_queue(self.pair));
        }
    }

    /// When [`Self::process_rx`] wants to be called although nothing happened.
    pub fn deadline(&self) -> Option<Instant> {
        if self.is_broken() {
            return None;
        }
        let interrupt = self.tx.as_ref().and_then(TxQueue::interrupt_deadline);
        [interrupt, self.backend.deadline()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Asks the guest to notify its next frame; true when there is one already.
    pub fn arm_tx(&mut self) -> bool {
        let Some(tx) = self.tx.as_mut().filter(|_| !self.rings.is_broken()) else {
            return false;
        };
        let more = tx.arm(&self.ram.memory());
        self.checked(tx_queue(self.pair), more)
    }

    fn checked(&mut self, queue: u16, result: Result<bool, DriverFault>) -> bool {
        result.unwrap_or_else(|fault| {
            self.fail(queue, &fault);
            false
        })
    }

    fn signal(&self, queue: u16) {
        // Receive queues have even indices (VIRTIO 1.3, 5.1.2).
        let counter = match queue % 2 {
            0 => &self.counters.rx_interrupts,
            _ => &self.counters.tx_interrupts,
        };
        count(counter, 1);
        self.interrupt.signal_queue(queue);
    }

    fn fail(&mut self, queue: u16, fault: &DriverFault) {
        // Once per reset, because nothing is processed after it.
        if !self.rings.set_broken() {
            return;
        }
        tracing::warn!(queue, %fault, "the network driver broke the virtio specification");
        count(&self.counters.driver_faults, 1);
        self.interrupt.needs_reset();
    }
}
