//! News of a tap's interface, for when its frames do not pass through this process.
//!
//! They come from the kernel's routing socket (rtnetlink(7)), which tells of all interfaces of the
//! network namespace.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};

use super::device::{interface_index, is_up};
use super::link::State;

/// RTMGRP_LINK.
const LINK_GROUP: u32 = 1;
const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
/// `struct nlmsghdr`.
const HEADER: usize = 16;
/// `struct ifinfomsg`.
const INFO: usize = 16;

/// The news of one interface.
#[derive(Debug)]
pub(in crate::net) struct LinkWatch {
    socket: OwnedFd,
    /// `None` when the interface is not in this network namespace.
    index: Option<u32>,
}

impl LinkWatch {
    /// Watches the interface `name`; also tells its present state.
    ///
    /// # Errors
    /// Fails when descriptors run out.
    pub(in crate::net) fn new(name: &str) -> io::Result<(Self, State)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
        bind(&socket, &SocketAddrNetlink::new(0, LINK_GROUP))?;
        // After the bind, so that no change is missed.
        let index = interface_index(name);
        let state = match index {
            Some(_) if !is_up(name) => State::Down,
            _ => State::Up,
        };
        Ok((Self { socket, index }, state))
    }

    /// Takes the news; the last state in them, if there is one.
    pub(in crate::net) fn news(&self) -> Option<State> {
        let mut last = None;
        let mut buf = [0; 16384];
        while let Ok((len, _)) = recv(&self.socket, &mut buf[..], RecvFlags::empty()) {
            if len == 0 {
                break;
            }
            last = self.parse(&buf[..len]).or(last);
        }
        last
    }

    fn parse(&self, mut bytes: &[u8]) -> Option<State> {
        let mut last = None;
        while bytes.len() >= HEADER + INFO {
            let word = |at: usize| {
                u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
            };
            let len = usize::try_from(word(0)).unwrap_or(usize::MAX);
            let kind = u16::from_ne_bytes([bytes[4], bytes[5]]);
            // A bridge speaks of its ports under a family of its own.
            let plain = u32::from(bytes[HEADER]) == u32::from(AddressFamily::UNSPEC.as_raw());
            let flags = word(HEADER + 8);
            if plain && Some(word(HEADER + 4)) == self.index {
                last = match kind {
                    RTM_DELLINK => Some(State::Gone),
                    RTM_NEWLINK if flags & 1 != 0 => Some(State::Up),
                    RTM_NEWLINK => Some(State::Down),
                    _ => last,
                };
            }
            let next = len.max(HEADER).next_multiple_of(4);
            bytes = bytes.get(next..).unwrap_or_default();
        }
        last
    }
}

impl AsRawFd for LinkWatch {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u16, family: u8, index: u32, flags: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(36u32.to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend([0; 10]);
        bytes.extend([family, 0, 1, 0]);
        bytes.extend(index.to_ne_bytes());
        bytes.extend(flags.to_ne_bytes());
        bytes.extend([0; 8]);
        bytes
    }

    #[test]
    fn only_news_of_the_interface_count() {
        let (mut watch, _) = LinkWatch::new("no-such-tap").unwrap();
        assert_eq!(watch.index, None);
        watch.index = Some(7);
        assert_eq!(watch.parse(&message(RTM_NEWLINK, 0, 8, 0)), None);
        assert_eq!(watch.parse(&message(RTM_DELLINK, 7, 7, 0)), None);
        assert_eq!(
            watch.parse(&message(RTM_NEWLINK, 0, 7, 0x1043)),
            Some(State::Up)
        );
        let mut two = message(RTM_NEWLINK, 0, 7, 0);
        two.extend(message(RTM_DELLINK, 0, 7, 0));
        assert_eq!(watch.parse(&two), Some(State::Gone));
        assert_eq!(watch.parse(&two[..40]), Some(State::Down));
        assert_eq!(watch.parse(&[0; 64]), None);
    }
}
