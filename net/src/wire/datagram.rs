//! UDP datagrams to the guest, in fragments when they are longer than the link takes (RFC 791, 3.2), or
//! many in one frame when the guest takes them apart itself.

use std::net::{Ipv4Addr, SocketAddr};

use smoltcp::wire::{IpProtocol, checksum};

use super::ipv4::{self, Place};
use super::{ETHERNET, IPV4, Macs, UDP};
use crate::checksum::Sum;
use crate::nic::{
    RxFrame, RxRing, VNET_HDR_F_NEEDS_CSUM, VNET_HDR_GSO_NONE, VNET_HDR_GSO_UDP_L4, VnetHdr,
};
use crate::outbox::Outbox;

/// Longest payload of a datagram in bytes: what an IPv4 packet holds.
pub const MAX_PAYLOAD: usize = 65535 - IPV4 - UDP;

/// Bytes of the headers of a frame that starts a datagram.
pub(crate) const HEADERS: usize = ETHERNET + IPV4 + UDP;
/// Where the checksum field is in a UDP header.
pub(crate) const CHECKSUM_OFFSET: u16 = 6;

/// A datagram to the guest.
#[derive(Clone, Copy, Debug)]
pub struct Datagram<'a> {
    /// The link-layer ends.
    pub macs: Macs,
    /// Who the guest is to think it comes from.
    pub from: SocketAddr,
    /// The guest's end.
    pub to: SocketAddr,
    /// Names the datagram when it is fragmented.
    pub ident: u16,
    /// Largest IP packet on the link, in bytes, at least 68.
    pub mtu: u16,
    /// What it carries, up to [`MAX_PAYLOAD`].
    pub payload: &'a [u8],
}

/// What is left to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// Nothing: the frames are as they would be on a wire.
    Nothing,
    /// The checksum, unless the datagram is fragmented.
    Checksum,
    /// To take the payload apart into datagrams of this many bytes each, the last one at most.
    Run(u16),
}

/// One frame of a datagram. Its headers lie apart from the payload, which stays where it is.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    hdr: VnetHdr,
    head: [u8; HEADERS],
    head_len: usize,
    payload: &'a [u8],
    /// What follows it in the datagram starts here; `None` when it is the last.
    pub next: Option<usize>,
}

/// Frames that a datagram with `payload_len` bytes takes on a link with `mtu`.
pub fn frames(payload_len: usize, mtu: u16) -> usize {
    if fits(payload_len, mtu) {
        1
    } else {
        (UDP + payload_len).div_ceil(fragment_len(mtu))
    }
}

/// True when a datagram with `payload_len` bytes is one frame on a link with `mtu`.
pub fn fits(payload_len: usize, mtu: u16) -> bool {
    IPV4 + UDP + payload_len <= usize::from(mtu)
}

/// Bytes of IP payload in every fragment but the last: a multiple of 8.
fn fragment_len(mtu: u16) -> usize {
    (usize::from(mtu.max(68)) - IPV4) & !7
}

impl<'a> Datagram<'a> {
    /// Queues the datagram's frames. False, and nothing queued, when it cannot be told to the guest:
    /// its ends are of different families or it is too long. `out` must have room for [`frames`].
    pub fn push(&self, out: &mut Outbox) -> bool {
        let mut next = Some(0);
        while let Some(start) = next {
            let Some(part) = self.frame(start, Finish::Nothing) else {
                return false;
            };
            out.push(|frame| {
                frame.extend_from_slice(part.head());
                frame.extend_from_slice(part.payload);
            });
            next = part.next;
        }
        true
    }

