//! The virtio network card (VIRTIO 1.3, 5.1): pairs of a receive and a transmit queue and one control
//! queue, in front of a [`Backend`] per pair.
//!
//! ```text
//!   Net (config space, features)
//!    +- worker 0..N: thread, sleeps on doorbells / backend fd / deadline
//!        +- engine: TxQueue -> Backend::transmit, Backend::receive -> RxBurst
//!                     CtrlQueue (worker 0) -> Rings -> every backend's set_offloads
//! ```

mod card;
mod counters;
mod ctrl;
pub mod engine;
pub mod features;
pub mod loopback;
pub mod null;
mod rings;
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

use net::nic::{Backend, Offloads};
use virtio_queue::Queue;

use self::card::{Card, CardQueues, no_pairs};
pub use self::card::{MAX_QUEUE_PAIRS, NetConfig, NetConfigError, rx_queue, tx_queue};
pub use self::counters::{CardCounters, Counters};
use self::engine::{NetEngine, NetParts};
use self::sleep::Kick;
pub use self::tx::{MAX_FRAME, TX_BURST, TX_INTERRUPT_DELAY};
use self::worker::Worker;
use crate::virtio::spec::ID_NET;
use crate::virtio::{Activation, ActiveQueue, Doorbell, VirtioDevice};

/// A network card.
pub struct Net {
    card: Card,
    counters: CardCounters,
    // One of the two holds the backends, in the order of their pairs, but for those whose worker
    // panicked.
    backends: Vec<Box<dyn Backend>>,
    workers: Vec<Worker>,
    /// What the driver had chosen when the card was suspended.
    chosen: Option<Chosen>,
}

/// What a driver chose by commands, and the features it had accepted.
#[derive(Clone, Copy, Debug)]
struct Chosen {
    features: u64,
    offloads: Offloads,
    pairs: u16,
}

impl Net {
    /// A card in front of `backend`.
    ///
    /// # Errors
    /// Fails when a value of `config` is not allowed; more than one pair of queues takes as many
    /// backends, see [`Self::with_backends`].
    pub fn new(config: NetConfig, backend: Box<dyn Backend>) -> Result<Self, NetConfigError> {
        Self::with_backends(config, vec![backend])
    }

    /// A card in front of as many `backends` as it has pairs of queues. A frame for the guest goes
    /// into the receive queue of the backend that has it.
    ///
    /// # Errors
    /// Fails when a value of `config` is not allowed.
    pub fn with_backends(
        config: NetConfig,
        backends: Vec<Box<dyn Backend>>,
    ) -> Result<Self, NetConfigError> {
        if backends.is_empty() || backends.len() != usize::from(config.queue_pairs) {
            return Err(NetConfigError::QueuePairs(config.queue_pairs));
        }
        let offloads = backends.iter().map(|backend| backend.offloads());
        let offloads = offloads.fold(Offloads::all(), |all, each| all & each);
        Ok(Self {
            card: Card::new(config, features::offered_features(offloads))?,
            counters: CardCounters::new(backends.len()),
            backends,
            workers: Vec::new(),
            chosen: None,
        })
    }

    /// Hides features from the driver, and those that require them, for comparisons and for narrowing
    /// down a problem.
    pub fn mask_features(&mut self, hidden: u64) {
        self.card.mask_features(hidden);
    }

    /// The counters; they live on across resets.
    pub fn counters(&self) -> CardCounters {
        self.counters.clone()
    }

    fn start(&mut self, activation: Activation) -> io::Result<()> {
        let features = activation.features;
        let sorted = self.card.sort(activation.queues, features);
        if sorted.start_anew() {
            self.chosen = None;
        }
        // A driver that accepted CTRL_VQ and does not use it is no worse off than one that did not.
        let CardQueues {
            pairs: queues,
            ctrl,
        } = sorted;
        if queues.is_empty() {
            return Err(no_pairs());
        }
        let mut kicks = self.kicks(&queues);
        if let Some(ctrl) = &ctrl {
            kicks[0].push((Kick::Ctrl, ctrl.kick.clone()));
        }
        let chosen = self.chosen.filter(|chosen| chosen.features == features);
        let chosen = chosen.unwrap_or(Chosen {
            features,
            offloads: features::accepted_offloads(features),
            // One until a command says otherwise (VIRTIO 1.3, 5.1.6.5.5). Where no command can come to
            // us, whoever gets it has started the right queues.
            pairs: if ctrl.is_some() { 1 } else { u16::MAX },
        });
        let parts = NetParts {
            ram: activation.ram,
            features,
            offloads: chosen.offloads,
            pairs: chosen.pairs,
            queues,
            ctrl,
            interrupt: activation.interrupt,
            guest_mac: self.card.config().mac,
            mtu: self.card.config().mtu,
        };
        let engines = parts.into_engines(std::mem::take(&mut self.backends), &self.counters.0);
        let mut failed = None;
        for (engine, kicks) in engines.into_iter().zip(kicks) {
            if failed.is_some() {
                self.backends.push(engine.into_backend());
                continue;
            }
            match Worker::spawn(engine, kicks) {
                Ok(worker) => self.workers.push(worker),
                Err((error, backend)) => {
                    let backends = self.stop().into_iter().map(NetEngine::into_backend);
                    self.backends = backends.chain([backend]).collect();
                    failed = Some(error);
                }
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// The doorbells of each worker: of its transmit queue, and of all receive queues into which it
    /// may deliver.
    fn kicks(&self, queues: &[[ActiveQueue; 2]]) -> Vec<Vec<(Kick, Doorbell)>> {
        let each = 0..self.backends.len();
        let of = |worker: usize| {
            let rx = queues.iter().take(worker + 1);
            let rx = rx.map(|[rx, _]| (Kick::Rx, rx.kick.clone()));
            let tx = queues
                .get(worker)
                .map(|[_, tx]| (Kick::Tx, tx.kick.clone()));
            rx.chain(tx).collect()
        };
        each.map(of).collect()
    }

    /// Stops all workers; what is left of them, in order. None of them runs any more when the first
    /// backend hears of it.
    fn stop(&mut self) -> Vec<NetEngine> {
        let workers = std::mem::take(&mut self.workers);
        workers.iter().for_each(Worker::ask_to_stop);
        workers.into_iter().filter_map(Worker::stop).collect()
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
        if self.backends.len() != usize::from(self.card.config().queue_pairs) {
            return Err(io::Error::other("a network backend was lost in a panic"));
        }
        self.start(activation)
    }

    fn reset(&mut self) {
        self.chosen = None;
        let engines = self.stop().into_iter();
        self.backends.extend(engines.map(NetEngine::into_backend));
    }

    fn suspend(&mut self) -> Vec<(u16, Queue)> {
        let engines = self.stop();
        let Some(first) = engines.first() else {
            return Vec::new();
        };
        self.chosen = Some(Chosen {
            features: first.features(),
            offloads: first.offloads(),
            pairs: first.pairs(),
        });
        let mut queues = Vec::new();
        for engine in engines {
            let (backend, some) = engine.into_parts();
            self.backends.push(backend);
            queues.extend(some);
        }
        queues.sort_by_key(|&(index, _)| index);
        queues
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        self.reset();
    }
}
