//! What a network card counts.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of one card, shared with whoever shows them. Named from the guest's side.
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

/// Adds to a counter.
pub(crate) fn count(counter: &AtomicU64, n: u64) {
    if n > 0 {
        counter.fetch_add(n, Ordering::Relaxed);
    }
}
