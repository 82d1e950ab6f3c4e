//! Echo requests of the guest, carried by the host's ping sockets.
//!
//! One host socket per identifier that the guest uses, as one `ping` process uses one. The kernel
//! picks the identifier on the wire; the guest gets its own back. Sequence number and payload pass
//! through. A flow ends after [`IDLE`] without a request.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use super::{ECHO_REPLY, ECHO_REQUEST, HEADER, write_packet};
use crate::drops::DropReason;
use crate::outbox::Outbox;
use crate::tcp::wire::Macs;

/// How long a flow without requests keeps its socket; what NATs must give ICMP (RFC 5508, 3.2).
pub const IDLE: Duration = Duration::from_secs(60);
/// Flows at once; the one idle longest makes room. A guest pings few places at a time.
pub const MAX_FLOWS: usize = 64;
/// Longest message that is passed on, in bytes.
const MAX_MESSAGE: usize = 65535 - 20;

/// Opens ping sockets.
pub trait PingHost {
    /// A socket that sends echo requests and receives their replies.
    type Socket: PingSocket;

    /// Opens a socket whose readiness is reported as number `number`.
    ///
    /// # Errors
    /// Fails when the host allows neither ping nor raw sockets.
    fn open_ping(&mut self, number: u64) -> io::Result<Self::Socket>;
}

/// A ping socket. No call blocks.
pub trait PingSocket {
    /// Sends the ICMP message `request`, whose identifier the socket may replace.
    ///
    /// # Errors
    /// What the host reports.
    fn send(&mut self, to: IpAddr, request: &mut [u8]) -> io::Result<()>;

    /// Receives the next echo reply, from its ICMP header on; returns its length.
    ///
    /// # Errors
    /// `WouldBlock` when there is none; an error that was reported for a request.
    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<usize>;
}

#[derive(Debug)]
struct Flow<S> {
    number: u64,
    socket: S,
    /// The guest's identifier.
    ident: [u8; 2],
    guest: Ipv4Addr,
    /// Who the guest thinks it talks to.
    far: Ipv4Addr,
    used: Instant,
    readable: bool,
}

/// The echo flows, oldest first.
#[derive(Debug)]
pub struct Echo<H: PingHost> {
    flows: VecDeque<Flow<H::Socket>>,
    next_number: u64,
    buffer: Vec<u8>,
}

/// An echo request from the guest.
#[derive(Clone, Copy, Debug)]
pub struct Request<'p> {
    /// The guest's address.
    pub guest: Ipv4Addr,
    /// The address that it asks.
    pub far: Ipv4Addr,
    /// The ICMP message.
    pub message: &'p [u8],
}

/// True for an echo request with a good checksum.
pub fn is_request(message: &[u8]) -> bool {
    message.len() >= HEADER
        && message[0] == ECHO_REQUEST
        && message[1] == 0
        && smoltcp::wire::checksum::data(message) == !0
}

/// Answers `request` from the address that it asks: one of ours.
pub fn reply(request: &Request<'_>, macs: Macs, outbox: &mut Outbox) -> Result<(), DropReason> {
    let pushed = outbox.push(|frame| {
        write_packet(frame, macs, request.far, request.guest, |frame| {
            frame.extend([ECHO_REPLY, 0]);
            frame.extend_from_slice(&request.message[2..]);
        });
    });
    if pushed {
        Ok(())
    } else {
        Err(DropReason::Full)
    }
}

impl<H: PingHost> Echo<H> {
    /// No flows.
    pub fn new() -> Self {
        Self {
            flows: VecDeque::new(),
            next_number: 0,
            buffer: Vec::new(),
        }
    }

    /// Flows at the moment.
    pub fn len(&self) -> usize {
        self.flows.len()
    }

    /// True without flows.
    pub fn is_empty(&self) -> bool {
        self.flows.is_empty()
    }

    /// Sends `request`, which [`is_request`] accepted, to host address `to`.
    ///
    /// # Errors
    /// Why it was not sent. The guest hears nothing then.
    pub fn handle_from_guest(
        &mut self,
        request: &Request<'_>,
        to: IpAddr,
        host: &mut H,
        now: Instant,
    ) -> Result<(), DropReason> {
        let ident = [request.message[4], request.message[5]];
        let found = self
            .flows
            .iter()
            .position(|flow| flow.ident == ident && flow.far == request.far);
        let mut flow = match found.and_then(|index| self.flows.remove(index)) {
            Some(flow) => flow,
            None => {
                let number = self.next_number;
                let socket = host.open_ping(number).map_err(|_| DropReason::NoSocket)?;
                self.next_number += 1;
                if self.flows.len() >= MAX_FLOWS {
                    self.flows.pop_front();
                }
                Flow {
                    number,
                    socket,
                    ident,
                    guest: request.guest,
                    far: request.far,
                    used: now,
                    readable: false,
                }
            }
        };
        flow.used = now;
        self.buffer.clear();
        self.buffer.extend_from_slice(request.message);
        let sent = flow.socket.send(to, &mut self.buffer);
        self.flows.push_back(flow);
        sent.map_err(|_| DropReason::HostRefused)
    }

    /// The socket of flow `number` reported something.
    pub fn handle_event(&mut self, number: u64) {
        if let Some(flow) = self.flows.iter_mut().find(|flow| flow.number == number) {
            flow.readable = true;
        }
    }

