//! The driver's side of the control queue.

use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use crate::testing::driver::MockDriver;
use crate::testing::ring::{Buffer, DESC_F_NEXT, DESC_F_WRITE};

/// What an answer holds until the device writes it.
const UNANSWERED: u8 = 0xa5;

impl MockDriver {
    /// Sends a command, class and number first, in descriptors as long as `splits` says; the last
    /// takes what is left. The byte for the answer has one of its own, which is returned.
    ///
    /// # Panics
    /// Panics when the ring is full.
    pub fn send_command(&mut self, request: &[u8], splits: &[usize], indirect: bool) -> Buffer {
        let mut chain = Vec::new();
        let mut rest = request;
        for &split in splits.iter().chain([&usize::MAX]) {
            let (now, later) = rest.split_at(split.min(rest.len()));
            // One descriptor at least, as no driver can do without.
            if !now.is_empty() || (chain.is_empty() && later.is_empty()) {
                let buffer = self.alloc(now.len());
                self.write(buffer, now);
                chain.push((buffer, 0));
            }
            rest = later;
        }
        let answer = self.alloc(1);
        self.write(answer, &[UNANSWERED]);
        chain.push((answer, DESC_F_WRITE));
        self.send_ctrl_chain(&chain, indirect);
        answer
    }

    /// Makes a chain of buffers, each with flags of its own, available on the control queue.
    ///
    /// # Panics
    /// Panics when the ring is full.
    pub fn send_ctrl_chain(&mut self, chain: &[(Buffer, u16)], indirect: bool) {
        let buffers: Vec<_> = chain.iter().map(|&(buffer, _)| buffer).collect();
        if !indirect {
            let flags: Vec<_> = chain.iter().map(|&(_, flags)| flags).collect();
            let added = self.ctrl.add_with(&buffers, |index| flags[index]);
            assert!(added.is_some(), "the mock driver's control ring is full");
            return;
        }
        let table = self.alloc(16 * chain.len());
        let last = chain.len() - 1;
        for (index, &(buffer, flags)) in (0u16..).zip(chain) {
            let next = if usize::from(index) < last {
                DESC_F_NEXT
            } else {
                0
            };
            let at = index + 1;
            self.ctrl
                .set_desc_at(table.addr, index, buffer, flags | next, at);
        }
        let added = self.ctrl.add_table(table);
        assert!(added.is_some(), "the mock driver's control ring is full");
    }

    /// The answer in `buffer`; `None` while the device has not written it.
    pub fn answer(&self, buffer: Buffer) -> Option<u8> {
        let ram = self.ram();
        let byte: u8 = ram.memory().read_obj(GuestAddress(buffer.addr)).unwrap();
        (byte != UNANSWERED).then_some(byte)
    }

    /// Takes back answered commands; returns how many.
    ///
    /// # Panics
    /// Panics when the device says that it wrote anything but one byte.
    pub fn collect_ctrl(&mut self) -> usize {
        let mut count = 0;
        while let Some((_, len)) = self.ctrl.pop_used() {
            assert_eq!(len, 1, "an answer is one byte");
            count += 1;
        }
        count
    }
}
