//! Datagrams received in one system call.

use std::net::{Ipv4Addr, SocketAddr};

/// Datagrams per batch: enough to spread the cost of the call, few enough to share the outbox.
pub(crate) const DATAGRAMS: usize = 16;
/// Bytes of room per datagram: more than any datagram has.
pub(crate) const ROOM: usize = 1 << 16;

/// Up to 16 datagrams with their senders.
///
/// The memory, 1 MiB, is reserved once and becomes resident only as far as datagrams were long.
#[derive(Debug)]
pub struct Batch {
    pub(crate) room: Vec<u8>,
    pub(crate) entries: [(SocketAddr, usize); DATAGRAMS],
    pub(crate) len: usize,
}

impl Default for Batch {
    fn default() -> Self {
        let nobody = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        Self {
            room: vec![0; DATAGRAMS * ROOM],
            entries: [(nobody, 0); DATAGRAMS],
            len: 0,
        }
    }
}

impl Batch {
    /// Datagrams in it.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True without datagrams.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// True when no more fit.
    pub fn is_full(&self) -> bool {
        self.len == DATAGRAMS
    }

    /// Takes all out.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Adds a datagram; one too many is ignored, and so are bytes beyond what a datagram can have.
    pub fn push(&mut self, from: SocketAddr, payload: &[u8]) {
        if self.is_full() {
            return;
        }
        let n = payload.len().min(ROOM);
        let at = self.len * ROOM;
        self.room[at..at + n].copy_from_slice(&payload[..n]);
        self.entries[self.len] = (from, n);
        self.len += 1;
    }

    /// The datagram at `index`.
    pub fn datagram(&self, index: usize) -> Option<(SocketAddr, &[u8])> {
        let &(from, n) = self.entries[..self.len].get(index)?;
        let at = index * ROOM;
        Some((from, &self.room[at..at + n.min(ROOM)]))
    }
}
