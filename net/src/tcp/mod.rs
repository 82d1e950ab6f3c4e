//! TCP as a NAT's guest side needs it (RFC 9293).
//!
//! # Theory of operation
//!
//! Every guest connection is two: one to the guest, spoken here, and one to the far end, spoken by
//! the host's kernel through a socket. This module joins them byte by byte:
//!
//! ```text
//!  download   host socket --read--> window --grant/commit--> RX descriptors --> guest
//!             (window: where un-ACKed bytes live; freed as the guest ACKs)
//!  upload     guest --> TX descriptors --take--> sendmsg --> host socket
//!             (what the socket does not want at once waits in the tail; ACKed when taken)
//! ```
//!
//! * [`conn`] is the state machine, [`sender`] and [`receiver`] its two halves. They are pure: time
//!   and numbers in, decisions out. They see lengths and sequence numbers, never payload.
//! * [`segment`] is what they speak; [`seq`] and [`rto`] what they count with.
//! * [`flows`] owns the host sockets, the windows and the tails, and carries the decisions out.
//!
//!
//! The guest hears nothing until the host side's connection attempt has ended; the outcome is
//! passed on as it is: connected gives SYN/ACK, refused gives RST, unreachable gives ICMP, silence
//! gives silence. End of stream and reset are passed on in both directions, each half on its own.

pub mod conn;
mod drain;
mod emit;
pub mod flows;
mod pump;
pub mod receiver;
pub mod rto;
pub mod rx_path;
pub mod segment;
pub mod sender;
pub mod seq;
pub mod socket;
pub mod tail;
mod window;
pub mod wire;

#[cfg(test)]
mod sim;
#[cfg(test)]
mod tests;

pub use drain::Run;
