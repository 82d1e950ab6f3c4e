//! An RX ring in ordinary memory.

use std::collections::VecDeque;

use vm_memory::VolatileSlice;

use crate::nic::{RxRing, VnetHdr};

/// Frames that the guest received, and room for more.
pub(crate) struct MemoryRing {
    /// Sizes of the pieces that a frame's room is made of, in turn.
    pieces: Vec<usize>,
    /// Frames that may still be reserved.
    pub(crate) credit: usize,
    reserved: VecDeque<Vec<VolatileSlice<'static>>>,
    /// Finished frames, oldest first.
    pub(crate) frames: VecDeque<(VnetHdr, Vec<u8>)>,
}

impl MemoryRing {
    /// A ring whose frames consist of pieces of these sizes, repeated as needed.
    pub(crate) fn new(pieces: &[usize]) -> Self {
        Self {
            pieces: pieces.to_vec(),
            credit: usize::MAX,
            reserved: VecDeque::new(),
            frames: VecDeque::new(),
        }
    }
}

impl RxRing for MemoryRing {
    fn reserve(&mut self, len: usize) -> bool {
        if self.reserved.len() >= self.credit {
            return false;
        }
        let mut room = Vec::new();
        let mut have = 0;
        for &piece in self.pieces.iter().cycle() {
            if have >= len.max(1) {
                break;
            }
            // Tests are short: leaked pieces stand for guest memory that outlives the ring.
            room.push(VolatileSlice::from(vec![0xa5; piece].leak()));
            have += piece;
        }
        self.reserved.push_back(room);
        true
    }

    fn slices(&self, index: usize) -> &[VolatileSlice<'_>] {
        &self.reserved[index]
    }

    fn finish(&mut self, hdr: &VnetHdr, len: usize) {
        let room = self.reserved.pop_front().expect("a frame was reserved");
        let mut frame = Vec::new();
        for slice in room {
            let n = slice.len().min(len - frame.len());
            let at = frame.len();
            frame.resize(at + n, 0);
            slice.copy_to(&mut frame[at..]);
        }
        assert_eq!(frame.len(), len, "the frame is longer than its room");
        self.credit = self.credit.saturating_sub(1);
        self.frames.push_back((*hdr, frame));
    }

    fn unreserve(&mut self) {
        self.reserved.clear();
    }
}
