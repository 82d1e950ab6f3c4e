//! What a network card counts.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of one worker of a card, shared with whoever shows them. Named from the guest's
        /// side.
        ///
        /// They are updated once per burst, each on its own: a reader sees no common instant.
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[$doc])* pub $name: AtomicU64,)*
        }

        impl Counters {
            /// Names and present values.
            pub fn snapshot(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.load(Ordering::Relaxed)),)*]
            }
        }
    };
}

counters! {
    /// Frames taken from the guest.
    tx_frames,
    /// Bytes in them, without virtio headers.
    tx_bytes,
    /// Calls of `Backend::transmit`.
    tx_bursts,
    /// Notifications of the TX queue.
    tx_kicks,
    /// Interrupts for the TX queue.
    tx_interrupts,
    /// Frames from the guest longer than any link carries.
    tx_oversized,
    /// Frames given to the guest.
    rx_frames,
    /// Bytes in them, without virtio headers.
    rx_bytes,
    /// Calls of `Backend::receive` that delivered something.
    rx_bursts,
    /// Notifications of the RX queue.
    rx_kicks,
    /// Interrupts for the RX queue.
    rx_interrupts,
    /// Calls of `Backend::receive` that ended for want of RX buffers.
    rx_starved,
    /// Frames that no RX buffer of the guest could hold.
    rx_undeliverable,
    /// Frames that the backend reserved but did not finish.
    rx_unfinished,
    /// Commands of the control queue.
    ctrl_commands,
    /// Those of them that were answered with ERR.
    ctrl_refused,
    /// Times that the driver broke the specification.
    driver_faults,
    /// Times that the worker went to sleep.
    sleeps,
}

/// Counters of a card: those of its workers together.
#[derive(Clone, Debug)]
pub struct CardCounters(pub(crate) Vec<std::sync::Arc<Counters>>);

impl CardCounters {
    /// Counters for `workers`.
    pub(crate) fn new(workers: usize) -> Self {
        Self((0..workers).map(|_| Default::default()).collect())
    }

    /// Names and present values.
    pub fn snapshot(&self) -> Vec<(&'static str, u64)> {
        let mut sums: Vec<(&str, u64)> = Vec::new();
        for each in &self.0 {
            if sums.is_empty() {
                sums = each.snapshot();
            } else {
                for (sum, (_, value)) in sums.iter_mut().zip(each.snapshot()) {
                    sum.1 += value;
                }
            }
        }
        sums
    }

    /// The present value of the counter `name`; 0 when there is none.
    pub fn get(&self, name: &str) -> u64 {
        let snapshot = self.snapshot();
        let found = snapshot.iter().find(|(each, _)| *each == name);
        found.map_or(0, |&(_, value)| value)
    }
}

/// Adds to a counter.
pub(crate) fn count(counter: &AtomicU64, n: u64) {
    if n > 0 {
        counter.fetch_add(n, Ordering::Relaxed);
    }
}
