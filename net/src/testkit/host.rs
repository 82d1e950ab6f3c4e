//! A host whose sockets do what the script says.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::rc::Rc;

use vm_memory::VolatileSlice;

use crate::flow::FlowId;
use crate::tcp::socket::{TcpHost, TcpSocket};

/// The far end of one connection, as the script sees it.
#[derive(Debug)]
pub(crate) struct FarEnd {
    pub(crate) id: FlowId,
    /// Where the stack connected to.
    pub(crate) to: SocketAddr,
    /// `None` while the connection attempt is under way.
    pub(crate) connected: Option<Result<(), io::ErrorKind>>,
    /// Bytes on their way to the stack.
    pub(crate) outgoing: VecDeque<u8>,
    /// No more bytes will come.
    pub(crate) closed: bool,
    /// The connection is broken.
    pub(crate) broken: Option<io::ErrorKind>,
    /// Bytes that arrived.
    pub(crate) arrived: Vec<u8>,
    /// Bytes that the socket takes before it is full.
    pub(crate) room: usize,
    /// The stack ended its stream.
    pub(crate) saw_fin: bool,
    /// The stack asked for a reset on close.
    pub(crate) saw_reset: bool,
    /// The stack closed its socket.
    pub(crate) dropped: bool,
}

pub(crate) type Far = Rc<RefCell<FarEnd>>;

/// Sockets that were opened, newest last, and connections that wait to be accepted.
#[derive(Debug, Default)]
pub(crate) struct FakeHost {
    pub(crate) opened: Vec<Far>,
    pub(crate) waiting: VecDeque<SocketAddr>,
    /// What `connect` answers at once.
    pub(crate) refuse: Option<io::ErrorKind>,
}

#[derive(Debug)]
pub(crate) struct FakeSocket(Far);

impl FakeHost {
    fn open(
        &mut self,
        to: SocketAddr,
        id: FlowId,
        connected: Option<Result<(), io::ErrorKind>>,
    ) -> FakeSocket {
        let far = Rc::new(RefCell::new(FarEnd {
            id,
            to,
            connected,
            outgoing: VecDeque::new(),
            closed: false,
            broken: None,
            arrived: Vec::new(),
            room: usize::MAX,
            saw_fin: false,
            saw_reset: false,
            dropped: false,
        }));
        self.opened.push(far.clone());
        FakeSocket(far)
    }
}

impl TcpHost for FakeHost {
    type Socket = FakeSocket;
    type Accepted = SocketAddr;

    fn connect(&mut self, to: SocketAddr, id: FlowId) -> io::Result<FakeSocket> {
        match self.refuse {
            Some(kind) => Err(kind.into()),
            None => Ok(self.open(to, id, None)),
        }
    }

    fn accept(&mut self, _listener: usize) -> io::Result<(SocketAddr, SocketAddr)> {
        let peer = self.waiting.pop_front().ok_or(io::ErrorKind::WouldBlock)?;
        Ok((peer, peer))
    }

    fn adopt(&mut self, peer: SocketAddr, id: FlowId) -> io::Result<FakeSocket> {
        Ok(self.open(peer, id, Some(Ok(()))))
    }
}

impl TcpSocket for FakeSocket {
    fn connect_result(&mut self) -> io::Result<()> {
        match self.0.borrow().connected {
            None => Err(io::ErrorKind::WouldBlock.into()),
            Some(Ok(())) => Ok(()),
            Some(Err(kind)) => Err(kind.into()),
        }
    }

    fn read(&mut self, pieces: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut far = self.0.borrow_mut();
        if let Some(kind) = far.broken {
            return Err(kind.into());
        }
        let mut n = 0;
        for piece in pieces {
            for byte in piece.iter_mut() {
                let Some(next) = far.outgoing.pop_front() else {
                    break;
                };
                *byte = next;
                n += 1;
            }
        }
        if n == 0 && !far.closed {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(n)
    }

    fn keep_peek_offset(&mut self) -> bool {
        true
    }

    fn peek_guest(
        &mut self,
        skip: usize,
        slices: &[VolatileSlice<'_>],
        at: usize,
        len: usize,
    ) -> io::Result<usize> {
        let far = self.0.borrow();
        if let Some(kind) = far.broken {
            return Err(kind.into());
        }
        let bytes: Vec<u8> = far.outgoing.iter().skip(skip).take(len).copied().collect();
        if bytes.is_empty() && !far.closed {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        crate::nic::write_at(slices, at, &bytes);
        Ok(bytes.len())
    }

    fn discard(&mut self, n: usize) -> io::Result<usize> {
        let mut far = self.0.borrow_mut();
        let n = n.min(far.outgoing.len());
        far.outgoing.drain(..n);
        Ok(n)
    }

    fn write_guest(&mut self, slices: &[VolatileSlice<'_>]) -> io::Result<usize> {
        let mut bytes = Vec::new();
        for slice in slices {
            let at = bytes.len();
            bytes.resize(at + slice.len(), 0);
            slice.copy_to(&mut bytes[at..]);
        }
        self.write(&bytes)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut far = self.0.borrow_mut();
        if let Some(kind) = far.broken {
            return Err(kind.into());
        }
        assert!(!far.saw_fin, "written after the end of the stream");
        let n = bytes.len().min(far.room);
        if n == 0 && !bytes.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        far.room -= n;
        far.arrived.extend_from_slice(&bytes[..n]);
        Ok(n)
    }

    fn shutdown_write(&mut self) {
        self.0.borrow_mut().saw_fin = true;
    }

    fn reset(&mut self) {
        self.0.borrow_mut().saw_reset = true;
    }
}

impl Drop for FakeSocket {
    fn drop(&mut self) {
        self.0.borrow_mut().dropped = true;
    }
}
