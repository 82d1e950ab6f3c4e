//! TCP and UDP packets in Ethernet frames: making them, reading them, and what Linux does with one
//! that was left unfinished: completing its checksum and cutting it into segments.
//!
//! Written for these tests alone, so that the stack is not checked by its own code.

use std::net::{IpAddr, SocketAddr};

use net::nic::{VNET_HDR_F_NEEDS_CSUM, VNET_HDR_GSO_NONE, VnetHdr};

pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;
pub(super) const FIN: u8 = 0x01;
pub(super) const SYN: u8 = 0x02;
pub(super) const RST: u8 = 0x04;
pub(super) const PSH: u8 = 0x08;
pub(super) const ACK: u8 = 0x10;
const CWR: u8 = 0x80;

pub(super) const GUEST_MAC: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
pub(super) const GATEWAY_MAC: [u8; 6] = [0x52, 0x55, 10, 0, 2, 2];

/// Where IP starts.
const IP: usize = 14;

/// The fields of a TCP header that matter here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TcpFields {
    pub(super) seq: u32,
    pub(super) ack: u32,
    pub(super) flags: u8,
    pub(super) window: u16,
}

/// Where the parts of a frame are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct View {
    pub(super) v4: bool,
    pub(super) protocol: u8,
    /// Where TCP or UDP starts.
    pub(super) transport: usize,
    /// Where its payload starts.
    pub(super) payload: usize,
}

impl View {
    /// Takes apart a frame.
    ///
    /// # Panics
    /// Panics when a length in it is wrong, or it is neither TCP nor UDP.
    pub(super) fn of(frame: &[u8]) -> Self {
        let v4 = match word(frame, 12) {
            0x0800 => true,
            0x86dd => false,
            other => panic!("ethertype {other:#06x}"),
        };
        let (protocol, transport, end) = if v4 {
            assert_eq!(frame[IP], 0x45, "version and header length");
            assert_eq!(word(frame, IP + 6) & 0x3fff, 0, "a fragment");
            let total = usize::from(word(frame, IP + 2));
            (frame[IP + 9], IP + 20, IP + total)
        } else {
            assert_eq!(frame[IP] >> 4, 6, "version");
            let len = usize::from(word(frame, IP + 4));
            (frame[IP + 6], IP + 40, IP + 40 + len)
        };
        assert_eq!(end, frame.len(), "the packet's length, and the frame's");
        let header = match protocol {
            TCP => usize::from(frame[transport + 12] >> 4) * 4,
            UDP => {
                let len = usize::from(word(frame, transport + 4));
                assert_eq!(transport + len, end, "UDP length");
                8
            }
            other => panic!("protocol {other}"),
        };
        assert!(header >= 8 && transport + header <= end, "header length");
        Self {
            v4,
            protocol,
            transport,
            payload: transport + header,
        }
    }

    /// Offset of the checksum from the start of the transport header.
    pub(super) fn checksum_at(&self) -> usize {
        if self.protocol == TCP { 16 } else { 6 }
    }

    /// The sum over the pseudo-header of `frame`: what a checksum left to others starts with.
    pub(super) fn pseudo_sum(&self, frame: &[u8]) -> u16 {
        let addresses = if self.v4 {
            &frame[IP + 12..IP + 20]
        } else {
            &frame[IP + 8..IP + 40]
        };
        let len = u16::try_from(frame.len() - self.transport).expect("a length of 16 bits");
        sum(addresses, u32::from(len) + u32::from(self.protocol))
    }

    /// True when the checksum of the transport is right.
    pub(super) fn checksum_holds(&self, frame: &[u8]) -> bool {
        let pseudo = self.pseudo_sum(frame);
        sum(&frame[self.transport..], pseudo.into()) == 0xffff
    }

    /// True for TCP, or when the checksum of the IPv4 header is right.
    pub(super) fn ip_checksum_holds(&self, frame: &[u8]) -> bool {
        !self.v4 || sum(&frame[IP..IP + 20], 0) == 0xffff
    }

    pub(super) fn tcp(&self, frame: &[u8]) -> TcpFields {
        let at = self.transport;
        TcpFields {
            seq: double_word(frame, at + 4),
            ack: double_word(frame, at + 8),
            flags: frame[at + 13],
            window: word(frame, at + 14),
        }
    }

    /// Source and destination port.
    pub(super) fn ports(&self, frame: &[u8]) -> (u16, u16) {
        (word(frame, self.transport), word(frame, self.transport + 2))
    }
}

