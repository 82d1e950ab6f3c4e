//! ICMP (RFC 792): echo through the host's ping sockets, and the errors that the stack reports.
//!
//! A reply from beyond the gateway is never made up: the guest's request goes out of a host socket,
//! and the guest hears what that socket hears. Only the gateway's and the name server's own
//! addresses are answered here, because here is where they are.

pub mod echo;
pub mod error;

use std::net::Ipv4Addr;

use smoltcp::wire::{IpProtocol, checksum};

use crate::wire::ipv4::{self, Place};
use crate::wire::{ETHERNET, IPV4, Macs};

/// Bytes of an ICMP header.
pub const HEADER: usize = 8;
/// Type of an echo reply.
pub const ECHO_REPLY: u8 = 0;
/// Type of an echo request.
pub const ECHO_REQUEST: u8 = 8;
/// Type of the destination unreachable message.
pub const UNREACHABLE: u8 = 3;

/// Puts Ethernet and IPv4 headers in front of the ICMP message that `message` appends to `frame`,
/// and fills in both checksums.
fn write_packet(
    frame: &mut Vec<u8>,
    macs: Macs,
    from: Ipv4Addr,
    to: Ipv4Addr,
    message: impl FnOnce(&mut Vec<u8>),
) {
    frame.resize(ETHERNET + IPV4, 0);
    message(frame);
    let icmp = &mut frame[ETHERNET + IPV4..];
    icmp[2..4].fill(0);
    let sum = !checksum::data(icmp);
    icmp[2..4].copy_from_slice(&sum.to_be_bytes());

    ipv4::write(frame, macs, from, to, IpProtocol::Icmp, Place::default());
}
