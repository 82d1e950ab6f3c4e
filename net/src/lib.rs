//! The NAT stack of wonton: what stands behind the guest's network card.
//!
//! `net` knows Ethernet frames, flows and host sockets. It does not know virtio, KVM or guest
//! addresses: frames reach it, and leave it, through the seam in [`nic`].
#![deny(unsafe_code)]

pub mod arp;
pub mod checksum;
pub mod config;
pub mod dhcp;
pub mod dns;
pub mod drops;
pub mod flow;
pub mod host;
pub mod icmp;
pub mod nic;
pub mod outbox;
pub mod policy;
pub mod stack;
pub mod tcp;
#[cfg(test)]
mod testkit;
pub mod udp;
pub mod window;
pub mod wire;
