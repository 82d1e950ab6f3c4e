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

use net::nic::Offloads;
use vmm_sys_util::eventfd::EventFd;

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
    wakers: Mutex<Vec<Arc<EventFd>>>,
}

/// A receive queue for one burst.
pub(crate) struct Lent<'r> {
    /// Number of its pair.
    pub(crate) pair: u16,
    pub(crate) queue: MutexGuard<'r, RxQueue>,
    /// What frames of the burst may ask of the driver.
    pub(crate) offloads: Offloads,
}

/// Ends the sleep of a worker.
pub(crate) fn wake(waker: &EventFd) {
    // Fails only when the counter is full; then there was an edge that nobody has seen yet.
    let _ = waker.write(1);
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

    /// The queue into which the worker of `pair` delivers now. Not to be used if the card is
    /// [broken](Self::is_broken) then.
    pub(crate) fn lend(&self, pair: u16) -> Lent<'_> {
        loop {
            let pairs = self.pairs();
            let target = pair % pairs;
            let queue = self.queues[usize::from(target)].lock();
            let queue = queue.unwrap_or_else(|poison| {
                // Somebody panicked in the middle of a burst.
                self.set_broken();
                poison.into_inner()
            });
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
            wake(waker);
        }
    }

    /// Has `waker` woken at each change.
    pub(crate) fn watch(&self, waker: Arc<EventFd>) {
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use virtio_queue::{Queue, QueueT as _};

    use super::*;
    use crate::virtio::vring::Vring;

    fn rings(count: usize, pairs: u16) -> Rings {
        let queue = |_| RxQueue::new(Vring::new(Queue::new(16).unwrap(), false), false);
        Rings::new((0..count).map(queue).collect(), pairs, Offloads::empty())
    }

    #[test]
    fn a_worker_whose_queue_is_out_of_use_delivers_into_one_in_use() {
        let rings = rings(4, 4);
        let targets = || [0, 1, 2, 3, 4, 5].map(|pair| rings.lend(pair).pair);
        assert_eq!(targets(), [0, 1, 2, 3, 0, 1]);
        rings.set_pairs(3);
        assert_eq!(targets(), [0, 1, 2, 0, 1, 2]);
        rings.set_pairs(1);
        assert_eq!(targets(), [0; 6]);
        rings.set_pairs(u16::MAX);
        assert_eq!(rings.pairs(), 4);
        rings.set_pairs(0);
        assert_eq!(rings.pairs(), 1);
    }

    #[test]
    fn a_change_waits_for_bursts_that_began_before_it() {
        let rings = rings(2, 2);
        let (done, changed) = mpsc::channel();
        std::thread::scope(|scope| {
            let lent = rings.lend(1);
            scope.spawn(|| {
                rings.set_pairs(1);
                rings.set_offloads(Offloads::GUEST_CSUM);
                done.send(()).unwrap();
            });
            let early = changed.recv_timeout(Duration::from_millis(50));
            assert_eq!(early, Err(mpsc::RecvTimeoutError::Timeout));
            drop(lent);
            changed.recv_timeout(Duration::from_secs(20)).unwrap();
            let lent = rings.lend(1);
            assert_eq!((lent.pair, lent.offloads), (0, Offloads::GUEST_CSUM));
        });
    }

    #[test]
    fn a_change_wakes_those_who_may_wait_at_the_wrong_queue() {
        let rings = rings(2, 2);
        let waker = Arc::new(EventFd::new(0).unwrap());
        rings.watch(waker.clone());
        rings.set_pairs(1);
        assert_eq!(waker.read().unwrap(), 1);
    }
}
