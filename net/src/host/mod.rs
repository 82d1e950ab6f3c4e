//! Everything that touches the host: real sockets behind the traits of the protocol modules.

mod os;
mod ping;
mod send;
mod tcp;

pub(crate) use os::PING;
pub use os::{OsHost, Subject};
pub use tcp::OsTcp;
