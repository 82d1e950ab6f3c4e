//! UDP sockets of the host.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, RawFd};

use socket2::{Domain, Protocol, Socket, Type};

use mio::Interest;
use mio::unix::SourceFd;

use super::os::{DNS, OsHost, Subject, UDP};
use super::{send, sys};
use crate::udp::{Batch, Entry, Message, Owner, Payload, SocketError, UdpHost, UdpSocket};
use crate::wire::error::{HOST, NET, TOO_BIG, UNREACHABLE};

/// `SO_EE_ORIGIN_LOCAL`: the host itself found the datagram impossible to send.
const LOCAL: u8 = 1;
/// `SO_EE_ORIGIN_ICMP`: an ICMP message came in.
const ICMP: u8 = 2;

/// Bytes that may wait in a flow's socket, each way.
const BUFFER: usize = 4 << 20;

/// A nonblocking UDP socket with its error queue on.
#[derive(Debug)]
pub struct OsUdp {
    socket: Socket,
    v6: bool,
    /// The kernel takes runs (Linux 4.18). Older ones would ignore the control message.
    takes_runs: bool,
}

impl OsUdp {
    /// Opens a socket bound to `local`; port 0 takes any port. The caller registers it,
    /// edge-triggered, by [`AsRawFd`].
    ///
    /// # Errors
    /// The host has no descriptor to give, or the address is taken.
    pub fn open(local: SocketAddr) -> io::Result<Self> {
        let socket = Socket::new(
            Domain::for_address(local),
            Type::DGRAM.nonblocking().cloexec(),
            Some(Protocol::UDP),
        )?;
        let v6 = local.is_ipv6();
        if v6 {
            // Like an IPv4 socket, it serves its own family.
            socket.set_only_v6(true)?;
        }
        sys::enable_error_queue(socket.as_fd(), v6)?;
        socket.bind(&local.into())?;
        Ok(Self {
            takes_runs: sys::takes_runs(socket.as_fd()),
            socket,
            v6,
        })
    }

    /// Prepares for a stream of datagrams: those that belong together come as one (Linux 5.0), and more
    /// of them may wait.
    pub fn expect_many(&self) {
        // Without it, every datagram comes alone.
        let joined = sys::join_received(self.socket.as_fd());
        // The kernel cuts it to what it allows.
        let room = self.socket.set_recv_buffer_size(BUFFER);
        let sent = self.socket.set_send_buffer_size(BUFFER);
        if let Err(error) = joined.and(room).and(sent) {
            tracing::debug!(%error, "a UDP socket will be slower than it could be");
        }
    }

    /// The address that the socket is bound to.
    ///
    /// # Errors
    /// What the host reports.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket
            .local_addr()?
            .as_socket()
            .ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

impl AsRawFd for OsUdp {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl UdpSocket for OsUdp {
    fn send(&mut self, messages: &[Message<'_, '_>]) -> io::Result<usize> {
        send::send_messages(self.socket.as_fd(), messages)
    }

    fn takes_runs(&self) -> bool {
        self.takes_runs
    }

    fn send_bytes(&mut self, to: SocketAddr, payload: &[u8]) -> io::Result<()> {
        self.socket.send_to(payload, &to.into()).map(drop)
    }

    fn set_hop_limit(&mut self, hops: u8) {
        let hops = u32::from(hops.max(1));
        let set = if self.v6 {
            self.socket.set_unicast_hops_v6(hops)
        } else {
            self.socket.set_ttl_v4(hops)
        };
        if let Err(error) = set {
            tracing::debug!(%error, hops, "cannot set the hop limit");
        }
    }

    fn receive(&mut self, batch: &mut Batch) -> io::Result<()> {
        sys::receive_batch(self.socket.as_fd(), batch)
    }

    fn receive_into(&mut self, room: &Payload<'_, '_>) -> io::Result<Entry> {
        sys::receive_into(self.socket.as_fd(), room)
    }

    fn take_error(&mut self) -> Option<SocketError> {
        loop {
            // Entries that say nothing to the guest are passed over; each call takes one off.
            let entry = sys::receive_error(self.socket.as_fd()).ok()?;
            if let Some(told) = entry.and_then(as_icmp) {
                return Some(told);
            }
        }
    }
}

impl UdpHost for OsHost {
    type Socket = OsUdp;

