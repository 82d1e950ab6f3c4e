//! UDP datagrams that the stack itself sends to the guest: DHCP and DNS answers.

use std::net::SocketAddrV4;

use smoltcp::wire::{
    EthernetAddress, EthernetFrame, EthernetProtocol, IpProtocol, Ipv4Packet, UdpPacket,
};

use crate::tcp::wire::{ETHERNET, IPV4, Macs};

/// Bytes of a UDP header.
pub(super) const UDP: usize = 8;
const HEADERS: usize = ETHERNET + IPV4 + UDP;

/// Writes the frame of one datagram, checksums included. The packet must fit the link's MTU.
pub(super) fn write(
    frame: &mut Vec<u8>,
    macs: Macs,
    from: SocketAddrV4,
    to: SocketAddrV4,
    payload: &[u8],
) {
    frame.resize(HEADERS, 0);
    frame.extend_from_slice(payload);
    let udp_len = u16::try_from(UDP + payload.len()).unwrap_or(u16::MAX);
    let mut ethernet = EthernetFrame::new_unchecked(&mut frame[..]);
    ethernet.set_src_addr(EthernetAddress(macs.gateway));
    ethernet.set_dst_addr(EthernetAddress(macs.guest));
    ethernet.set_ethertype(EthernetProtocol::Ipv4);
    let mut ip = Ipv4Packet::new_unchecked(&mut frame[ETHERNET..]);
    ip.set_version(4);
    ip.set_header_len(20);
    ip.set_total_len(udp_len.saturating_add(20));
    ip.set_dont_frag(true);
    ip.set_hop_limit(64);
    ip.set_next_header(IpProtocol::Udp);
    ip.set_src_addr(*from.ip());
    ip.set_dst_addr(*to.ip());
    ip.fill_checksum();
    let mut udp = UdpPacket::new_unchecked(&mut frame[ETHERNET + IPV4..]);
    udp.set_src_port(from.port());
    udp.set_dst_port(to.port());
    udp.set_len(udp_len);
    udp.fill_checksum(&(*from.ip()).into(), &(*to.ip()).into());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_and_checksums_are_right() {
        let macs = Macs {
            gateway: [2; 6],
            guest: [4; 6],
        };
        let from: SocketAddrV4 = "10.0.2.2:67".parse().unwrap();
        let to: SocketAddrV4 = "255.255.255.255:68".parse().unwrap();
        for len in [0, 1, 300] {
            let mut frame = Vec::new();
            write(&mut frame, macs, from, to, &vec![7; len]);
            let ip = Ipv4Packet::new_checked(&frame[ETHERNET..]).unwrap();
            assert!(ip.verify_checksum());
            let udp = UdpPacket::new_checked(ip.payload()).unwrap();
            assert!(udp.verify_checksum(&ip.src_addr().into(), &ip.dst_addr().into()));
            assert_eq!(udp.payload().len(), len);
        }
    }
}
