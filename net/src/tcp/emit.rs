//! Segments into frames.

use super::flows::TcpLink;
use super::rx_path::RxPath;
use super::segment::Header;
use super::wire::{CHECKSUM_OFFSET, Encoded, IPV4, IPV6, TCP, encode};
use crate::checksum::Sum;
use crate::flow::FlowKey;
use crate::nic::{
    Offloads, RxFrame, VNET_HDR_F_NEEDS_CSUM, VNET_HDR_GSO_NONE, VNET_HDR_GSO_TCPV4,
    VNET_HDR_GSO_TCPV6, VnetHdr,
};
use crate::wire::ETHERNET;

/// The text of a segment.
#[derive(Clone, Copy, Debug)]
pub(super) enum Payload<'r> {
    /// None.
    Empty,
    /// At most two slices of a ring, in segments of up to `mss` octets on the link.
    Slices {
        front: &'r [u8],
        back: &'r [u8],
        mss: u32,
    },
    /// It is in its place in the frame already, behind [`header_len`] octets.
    InPlace { len: usize, mss: u32 },
}

impl Payload<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Empty => 0,
            Self::Slices { front, back, .. } => front.len() + back.len(),
            Self::InPlace { len, .. } => *len,
        }
    }

    /// Octets per segment on the link, if it has to be cut.
    fn gso_size(&self) -> Option<u16> {
        let (Self::Slices { mss, .. } | Self::InPlace { mss, .. }) = self else {
            return None;
        };
        (self.len() > *mss as usize).then(|| saturating_u16(*mss as usize))
    }
}

/// Octets of headers, Ethernet's included, ahead of the text of a segment with data.
pub(super) fn header_len(key: &FlowKey) -> usize {
    ETHERNET + if key.guest.is_ipv4() { IPV4 } else { IPV6 } + TCP
}

/// Octets of payload that one frame to the guest may carry.
pub(super) fn frame_room(link: &TcpLink, key: &FlowKey, mss: u32) -> u32 {
    let (tso, ip) = if key.guest.is_ipv4() {
        (Offloads::GUEST_TSO4, IPV4)
    } else {
        (Offloads::GUEST_TSO6, IPV6)
    };
    if !link.offloads.contains(tso | Offloads::GUEST_CSUM) {
        return mss;
    }
    // The IP packet is at most 65535 bytes; whole segments, so that none ends up short.
    let most = u32::from(u16::MAX) - u32::try_from(ip + TCP).unwrap_or(60);
    (most / mss).max(1) * mss
}

/// Puts header and payload into the reserved frame and hands it to the guest.
pub(super) fn emit(
    mut frame: RxFrame<'_>,
    link: &TcpLink,
    key: &FlowKey,
    header: &Header,
    payload: Payload<'_>,
    scratch: &mut Vec<u8>,
) {
    let mut encoded = encode(link.macs, key, header, payload.len());
    let hdr = vnet_hdr(link, key, &encoded, &payload);
    // With GUEST_CSUM the guest trusts its host, or finishes the sum when it passes the frame on.
    let complete = hdr.flags & VNET_HDR_F_NEEDS_CSUM == 0;
    encoded.set_checksum(encoded.pseudo);
    let (front, back): (&[u8], &[u8]) = match payload {
        Payload::Slices { front, back, .. } => (front, back),
        Payload::Empty | Payload::InPlace { .. } => (&[], &[]),
    };
    debug_assert!(!complete || !matches!(payload, Payload::InPlace { .. }));
    if link.rx == RxPath::Copy {
        scratch.clear();
        scratch.extend_from_slice(encoded.bytes());
        scratch.extend_from_slice(front);
        scratch.extend_from_slice(back);
        if complete {
            let mut sum = Sum::from_words(0);
            sum.add(&scratch[encoded.tcp_at..]);
            encoded.set_checksum(sum.finish());
            scratch[..encoded.bytes().len()].copy_from_slice(encoded.bytes());
        }
        frame.write(0, scratch);
    } else {
        if complete {
            let mut sum = Sum::from_words(0);
            for part in [encoded.tcp(), front, back] {
                sum.add(part);
            }
            encoded.set_checksum(sum.finish());
        }
        let at = encoded.bytes().len();
        frame.write(0, encoded.bytes());
        frame.write(at, front);
        frame.write(at + front.len(), back);
    }
    frame.finish(&hdr, encoded.bytes().len() + payload.len());
}

/// What to tell the guest beside the frame (VIRTIO 1.3, 5.1.6.4.1).
fn vnet_hdr(link: &TcpLink, key: &FlowKey, encoded: &Encoded, payload: &Payload<'_>) -> VnetHdr {
    if !link.offloads.contains(Offloads::GUEST_CSUM) {
        return VnetHdr::default();
    }
    let gso_size = payload.gso_size();
    VnetHdr {
        flags: VNET_HDR_F_NEEDS_CSUM,
        gso_type: match (gso_size, key.guest.is_ipv4()) {
            (None, _) => VNET_HDR_GSO_NONE,
            (Some(_), true) => VNET_HDR_GSO_TCPV4,
            (Some(_), false) => VNET_HDR_GSO_TCPV6,
        },
        gso_size: gso_size.unwrap_or(0),
        hdr_len: saturating_u16(encoded.bytes().len()),
        csum_start: saturating_u16(encoded.tcp_at),
        csum_offset: CHECKSUM_OFFSET,
    }
}

fn saturating_u16(n: usize) -> u16 {
    u16::try_from(n).unwrap_or(u16::MAX)
}
