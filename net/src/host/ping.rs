//! Ping sockets of the host.
//!
//! An unprivileged ping socket (`IPPROTO_ICMP` datagrams) where `net.ipv4.ping_group_range` admits
//! us, else a raw socket where we may have one. A raw socket sees all of the host's ICMP, so it
//! chooses an identifier and lets only that one through.

use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU16, Ordering};

use mio::Interest;
use mio::unix::SourceFd;
use socket2::{Domain, Protocol, Socket, Type};

use super::os::{OsHost, PING, Subject};
use crate::checksum::Sum;
use crate::icmp::echo::{PingHost, PingSocket};
use crate::icmp::{ECHO_REPLY, HEADER};

/// A ping socket, or a raw one that behaves like it.
#[derive(Debug)]
pub struct OsPing {
    socket: Socket,
    /// The identifier of a raw socket's requests.
    raw: Option<[u8; 2]>,
}

impl OsPing {
    fn open() -> io::Result<Self> {
        let nonblocking = |kind| -> io::Result<Socket> {
            let socket = Socket::new(Domain::IPV4, kind, Some(Protocol::ICMPV4))?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        };
        if let Ok(socket) = nonblocking(Type::DGRAM) {
            return Ok(Self { socket, raw: None });
        }
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let process = std::process::id().to_be_bytes();
        let ident = NEXT
            .fetch_add(1, Ordering::Relaxed)
            .wrapping_add(u16::from_be_bytes([process[2], process[3]]));
        Ok(Self {
            socket: nonblocking(Type::RAW)?,
            raw: Some(ident.to_be_bytes()),
        })
    }
}

impl PingSocket for OsPing {
    fn send(&mut self, to: IpAddr, request: &mut [u8]) -> io::Result<()> {
        if let Some(ident) = self.raw {
            request[4..6].copy_from_slice(&ident);
            request[2..4].fill(0);
            let mut sum = Sum::default();
            sum.add(request);
            request[2..4].copy_from_slice(&sum.finish().to_be_bytes());
        }
        let to = SocketAddr::new(to, 0);
        self.socket.send_to(request, &to.into()).map(drop)
    }

    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Some(ident) = self.raw else {
            return (&self.socket).read(buffer);
        };
        loop {
            let n = (&self.socket).read(buffer)?;
            // A raw socket delivers the IP header, too.
            let header = usize::from(buffer[0] & 15) * 4;
            if n < header + HEADER || buffer[header] != ECHO_REPLY {
                continue;
            }
            if buffer[header + 4..header + 6] == ident {
                buffer.copy_within(header..n, 0);
                return Ok(n - header);
            }
        }
    }
}

impl PingHost for OsHost {
    type Socket = OsPing;

    fn open_ping(&mut self, number: u64) -> io::Result<OsPing> {
        let ping = OsPing::open()?;
        let fd = ping.socket.as_raw_fd();
        self.watch(
            &mut SourceFd(&fd),
            Subject::Other(PING, number),
            Interest::READABLE,
        )?;
        Ok(ping)
    }
}
