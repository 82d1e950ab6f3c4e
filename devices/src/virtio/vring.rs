//! The device's side of one split virtqueue (VIRTIO 1.3, 2.7).
//!
//! [`virtio_queue::Queue`] holds the ring's addresses and does the notification arithmetic. This
//! wrapper adds what a fast network card wants: the available index is cached, used elements are
//! made visible once per burst (one Release store), and then there is one interrupt decision.
//!
//! ```text
//!   pop .. pop   push_used .. push_used   publish -> interrupt?   enable_notification -> more?
//! ```

use std::sync::atomic::{Ordering, fence};

use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use crate::virtio::chain::Table;
use crate::virtio::fault::DriverFault;
use crate::virtio::spec::AVAIL_F_NO_INTERRUPT;
use crate::virtio::window::Window;

/// The memory of a virtqueue, looked up for one burst.
#[derive(Clone, Copy, Debug)]
pub struct RingView<'m> {
    /// Guest memory.
    pub mem: &'m GuestMemoryMmap,
    desc: Window<'m>,
    avail: Window<'m>,
    used: Window<'m>,
}

/// A virtqueue in use.
#[derive(Debug)]
pub struct Vring {
    queue: Queue,
    indirect: bool,
    /// `idx` of the available ring when last read; at or ahead of the queue's `next_avail`.
    avail_seen: u16,
    /// Used elements that are written but not yet visible to the driver.
    pending: u16,
}

impl Vring {
    /// Takes over `queue`, which is ready; `indirect` tells if INDIRECT_DESC was negotiated.
    pub fn new(queue: Queue, indirect: bool) -> Self {
        Self {
            avail_seen: queue.next_avail(),
            queue,
            indirect,
            pending: 0,
        }
    }

    /// Gives the queue back.
    pub fn into_queue(self) -> Queue {
        self.queue
    }

    /// Number of entries.
    pub fn size(&self) -> u16 {
        self.queue.size()
    }

    /// Used elements that await [`Self::publish`].
    pub fn pending(&self) -> u16 {
        self.pending
    }

    /// Position in the available ring of the chain that [`Self::pop`] gives next.
    pub fn next_avail(&self) -> u16 {
        self.queue.next_avail()
    }

