//! A link that loses frames, for testing what is on either side of it.
//!
//! [`Lossy`] is a [`Backend`] around another one. Which frames get lost follows from a seed and the
//! order of frames alone, so a run in which the order is fixed can be repeated.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use crate::nic::{Backend, Link, Offloads, RxRing, Stop, TxBurst, VnetHdr, VolatileSlice};

/// Longest frame: Ethernet, and the largest IP packet.
const MAX_FRAME: usize = 14 + 40 + 65535;

/// How bad the link is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Loss {
    /// Frames lost of each million, in each direction. A frame is what crosses the link between
    /// driver and device: with TSO, up to 64 KiB.
    pub per_million: u32,
    /// Start of the sequence of choices.
    pub seed: u64,
}

/// Choices, one per frame (SplitMix64 by Steele, Lea and Flood).
#[derive(Debug)]
struct Dice {
    state: u64,
    per_million: u32,
}

impl Dice {
    fn loses(&mut self) -> bool {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        z % 1_000_000 < u64::from(self.per_million)
    }
}

/// A backend behind a link that loses frames.
pub struct Lossy {
    inner: Box<dyn Backend>,
    to_guest: Dice,
    from_guest: Dice,
    sink: Box<[u8]>,
    /// Kept for its allocation.
    kinds: VecDeque<bool>,
}

impl Lossy {
    /// `inner` behind a link with `loss`.
    pub fn new(inner: Box<dyn Backend>, loss: Loss) -> Self {
        let dice = |salt| Dice {
            state: loss.seed ^ salt,
            per_million: loss.per_million,
        };
        Self {
            inner,
            to_guest: dice(0),
            from_guest: dice(u64::MAX),
            sink: vec![0; MAX_FRAME].into(),
            kinds: VecDeque::new(),
        }
    }
}

impl Backend for Lossy {
    fn offloads(&self) -> Offloads {
        self.inner.offloads()
    }

    fn configure(&mut self, link: &Link) {
        self.inner.configure(link);
    }

    fn transmit(&mut self, burst: &TxBurst<'_>, now: Instant) {
        let mut kept = TxBurst::default();
        for frame in burst.iter() {
            if !self.from_guest.loses() {
                kept.push_frame(&frame);
            }
        }
        self.inner.transmit(&kept, now);
    }

    fn receive(&mut self, ring: &mut dyn RxRing, now: Instant) -> Stop {
        let mut ring = LossyRing {
            inner: ring,
            dice: &mut self.to_guest,
            sink: [VolatileSlice::from(&mut *self.sink)],
            kinds: &mut self.kinds,
        };
        let stop = self.inner.receive(&mut ring, now);
        self.kinds.clear();
        stop
    }

    fn set_offloads(&mut self, link: &Link) {
        self.inner.set_offloads(link);
    }

    fn after_burst(&mut self) -> bool {
        self.inner.after_burst()
    }

    fn host_is_quiet(&mut self) {
        self.inner.host_is_quiet();
    }

    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.poll_fd()
    }

    fn deadline(&self) -> Option<Instant> {
        self.inner.deadline()
    }

    fn reset(&mut self) {
        self.inner.reset();
    }
}

/// A ring some of whose frames lead nowhere.
struct LossyRing<'r, 's> {
    inner: &'r mut dyn RxRing,
    dice: &'r mut Dice,
    sink: [VolatileSlice<'s>; 1],
    /// For each reserved frame: it is the guest's. The others share the sink.
    kinds: &'r mut VecDeque<bool>,
}

impl RxRing for LossyRing<'_, '_> {
    fn reserve(&mut self, len: usize) -> bool {
        let lost = len <= MAX_FRAME && self.dice.loses();
        let reserved = lost || self.inner.reserve(len);
        if reserved {
            self.kinds.push_back(!lost);
        }
        reserved
    }

    fn slices(&self, index: usize) -> &[VolatileSlice<'_>] {
        match self.kinds.get(index) {
            Some(true) => {
                let before = self.kinds.iter().take(index).filter(|real| **real).count();
                self.inner.slices(before)
            }
            Some(false) => &self.sink,
            None => &[],
        }
    }

    fn finish(&mut self, hdr: &VnetHdr, len: usize) {
        if self.kinds.pop_front() == Some(true) {
            self.inner.finish(hdr, len);
        }
    }

    fn unreserve(&mut self) {
        self.kinds.clear();
        self.inner.unreserve();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::ring::MemoryRing;

    #[test]
    fn frames_keep_their_place_around_lost_ones() {
        let mut inner = MemoryRing::new(&[64]);
        let mut dice = Dice {
            state: 5,
            per_million: 500_000,
        };
        let mut sink = [0; 64];
        let mut kinds = VecDeque::new();
        let mut ring = LossyRing {
            inner: &mut inner,
            dice: &mut dice,
            sink: [VolatileSlice::from(&mut sink[..])],
            kinds: &mut kinds,
        };
        for _ in 0..40 {
            assert!(ring.reserve(1));
        }
        let kept: Vec<u8> = (0..40u8).filter(|i| ring.kinds[usize::from(*i)]).collect();
        for i in 0..40u8 {
            ring.slices(0)[0].copy_from(&[i]);
            ring.finish(&VnetHdr::default(), 1);
        }
        assert!((10..30).contains(&kept.len()), "{}", kept.len());
        let seen: Vec<u8> = inner.frames.iter().map(|(_, frame)| frame[0]).collect();
        assert_eq!(seen, kept);
    }
}