    /// The frame at `start`: 0, or what [`Frame::next`] of the one before said. `None` when the
    /// datagram cannot be told to the guest.
    pub fn frame(&self, start: usize, finish: Finish) -> Option<Frame<'a>> {
        let (SocketAddr::V4(from), SocketAddr::V4(to)) = (self.from, self.to) else {
            return None;
        };
        let len = UDP + self.payload.len();
        if self.payload.len() > MAX_PAYLOAD || start >= len {
            return None;
        }
        let whole = fits(self.payload.len(), self.mtu) || matches!(finish, Finish::Run(_));
        let end = if whole {
            len
        } else {
            len.min(start + fragment_len(self.mtu))
        };
        let place = Place {
            ident: self.ident,
            // Bounded by MAX_PAYLOAD.
            offset: u16::try_from(start).unwrap_or(u16::MAX),
            more: end < len,
        };
        let finish = if whole { finish } else { Finish::Nothing };
        let mut head = [0; HEADERS];
        let mut head_len = ETHERNET + IPV4;
        if start == 0 {
            let summed = (finish == Finish::Nothing).then_some(self.payload);
            write_udp(
                &mut head[head_len..],
                self.from,
                self.to,
                self.payload.len(),
                summed,
            );
            head_len += UDP;
        }
        let ip_len = IPV4 + end - start;
        let (src, dst): (Ipv4Addr, Ipv4Addr) = (*from.ip(), *to.ip());
        ipv4::write_header(
            &mut head,
            ip_len,
            self.macs,
            src,
            dst,
            IpProtocol::Udp,
            place,
        );
        Some(Frame {
            hdr: vnet_hdr(finish),
            head,
            head_len,
            payload: &self.payload[start.max(UDP) - UDP..end - UDP],
            next: (end < len).then_some(end),
        })
    }
}

/// Completes a frame whose payload, `len` bytes, already lies [`HEADERS`] into `room`, and hands it to
/// the guest. Its checksum is left to the guest, whatever `finish` says. Gives the room back when the
/// guest cannot be told.
pub(crate) fn finish_in_place(
    mut room: RxFrame<'_>,
    macs: Macs,
    (from, to): (SocketAddr, SocketAddr),
    ident: u16,
    len: usize,
    finish: Finish,
) {
    let (SocketAddr::V4(src), SocketAddr::V4(dst)) = (from, to) else {
        return;
    };
    let finish = match finish {
        Finish::Nothing => Finish::Checksum,
        finish => finish,
    };
    let mut head = [0; HEADERS];
    write_udp(&mut head[ETHERNET + IPV4..], from, to, len, None);
    ipv4::write_header(
        &mut head,
        IPV4 + UDP + len,
        macs,
        *src.ip(),
        *dst.ip(),
        IpProtocol::Udp,
        Place {
            ident,
            ..Place::default()
        },
    );
    room.write(0, &head);
    room.finish(&vnet_hdr(finish), HEADERS + len);
}

/// Writes the UDP header of a datagram with `len` bytes of payload. The checksum is over that, if it is
/// given; without, it is only started, for the guest to finish.
fn write_udp(
    header: &mut [u8],
    from: SocketAddr,
    to: SocketAddr,
    len: usize,
    payload: Option<&[u8]>,
) {
    header[..2].copy_from_slice(&from.port().to_be_bytes());
    header[2..4].copy_from_slice(&to.port().to_be_bytes());
    // Also of a run: the guest puts in the length of each datagram, and corrects the sum.
    let field = u16::try_from(UDP + len).unwrap_or(u16::MAX);
    header[4..6].copy_from_slice(&field.to_be_bytes());
    header[6..8].fill(0);
    let mut sum = Sum::from_words(checksum::pseudo_header(
        &from.ip().into(),
        &to.ip().into(),
        IpProtocol::Udp,
        u32::from(field),
    ));
    let field = match payload {
        None => sum.partial(),
        Some(payload) => {
            sum.add(&header[..UDP]);
            sum.add(payload);
            // A sum of zero would mean that there is none (RFC 768).
            match sum.finish() {
                0 => u16::MAX,
                sum => sum,
            }
        }
    };
    header[6..8].copy_from_slice(&field.to_be_bytes());
}

/// What to tell the guest beside a frame (VIRTIO 1.3, 5.1.6.4.1).
fn vnet_hdr(finish: Finish) -> VnetHdr {
    let (gso_type, gso_size) = match finish {
        Finish::Nothing => return VnetHdr::default(),
        Finish::Checksum => (VNET_HDR_GSO_NONE, 0),
        Finish::Run(segment) => (VNET_HDR_GSO_UDP_L4, segment),
    };
    VnetHdr {
        flags: VNET_HDR_F_NEEDS_CSUM,
        gso_type,
        hdr_len: HEADERS as u16,
        gso_size,
        csum_start: (ETHERNET + IPV4) as u16,
        csum_offset: CHECKSUM_OFFSET,
    }
}

