//! UDP between the guest and the host's world.
//!
//! # Theory of operation
//!
//! One host socket per guest address and port, whoever the guest talks to from there: the mapping is
//! endpoint-independent, so that peer-to-peer programs work (RFC 4787, REQ-1). What arrives is
//! delivered if the guest has sent to that very peer (address and port dependent filtering,
//! REQ-8), or if the socket belongs to a forward.
//!
//! ```text
//!  guest datagram --handle_from_guest--> flow by guest end --> Outgoing, payload in guest memory
//!  end of burst --end_run--> one send per flow ----------------------> host socket
//!  host event --handle_event--> ready list --pump--> receive a batch --> RX ring
//!                                                \-> error queue --pump_errors--> outbox
//! ```
//!
//! Runs of datagrams of one length stay together all the way. From the guest they come as frames
//! (HOST_USO), or are found in a burst, and leave as one message (UDP_SEGMENT). From the host they come
//! as one message (UDP_GRO); the guest gets them as one frame if it can (GUEST_USO4), else cut.
//! A socket whose runs are long, for such a guest, is read straight into the guest's descriptors;
//! others are read in batches, which are copied once.
//!
//! Nothing is buffered here beyond one batch: when the guest does not take frames, datagrams wait in
//! their sockets, and it is the kernel that drops what is too much.
//!
//! Sockets are unconnected and have IP_RECVERR set, so ICMP errors are read off an error queue that
//! says which peer they are about.

mod batch;
mod outgoing;
mod table;
#[cfg(test)]
mod tests;

use std::io;
use std::net::{IpAddr, SocketAddr};

use vm_memory::VolatileSlice;

pub use batch::{Batch, Entry, Received};
pub(crate) use batch::{DATAGRAMS, ROOM};
pub use outgoing::{MAX_RUN, MAX_SEGMENTS, Message, Outgoing};
pub use table::{MAX_FLOWS, MAX_PEERS, ONE_WAY, TWO_WAY, UdpLink, UdpTable};

use crate::config::Config;
use crate::drops::DropReason;
use crate::policy::{self, Route};
use crate::wire::error::{HOST, PORT};

/// Where the payload of a datagram lies in guest memory.
#[derive(Clone, Copy, Debug)]
pub struct Payload<'a, 'm> {
    /// The frame that holds it.
    pub frame: &'a [VolatileSlice<'m>],
    /// Offset of the payload in the frame, in bytes.
    pub at: usize,
    /// Length in bytes. What the frame does not hold is not sent.
    pub len: usize,
}

impl<'m> Payload<'_, 'm> {
    /// The `len` bytes of it that start `at` bytes into it.
    #[must_use]
    pub fn part(&self, at: usize, len: usize) -> Self {
        let at = at.min(self.len);
        Self {
            frame: self.frame,
            at: self.at + at,
            len: len.min(self.len - at),
        }
    }

    /// Appends its bytes to `bytes`.
    pub fn copy_to(&self, bytes: &mut Vec<u8>) {
        self.for_each_slice(|slice| {
            let at = bytes.len();
            bytes.resize(at + slice.len(), 0);
            slice.copy_to(&mut bytes[at..]);
        });
    }

    /// Calls `visit` with the pieces of the payload in order. Empty pieces are left out.
    pub fn for_each_slice(&self, mut visit: impl FnMut(VolatileSlice<'m>)) {
        let (mut skip, mut left) = (self.at, self.len);
        for slice in self.frame {
            let from = skip.min(slice.len());
            skip -= from;
            let n = left.min(slice.len() - from);
            if n > 0
                && let Ok(part) = slice.subslice(from, n)
            {
                visit(part);
                left -= n;
            }
        }
    }
}

/// A datagram from the guest, or a run of them in one frame, with headers that were found good.
#[derive(Clone, Copy, Debug)]
pub struct GuestDatagram<'a, 'm> {
    /// The guest's end.
    pub guest: SocketAddr,
    /// The far end, as the guest names it.
    pub far: SocketAddr,
    /// Hops that the guest gave it.
    pub hop_limit: u8,
    /// What it carries.
    pub payload: Payload<'a, 'm>,
    /// Bytes of payload in each datagram of a run, but the last, which may have fewer; for a single
    /// datagram at least the length of the payload.
    pub segment: usize,
}

