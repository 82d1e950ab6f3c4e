//! A ring as the front-end sets it up, piece by piece.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_queue::{Queue, QueueT as _};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use crate::virtio::{ActiveQueue, Doorbell};

/// Largest size of a ring, whatever the device would offer a driver of its own: the protocol has no
/// question for that. User Mode Linux gives each ring 256 entries, QEMU up to this many.
pub(super) const MAX_SIZE: u16 = 1024;

/// Where a ring's three parts are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Addresses {
    pub(super) desc: GuestAddress,
    pub(super) avail: GuestAddress,
    pub(super) used: GuestAddress,
}

/// What is known of a ring.
#[derive(Default)]
pub(super) struct Ring {
    pub(super) size: u16,
    pub(super) addresses: Option<Addresses>,
    /// Position in the available ring to go on from.
    pub(super) base: u16,
    pub(super) kick: Option<Doorbell>,
    pub(super) enabled: bool,
}

impl Ring {
    /// Everything that it takes to run is there.
    pub(super) fn is_ready(&self) -> bool {
        self.enabled && self.size > 0 && self.addresses.is_some() && self.kick.is_some()
    }

    pub(super) fn set_kick(&mut self, file: File) {
        self.kick = Some(Arc::new(file));
    }

    /// The queue to run, with its positions: the available one as the front-end (or the last run)
    /// left it, the used one as the ring itself has it.
    pub(super) fn activate(
        &self,
        index: u16,
        event_idx: bool,
        memory: &GuestMemoryMmap,
    ) -> io::Result<ActiveQueue> {
        let fail = |problem: String| io::Error::other(format!("ring {index}: {problem}"));
        let (Some(at), Some(kick)) = (self.addresses, self.kick.clone()) else {
            return Err(fail("not set up".into()));
        };
        let queue = (|| {
            let mut queue = Queue::new(MAX_SIZE)?;
            queue.try_set_size(self.size)?;
            queue.try_set_desc_table_address(at.desc)?;
            queue.try_set_avail_ring_address(at.avail)?;
            queue.try_set_used_ring_address(at.used)?;
            queue.set_event_idx(event_idx);
            queue.set_ready(true);
            Ok::<_, virtio_queue::Error>(queue)
        })();
        let mut queue = queue.map_err(|error| fail(error.to_string()))?;
        if !queue.is_valid(memory) {
            return Err(fail("it does not lie in guest memory".into()));
        }
        let used = queue
            .used_idx(memory, Ordering::Acquire)
            .map_err(|error| fail(error.to_string()))?;
        queue.set_next_avail(self.base);
        queue.set_next_used(used.0);
        Ok(ActiveQueue { index, queue, kick })
    }
}
