//! The smallest backend: frames from the guest disappear, and none ever arrive.
//!
//! Start here to write one of your own: a backend must take what the guest sends and say that it
//! has nothing to deliver. Everything else has a default.

use std::time::Instant;

use net::nic::{Backend, Link, Offloads, RxRing, Stop, TxBurst};

/// Drops everything.
#[derive(Debug, Default)]
pub struct Null;

impl Backend for Null {
    /// What is dropped needs no checksum and no segmentation, so the guest may leave both to us.
    fn offloads(&self) -> Offloads {
        Offloads::CSUM | Offloads::HOST_TSO4 | Offloads::HOST_TSO6 | Offloads::HOST_USO
    }

    /// Called before the first frame, and again whenever the driver starts anew.
    fn configure(&mut self, _link: &Link) {}

    /// Returning is all it takes for the guest to get its buffers back.
    fn transmit(&mut self, _burst: &TxBurst<'_>, _now: Instant) {}

    /// Without a `poll_fd` and a `deadline`, this is called only after `transmit` and when the
    /// guest notifies a queue.
    fn receive(&mut self, _ring: &mut dyn RxRing, _now: Instant) -> Stop {
        Stop::Idle
    }
}

#[cfg(test)]
mod tests {
    use super::Null;

    #[test]
    fn conforms() {
        crate::testing::conformance::run(|| Box::new(Null));
    }
}
