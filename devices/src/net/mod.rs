//! The virtio network card (VIRTIO 1.3, 5.1): one receive, one transmit and one control
//! queue, in front of any [`Backend`].
//!
//! ```text
//!   Net (config space, features)
//!    +- worker: thread, sleeps on doorbells / backend fd / deadline
//!        +- engine: TxQueue -> Backend::transmit, Backend::receive -> RxBurst
//!                     CtrlQueue -> Backend::set_offloads
//! ```

mod counters;
mod ctrl;
pub mod engine;
pub mod features;
pub mod loopback;
pub mod null;
mod rx;
mod scratch;
#[cfg(test)]
pub(crate) mod tests;
mod tx;
mod worker;

use std::io;
use std::sync::Arc;

use net::nic::{Backend, Offloads};
use virtio_queue::{Queue, QueueT as _};

pub use self::counters::Counters;
use self::engine::{CTRL_QUEUE, NetEngine, NetParts, RX_QUEUE, TX_QUEUE};
pub use self::tx::{MAX_FRAME, TX_BURST, TX_INTERRUPT_DELAY};
use self::worker::Worker;
use crate::virtio::spec::{ID_NET, NET_F_CTRL_VQ, NET_S_LINK_UP};
use crate::virtio::{Activation, VirtioDevice};

/// What can be chosen about a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetConfig {
    /// The guest's MAC address.
    pub mac: [u8; 6],
    /// Largest IP packet on the link, in bytes.
    pub mtu: u16,
    /// Largest size of the RX and of the TX queue, a power of two.
    pub queue_size: u16,
}

impl Default for NetConfig {
    fn default() -> Self {
        Self {
            mac: [0x52, 0x54, 0x00, 0x12, 0x34, 0x56],
            mtu: 1500,
            queue_size: 256,
        }
    }
}

/// Why a [`NetConfig`] is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum NetConfigError {
    /// The queue size is not one that a card can have.
    #[error("queue size {0} is not a power of two from 2 to 1024")]
    QueueSize(u16),
    /// The MTU is below what VIRTIO 1.3, 5.1.4.1 allows.
    #[error("mtu {0} is below 68")]
    Mtu(u16),
    /// The MAC address is not one that a card can have.
    #[error("mac address {0:02x?} is a group address")]
    Mac([u8; 6]),
}

/// A network card.
pub struct Net {
    config: NetConfig,
    features: u64,
    queue_sizes: [u16; 3],
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
        let size = config.queue_size;
        if !size.is_power_of_two() || !(2..=1024).contains(&size) {
            return Err(NetConfigError::QueueSize(size));
        }
        if config.mtu < 68 {
            return Err(NetConfigError::Mtu(config.mtu));
        }
        if config.mac[0] & 1 != 0 {
            return Err(NetConfigError::Mac(config.mac));
        }
        Ok(Self {
            config,
            features: features::offered_features(backend.offloads()),
            queue_sizes: [size; 3],
            counters: Arc::default(),
            backend: Some(backend),
            worker: None,
            changed: None,
        })
    }

    /// Hides features from the driver, and those that require them, for comparisons and for narrowing
    /// down a problem.
    pub fn mask_features(&mut self, hidden: u64) {
        self.features = features::consistent(self.features & !hidden);
    }

    /// The counters; they live on across resets.
    pub fn counters(&self) -> Arc<Counters> {
        self.counters.clone()
    }

    /// `struct virtio_net_config` (VIRTIO 1.3, 5.1.4), up to `mtu`.
    fn config_space(&self) -> [u8; 12] {
        let mut space = [0; 12];
        space[..6].copy_from_slice(&self.config.mac);
        space[6..8].copy_from_slice(&NET_S_LINK_UP.to_le_bytes());
        space[8..10].copy_from_slice(&1u16.to_le_bytes()); // max_virtqueue_pairs
        space[10..].copy_from_slice(&self.config.mtu.to_le_bytes());
        space
    }

    fn start(&mut self, activation: Activation, backend: Box<dyn Backend>) -> io::Result<()> {
        let (mut rx, mut tx, mut ctrl) = (None, None, None);
        for queue in activation.queues {
            match queue.index {
                RX_QUEUE => rx = Some(queue),
                TX_QUEUE => tx = Some(queue),
                CTRL_QUEUE => ctrl = Some(queue),
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
            guest_mac: self.config.mac,
            mtu: self.config.mtu,
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
        // Without CTRL_VQ on offer there is no control queue (VIRTIO 1.3, 5.1.2).
        let without_ctrl = usize::from(self.features & NET_F_CTRL_VQ == 0);
        &self.queue_sizes[..self.queue_sizes.len() - without_ctrl]
    }

    fn device_features(&self) -> u64 {
        self.features
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let space = self.config_space();
        for (at, byte) in (offset..).zip(data) {
            let at = usize::try_from(at).unwrap_or(usize::MAX);
            *byte = space.get(at).copied().unwrap_or(0);
        }
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