impl Frame<'_> {
    /// Bytes of the frame.
    pub(crate) fn len(&self) -> usize {
        self.head_len + self.payload.len()
    }

    fn head(&self) -> &[u8] {
        &self.head[..self.head_len]
    }

    /// Writes it to the guest. False when the guest has no buffers for it.
    pub fn deliver(&self, ring: &mut dyn RxRing) -> bool {
        let Some(mut room) = RxFrame::reserve(ring, self.len()) else {
            return false;
        };
        room.write(0, self.head());
        room.write(self.head_len, self.payload);
        room.finish(&self.hdr, self.len());
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::datagrams::take;
    use smoltcp::wire::{EthernetFrame, Ipv4Packet, UdpPacket};

    fn datagram(payload: &[u8], mtu: u16) -> Datagram<'_> {
        Datagram {
            macs: Macs {
                gateway: [0x52, 0x55, 10, 0, 2, 2],
                guest: [2, 0, 0, 0, 0, 1],
            },
            from: "192.0.2.1:53".parse().unwrap(),
            to: "10.0.2.15:4096".parse().unwrap(),
            ident: 0x1234,
            mtu,
            payload,
        }
    }

    #[test]
    fn a_short_datagram_is_these_bytes() {
        let mut out = Outbox::default();
        assert!(datagram(b"hi", 1500).push(&mut out));
        assert_eq!(
            out.front().unwrap(),
            [
                2, 0, 0, 0, 0, 1, 0x52, 0x55, 10, 0, 2, 2, 8, 0, // Ethernet
                0x45, 0, 0, 30, 0x12, 0x34, 0x40, 0, 64, 17, 0x5a, 0x8b, 192, 0, 2, 1, 10, 0, 2,
                15, // IPv4
                0, 53, 0x10, 0, 0, 10, 0xb9, 0x2b, b'h', b'i'
            ]
        );
    }

    #[test]
    fn long_datagrams_come_in_fragments_that_add_up() {
        for (len, mtu) in [
            (0, 1500),
            (1472, 1500),
            (1473, 1500),
            (8192, 576),
            (65507, 1500),
        ] {
            let payload: Vec<u8> = (0..len).map(|i: usize| (i % 251) as u8).collect();
            let mut out = Outbox::default();
            assert!(datagram(&payload, mtu).push(&mut out));
            let sent = take(&mut out);
            assert_eq!(sent.len(), frames(len, mtu), "{len} bytes at {mtu}");
            let mut whole = Vec::new();
            for (i, frame) in sent.iter().enumerate() {
                assert!(frame.len() <= 14 + usize::from(mtu));
                let ethernet = EthernetFrame::new_checked(&frame[..]).unwrap();
                let ip = Ipv4Packet::new_checked(ethernet.payload()).unwrap();
                assert!(ip.verify_checksum());
                assert_eq!(ip.ident(), 0x1234);
                assert_eq!(usize::from(ip.frag_offset()), whole.len());
                assert_eq!(ip.more_frags(), i + 1 < sent.len());
                assert_eq!(ip.dont_frag(), sent.len() == 1);
                whole.extend_from_slice(ip.payload());
            }
            let udp = UdpPacket::new_checked(&whole[..]).unwrap();
            let d = datagram(&payload, mtu);
            assert!(udp.verify_checksum(&d.from.ip().into(), &d.to.ip().into()));
            assert_eq!(udp.payload(), payload);
        }
    }

    #[test]
    fn what_ipv4_cannot_say_is_refused() {
        let mut out = Outbox::default();
        let long = vec![0; MAX_PAYLOAD + 1];
        assert!(!datagram(&long, 1500).push(&mut out));
        let six = Datagram {
            from: "[::1]:53".parse().unwrap(),
            ..datagram(b"", 1500)
        };
        assert!(!six.push(&mut out));
        assert!(out.is_empty());
    }
}
