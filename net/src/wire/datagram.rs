//! UDP datagrams to the guest, in fragments when they are longer than the link takes (RFC 791, 3.2).

use std::net::SocketAddr;

use smoltcp::wire::{IpProtocol, checksum};

use super::ipv4::{self, Place};
use super::{ETHERNET, IPV4, Macs, UDP};
use crate::checksum::Sum;
use crate::outbox::Outbox;

/// Longest payload of a datagram in bytes: what an IPv4 packet holds.
pub const MAX_PAYLOAD: usize = 65535 - IPV4 - UDP;

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

/// Frames that a datagram with `payload_len` bytes takes on a link with `mtu`.
pub fn frames(payload_len: usize, mtu: u16) -> usize {
    let len = UDP + payload_len;
    if IPV4 + len <= usize::from(mtu) {
        1
    } else {
        len.div_ceil(fragment_len(mtu))
    }
}

/// Bytes of IP payload in every fragment but the last: a multiple of 8.
fn fragment_len(mtu: u16) -> usize {
    (usize::from(mtu.max(68)) - IPV4) & !7
}

impl Datagram<'_> {
    /// Queues the datagram's frames. False, and nothing queued, when it cannot be told to the guest:
    /// its ends are of different families or it is too long. `out` must have room for [`frames`].
    pub fn push(&self, out: &mut Outbox) -> bool {
        let (SocketAddr::V4(from), SocketAddr::V4(to)) = (self.from, self.to) else {
            return false;
        };
        if self.payload.len() > MAX_PAYLOAD {
            return false;
        }
        let header = self.header();
        let len = UDP + self.payload.len();
        let step = if IPV4 + len <= usize::from(self.mtu) {
            len
        } else {
            fragment_len(self.mtu)
        };
        for start in (0..len).step_by(step) {
            let end = len.min(start + step);
            let place = Place {
                ident: self.ident,
                // Bounded by MAX_PAYLOAD.
                offset: u16::try_from(start).unwrap_or(u16::MAX),
                more: end < len,
            };
            out.push(|frame| {
                frame.resize(ETHERNET + IPV4, 0);
                if start == 0 {
                    frame.extend_from_slice(&header);
                }
                let part = start.max(UDP) - UDP..end - UDP;
                frame.extend_from_slice(&self.payload[part]);
                let (src, dst) = (*from.ip(), *to.ip());
                ipv4::write(frame, self.macs, src, dst, IpProtocol::Udp, place);
            });
        }
        true
    }

    /// The UDP header, with the checksum of the whole datagram.
    fn header(&self) -> [u8; UDP] {
        let len = UDP + self.payload.len();
        let mut header = [0; UDP];
        header[..2].copy_from_slice(&self.from.port().to_be_bytes());
        header[2..4].copy_from_slice(&self.to.port().to_be_bytes());
        let field = u16::try_from(len).unwrap_or(u16::MAX);
        header[4..6].copy_from_slice(&field.to_be_bytes());
        let mut sum = Sum::from_words(checksum::pseudo_header(
            &self.from.ip().into(),
            &self.to.ip().into(),
            IpProtocol::Udp,
            u32::from(field),
        ));
        sum.add(&header);
        sum.add(self.payload);
        // A sum of zero would mean that there is none (RFC 768).
        let field = match sum.finish() {
            0 => u16::MAX,
            sum => sum,
        };
        header[6..].copy_from_slice(&field.to_be_bytes());
        header
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
