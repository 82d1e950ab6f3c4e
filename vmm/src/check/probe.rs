//! Devices and socket features.

use std::fs::File;
use std::io::{self, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd as _;

use super::{Item, State};
use crate::sys;

fn item(name: &'static str, result: Result<String, String>, hint: &str) -> Item {
    match result {
        Ok(detail) => Item {
            name,
            state: State::Yes,
            detail,
            hint: None,
        },
        Err(detail) => Item {
            name,
            state: State::No,
            detail,
            hint: Some(hint.to_owned()),
        },
    }
}

/// Whether a device node can be opened.
pub(super) fn device(name: &'static str, path: &str, hint: &str) -> Item {
    let result = File::options().read(true).write(true).open(path);
    let result = match result {
        Ok(_) => Ok(format!("`{path}` opens")),
        Err(error) => Err(format!("cannot open `{path}`: {error}")),
    };
    item(name, result, hint)
}

/// Whether SO_PEEK_OFF works on TCP, for IPv4 or IPv6.
pub(super) fn peek_off(v6: bool) -> Item {
    let (name, hint) = if v6 {
        (
            "peek-off-v6",
            "needs a newer kernel for TCP over IPv6; only rx=direct wants it",
        )
    } else {
        ("peek-off-v4", "needs Linux 6.9; only rx=direct wants it")
    };
    let result = match try_peek_off(if v6 { "[::1]:0" } else { "127.0.0.1:0" }) {
        Ok(true) => Ok("peeks of a TCP socket advance".to_owned()),
        Ok(false) => Err("SO_PEEK_OFF is accepted for TCP, but has no effect".to_owned()),
        Err(error) => Err(format!("no SO_PEEK_OFF for TCP: {error}")),
    };
    item(name, result, hint)
}

/// Peeks twice at "abcd", and looks whether the second peek starts where the first ended.
fn try_peek_off(address: &str) -> io::Result<bool> {
    let listener = TcpListener::bind(address)?;
    let mut sender = TcpStream::connect(listener.local_addr()?)?;
    let (receiver, _) = listener.accept()?;
    receiver.set_read_timeout(Some(std::time::Duration::from_secs(1)))?;
    net::host::set_peek_offset(receiver.as_fd(), 0)?;
    sender.write_all(b"abcd")?;
    let (mut first, mut second) = ([0; 2], [0; 2]);
    receiver.peek(&mut first)?;
    receiver.peek(&mut second)?;
    Ok(&first == b"ab" && &second == b"cd")
}

/// Whether the guest's pings can go out: unprivileged ICMP sockets, for IPv4 or IPv6.
pub(super) fn ping(v6: bool) -> Item {
    let name = if v6 { "ping-v6" } else { "ping-v4" };
    let result = match sys::ping_socket(v6) {
        Ok(_) => Ok("ICMP sockets open".to_owned()),
        Err(error) => Err(format!("cannot open an ICMP socket: {error}")),
    };
    item(
        name,
        result,
        "sysctl -w net.ipv4.ping_group_range='0 2147483647'",
    )
}
