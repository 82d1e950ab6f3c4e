//! The receive queues of a card, which its workers share.
//!
//! Each worker has a transmit queue of its own, and receives into the queue beside it. That one may be
//! out of use, since the driver says how many pairs it uses (VIRTIO 1.3, 5.1.6.5.5), while flows that
//! began on it go on. Then the worker delivers into a queue of another, and so each queue is locked for
//! the length of a burst. Where every worker has its own, nobody waits for the lock.
//!
//! What the driver chooses is read under the lock. Whoever changes it takes every lock once before the
//! driver has its answer: bursts that started earlier are over by then.

use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mio::Waker;
use net::nic::Offloads;

use crate::net::rx::RxQueue;

/// The receive queues, and what all workers have to know of the card.
#[derive(Debug)]
pub(crate) struct Rings {
    queues: Vec<Mutex<RxQueue>>,
    /// Pairs in use, 1 to the number of queues.
    pairs: AtomicU16,
    /// Bits of [`Offloads`] in use.
    offloads: AtomicU16,
    broken: AtomicBool,
    wakers: Mutex<Vec<Arc<Waker>>>,
}

/// A receive queue for one burst.
pub(crate) struct Lent<'r> {
    /// Number of its pair.
    pub(crate) pair: u16,
    pub(crate) queue: MutexGuard<'r, RxQueue>,
    /// What frames of the burst may ask of the driver.
    pub(crate) offloads: Offloads,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Rings {
    /// `queues` of the pairs from 0 on, at least one, of which `pairs` are in use.
    pub(crate) fn new(queues: Vec<RxQueue>, pairs: u16, offloads: Offloads) -> Self {
        Self {
            queues: queues.into_iter().map(Mutex::new).collect(),
            pairs: AtomicU16::new(pairs),
            offloads: AtomicU16::new(offloads.bits()),
            broken: AtomicBool::new(false),
            wakers: Mutex::default(),
        }
    }

    /// The queues, when no worker has them any more.
    pub(crate) fn into_queues(self) -> impl Iterator<Item = RxQueue> {
        let queues = self.queues.into_iter();
        queues.map(|queue| queue.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    /// Pairs that there are.
    pub(crate) fn len(&self) -> u16 {
        // At most `MAX_QUEUE_PAIRS`.
        u16::try_from(self.queues.len()).unwrap_or(u16::MAX)
    }

    /// Pairs in use.
    pub(crate) fn pairs(&self) -> u16 {
        self.pairs.load(Ordering::Acquire)
    }

    /// The queue into which the worker of `pair` delivers now.
    pub(crate) fn lend(&self, pair: u16) -> Lent<'_> {
        loop {
            let pairs = self.pairs();
            let target = pair % pairs;
            let queue = lock(&self.queues[usize::from(target)]);
            if self.pairs() == pairs {
                return Lent {
                    pair: target,
                    queue,
                    offloads: self.offloads(),
                };
            }
        }
    }

    /// What frames may ask of the driver.
    pub(crate) fn offloads(&self) -> Offloads {
        Offloads::from_bits_truncate(self.offloads.load(Ordering::Acquire))
    }

    /// From the return on, bursts go into the first `pairs` queues (clamped to those that there are).
    pub(crate) fn set_pairs(&self, pairs: u16) {
        let pairs = pairs.clamp(1, self.len());
        self.pairs.store(pairs, Ordering::Release);
        self.settle();
    }

    /// From the return on, frames keep to `offloads`.
    pub(crate) fn set_offloads(&self, offloads: Offloads) {
        self.offloads.store(offloads.bits(), Ordering::Release);
        self.settle();
    }

    fn settle(&self) {
        for queue in &self.queues {
            drop(lock(queue));
        }
        // A worker that waits for buffers may wait at the wrong queue.
        for waker in &*lock(&self.wakers) {
            if let Err(error) = waker.wake() {
                tracing::error!(%error, "cannot wake a network thread");
            }
        }
    }

    /// Has `waker` woken at each change.
    pub(crate) fn watch(&self, waker: Arc<Waker>) {
        lock(&self.wakers).push(waker);
    }

    /// The driver broke the specification: all workers stop working. True for whoever says so first.
    pub(crate) fn set_broken(&self) -> bool {
        !self.broken.swap(true, Ordering::AcqRel)
    }

    /// True when the driver broke the specification.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }
}
