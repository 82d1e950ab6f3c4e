//! TCP headers in frames: read from a copied head, written in front of a payload.

use std::net::{IpAddr, SocketAddr};

use smoltcp::wire::{
    EthernetAddress, EthernetFrame, EthernetProtocol, IpAddress, IpProtocol, Ipv4Packet,
    Ipv6Packet, TcpOption, TcpPacket, TcpSeqNumber, checksum,
};

use super::segment::{Flags, Header, Segment, SynOptions};
use super::seq::SeqNum;
use crate::flow::FlowKey;
use crate::wire::HOP_LIMIT;
pub use crate::wire::{ETHERNET, IPV4, Macs};

/// Room for the longest header that is written: Ethernet, IPv6, TCP with the options of a SYN.
pub const MAX_HEADER: usize = ETHERNET + IPV6 + TCP + SYN_OPTIONS;
/// Bytes of an IPv6 header without extensions.
pub const IPV6: usize = 40;
/// Bytes of a TCP header without options.
pub const TCP: usize = 20;
/// MSS (4), window scale (3), and one octet of padding.
const SYN_OPTIONS: usize = 8;
/// Offset of the checksum field in the TCP header.
pub const CHECKSUM_OFFSET: u16 = 16;

/// A TCP segment read from a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parsed {
    /// Source port.
    pub src_port: u16,
    /// Destination port.
    pub dst_port: u16,
    /// The segment.
    pub segment: Segment,
    /// Bytes of the TCP header: where the payload starts.
    pub header_len: usize,
}

/// Reads the TCP header at the start of `head`, a copy of what follows the IP header.
///
/// `len` is the length of the whole TCP segment by the IP header. `None` when the header does not fit.
pub fn parse(head: &[u8], len: usize) -> Option<Parsed> {
    if head.len() < TCP || len < TCP {
        return None;
    }
    let packet = TcpPacket::new_unchecked(head);
    let header_len = usize::from(packet.header_len());
    if header_len < TCP || header_len > head.len() || header_len > len {
        return None;
    }
    let flags = [
        (packet.fin(), Flags::FIN),
        (packet.syn(), Flags::SYN),
        (packet.rst(), Flags::RST),
        (packet.psh(), Flags::PSH),
        (packet.ack(), Flags::ACK),
        (packet.urg(), Flags::URG),
    ]
    .into_iter()
    .filter_map(|(set, flag)| set.then_some(flag))
    .collect::<Flags>();
    Some(Parsed {
        src_port: packet.src_port(),
        dst_port: packet.dst_port(),
        segment: Segment {
            seq: seq_num(packet.seq_number()),
            ack: seq_num(packet.ack_number()),
            flags,
            window: packet.window_len(),
            len: u32::try_from(len - header_len).ok()?,
            options: if flags.contains(Flags::SYN) {
                syn_options(packet.options())
            } else {
                SynOptions::default()
            },
        },
        header_len,
    })
}

fn syn_options(mut bytes: &[u8]) -> SynOptions {
    let mut options = SynOptions::default();
    while !bytes.is_empty() {
        let Ok((rest, option)) = TcpOption::parse(bytes) else {
            break;
        };
        match option {
            TcpOption::EndOfList => break,
            TcpOption::MaxSegmentSize(mss) => options.mss = Some(mss),
            TcpOption::WindowScale(shift) => options.window_scale = Some(shift),
            _ => {}
        }
        bytes = rest;
    }
    options
}

fn seq_num(n: TcpSeqNumber) -> SeqNum {
    SeqNum(n.0.cast_unsigned())
}

/// A written header, ready to go in front of a payload.
#[derive(Debug)]
pub struct Encoded {
    bytes: [u8; MAX_HEADER],
    len: usize,
    /// Offset of the TCP header in the frame.
    pub tcp_at: usize,
    /// One's complement sum of the pseudo header (RFC 9293, 3.1).
    pub pseudo: u16,
}

impl Encoded {
    /// The header's bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// The TCP header, checksum field zero until set.
    pub fn tcp(&self) -> &[u8] {
        &self.bytes[self.tcp_at..self.len]
    }

