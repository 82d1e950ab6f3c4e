//! The IPv4 header (RFC 791, 3.1).

use std::net::Ipv4Addr;

use smoltcp::wire::{EthernetAddress, EthernetFrame, EthernetProtocol, IpProtocol, Ipv4Packet};

use super::{ETHERNET, HOP_LIMIT, IPV4, Macs};
use crate::drops::DropReason;

/// A packet whose header was found good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv4Head {
    /// Source address.
    pub src: Ipv4Addr,
    /// Destination address.
    pub dst: Ipv4Addr,
    /// Protocol of the payload.
    pub protocol: IpProtocol,
    /// Time to live, in hops.
    pub hop_limit: u8,
    /// Bytes of the header: where the payload starts.
    pub header_len: usize,
    /// Bytes of payload.
    pub payload_len: usize,
}

/// Checks the header at the start of `head`, a copy of the packet's first bytes; `len` is how many
/// bytes the frame holds from there on. More than the packet needs is Ethernet padding.
///
/// # Errors
/// The packet is not IPv4, does not fit, or its checksum is wrong (RFC 1122, 3.2.1.2); or it is a
/// fragment.
pub fn parse(head: &[u8], len: usize) -> Result<Ipv4Head, DropReason> {
    if head.len() < IPV4 {
        return Err(DropReason::Truncated);
    }
    let packet = Ipv4Packet::new_unchecked(head);
    let header_len = usize::from(packet.header_len());
    let total_len = usize::from(packet.total_len());
    if packet.version() != 4 || header_len < IPV4 || header_len > head.len() {
        return Err(DropReason::BadIpHeader);
    }
    if total_len < header_len || total_len > len || !packet.verify_checksum() {
        return Err(DropReason::BadIpHeader);
    }
    if packet.more_frags() || packet.frag_offset() != 0 {
        return Err(DropReason::Fragment);
    }
    Ok(Ipv4Head {
        src: packet.src_addr(),
        dst: packet.dst_addr(),
        protocol: packet.next_header(),
        hop_limit: packet.hop_limit(),
        header_len,
        payload_len: total_len - header_len,
    })
}

/// Where a packet belongs in the datagram it is a fragment of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    /// Names the datagram.
    pub(crate) ident: u16,
    /// Offset in bytes, a multiple of 8.
    pub(crate) offset: u16,
    /// More fragments follow.
    pub(crate) more: bool,
}

/// Writes Ethernet and IPv4 headers at the start of `frame`, which holds the payload behind them.
/// A packet that is all of its datagram is marked "don't fragment".
pub(crate) fn write(
    frame: &mut [u8],
    macs: Macs,
    src: Ipv4Addr,
    dst: Ipv4Addr,
    protocol: IpProtocol,
    place: Place,
) {
    let len = frame.len() - ETHERNET;
    write_header(frame, len, macs, src, dst, protocol, place);
}

/// As [`write()`], for a payload that lies elsewhere: `head` has room for the headers, and `len` is the
/// length of the whole IP packet.
pub(crate) fn write_header(
    head: &mut [u8],
    len: usize,
    macs: Macs,
    src: Ipv4Addr,
    dst: Ipv4Addr,
    protocol: IpProtocol,
    place: Place,
) {
    let len = u16::try_from(len).unwrap_or(u16::MAX);
    let mut ethernet = EthernetFrame::new_unchecked(&mut *head);
    ethernet.set_src_addr(EthernetAddress(macs.gateway));
    ethernet.set_dst_addr(EthernetAddress(macs.guest));
    ethernet.set_ethertype(EthernetProtocol::Ipv4);
    let mut ip = Ipv4Packet::new_unchecked(&mut head[ETHERNET..]);
    ip.set_version(4);
    ip.set_header_len(20);
    ip.set_dscp(0);
    ip.set_ecn(0);
    ip.set_total_len(len);
    ip.set_ident(place.ident);
    ip.clear_flags();
    ip.set_dont_frag(!place.more && place.offset == 0);
    ip.set_more_frags(place.more);
    ip.set_frag_offset(place.offset);
    ip.set_hop_limit(HOP_LIMIT);
    ip.set_next_header(protocol);
    ip.set_src_addr(src);
    ip.set_dst_addr(dst);
    ip.fill_checksum();
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// 10.0.2.15 to 192.0.2.1, UDP, 8 bytes of payload.
    const GOOD: [u8; 28] = [
        0x45, 0, 0, 28, 0, 1, 0x40, 0, 64, 17, 0x6c, 0xc0, 10, 0, 2, 15, 192, 0, 2, 1, 0, 7, 0, 9,
        0, 8, 0, 0,
    ];

    fn with(at: usize, byte: u8) -> [u8; 28] {
        let mut packet = GOOD;
        packet[at] = byte;
        Ipv4Packet::new_unchecked(&mut packet[..]).set_checksum(0);
        let sum = !smoltcp::wire::checksum::data(&packet[..20]);
        packet[10..12].copy_from_slice(&sum.to_be_bytes());
        packet
    }

    #[test]
    fn a_good_header_is_read() {
        let head = parse(&GOOD, 46).unwrap();
        assert_eq!(head.src, Ipv4Addr::new(10, 0, 2, 15));
        assert_eq!(head.dst, Ipv4Addr::new(192, 0, 2, 1));
        assert_eq!(head.protocol, IpProtocol::Udp);
        assert_eq!((head.header_len, head.payload_len), (20, 8));
        assert_eq!(head.hop_limit, 64);
    }

    #[test]
    fn bad_headers_have_names() {
        let mut bad_sum = GOOD;
        bad_sum[10] ^= 1;
        assert_eq!(parse(&bad_sum, 28), Err(DropReason::BadIpHeader));
        assert_eq!(parse(&GOOD[..19], 28), Err(DropReason::Truncated));
        assert_eq!(parse(&GOOD, 27), Err(DropReason::BadIpHeader));
        for ihl in 0..5 {
            let packet = with(0, 0x40 | ihl);
            assert_eq!(parse(&packet, 28), Err(DropReason::BadIpHeader));
        }
        assert_eq!(parse(&with(0, 0x65), 28), Err(DropReason::BadIpHeader));
        assert_eq!(parse(&with(3, 19), 28), Err(DropReason::BadIpHeader));
        assert_eq!(parse(&with(6, 0x20), 28), Err(DropReason::Fragment));
        assert_eq!(parse(&with(7, 1), 28), Err(DropReason::Fragment));
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_within_their_bounds(
            bytes in proptest::collection::vec(any::<u8>(), 0..80),
            len in 0usize..70_000,
        ) {
            if let Ok(head) = parse(&bytes, len) {
                prop_assert!(head.header_len <= bytes.len());
                prop_assert!(head.header_len + head.payload_len <= len);
            }
        }
    }
}
