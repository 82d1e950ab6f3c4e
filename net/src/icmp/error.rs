//! What the guest is told when a TCP connection cannot be opened (RFC 792, RFC 1122, 3.2.2).
//!
//! Errors about datagrams are in [`crate::wire::error`].

use std::net::{Ipv4Addr, SocketAddr};

use smoltcp::wire::{IpProtocol, Ipv4Packet};

use super::{UNREACHABLE, write_packet};
use crate::flow::FlowKey;
use crate::tcp::segment::Segment;
use crate::tcp::wire::{IPV4, Macs};

/// Codes of the destination unreachable message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Code {
    /// Network unreachable.
    Net = 0,
    /// Host unreachable.
    Host = 1,
    /// Port unreachable.
    Port = 3,
    /// Communication administratively prohibited (RFC 1812, 5.2.7.1).
    Prohibited = 13,
}

/// The start of the packet that an error is about: an IPv4 header and 8 octets behind it.
pub type Quote = [u8; IPV4 + 8];

/// What to quote of the guest's SYN.
pub fn quote_syn(key: &FlowKey, syn: &Segment) -> Option<Quote> {
    let mut quote = quote(key, IpProtocol::Tcp, IPV4 + 20)?;
    quote[IPV4 + 4..].copy_from_slice(&syn.seq.0.to_be_bytes());
    Some(quote)
}

fn quote(key: &FlowKey, protocol: IpProtocol, total_len: usize) -> Option<Quote> {
    let (SocketAddr::V4(guest), SocketAddr::V4(far)) = (key.guest, key.far) else {
        return None;
    };
    let mut quote = [0; IPV4 + 8];
    let mut ip = Ipv4Packet::new_unchecked(&mut quote[..]);
    ip.set_version(4);
    ip.set_header_len(20);
    ip.set_total_len(u16::try_from(total_len).unwrap_or(u16::MAX));
    ip.set_dont_frag(true);
    ip.set_hop_limit(63);
    ip.set_next_header(protocol);
    ip.set_src_addr(*guest.ip());
    ip.set_dst_addr(*far.ip());
    ip.fill_checksum();
    quote[IPV4..IPV4 + 2].copy_from_slice(&guest.port().to_be_bytes());
    quote[IPV4 + 2..IPV4 + 4].copy_from_slice(&far.port().to_be_bytes());
    Some(quote)
}

/// Makes the frame that tells the guest `code` about the packet quoted. `from` is who says so.
pub fn write_unreachable(
    frame: &mut Vec<u8>,
    macs: Macs,
    from: Ipv4Addr,
    guest: Ipv4Addr,
    code: Code,
    quote: &[u8],
) {
    write_packet(frame, macs, from, guest, |frame| {
        frame.extend([UNREACHABLE, code as u8, 0, 0, 0, 0, 0, 0]);
        frame.extend_from_slice(quote);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::seq::SeqNum;
    use smoltcp::wire::{EthernetFrame, Icmpv4Message, Icmpv4Packet, TcpPacket};

    #[test]
    fn a_refused_syn_is_quoted_so_that_the_guest_finds_its_socket() {
        let key = FlowKey {
            guest: "10.0.2.15:40000".parse().unwrap(),
            far: "192.0.2.1:80".parse().unwrap(),
        };
        let syn = Segment {
            seq: SeqNum(0x0102_0304),
            ..Segment::default()
        };
        let macs = Macs {
            gateway: [2; 6],
            guest: [4; 6],
        };
        let mut frame = Vec::new();
        let quote = quote_syn(&key, &syn).unwrap();
        let (gateway, guest) = ([10, 0, 2, 2].into(), [10, 0, 2, 15].into());
        write_unreachable(&mut frame, macs, gateway, guest, Code::Host, &quote);

        let ethernet = EthernetFrame::new_checked(&frame[..]).unwrap();
        let ip = Ipv4Packet::new_checked(ethernet.payload()).unwrap();
        assert!(ip.verify_checksum());
        let icmp = Icmpv4Packet::new_checked(ip.payload()).unwrap();
        assert!(icmp.verify_checksum());
        assert_eq!(icmp.msg_type(), Icmpv4Message::DstUnreachable);
        assert_eq!(icmp.msg_code(), 1);
        let quoted = Ipv4Packet::new_unchecked(icmp.data());
        assert!(quoted.verify_checksum());
        assert_eq!(quoted.dst_addr(), Ipv4Addr::new(192, 0, 2, 1));
        let tcp = TcpPacket::new_unchecked(&icmp.data()[20..]);
        assert_eq!((tcp.src_port(), tcp.dst_port()), (40000, 80));
        assert_eq!(tcp.seq_number().0, 0x0102_0304);
    }
}
