//! A backend that gives each frame back to the guest, in order.
//!
//! It shows the two things that [`Null`](super::null::Null) has no need of: a bounded queue with a
//! drop at its end, and the reserve, fill, finish steps of delivery.

use std::collections::VecDeque;
use std::time::Instant;

use net::nic::{Backend, Link, Offloads, RxFrame, RxRing, Stop, TxBurst, VnetHdr};

/// Frames that wait for RX buffers at most; more are dropped, as a real link would.
pub const CAPACITY: usize = 256;

/// Frames delivered in one turn, so that the guest's own frames get theirs.
const BURST: usize = 64;

/// Returns every frame.
#[derive(Debug, Default)]
pub struct Loopback {
    waiting: VecDeque<(VnetHdr, Vec<u8>)>,
    /// Emptied buffers, for the frames to come.
    spare: Vec<Vec<u8>>,
    dropped: u64,
}

impl Loopback {
    /// Frames dropped because [`CAPACITY`] was reached.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }
}

impl Backend for Loopback {
    /// None: what the guest is able to send it need not be able to receive. Without offloads all
    /// frames are plain, and the header is empty in both directions.
    fn offloads(&self) -> Offloads {
        Offloads::empty()
    }

    fn configure(&mut self, _link: &Link) {}

    /// The guest reuses its buffers when this returns, so the frames are copied.
    fn transmit(&mut self, burst: &TxBurst<'_>, _now: Instant) {
        for frame in burst.iter() {
            if self.waiting.len() == CAPACITY {
                self.dropped += 1;
                continue;
            }
            let mut bytes = self.spare.pop().unwrap_or_default();
            bytes.resize(frame.len(), 0);
            frame.copy_head(&mut bytes);
            // Nothing that the guest claims about its frame was negotiated: do not repeat it.
            self.waiting.push_back((VnetHdr::default(), bytes));
        }
    }

    fn receive(&mut self, ring: &mut dyn RxRing, _now: Instant) -> Stop {
        for _ in 0..BURST {
            let Some((hdr, bytes)) = self.waiting.front() else {
                return Stop::Idle;
            };
            let Some(mut frame) = RxFrame::reserve(ring, bytes.len()) else {
                return Stop::NoBuffers;
            };
            frame.write(0, bytes);
            frame.finish(hdr, bytes.len());
            self.spare
                .extend(self.waiting.pop_front().map(|(_, bytes)| bytes));
        }
        Stop::Yield
    }

    /// The frames were for the driver that is gone.
    fn reset(&mut self) {
        self.waiting.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::Loopback;

    #[test]
    fn conforms() {
        crate::testing::conformance::run(|| Box::new(Loopback::default()));
    }
}
