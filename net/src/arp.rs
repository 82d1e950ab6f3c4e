//! ARP (RFC 826): every address of the guest's network but its own is the gateway's.

use std::net::Ipv4Addr;

use smoltcp::wire::{
    ArpOperation, ArpPacket, ArpRepr, EthernetAddress, EthernetFrame, EthernetProtocol,
};

use crate::config::Config;

/// Bytes of an ARP frame.
const LEN: usize = 14 + 28;

/// What a request said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    sender_mac: EthernetAddress,
    sender_ip: Ipv4Addr,
    target_ip: Ipv4Addr,
}

/// Reads the ARP message in `payload`; `None` unless it is a request for an IPv4 address.
pub fn parse(payload: &[u8]) -> Option<Request> {
    let packet = ArpPacket::new_checked(payload).ok()?;
    match ArpRepr::parse(&packet).ok()? {
        ArpRepr::EthernetIpv4 {
            operation: ArpOperation::Request,
            source_hardware_addr: sender_mac,
            source_protocol_addr: sender_ip,
            target_protocol_addr: target_ip,
            ..
        } => Some(Request {
            sender_mac,
            sender_ip,
            target_ip,
        }),
        _ => None,
    }
}

/// The reply to `request`, if it is ours to answer.
///
/// The gateway and the name server answer; so would a router that does proxy ARP, but an address
/// that nobody has stays silent, and so does the guest's own: it is probing for duplicates
/// (RFC 5227).
pub fn reply(config: &Config, request: &Request, frame: &mut Vec<u8>) -> bool {
    if request.target_ip != config.gateway && request.target_ip != config.dns {
        return false;
    }
    let own = EthernetAddress(config.gateway_mac);
    frame.resize(LEN, 0);
    let mut ethernet = EthernetFrame::new_unchecked(&mut frame[..]);
    ethernet.set_src_addr(own);
    ethernet.set_dst_addr(request.sender_mac);
    ethernet.set_ethertype(EthernetProtocol::Arp);
    ArpRepr::EthernetIpv4 {
        operation: ArpOperation::Reply,
        source_hardware_addr: own,
        source_protocol_addr: request.target_ip,
        target_hardware_addr: request.sender_mac,
        target_protocol_addr: request.sender_ip,
    }
    .emit(&mut ArpPacket::new_unchecked(&mut frame[14..]));
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: [u8; 28] = [
        0, 1, 8, 0, 6, 4, 0, 1, // request, Ethernet, IPv4
        0x52, 0x54, 0, 0x12, 0x34, 0x56, 10, 0, 2, 15, // sender
        0, 0, 0, 0, 0, 0, 10, 0, 2, 2, // target
    ];

    #[test]
    fn the_gateway_answers_byte_for_byte() {
        let mut frame = Vec::new();
        let request = parse(&REQUEST).unwrap();
        assert!(reply(&Config::default(), &request, &mut frame));
        assert_eq!(
            frame,
            [
                0x52, 0x54, 0, 0x12, 0x34, 0x56, 0x52, 0x55, 10, 0, 2, 2, 8, 6, //
                0, 1, 8, 0, 6, 4, 0, 2, //
                0x52, 0x55, 10, 0, 2, 2, 10, 0, 2, 2, //
                0x52, 0x54, 0, 0x12, 0x34, 0x56, 10, 0, 2, 15,
            ]
        );
    }

    #[test]
    fn own_and_vacant_addresses_get_silence() {
        for last in [15, 77] {
            let mut bytes = REQUEST;
            bytes[27] = last;
            let request = parse(&bytes).unwrap();
            assert!(!reply(&Config::default(), &request, &mut Vec::new()));
        }
    }

    #[test]
    fn replies_and_rubbish_are_not_requests() {
        let mut bytes = REQUEST;
        bytes[7] = 2;
        assert_eq!(parse(&bytes), None);
        assert_eq!(parse(&REQUEST[..27]), None);
        assert_eq!(parse(&[0xff; 28]), None);
    }
}
