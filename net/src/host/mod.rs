//! Everything that touches the host: real sockets behind the traits of the protocol modules.

mod os;
mod peek;
mod ping;
pub mod resolv;
mod send;
mod sys;
mod tcp;
mod udp;

pub(crate) use os::{DNS, PING, UDP};
pub use os::{OsHost, Subject};
pub use peek::set_peek_offset;
pub use ping::OsPing;
pub(crate) use sys::descriptor_limit;
pub use tcp::OsTcp;
pub use udp::OsUdp;
