//! A loopback that can do everything: what the guest left to it, it leaves to the guest if that may
//! be, and otherwise does itself.

use std::collections::VecDeque;
use std::time::Instant;

use net::nic::{
    Backend, Link, Offloads, RxFrame, RxRing, Stop, TxBurst, VNET_HDR_GSO_NONE, VNET_HDR_GSO_TCPV4,
    VNET_HDR_GSO_TCPV6, VnetHdr,
};

use super::packet::{View, cut};

#[derive(Default)]
pub(super) struct Mirror {
    offloads: Offloads,
    waiting: VecDeque<(VnetHdr, Vec<u8>)>,
}

impl Backend for Mirror {
    fn offloads(&self) -> Offloads {
        Offloads::all()
    }

    fn configure(&mut self, link: &Link) {
        self.offloads = link.offloads;
    }

    fn transmit(&mut self, burst: &TxBurst<'_>, _now: Instant) {
        for frame in burst.iter() {
            let mut bytes = vec![0; frame.len()];
            frame.copy_head(&mut bytes);
            self.waiting.push_back((frame.hdr, bytes));
        }
    }

    fn receive(&mut self, ring: &mut dyn RxRing, _now: Instant) -> Stop {
        while let Some((hdr, bytes)) = self.waiting.front() {
            let needs = match (hdr.gso_type, View::of(bytes).v4) {
                (VNET_HDR_GSO_NONE, _) if hdr.flags == 0 => Offloads::empty(),
                (VNET_HDR_GSO_NONE, _) => Offloads::GUEST_CSUM,
                (VNET_HDR_GSO_TCPV4, _) => Offloads::GUEST_TSO4,
                (VNET_HDR_GSO_TCPV6, _) => Offloads::GUEST_TSO6,
                (_, true) => Offloads::GUEST_USO4,
                (_, false) => Offloads::GUEST_USO6,
            };
            if !self.offloads.contains(needs) {
                let parts = cut(hdr, bytes);
                self.waiting.pop_front();
                for part in parts.into_iter().rev() {
                    self.waiting.push_front((VnetHdr::default(), part));
                }
                continue;
            }
            let Some(mut frame) = RxFrame::reserve(ring, bytes.len()) else {
                return Stop::NoBuffers;
            };
            frame.write(0, bytes);
            frame.finish(hdr, bytes.len());
            self.waiting.pop_front();
        }
        Stop::Idle
    }
}
