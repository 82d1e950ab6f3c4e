//! Headers of datagrams and of ICMP errors: read from a copied head, written into frames.
//!
//! One header per file. The fields and checksums are smoltcp's; what is here is the order of the
//! checks and what a failed one is called.

pub mod datagram;
pub mod error;
pub mod ipv4;
pub mod udp;

/// Bytes of an Ethernet header.
pub const ETHERNET: usize = 14;
/// Bytes of an IPv4 header without options.
pub const IPV4: usize = 20;
/// Bytes of a UDP header.
pub const UDP: usize = 8;
/// Hop limit of what the stack itself sends.
pub const HOP_LIMIT: u8 = 64;

/// The link-layer ends of every frame to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Macs {
    /// The gateway's address: the source.
    pub gateway: [u8; 6],
    /// The guest's address.
    pub guest: [u8; 6],
}
