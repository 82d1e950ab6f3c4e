//! The NAT stack of wonton: what stands behind the guest's network card.
//!
//! ```text
//!             nic (the seam)        stack                      host
//!  download   RxRing   <-- emit -- tcp::pump <- window::Ring <- readv     <- TCP socket
//!             RxRing   <-- udp::pump <- Batch, or straight <- recvmmsg   <- UDP sockets
//!             RxRing   <-- deliver -- outbox <- dns, icmp <- recv          <- UDP, ping sockets
//!  upload     TxBurst  --> stack::ingress -> tcp::drain -> sendmsg         -> TCP socket
//!                                        \-> udp::Outgoing -> sendmmsg    -> UDP sockets
//!                                        \-> dns, icmp -> send            -> UDP, ping sockets
//!                                         \-> arp, dhcp -> outbox -> RxRing
//! ```
//!
//! `net` knows Ethernet frames, flows and host sockets. It does not know virtio, KVM or guest
//! addresses: frames reach it, and leave it, through the seam in [`nic`].
//!
//! The protocol modules are pure: time, randomness and what sockets said are handed to them, and
//! sockets are behind small traits ([`tcp::socket`], [`udp::UdpHost`], [`icmp::echo::PingHost`]), so
//! that tests run them on a virtual clock against scripted ends. [`host`] has the real ones.
//!
//! Deliberately absent: checksums of TCP segments from the guest are not verified (a frame comes out
//! of memory, and the host's kernel makes a new sum), and nothing is retransmitted to the host (its
//! kernel does that).
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
pub mod impair;
pub mod nic;
pub mod outbox;
pub mod policy;
pub mod shard;
pub mod stack;
pub mod tcp;
#[cfg(test)]
mod testkit;
pub mod udp;
pub mod window;
pub mod wire;