    /// Queues the replies that are there, as far as `outbox` takes them. True when some are left.
    pub fn pump(&mut self, macs: Macs, outbox: &mut Outbox) -> bool {
        for flow in self.flows.iter_mut().filter(|flow| flow.readable) {
            self.buffer.resize(MAX_MESSAGE, 0);
            // An outbox that is full keeps the rest in the socket for the next round.
            while !outbox.is_full() {
                match flow.socket.receive(&mut self.buffer) {
                    Ok(n) if n >= HEADER && self.buffer[0] == ECHO_REPLY => {
                        let reply = &mut self.buffer[..n];
                        reply[4..6].copy_from_slice(&flow.ident);
                        outbox.push(|frame| {
                            write_packet(frame, macs, flow.far, flow.guest, |frame| {
                                frame.extend_from_slice(reply);
                            });
                        });
                    }
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        flow.readable = false;
                        break;
                    }
                    // An error about one request: the socket goes on.
                    Err(_) => {}
                }
            }
        }
        self.flows.iter().any(|flow| flow.readable)
    }

    /// When [`Self::handle_timeout`] wants to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.flows.front().map(|flow| flow.used + IDLE)
    }

    /// Ends flows that were idle for too long.
    pub fn handle_timeout(&mut self, now: Instant) {
        while self
            .flows
            .front()
            .is_some_and(|flow| now >= flow.used + IDLE)
        {
            self.flows.pop_front();
        }
    }
}

impl<H: PingHost> Default for Echo<H> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::rc::Rc;

    type Sent = Rc<RefCell<Vec<(IpAddr, Vec<u8>)>>>;
    type Replies = Rc<RefCell<VecDeque<Vec<u8>>>>;

    #[derive(Default)]
    struct FakeHost {
        refuse: bool,
        sent: Sent,
        replies: Replies,
    }

    struct FakePing(Sent, Replies);

    impl PingHost for FakeHost {
        type Socket = FakePing;
        fn open_ping(&mut self, _: u64) -> io::Result<FakePing> {
            if self.refuse {
                return Err(io::ErrorKind::PermissionDenied.into());
            }
            Ok(FakePing(self.sent.clone(), self.replies.clone()))
        }
    }

    impl PingSocket for FakePing {
        fn send(&mut self, to: IpAddr, request: &mut [u8]) -> io::Result<()> {
            self.0.borrow_mut().push((to, request.to_vec()));
            Ok(())
        }
        fn receive(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let reply = self.1.borrow_mut().pop_front();
            let reply = reply.ok_or(io::ErrorKind::WouldBlock)?;
            buffer[..reply.len()].copy_from_slice(&reply);
            Ok(reply.len())
        }
    }

    fn message(kind: u8, ident: u8) -> Vec<u8> {
        let mut bytes = vec![kind, 0, 0, 0, 0x12, ident, 0, 1, b'h', b'i', b'!'];
        let sum = !smoltcp::wire::checksum::data(&bytes);
        bytes[2..4].copy_from_slice(&sum.to_be_bytes());
        bytes
    }

    fn request(message: &[u8]) -> Request<'_> {
        Request {
            guest: Ipv4Addr::new(10, 0, 2, 15),
            far: Ipv4Addr::new(192, 0, 2, 1),
            message,
        }
    }

    const MACS: Macs = Macs {
        gateway: [2; 6],
        guest: [4; 6],
    };

    #[test]
    fn a_reply_comes_back_under_the_guests_identifier() {
        let mut host = FakeHost::default();
        let mut echo = Echo::new();
        let mut outbox = Outbox::default();
        let ping = message(ECHO_REQUEST, 0x34);
        assert!(is_request(&ping));
        let to: IpAddr = [192, 0, 2, 1].into();
        let now = Instant::now();
        echo.handle_from_guest(&request(&ping), to, &mut host, now)
            .unwrap();
        assert_eq!(host.sent.borrow()[0], (to, ping));
        // The kernel chose another identifier.
        host.replies
            .borrow_mut()
            .push_back(message(ECHO_REPLY, 0x99));
        echo.handle_event(0);
        echo.pump(MACS, &mut outbox);
        let frame = outbox.front().unwrap();
        assert_eq!(&frame[34..], message(ECHO_REPLY, 0x34));
        assert_eq!(&frame[26..30], [192, 0, 2, 1]);
        echo.handle_timeout(now + IDLE);
        assert!(echo.is_empty());
    }

    #[test]
    fn no_socket_means_silence() {
        let mut host = FakeHost {
            refuse: true,
            ..FakeHost::default()
        };
        let mut echo = Echo::new();
        let ping = message(ECHO_REQUEST, 1);
        let to = [192, 0, 2, 1].into();
        let sent = echo.handle_from_guest(&request(&ping), to, &mut host, Instant::now());
        assert_eq!(sent, Err(DropReason::NoSocket));
    }

    #[test]
    fn flows_are_bounded_and_the_oldest_goes() {
        let mut host = FakeHost::default();
        let mut echo = Echo::new();
        for ident in 0..=255 {
            let ping = message(ECHO_REQUEST, ident);
            let to = [192, 0, 2, 1].into();
            echo.handle_from_guest(&request(&ping), to, &mut host, Instant::now())
                .unwrap();
        }
        assert_eq!(echo.len(), MAX_FLOWS);
        assert_eq!(echo.flows[0].ident[1], 192);
    }

    #[test]
    fn rubbish_is_not_a_request() {
        let good = message(ECHO_REQUEST, 1);
        assert!(!is_request(&good[..7]));
        assert!(!is_request(&message(ECHO_REPLY, 1)));
        let mut bad = good;
        bad[9] ^= 1;
        assert!(!is_request(&bad));
    }
}
