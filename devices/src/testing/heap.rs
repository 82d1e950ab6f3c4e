//! Where the mock driver's buffers lie.

use std::collections::HashMap;

use crate::testing::driver::{HEAP_BASE, RAM_LEN};
use crate::testing::ring::Buffer;

/// Buffers by power-of-two size. They are skewed, so that most lie at odd addresses.
#[derive(Debug, Default)]
pub(super) struct Heap {
    used: u64,
    free: HashMap<u32, Vec<u64>>,
}

impl Heap {
    pub(super) fn alloc(&mut self, len: usize) -> Buffer {
        let len = u32::try_from(len).unwrap();
        let class = len.next_power_of_two().max(32);
        let reused = self.free.entry(class).or_default().pop();
        let addr = reused.unwrap_or_else(|| {
            let addr = HEAP_BASE + self.used;
            self.used += u64::from(class) + 1;
            assert!(
                addr + u64::from(class) < RAM_LEN,
                "the mock driver's RAM is used up"
            );
            addr
        });
        Buffer { addr, len }
    }

    pub(super) fn free(&mut self, buffers: impl IntoIterator<Item = Buffer>) {
        for buffer in buffers {
            let class = buffer.len.next_power_of_two().max(32);
            self.free.entry(class).or_default().push(buffer.addr);
        }
    }
}