pub(super) fn word(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn double_word(bytes: &[u8], at: usize) -> u32 {
    u32::from(word(bytes, at)) << 16 | u32::from(word(bytes, at + 2))
}

fn put_word(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

/// The Internet checksum's sum (RFC 1071), not complemented.
fn sum(bytes: &[u8], start: u32) -> u16 {
    let (pairs, rest) = bytes.as_chunks();
    let mut sum = u64::from(start);
    for &pair in pairs {
        sum += u64::from(u16::from_be_bytes(pair));
    }
    if let [last] = rest {
        sum += u64::from(*last) << 8;
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// A frame from one end to the other with its transport header, whose checksum is zero.
fn packet(from: SocketAddr, to: SocketAddr, protocol: u8, transport: &[u8]) -> Vec<u8> {
    let mut frame = [GATEWAY_MAC, GUEST_MAC].concat();
    let len = u16::try_from(transport.len()).unwrap();
    match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            frame.extend([0x08, 0x00, 0x45, 0]);
            frame.extend((20 + len).to_be_bytes());
            frame.extend([0x10, 0x01, 0x40, 0, 64, protocol, 0, 0]);
            frame.extend(from.octets());
            frame.extend(to.octets());
            finish_ip(&mut frame);
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend(len.to_be_bytes());
            frame.extend([protocol, 64]);
            frame.extend(from.octets());
            frame.extend(to.octets());
        }
        _ => panic!("two families"),
    }
    frame.extend(transport);
    frame
}

/// A TCP segment with its checksum zero; a SYN has the options MSS 1460 and window scale 3.
pub(super) fn tcp(from: SocketAddr, to: SocketAddr, fields: TcpFields, payload: &[u8]) -> Vec<u8> {
    let options: &[u8] = match fields.flags & SYN {
        0 => &[],
        _ => &[2, 4, 0x05, 0xb4, 3, 3, 3, 1],
    };
    let mut bytes = Vec::new();
    bytes.extend(from.port().to_be_bytes());
    bytes.extend(to.port().to_be_bytes());
    bytes.extend(fields.seq.to_be_bytes());
    bytes.extend(fields.ack.to_be_bytes());
    let words = u8::try_from((20 + options.len()) / 4).unwrap();
    bytes.extend([words << 4, fields.flags]);
    bytes.extend(fields.window.to_be_bytes());
    bytes.extend([0; 4]);
    bytes.extend(options);
    bytes.extend(payload);
    packet(from, to, TCP, &bytes)
}

/// A UDP datagram with its checksum zero.
pub(super) fn udp(from: SocketAddr, to: SocketAddr, payload: &[u8]) -> Vec<u8> {
    let len = u16::try_from(8 + payload.len()).unwrap();
    let mut bytes = Vec::new();
    bytes.extend(from.port().to_be_bytes());
    bytes.extend(to.port().to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes.extend([0; 2]);
    bytes.extend(payload);
    packet(from, to, UDP, &bytes)
}

fn finish_ip(frame: &mut [u8]) {
    put_word(frame, IP + 10, 0);
    let header = sum(&frame[IP..IP + 20], 0);
    put_word(frame, IP + 10, !header);
}

/// Leaves the checksum to the receiver, as NEEDS_CSUM asks for.
pub(super) fn leave_checksum(frame: &mut [u8]) -> VnetHdr {
    let view = View::of(frame);
    let pseudo = view.pseudo_sum(frame);
    put_word(frame, view.transport + view.checksum_at(), pseudo);
    VnetHdr {
        flags: VNET_HDR_F_NEEDS_CSUM,
        hdr_len: u16::try_from(view.payload).unwrap(),
        csum_start: u16::try_from(view.transport).unwrap(),
        csum_offset: u16::try_from(view.checksum_at()).unwrap(),
        ..VnetHdr::default()
    }
}

/// Completes the checksum, whatever is in its field.
pub(super) fn finish_checksum(frame: &mut [u8]) {
    let view = View::of(frame);
    let at = view.transport + view.checksum_at();
    put_word(frame, at, 0);
    let pseudo = view.pseudo_sum(frame);
    let value = match !sum(&frame[view.transport..], pseudo.into()) {
        0 if view.protocol == UDP => 0xffff,
        value => value,
    };
    put_word(frame, at, value);
}

/// The packets that a frame stands for: with checksums complete, and no longer than `gso_size` says.
pub(super) fn cut(hdr: &VnetHdr, frame: &[u8]) -> Vec<Vec<u8>> {
    let view = View::of(frame);
    let (header, payload) = frame.split_at(view.payload);
    let whole = hdr.gso_type == VNET_HDR_GSO_NONE || payload.is_empty();
    let size = if whole {
        payload.len().max(1)
    } else {
        hdr.gso_size.into()
    };
    let mut pieces: Vec<_> = payload.chunks(size).collect();
    if pieces.is_empty() {
        pieces.push(&[]);
    }
    let last = pieces.len() - 1;
    let packet = |(index, piece): (usize, &[u8])| {
        let mut packet = [header, piece].concat();
        if last > 0 {
            shorten(&mut packet, &view, index, index * size, index == last);
        }
        if hdr.flags & VNET_HDR_F_NEEDS_CSUM != 0 {
            finish_checksum(&mut packet);
        }
        packet
    };
    pieces.into_iter().enumerate().map(packet).collect()
}

/// Makes the header of a long packet that of its part `index`, at `offset` of the payload.
fn shorten(packet: &mut [u8], view: &View, index: usize, offset: usize, last: bool) {
    let len = |from: usize| u16::try_from(packet.len() - from).unwrap();
    let (ip_len, transport_len) = (len(IP), len(view.transport));
    if view.v4 {
        put_word(packet, IP + 2, ip_len);
        let ident = word(packet, IP + 4).wrapping_add(u16::try_from(index).unwrap());
        put_word(packet, IP + 4, ident);
        finish_ip(packet);
    } else {
        put_word(packet, IP + 4, ip_len - 40);
    }
    let at = view.transport;
    if view.protocol == UDP {
        put_word(packet, at + 4, transport_len);
        return;
    }
    let seq = double_word(packet, at + 4).wrapping_add(u32::try_from(offset).unwrap());
    packet[at + 4..at + 8].copy_from_slice(&seq.to_be_bytes());
    if !last {
        packet[at + 13] &= !(FIN | PSH);
    }
    if index > 0 {
        packet[at + 13] &= !CWR;
    }
}
