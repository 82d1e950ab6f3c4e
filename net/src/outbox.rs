//! Small frames for the guest that wait for RX descriptors.
//!
//! Answers of the stack itself (ARP, DHCP, ICMP, DNS) are made whole and queued here. Streams and
//! datagrams never pass through: they wait in their sockets.

use std::collections::VecDeque;

use crate::nic::{RxFrame, RxRing, VnetHdr};

/// Frames at once; more are dropped, as a switch drops what its port cannot take.
const MAX_FRAMES: usize = 256;
/// Emptied buffers that are kept for reuse.
const MAX_SPARE: usize = 32;

/// A bounded queue of complete frames.
#[derive(Debug, Default)]
pub struct Outbox {
    frames: VecDeque<Vec<u8>>,
    spare: Vec<Vec<u8>>,
}

impl Outbox {
    /// Frames waiting.
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// True when none waits.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// True when nothing more is taken.
    pub fn is_full(&self) -> bool {
        self.frames.len() >= MAX_FRAMES
    }

    /// The frame that waits longest.
    pub fn front(&self) -> Option<&[u8]> {
        self.frames.front().map(Vec::as_slice)
    }

    /// Queues the frame that `write` makes in an empty buffer. False when the queue is full.
    pub fn push(&mut self, write: impl FnOnce(&mut Vec<u8>)) -> bool {
        if self.is_full() {
            return false;
        }
        let mut frame = self.spare.pop().unwrap_or_default();
        write(&mut frame);
        self.frames.push_back(frame);
        true
    }

    /// Delivers what there are descriptors for. True when nothing is left.
    pub fn deliver(&mut self, ring: &mut dyn RxRing) -> bool {
        while let Some(frame) = self.frames.front() {
            let Some(mut room) = RxFrame::reserve(ring, frame.len()) else {
                return false;
            };
            room.write(0, frame);
            room.finish(&VnetHdr::default(), frame.len());
            if let Some(mut frame) = self.frames.pop_front()
                && self.spare.len() < MAX_SPARE
            {
                frame.clear();
                self.spare.push(frame);
            }
        }
        true
    }
}