    /// Sets the TCP checksum field.
    pub fn set_checksum(&mut self, checksum: u16) {
        let at = self.tcp_at + usize::from(CHECKSUM_OFFSET);
        self.bytes[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
    }
}

/// Writes the header of a segment from `key.far` to `key.guest` with `payload_len` bytes behind it.
///
/// `payload_len` must keep the IP packet within 65535 bytes. The TCP checksum is left zero.
pub fn encode(macs: Macs, key: &FlowKey, header: &Header, payload_len: usize) -> Encoded {
    let options = header.options.mss.is_some();
    let tcp_len = TCP + if options { SYN_OPTIONS } else { 0 };
    let segment_len = tcp_len + payload_len;
    let mut bytes = [0; MAX_HEADER];
    let ip_len = if key.guest.is_ipv4() { IPV4 } else { IPV6 };
    let tcp_at = ETHERNET + ip_len;

    let mut ethernet = EthernetFrame::new_unchecked(&mut bytes[..]);
    ethernet.set_src_addr(EthernetAddress(macs.gateway));
    ethernet.set_dst_addr(EthernetAddress(macs.guest));
    let pseudo = match (key.far, key.guest) {
        (SocketAddr::V4(far), SocketAddr::V4(guest)) => {
            ethernet.set_ethertype(EthernetProtocol::Ipv4);
            let mut ip = Ipv4Packet::new_unchecked(&mut bytes[ETHERNET..]);
            ip.set_version(4);
            ip.set_header_len(20);
            ip.set_total_len(saturating_u16(IPV4 + segment_len));
            ip.set_dont_frag(true);
            ip.set_hop_limit(HOP_LIMIT);
            ip.set_next_header(IpProtocol::Tcp);
            ip.set_src_addr(*far.ip());
            ip.set_dst_addr(*guest.ip());
            ip.fill_checksum();
            pseudo_header(
                far.ip().to_owned().into(),
                guest.ip().to_owned().into(),
                segment_len,
            )
        }
        (far, guest) => {
            ethernet.set_ethertype(EthernetProtocol::Ipv6);
            let (IpAddr::V6(far), IpAddr::V6(guest)) = (far.ip(), guest.ip()) else {
                unreachable!("both ends of a flow are of one family");
            };
            let mut ip = Ipv6Packet::new_unchecked(&mut bytes[ETHERNET..]);
            ip.set_version(6);
            ip.set_payload_len(saturating_u16(segment_len));
            ip.set_next_header(IpProtocol::Tcp);
            ip.set_hop_limit(HOP_LIMIT);
            ip.set_src_addr(far);
            ip.set_dst_addr(guest);
            pseudo_header(far.into(), guest.into(), segment_len)
        }
    };

    let mut tcp = TcpPacket::new_unchecked(&mut bytes[tcp_at..]);
    tcp.set_src_port(key.far.port());
    tcp.set_dst_port(key.guest.port());
    tcp.set_seq_number(TcpSeqNumber(header.seq.0.cast_signed()));
    tcp.set_ack_number(TcpSeqNumber(header.ack.0.cast_signed()));
    tcp.clear_flags();
    tcp.set_header_len(u8::try_from(tcp_len).unwrap_or(20));
    tcp.set_fin(header.flags.contains(Flags::FIN));
    tcp.set_syn(header.flags.contains(Flags::SYN));
    tcp.set_rst(header.flags.contains(Flags::RST));
    tcp.set_psh(header.flags.contains(Flags::PSH));
    tcp.set_ack(header.flags.contains(Flags::ACK));
    tcp.set_window_len(header.window);
    if let Some(mss) = header.options.mss {
        let rest = TcpOption::MaxSegmentSize(mss).emit(tcp.options_mut());
        match header.options.window_scale {
            Some(shift) => {
                let rest = TcpOption::WindowScale(shift).emit(rest);
                TcpOption::EndOfList.emit(rest);
            }
            None => rest.fill(1),
        }
    }
    Encoded {
        bytes,
        len: tcp_at + tcp_len,
        tcp_at,
        pseudo,
    }
}

fn pseudo_header(far: IpAddress, guest: IpAddress, segment_len: usize) -> u16 {
    let len = u32::try_from(segment_len).unwrap_or(u32::MAX);
    checksum::pseudo_header(&far, &guest, IpProtocol::Tcp, len)
}

fn saturating_u16(n: usize) -> u16 {
    u16::try_from(n).unwrap_or(u16::MAX)
}
