//! What the guest sent and the host socket did not want yet.

use vm_memory::VolatileSlice;

/// Bytes between the guest and a full host socket. Bounded by the window that the receiver offers.
#[derive(Debug, Default)]
pub struct Tail {
    bytes: Vec<u8>,
    /// Bytes at the front that were sent.
    sent: usize,
}

impl Tail {
    /// Bytes waiting.
    pub fn len(&self) -> usize {
        self.bytes.len() - self.sent
    }

    /// True when nothing waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes waiting, oldest first.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[self.sent..]
    }

    /// Copies what lies behind the first `skip` bytes of `slices`.
    pub fn push(&mut self, slices: &[VolatileSlice<'_>], mut skip: usize) {
        if self.sent > 0 && self.sent >= self.len() {
            self.bytes.drain(..self.sent);
            self.sent = 0;
        }
        for slice in slices {
            if skip >= slice.len() {
                skip -= slice.len();
                continue;
            }
            let Ok(rest) = slice.offset(skip) else {
                continue;
            };
            skip = 0;
            let at = self.bytes.len();
            self.bytes.resize(at + rest.len(), 0);
            rest.copy_to(&mut self.bytes[at..]);
        }
    }

    /// The oldest `n` bytes were sent.
    pub fn consume(&mut self, n: usize) {
        self.sent += n.min(self.len());
        if self.is_empty() {
            // The socket keeps up again, as a rule for long: give the memory back.
            *self = Self::default();
        }
    }
}
