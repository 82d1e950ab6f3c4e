//! Datagrams received in one system call.

use std::net::{Ipv4Addr, SocketAddr};

/// Runs per batch: enough to spread the cost of the call, few enough to stay in the processor's cache
/// until they are with the guest.
pub(crate) const DATAGRAMS: usize = 16;
/// Bytes of room per run: more than any has.
pub(crate) const ROOM: usize = 1 << 16;

/// Up to 16 runs of datagrams with their senders.
///
/// The kernel joins datagrams of equal length from one sender (UDP_GRO); most often a run is one
/// datagram. The memory, 1 MiB, is reserved once and becomes resident only as far as runs were long.
#[derive(Debug)]
pub struct Batch {
    pub(crate) room: Vec<u8>,
    pub(crate) entries: [Entry; DATAGRAMS],
    pub(crate) len: usize,
}

/// What is known of a run beside its bytes.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Who sent it.
    pub from: SocketAddr,
    /// Bytes of the whole run.
    pub len: usize,
    /// Bytes of each datagram but the last; 0 when the kernel does not say, for then there is one.
    pub segment: usize,
}

impl Entry {
    /// Bytes of each datagram but the last, at least 1.
    pub fn segment(&self) -> usize {
        match self.segment {
            0 => self.len.max(1),
            segment => segment,
        }
    }
}

/// Datagrams from one sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received<'a> {
    /// Who sent them.
    pub from: SocketAddr,
    /// Their payloads, one behind the other.
    pub payload: &'a [u8],
    /// Bytes of each but the last, which may be shorter. At least 1.
    pub segment: usize,
}

impl Default for Batch {
    fn default() -> Self {
        let nobody = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        Self {
            room: vec![0; DATAGRAMS * ROOM],
            entries: [Entry {
                from: nobody,
                len: 0,
                segment: 0,
            }; DATAGRAMS],
            len: 0,
        }
    }
}

impl Batch {
    /// Runs in it.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True without runs.
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

    /// Adds a run whose datagrams have `segment` bytes each, the last at most; one too many is
    /// ignored, and so are bytes beyond what a run can have.
    pub fn push(&mut self, from: SocketAddr, payload: &[u8], segment: usize) {
        if self.is_full() {
            return;
        }
        let n = payload.len().min(ROOM);
        let at = self.len * ROOM;
        self.room[at..at + n].copy_from_slice(&payload[..n]);
        self.entries[self.len] = Entry {
            from,
            len: n,
            segment,
        };
        self.len += 1;
    }

    /// The run at `index`.
    pub fn run(&self, index: usize) -> Option<Received<'_>> {
        let entry = self.entries[..self.len].get(index)?;
        let at = index * ROOM;
        Some(Received {
            from: entry.from,
            payload: &self.room[at..at + entry.len.min(ROOM)],
            segment: entry.segment(),
        })
    }
}