    /// Looks up the ring in `mem`.
    pub fn view<'m>(&self, mem: &'m GuestMemoryMmap) -> RingView<'m> {
        let (queue, size) = (&self.queue, usize::from(self.queue.size()));
        let window = |addr, len| Window::new(mem, GuestAddress(addr), len);
        RingView {
            mem,
            desc: window(queue.desc_table(), 16 * size),
            // Both end with an event index.
            avail: window(queue.avail_ring(), 2 * size + 6),
            used: window(queue.used_ring(), 8 * size + 6),
        }
    }

    /// The descriptor table.
    pub fn table<'m>(&self, view: &RingView<'m>) -> Table<'m> {
        Table {
            mem: view.mem,
            window: view.desc,
            size: self.queue.size(),
            indirect: self.indirect,
        }
    }

    /// Takes the next available chain; the number is its first descriptor.
    ///
    /// # Errors
    /// Fails when the driver's index is impossible.
    pub fn pop(&mut self, view: &RingView<'_>) -> Result<Option<u16>, DriverFault> {
        let (next, size) = (self.queue.next_avail(), self.queue.size());
        if next == self.avail_seen {
            // Acquire: the entries and descriptors behind the index are read after it.
            let idx = view.avail.load(2, Ordering::Acquire)?;
            if idx.wrapping_sub(next) > size {
                return Err(DriverFault::AvailJump { idx, next, size });
            }
            self.avail_seen = idx;
            if idx == next {
                return Ok(None);
            }
        }
        let entry = 4 + 2 * usize::from(next % size);
        let index = view.avail.load(entry, Ordering::Relaxed)?;
        if index >= size {
            return Err(DriverFault::Index { index, size });
        }
        self.queue.set_next_avail(next.wrapping_add(1));
        Ok(Some(index))
    }

    /// Makes the chain popped last available again.
    pub fn unpop(&mut self) {
        let next = self.queue.next_avail().wrapping_sub(1);
        self.queue.set_next_avail(next);
    }

    /// Returns a chain with `len` bytes written. The driver does not see it before
    /// [`Self::publish`].
    ///
    /// # Errors
    /// Fails when the ring is not in guest memory.
    pub fn push_used(
        &mut self,
        view: &RingView<'_>,
        head: u16,
        len: u32,
    ) -> Result<(), DriverFault> {
        let slot = self.queue.next_used().wrapping_add(self.pending) % self.queue.size();
        let entry = 4 + 8 * usize::from(slot);
        // `struct virtq_used_elem`: two little-endian words, `id` and `len`.
        let elem = u64::from(head) | (u64::from(len) << 32);
        view.used.write(entry, elem.to_le())?;
        self.pending = self.pending.wrapping_add(1);
        Ok(())
    }

    /// Shows all returned chains to the driver; true when it wants an interrupt for them.
    ///
    /// # Errors
    /// Fails when the ring is not in guest memory.
    pub fn publish(&mut self, view: &RingView<'_>) -> Result<bool, DriverFault> {
        if self.pending == 0 {
            return Ok(false);
        }
        let old = self.queue.next_used();
        let new = old.wrapping_add(self.pending);
        self.pending = 0;
        self.queue.set_next_used(new);
        // Release: buffers and used elements are visible before the index is.
        view.used.store(2, new, Ordering::Release)?;
        self.wants_interrupt(view, old)
    }

    /// Position in the used ring that the driver sees.
    pub fn next_used(&self) -> u16 {
        self.queue.next_used()
    }

    /// True when the driver wants an interrupt for what became visible since the used index was `old`.
    ///
    /// # Errors
    /// Fails when the ring is not in guest memory.
    pub fn wants_interrupt(&self, view: &RingView<'_>, old: u16) -> Result<bool, DriverFault> {
        // The index must be visible before we read what the driver wants: it does the same two
        // steps in the opposite order, so at least one of us sees the other (VIRTIO 1.3, 2.7.7.2).
        fence(Ordering::SeqCst);
        if self.queue.event_idx_enabled() {
            let at = 4 + 2 * usize::from(self.queue.size());
            let used_event = view.avail.load(at, Ordering::Relaxed)?;
            Ok(event_passed(used_event, old, self.queue.next_used()))
        } else {
            let flags = view.avail.load(0, Ordering::Relaxed)?;
            Ok(flags & AVAIL_F_NO_INTERRUPT == 0)
        }
    }

    /// Asks the driver to notify us of new buffers; true when some came in before it could know.
    ///
    /// # Errors
    /// Fails when the ring is not in guest memory.
    pub fn enable_notification(&mut self, mem: &GuestMemoryMmap) -> Result<bool, DriverFault> {
        Ok(self.queue.enable_notification(mem)?)
    }

    /// Asks the driver not to notify us.
    ///
    /// # Errors
    /// Fails when the ring is not in guest memory.
    pub fn disable_notification(&mut self, mem: &GuestMemoryMmap) -> Result<(), DriverFault> {
        Ok(self.queue.disable_notification(mem)?)
    }
}

/// True when an index moving from `old` to `new` passed `event` (VIRTIO 1.3, 2.7.7.1).
fn event_passed(event: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::event_passed;

    #[test]
    fn events_are_found_across_the_wrap() {
        for (event, old, new, passed) in [
            (0, 0, 1, true),
            (1, 0, 1, false),
            (4, 0, 5, true),
            (5, 0, 5, false),
            (0xffff, 0, 5, false),
            (0xffff, 0xfffe, 2, true),
            (0, 0xfffe, 2, true),
            (2, 0xfffe, 2, false),
            (0xfffd, 0xfffe, 2, false),
        ] {
            assert_eq!(event_passed(event, old, new), passed, "{event} {old} {new}");
        }
    }
}
