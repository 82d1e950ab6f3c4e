//! ICMP errors about datagrams (RFC 792, RFC 1122, 3.2.2), quoting the guest's own header.

use std::net::{Ipv4Addr, SocketAddr};

use smoltcp::wire::{IpProtocol, Ipv4Packet, checksum};

use super::ipv4::{self, Place};
use super::{ETHERNET, IPV4, Macs, UDP};

/// Type of the destination unreachable message.
pub const UNREACHABLE: u8 = 3;
/// Type of the time exceeded message.
pub const TIME_EXCEEDED: u8 = 11;
/// Code of [`UNREACHABLE`]: network unreachable.
pub const NET: u8 = 0;
/// Code of [`UNREACHABLE`]: host unreachable.
pub const HOST: u8 = 1;
/// Code of [`UNREACHABLE`]: port unreachable.
pub const PORT: u8 = 3;
/// Code of [`UNREACHABLE`]: fragmentation needed and DF set (RFC 1191, 4).
pub const TOO_BIG: u8 = 4;
/// Code of [`UNREACHABLE`]: administratively prohibited (RFC 1812, 5.2.7.1).
pub const PROHIBITED: u8 = 13;

/// What went wrong with a datagram of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcmpError {
    /// Who says so, if it is not the gateway.
    pub from: Option<Ipv4Addr>,
    /// [`UNREACHABLE`] or [`TIME_EXCEEDED`].
    pub kind: u8,
    /// Code, by kind.
    pub code: u8,
    /// MTU of the next hop in bytes; only with [`TOO_BIG`].
    pub mtu: u16,
    /// The guest's end of the datagram.
    pub guest: SocketAddr,
    /// The far end, as the guest named it.
    pub far: SocketAddr,
    /// Payload of the datagram, in bytes.
    pub payload_len: usize,
}

/// Writes the frame that tells the guest of `error`. False, and nothing written, when one of the
/// ends is not IPv4.
pub fn write(frame: &mut Vec<u8>, macs: Macs, gateway: Ipv4Addr, error: &IcmpError) -> bool {
    let (SocketAddr::V4(guest), SocketAddr::V4(far)) = (error.guest, error.far) else {
        return false;
    };
    let udp_len = u16::try_from(UDP + error.payload_len).unwrap_or(u16::MAX);
    frame.clear();
    frame.resize(ETHERNET + IPV4, 0);
    frame.extend([error.kind, error.code, 0, 0, 0, 0]);
    frame.extend(error.mtu.to_be_bytes());

    let mut quote = [0; IPV4 + UDP];
    let mut ip = Ipv4Packet::new_unchecked(&mut quote[..]);
    ip.set_version(4);
    ip.set_header_len(20);
    ip.set_total_len(udp_len.saturating_add(20));
    ip.set_dont_frag(true);
    ip.set_hop_limit(1);
    ip.set_next_header(IpProtocol::Udp);
    ip.set_src_addr(*guest.ip());
    ip.set_dst_addr(*far.ip());
    ip.fill_checksum();
    quote[IPV4..IPV4 + 2].copy_from_slice(&guest.port().to_be_bytes());
    quote[IPV4 + 2..IPV4 + 4].copy_from_slice(&far.port().to_be_bytes());
    quote[IPV4 + 4..IPV4 + 6].copy_from_slice(&udp_len.to_be_bytes());
    frame.extend(quote);

    let icmp = &mut frame[ETHERNET + IPV4..];
    let sum = !checksum::data(icmp);
    icmp[2..4].copy_from_slice(&sum.to_be_bytes());
    let from = error.from.unwrap_or(gateway);
    let icmp = IpProtocol::Icmp;
    ipv4::write(frame, macs, from, *guest.ip(), icmp, Place::default());
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use smoltcp::wire::{EthernetFrame, Icmpv4Packet, UdpPacket};

    #[test]
    fn the_quote_leads_the_guest_to_its_socket() {
        let macs = Macs {
            gateway: [2; 6],
            guest: [4; 6],
        };
        let error = IcmpError {
            from: None,
            kind: UNREACHABLE,
            code: TOO_BIG,
            mtu: 1300,
            guest: "10.0.2.15:40000".parse().unwrap(),
            far: "192.0.2.1:9".parse().unwrap(),
            payload_len: 1400,
        };
        let mut frame = Vec::new();
        assert!(write(&mut frame, macs, [10, 0, 2, 2].into(), &error));
        let ethernet = EthernetFrame::new_checked(&frame[..]).unwrap();
        let ip = Ipv4Packet::new_checked(ethernet.payload()).unwrap();
        assert!(ip.verify_checksum());
        assert_eq!(ip.src_addr(), Ipv4Addr::new(10, 0, 2, 2));
        let icmp = Icmpv4Packet::new_checked(ip.payload()).unwrap();
        assert!(icmp.verify_checksum());
        assert_eq!(ip.payload()[..2], [3, 4]);
        assert_eq!(ip.payload()[4..8], [0, 0, 5, 20]);
        let quoted = Ipv4Packet::new_unchecked(icmp.data());
        assert!(quoted.verify_checksum());
        assert_eq!(quoted.src_addr(), Ipv4Addr::new(10, 0, 2, 15));
        assert_eq!(quoted.dst_addr(), Ipv4Addr::new(192, 0, 2, 1));
        assert_eq!(quoted.total_len(), 1428);
        let udp = UdpPacket::new_unchecked(&icmp.data()[20..]);
        assert_eq!((udp.src_port(), udp.dst_port()), (40000, 9));
        assert_eq!(udp.len(), 1408);
    }
}