    fn open_udp(&mut self, local: SocketAddr, owner: Owner, number: u64) -> io::Result<OsUdp> {
        let socket = OsUdp::open(local)?;
        let kind = match owner {
            Owner::Flows => {
                socket.expect_many();
                UDP
            }
            Owner::Dns => DNS,
        };
        let fd = socket.as_raw_fd();
        self.watch(
            &mut SourceFd(&fd),
            Subject::Other(kind, number),
            Interest::READABLE,
        )?;
        Ok(socket)
    }
}

/// The ICMP message for the guest that an entry of the error queue amounts to.
fn as_icmp(entry: sys::QueuedError) -> Option<SocketError> {
    let too_big = entry.errno == libc::EMSGSIZE;
    let (kind, code) = match (entry.origin, entry.errno) {
        (ICMP, _) => (entry.kind, entry.code),
        (LOCAL, libc::EMSGSIZE) => (UNREACHABLE, TOO_BIG),
        (LOCAL, libc::EHOSTUNREACH) => (UNREACHABLE, HOST),
        (LOCAL, libc::ENETUNREACH) => (UNREACHABLE, NET),
        _ => return None,
    };
    Some(SocketError {
        to: entry.to,
        from: entry
            .offender
            .filter(|_| entry.origin == ICMP)
            .map(|offender| offender.ip()),
        kind,
        code,
        mtu: if too_big {
            u16::try_from(entry.info).unwrap_or(u16::MAX)
        } else {
            0
        },
        payload_len: entry.len,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket as StdSocket;
    use std::time::{Duration, Instant};
    use vm_memory::VolatileSlice;

    fn eventually<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(result) = attempt() {
                return result;
            }
            assert!(start.elapsed() < Duration::from_secs(5), "nothing came");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn datagrams_go_out_of_pieces_and_come_back_in_a_batch() {
        let far = StdSocket::bind("127.0.0.1:0").unwrap();
        far.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let to = far.local_addr().unwrap();
        let mut socket = OsUdp::open("127.0.0.1:0".parse().unwrap()).unwrap();
        let (mut a, mut b) = (*b"hel", *b"lo-tail");
        let whole = [
            VolatileSlice::from(&mut a[..]),
            VolatileSlice::from(&mut b[..]),
        ];
        let hello = [whole[0], whole[1].subslice(0, 2).unwrap()];
        let message = |payload| Message {
            to,
            payload,
            segment: None,
        };
        let messages = [message(&hello[..]), message(&[]), message(&whole)];
        assert_eq!(socket.send(&messages).unwrap(), 3);
        let mut buffer = [0; 64];
        for expected in [&b"hello"[..], b"", b"hello-tail"] {
            let (n, from) = far.recv_from(&mut buffer).unwrap();
            assert_eq!(&buffer[..n], expected);
            far.send_to(&buffer[..n], from).unwrap();
        }
        let mut batch = Batch::default();
        eventually(|| socket.receive(&mut batch).ok());
        assert_eq!(batch.len(), 3);
        let received = |index| batch.run(index).map(|run| (run.from, run.payload));
        assert_eq!(received(0), Some((to, &b"hello"[..])));
        assert_eq!(received(1), Some((to, &b""[..])));
        assert_eq!(received(3), None);
        let error = socket.receive(&mut batch).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn runs_cross_the_loopback_whole_both_ways() {
        let local = "127.0.0.1:0".parse().unwrap();
        let mut ends = [OsUdp::open(local).unwrap(), OsUdp::open(local).unwrap()];
        for end in &ends {
            end.expect_many();
            assert!(end.takes_runs(), "Linux 4.18 is needed");
        }
        let mut batch = Batch::default();
        for (segment, len) in [(1000, 10_000), (1472, 44 * 1472 + 3), (7, 64 * 7), (1, 2)] {
            let mut memory: Vec<u8> = (0..len).map(|i: usize| (i * 31 + i / 251) as u8).collect();
            let sent = memory.clone();
            // Pieces that do not end where datagrams do.
            let pieces: Vec<_> = memory.chunks_mut(333).map(VolatileSlice::from).collect();
            let [from, to] = &mut ends;
            let message = Message {
                to: to.local_addr().unwrap(),
                payload: &pieces,
                segment: Some(segment),
            };
            assert_eq!(from.send(&[message]).unwrap(), 1);
            let mut got = Vec::new();
            eventually(|| {
                to.receive(&mut batch).ok()?;
                for index in 0..batch.len() {
                    let run = batch.run(index)?;
                    assert_eq!(run.from, from.local_addr().unwrap());
                    // All in one, with the length of each.
                    assert_eq!(run.segment, usize::from(segment));
                    got.extend_from_slice(run.payload);
                }
                (got.len() == len).then_some(())
            });
            assert_eq!(got, sent);

            // Again, and straight into guest memory.
            assert_eq!(from.send(&[message]).unwrap(), 1);
            let mut memory = vec![0xa5; 70_000];
            let slices: Vec<_> = memory.chunks_mut(1526).map(VolatileSlice::from).collect();
            let room = Payload {
                frame: &slices,
                at: 42,
                len: 65507,
            };
            let entry = eventually(|| to.receive_into(&room).ok());
            assert_eq!(entry.from, from.local_addr().unwrap());
            assert_eq!((entry.len, entry.segment), (len, usize::from(segment)));
            assert_eq!(memory[42..42 + len], sent);
            assert!(memory[..42].iter().all(|&byte| byte == 0xa5));
            ends.swap(0, 1);
        }
        // Longer than the device takes in one packet: the kernel's answer is one that the flow's
        // fallback knows.
        let mut memory = vec![0; 65_000];
        let pieces = [VolatileSlice::from(&mut memory[..])];
        let message = Message {
            to: "192.0.2.1:9".parse().unwrap(),
            payload: &pieces,
            segment: Some(64_000),
        };
        let error = ends[0].send(&[message]).unwrap_err();
        let errno = error.raw_os_error().unwrap();
        let known = [libc::EINVAL, libc::EMSGSIZE, libc::ENETUNREACH];
        assert!(known.contains(&errno), "{error}");
    }

    #[test]
    fn a_closed_port_is_told_with_the_peer_it_is_about() {
        let closed = StdSocket::bind("127.0.0.1:0").unwrap();
        let to = closed.local_addr().unwrap();
        drop(closed);
        let mut socket = OsUdp::open("127.0.0.1:0".parse().unwrap()).unwrap();
        socket.send_bytes(to, b"anyone?").unwrap();
        let told = eventually(|| socket.take_error());
        assert_eq!((told.kind, told.code), (UNREACHABLE, 3));
        assert_eq!(told.to, to);
        assert_eq!(told.payload_len, 7);
        assert_eq!(socket.take_error(), None);
    }
}
