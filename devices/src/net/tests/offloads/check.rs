//! What a driver may expect of each frame, given what it accepted (VIRTIO 1.3, 5.1.6.4.1).

use net::nic::{
    Offloads, VNET_HDR_F_DATA_VALID, VNET_HDR_F_NEEDS_CSUM, VNET_HDR_GSO_NONE, VNET_HDR_GSO_TCPV4,
    VNET_HDR_GSO_TCPV6, VNET_HDR_GSO_UDP_L4, VnetHdr,
};

use super::packet::{TCP, UDP, View, word};
use crate::testing::Received;
use crate::virtio::spec::NET_HDR_LEN;

/// Most datagrams in a run: `UDP_MAX_SEGMENTS` of Linux before 6.9.
const MAX_RUN: usize = 64;

/// What the driver of a card knows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Accepted {
    pub(super) offloads: Offloads,
    pub(super) mtu: usize,
    pub(super) mergeable: bool,
    /// Bytes that one posted chain holds.
    pub(super) room: usize,
}

/// Checks one frame to the guest; returns where its parts are.
///
/// # Panics
/// Panics at the first thing that is wrong.
pub(super) fn check(accepted: &Accepted, received: &Received) -> View {
    let Received {
        hdr,
        num_buffers,
        bytes,
    } = received;
    let needed = (NET_HDR_LEN + bytes.len()).div_ceil(accepted.room);
    assert_eq!(usize::from(*num_buffers), needed, "num_buffers");
    assert!(accepted.mergeable || needed == 1, "more than one buffer");

    let view = View::of(bytes);
    assert!(view.ip_checksum_holds(bytes), "IPv4 header checksum");
    let takes = |offload| accepted.offloads.contains(offload);
    let known = VNET_HDR_F_NEEDS_CSUM | VNET_HDR_F_DATA_VALID;
    assert_eq!(hdr.flags & !known, 0, "flags {:#x}", hdr.flags);
    if !takes(Offloads::GUEST_CSUM) {
        assert_eq!(*hdr, VnetHdr::default(), "the guest accepted no offload");
    }
    check_size(accepted, hdr, bytes, &view);
    if hdr.flags & VNET_HDR_F_NEEDS_CSUM == 0 {
        let none = view.v4 && view.protocol == UDP && word(bytes, view.transport + 6) == 0;
        assert!(none || view.checksum_holds(bytes), "checksum");
        return view;
    }
    let (start, offset) = (usize::from(hdr.csum_start), usize::from(hdr.csum_offset));
    assert_eq!(start, view.transport, "csum_start");
    assert_eq!(offset, view.checksum_at(), "csum_offset");
    let field = word(bytes, start + offset);
    assert_eq!(field, view.pseudo_sum(bytes), "the pseudo-header's sum");
    view
}

/// An ordinary frame is an MTU long at most; a longer one says how to cut it.
fn check_size(accepted: &Accepted, hdr: &VnetHdr, bytes: &[u8], view: &View) {
    let headers = view.payload - 14;
    let payload = bytes.len() - view.payload;
    let needs = match (hdr.gso_type, view.protocol, view.v4) {
        (VNET_HDR_GSO_NONE, ..) => {
            assert!(headers + payload <= accepted.mtu, "longer than the MTU");
            assert_eq!(hdr.gso_size, 0, "gso_size without a gso_type");
            return;
        }
        (VNET_HDR_GSO_TCPV4, TCP, true) => Offloads::GUEST_TSO4,
        (VNET_HDR_GSO_TCPV6, TCP, false) => Offloads::GUEST_TSO6,
        (VNET_HDR_GSO_UDP_L4, UDP, true) => Offloads::GUEST_USO4,
        (VNET_HDR_GSO_UDP_L4, UDP, false) => Offloads::GUEST_USO6,
        other => panic!("gso_type, protocol and family {other:?}"),
    };
    assert!(accepted.offloads.contains(needs), "{needs:?} not accepted");
    assert_ne!(hdr.flags & VNET_HDR_F_NEEDS_CSUM, 0, "checksums of parts");
    let size = usize::from(hdr.gso_size);
    assert!(
        size > 0 && headers + size <= accepted.mtu,
        "gso_size {size}"
    );
    assert!(payload > size, "no need to cut");
    assert_eq!(usize::from(hdr.hdr_len), view.payload, "hdr_len");
    assert!(view.protocol == TCP || payload.div_ceil(size) <= MAX_RUN);
}
