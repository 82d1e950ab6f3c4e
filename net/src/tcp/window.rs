//! Where the bytes of a download wait for the guest's acknowledgment.

use std::io;

use super::rx_path::RxPath;
use super::socket::TcpSocket;
use crate::nic::Offloads;
use crate::window::Ring;

/// What a flow's first peek asks for. Later ones follow what the socket had.
const FIRST_PEEK: u32 = 16 << 10;
/// What the smallest peek asks for.
const MIN_PEEK: u32 = 2 << 10;

/// The un-ACKed bytes of one flow.
#[derive(Debug)]
pub(super) enum Window {
    /// In our memory: read once, taken from there as often as needed.
    Ring(Ring),
    /// In the host's socket, which gives them out as often as needed.
    Socket(Peeked),
}

/// The state of bytes that wait in a socket.
#[derive(Debug)]
pub(super) struct Peeked {
    /// Bytes that the guest acknowledged and the socket still holds, ahead of the window.
    owed: u32,
    /// Bytes that the next peek asks for: room is reserved for them.
    expected: u32,
    /// Peeks go on past `owed` at no cost.
    offset: bool,
}

impl Window {
    /// A window for `socket`, by the path `rx` if the link and the host allow it.
    pub(super) fn open(rx: RxPath, offloads: Offloads, socket: &mut impl TcpSocket) -> Self {
        let offset = match rx {
            _ if !offloads.contains(Offloads::GUEST_CSUM) => None,
            RxPath::Ring | RxPath::Copy => None,
            RxPath::Direct => socket.keep_peek_offset().then_some(true),
            RxPath::DirectDiscard => Some(false),
        };
        match offset {
            Some(offset) => Self::Socket(Peeked {
                owed: 0,
                expected: FIRST_PEEK,
                offset,
            }),
            None => Self::Ring(Ring::default()),
        }
    }

    /// Bytes of our memory in use.
    pub(super) fn capacity(&self) -> u64 {
        match self {
            Self::Ring(ring) => ring.capacity() as u64,
            Self::Socket(_) => 0,
        }
    }

    /// The guest acknowledged `n` bytes.
    pub(super) fn release(&mut self, n: u32) {
        match self {
            Self::Ring(ring) => ring.consume(n as usize),
            Self::Socket(peeked) => peeked.owed += n,
        }
    }

    /// Gives memory back that holds nothing.
    pub(super) fn shrink(&mut self) {
        if let Self::Ring(ring) = self {
            ring.shrink_if_empty();
        }
    }

    /// Drops from `socket` what the guest acknowledged.
    ///
    /// To be called before the socket is closed, too: closed with bytes left to read, it would reset
    /// the connection, and with that what the guest sent last.
    pub(super) fn settle(&mut self, socket: &mut impl TcpSocket) -> io::Result<()> {
        let Self::Socket(peeked) = self else {
            return Ok(());
        };
        while peeked.owed > 0 {
            match socket.discard(peeked.owed as usize) {
                // What was peeked at cannot have gone; but a loop would not bring it back.
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => peeked.owed -= u32::try_from(n).unwrap_or(u32::MAX).min(peeked.owed),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Peeked {
    /// Bytes ahead of the window that peeks have to get past.
    pub(super) fn owed(&self) -> u32 {
        self.owed
    }

    /// Dropping what was acknowledged can wait for the end of the burst.
    pub(super) fn can_owe(&self) -> bool {
        self.offset
    }

    /// How many of `granted` bytes to ask for, in whole segments of `mss` bytes if more than one.
    pub(super) fn ask(&self, granted: u32, mss: u32) -> u32 {
        let n = granted.min(self.expected.max(mss));
        if n < granted && n > mss {
            n - n % mss
        } else {
            n
        }
    }

    /// A peek that asked for `asked` bytes gave `got`.
    pub(super) fn learn(&mut self, asked: u32, got: u32) {
        self.expected = if got >= asked {
            self.expected.max(asked).saturating_mul(4).min(1 << 20)
        } else {
            // What came once will come again.
            got.saturating_mul(2).max(MIN_PEEK)
        };
    }
}
