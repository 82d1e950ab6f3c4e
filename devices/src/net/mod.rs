//! The virtio network card (VIRTIO 1.3, 5.1): one receive, one transmit and one control
//! queue, in front of any [`Backend`].
//!
//! ```text
//!   Net (config space, features)
//!    +- worker: thread, sleeps on doorbells / backend fd / deadline
//!        +- engine: TxQueue -> Backend::transmit, Backend::receive -> RxBurst
//!                     CtrlQueue -> Backend::set_offloads
//! ```

mod card;
mod counters;
mod ctrl;
pub mod engine;
pub mod features;
pub mod loopback;
pub mod null;
mod rx;
mod scratch;
mod sleep;
pub mod tap;
#[cfg(test)]
pub(crate) mod tests;
mod tx;
pub mod vhost;
mod worker;

use std::io;
use std::sync::Arc;

use net::nic::{Backend, Offloads};
use virtio_queue::{Queue, QueueT as _};

use self::card::Card;
pub use self::card::{MAX_QUEUE_PAIRS, NetConfig, NetConfigError, rx_queue, tx_queue};
pub use self::counters::Counters;
use self::engine::{CTRL_QUEUE, NetEngine, NetParts, RX_QUEUE, TX_QUEUE};
pub use self::tx::{MAX_FRAME, TX_BURST, TX_INTERRUPT_DELAY};
use self::worker::Worker;
use crate::virtio::spec::ID_NET;
use crate::virtio::{Activation, VirtioDevice};

/// A network card.
pub struct Net {
    card: Card,
    counters: Arc<Counters>,
    // One of the two holds the backend, unless the worker's thread panicked.
    backend: Option<Box<dyn Backend>>,
    worker: Option<Worker>,
    /// What the driver had made of its offloads when the card was suspended, and its features.
    changed: Option<(u64, Offloads)>,
}

impl Net {
    /// A card in front of `backend`.
    ///
    /// # Errors
    /// Fails when a value of `config` is not allowed.
    pub fn new(config: NetConfig, backend: Box<dyn Backend>) -> Result<Self, NetConfigError> {
        Ok(Self {
            card: Card::new(config, features::offered_features(backend.offloads()))?,
            counters: Arc::default(),
            backend: Some(backend),
            worker: None,
            changed: None,
        })
    }

    /// Hides features from the driver, and those that require them, for comparisons and for narrowing
    /// down a problem.
    pub fn mask_features(&mut self, hidden: u64) {
        self.card.mask_features(hidden);
    }

    /// The counters; they live on across resets.
    pub fn counters(&self) -> Arc<Counters> {
        self.counters.clone()
    }

    fn start(&mut self, activation: Activation, backend: Box<dyn Backend>) -> io::Result<()> {
        let ctrl_queue = self.card.ctrl_queue(activation.features);
        let (mut rx, mut tx, mut ctrl) = (None, None, None);
        for queue in activation.queues {
            match queue.index {
                RX_QUEUE => rx = Some(queue),
                TX_QUEUE => tx = Some(queue),
                index if index == ctrl_queue => ctrl = Some(queue),
                _ => {}
            }
        }
        let (Some(rx), Some(tx)) = (rx, tx) else {
            self.backend = Some(backend);
            return Err(io::Error::other(
                "the driver did not enable the RX and the TX queue",
            ));
        };
        // A driver that accepted CTRL_VQ and does not use it is no worse off than one that did not.
        let queues = [&rx, &tx].into_iter().chain(&ctrl);
        let kicks = queues.map(|queue| queue.kick.clone()).collect();
        // A driver that starts anew has not sent a command yet.
        if ctrl
            .as_ref()
            .is_some_and(|ctrl| ctrl.queue.next_avail() == 0)
        {
            self.changed = None;
        }
        let features = activation.features;
        let offloads = match self.changed {
            Some((before, offloads)) if before == features => offloads,
            _ => features::accepted_offloads(features),
        };
        let parts = NetParts {
            ram: activation.ram,
            features,
            offloads,
            rx,
            tx,
            ctrl,
            interrupt: activation.interrupt,
            counters: self.counters.clone(),
            guest_mac: self.card.config().mac,
            mtu: self.card.config().mtu,
        };
        match Worker::spawn(NetEngine::new(parts, backend), kicks) {
            Ok(worker) => {
                self.worker = Some(worker);
                Ok(())
            }
            Err((error, backend)) => {
                self.backend = Some(backend);
                Err(error)
            }
        }
    }
}

impl VirtioDevice for Net {
    fn device_type(&self) -> u32 {
        ID_NET
    }

    fn queue_max_sizes(&self) -> &[u16] {
        self.card.queue_max_sizes()
    }

    fn device_features(&self) -> u64 {
        self.card.features()
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.card.read_config(offset, data);
    }

    fn activate(&mut self, activation: Activation) -> io::Result<()> {
        let Some(backend) = self.backend.take() else {
            return Err(io::Error::other("the network backend was lost in a panic"));
        };
        self.start(activation, backend)
    }

    fn reset(&mut self) {
        self.changed = None;
        if let Some(worker) = self.worker.take() {
            self.backend = worker.stop().map(NetEngine::into_backend);
        }
    }

    fn suspend(&mut self) -> Vec<(u16, Queue)> {
        let Some(engine) = self.worker.take().and_then(Worker::stop) else {
            return Vec::new();
        };
        self.changed = Some((engine.features(), engine.offloads()));
        let (backend, [rx, tx], ctrl) = engine.into_parts();
        self.backend = Some(backend);
        let ctrl = ctrl.map(|queue| (CTRL_QUEUE, queue));
        [(RX_QUEUE, rx), (TX_QUEUE, tx)]
            .into_iter()
            .chain(ctrl)
            .collect()
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        self.reset();
    }
}
