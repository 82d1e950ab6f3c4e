//! The host's sockets behind one pollable descriptor.
//!
//! All sockets report to one `mio::Poll`, edge-triggered. Its descriptor nests in the device
//! worker's own poll, so the worker never learns about flows.

use std::io::{self, Read};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use mio::event::Source as Pollable;
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};

use super::tcp::OsTcp;
use crate::flow::FlowId;
use crate::tcp::flows::Readiness;
use crate::tcp::socket::TcpHost;

/// Events taken from the kernel per call.
const EVENTS: usize = 256;

/// Kind of [`Subject::Other`]: a ping socket.
pub(crate) const PING: u8 = 0;
/// Kind of [`Subject::Other`]: a UDP flow's socket.
pub(crate) const UDP: u8 = 1;
/// Kind of [`Subject::Other`]: a DNS query's socket.
pub(crate) const DNS: u8 = 2;
/// Kind of [`Subject::Other`]: another thread has something for the stack.
pub(crate) const WAKE: u8 = 3;

/// What a readiness event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The socket of a TCP flow.
    Tcp(FlowId),
    /// A listener, by index.
    Listener(usize),
    /// Another socket, by kind and number, as it was registered.
    Other(u8, u64),
}

const TCP: u64 = 0;
const LISTENER: u64 = 1;
/// First kind for [`Subject::Other`].
const OTHER: u64 = 2;

impl Subject {
    fn token(self) -> Token {
        let (kind, bits) = match self {
            Self::Tcp(id) => (TCP, id.to_bits()),
            Self::Listener(index) => (LISTENER, index as u64),
            Self::Other(kind, number) => (OTHER + u64::from(kind), number),
        };
        let packed = kind << FlowId::BITS | bits & ((1 << FlowId::BITS) - 1);
        Token(usize::try_from(packed).expect("pointers are 64 bits wide"))
    }

    fn of(token: Token) -> Self {
        let packed = token.0 as u64;
        let bits = packed & ((1 << FlowId::BITS) - 1);
        match packed >> FlowId::BITS {
            TCP => Self::Tcp(FlowId::from_bits(bits)),
            LISTENER => Self::Listener(usize::try_from(bits).unwrap_or(usize::MAX)),
            // The kind was a byte when it was packed.
            kind => Self::Other(u8::try_from(kind - OTHER).unwrap_or(u8::MAX), bits),
        }
    }
}

/// The sockets of one NAT stack.
#[derive(Debug)]
pub struct OsHost {
    poll: Poll,
    events: Events,
    listeners: Vec<TcpListener>,
}

impl OsHost {
    /// No sockets yet.
    ///
    /// # Errors
    /// Fails when the kernel has no epoll instance to give.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            poll: Poll::new()?,
            events: Events::with_capacity(EVENTS),
            listeners: Vec::new(),
        })
    }

    /// A number that a guest cannot guess.
    ///
    /// # Errors
    /// Fails when the kernel has no randomness to give.
    pub fn random(&mut self) -> io::Result<u64> {
        let mut bytes = [0; 8];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// Listens on `address`; returns the listener's index.
    ///
    /// # Errors
    /// Fails when the address cannot be bound.
    pub fn listen(&mut self, address: SocketAddr) -> io::Result<usize> {
        let index = self.listeners.len();
        let mut listener = TcpListener::bind(address)?;
        self.watch(&mut listener, Subject::Listener(index), Interest::READABLE)?;
        self.listeners.push(listener);
        Ok(index)
    }

    /// Reports the readiness of `source` as `subject`.
    ///
    /// # Errors
    /// Fails when the kernel cannot watch one more descriptor.
    pub fn watch(
        &mut self,
        source: &mut impl Pollable,
        subject: Subject,
        interest: Interest,
    ) -> io::Result<()> {
        self.poll
            .registry()
            .register(source, subject.token(), interest)
    }

    /// Makes this readable from another thread. There can be only one.
    ///
    /// # Errors
    /// Fails when the process has no descriptors left.
    pub fn waker(&self) -> io::Result<mio::Waker> {
        mio::Waker::new(self.poll.registry(), Subject::Other(WAKE, 0).token())
    }

    /// Takes the events that are there, without waiting. True when there may be more.
    pub fn poll_events(&mut self, out: &mut Vec<(Subject, Readiness)>) -> bool {
        out.clear();
        match self.poll.poll(&mut self.events, Some(Duration::ZERO)) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return true,
            Err(error) => {
                tracing::error!(%error, "cannot poll host sockets");
                return false;
            }
        }
        out.extend(self.events.iter().map(|event| {
            let failed = event.is_error();
            let readiness = Readiness {
                readable: event.is_readable() || failed,
                urgent: event.is_priority(),
                writable: event.is_writable() || failed,
                read_closed: event.is_read_closed() || failed,
                failed,
            };
            (Subject::of(event.token()), readiness)
        }));
        out.len() == EVENTS
    }
}

impl AsFd for OsHost {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.poll.registry().as_fd()
    }
}

impl TcpHost for OsHost {
    type Socket = OsTcp;
    type Accepted = TcpStream;

    fn connect(&mut self, to: SocketAddr, id: FlowId) -> io::Result<OsTcp> {
        self.adopt(TcpStream::connect(to)?, id)
    }

    fn accept(&mut self, listener: usize) -> io::Result<(TcpStream, SocketAddr)> {
        let listener = self
            .listeners
            .get(listener)
            .ok_or(io::ErrorKind::WouldBlock)?;
        loop {
            match listener.accept() {
                // The peer gave up while it waited: the next one may be there.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                result => return result,
            }
        }
    }

    fn adopt(&mut self, mut stream: TcpStream, id: FlowId) -> io::Result<OsTcp> {
        self.watch(
            &mut stream,
            Subject::Tcp(id),
            Interest::READABLE | Interest::WRITABLE | Interest::PRIORITY,
        )?;
        Ok(OsTcp::new(stream))
    }
}