/// Why a datagram may not leave, and what the guest is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What is counted.
    pub reason: DropReason,
    /// Code of the unreachable message to the guest; `None` for silence.
    pub code: Option<u8>,
}

/// Where on the host a datagram to `far` goes: [`policy::route`], as UDP sees it.
///
/// # Errors
/// The guest may not, or cannot, send there.
pub fn route(config: &Config, far: SocketAddr) -> Result<SocketAddr, Refusal> {
    let (reason, code) = match policy::route(config, far.ip()) {
        // No socket can send to port 0.
        Route::Host(_) if far.port() == 0 => (DropReason::Unroutable, None),
        Route::Host(ip) => return Ok(SocketAddr::new(ip, far.port())),
        Route::Gateway | Route::Dns => (DropReason::Vacant, Some(PORT)),
        Route::Vacant => (DropReason::Vacant, Some(HOST)),
        Route::Unroutable => (DropReason::Unroutable, None),
    };
    Err(Refusal { reason, code })
}

/// What a socket's error queue says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketError {
    /// The peer that the failed datagram was for.
    pub to: SocketAddr,
    /// Who reported it, if it came from the network.
    pub from: Option<IpAddr>,
    /// Type of the ICMP message that stands for it.
    pub kind: u8,
    /// Code of the ICMP message.
    pub code: u8,
    /// MTU of the next hop in bytes, for "fragmentation needed"; else 0.
    pub mtu: u16,
    /// Payload of the failed datagram as far as it was quoted, in bytes.
    pub payload_len: usize,
}

/// Whose number it is that a socket's readiness is reported by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// [`UdpTable::handle_event`] is to be called.
    Flows,
    /// [`dns::Forwarder::handle_event`](crate::dns::Forwarder::handle_event) is.
    Dns,
}

/// Opens UDP sockets.
pub trait UdpHost {
    /// A UDP socket.
    type Socket: UdpSocket;

    /// Opens a socket bound to `local` (port 0: any port) whose readiness is reported, edge-triggered,
    /// as number `number` of `owner`. Numbers are never used twice.
    ///
    /// # Errors
    /// The host has no descriptor to give, or the address is taken.
    fn open_udp(
        &mut self,
        local: SocketAddr,
        owner: Owner,
        number: u64,
    ) -> io::Result<Self::Socket>;
}

/// An unconnected UDP socket. No call blocks.
pub trait UdpSocket {
    /// Sends datagrams in order, straight from guest memory. Returns how many messages were taken, at
    /// least one.
    ///
    /// # Errors
    /// What the host reports about the first; a pending error of an earlier datagram is reported
    /// instead of sending.
    fn send(&mut self, messages: &[Message<'_, '_>]) -> io::Result<usize>;

    /// True when a [`Message`] may hold several datagrams.
    fn takes_runs(&self) -> bool;

    /// Sends one datagram of our own.
    ///
    /// # Errors
    /// What the host reports; a pending error of an earlier datagram is reported instead of sending.
    fn send_bytes(&mut self, to: SocketAddr, payload: &[u8]) -> io::Result<()>;

    /// Sets the hops that later datagrams may take; at least 1.
    fn set_hop_limit(&mut self, hops: u8);

    /// Replaces what is in `batch` by as many runs as are there and fit.
    ///
    /// # Errors
    /// `WouldBlock` when there are none; a pending error of an earlier datagram.
    fn receive(&mut self, batch: &mut Batch) -> io::Result<()>;

    /// Receives the next run straight into guest memory. What does not fit into `room` is lost.
    ///
    /// # Errors
    /// As [`Self::receive`].
    fn receive_into(&mut self, room: &Payload<'_, '_>) -> io::Result<Entry>;

    /// Takes the next entry of the error queue.
    fn take_error(&mut self) -> Option<SocketError>;
}

/// True for the errors that a socket keeps from an earlier datagram and reports once.
fn is_about_the_past(failure: &io::Error) -> bool {
    matches!(
        failure.raw_os_error(),
        Some(
            libc::ECONNREFUSED
                | libc::EHOSTUNREACH
                | libc::ENETUNREACH
                | libc::EPROTO
                | libc::ENOPROTOOPT
                | libc::EMSGSIZE
        )
    )
}
