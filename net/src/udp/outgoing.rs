//! Datagrams of one burst of the guest, on their way to host sockets.
//!
//! Payload stays in the guest's descriptors until the burst is over. Then every flow gives its socket
//! what has come together in one call, and datagrams of one length in a row are one message that the
//! kernel takes apart again (UDP_SEGMENT).

use std::io;
use std::net::SocketAddr;

use vm_memory::VolatileSlice;

use super::{GuestDatagram, UdpSocket};
use crate::drops::{DropReason, Drops};
use crate::wire::datagram::MAX_PAYLOAD;

/// Datagrams in one message: UDP_MAX_SEGMENTS of the kernels that allow the fewest.
pub const MAX_SEGMENTS: usize = 64;
/// Pieces of guest memory in one message: what the kernel takes (UIO_MAXIOV).
pub(super) const MAX_PIECES: usize = 1024;
/// Datagrams that one frame of the guest may stand for. Whoever asks for more means harm: Linux makes
/// 128 at most.
pub const MAX_RUN: usize = 1024;
/// Flows whose datagrams are kept until the end of the burst. One more sends those of the others.
const MAX_QUEUES: usize = 32;

/// Datagrams to one peer in guest memory.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a, 'm> {
    /// The peer.
    pub to: SocketAddr,
    /// Their payloads, one behind the other, without empty pieces.
    pub payload: &'a [VolatileSlice<'m>],
    /// Bytes of each but the last, which may be shorter; `None` for one datagram. There are
    /// [`MAX_SEGMENTS`] at most.
    pub segment: Option<u16>,
}

/// What of a burst is not sent yet, and the datagrams of it that were dropped.
#[derive(Debug, Default)]
pub struct Outgoing<'m> {
    pub(super) queues: Vec<Queue<'m>>,
    pub(super) drops: Drops,
}

/// Datagrams of one flow, in order.
#[derive(Debug)]
pub(super) struct Queue<'m> {
    pub(super) flow: u64,
    pub(super) hops: u8,
    pub(super) guest: SocketAddr,
    sends: Vec<Pending>,
    slices: Vec<VolatileSlice<'m>>,
}

/// One message in the making.
#[derive(Clone, Copy, Debug)]
struct Pending {
    to: SocketAddr,
    /// The peer as the guest names it.
    far: SocketAddr,
    /// Where its pieces end in the queue's slices.
    end: usize,
    pieces: usize,
    len: usize,
    /// Bytes of each datagram, of the last at most.
    segment: usize,
}

/// A datagram, or several, that could not be sent.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) far: SocketAddr,
    /// Bytes of each datagram.
    pub(super) len: usize,
    pub(super) error: io::Error,
}

impl<'m> Outgoing<'m> {
    /// The flow's queue, if it has one.
    pub(super) fn queue(&mut self, flow: u64) -> Option<usize> {
        self.queues.iter().rposition(|queue| queue.flow == flow)
    }

    pub(super) fn is_full(&self) -> bool {
        self.queues.len() >= MAX_QUEUES
    }

    /// Adds an empty queue; returns its index.
    pub(super) fn open(&mut self, flow: u64, hops: u8, guest: SocketAddr) -> usize {
        self.queues.push(Queue {
            flow,
            hops,
            guest,
            sends: Vec::new(),
            slices: Vec::new(),
        });
        self.queues.len() - 1
    }
}

impl Pending {
    fn count(&self) -> usize {
        self.len.div_ceil(self.segment).max(1)
    }

    /// True when a datagram of `len` bytes in `pieces` pieces may be its next one.
    fn takes(&self, to: SocketAddr, far: SocketAddr, len: usize, pieces: usize) -> bool {
        self.to == to
            && self.far == far
            && (1..=self.segment).contains(&len)
            // One that is shorter was the last, and an empty one cannot be told from none.
            && self.len > 0
            && self.len.is_multiple_of(self.segment)
            && self.len + len <= MAX_PAYLOAD
            && self.count() < MAX_SEGMENTS
            && self.pieces + pieces <= MAX_PIECES
    }
}

impl<'m> Queue<'m> {
    /// Takes what the guest's datagram, or run of datagrams, carries. `most` is the length up to which
    /// datagrams may share a message.
    pub(super) fn push(&mut self, datagram: &GuestDatagram<'_, 'm>, to: SocketAddr, most: usize) {
        let (total, far) = (datagram.payload.len, datagram.far);
        let segment = datagram.segment.min(total).max(1);
        // As much as one message may hold.
        let step = if segment > most {
            segment
        } else {
            segment * (MAX_PAYLOAD / segment).clamp(1, MAX_SEGMENTS)
        };
        let mut start = 0;
        loop {
            let len = step.min(total - start);
            let from = self.slices.len();
            datagram
                .payload
                .part(start, len)
                .for_each_slice(|slice| self.slices.push(slice));
            let pieces = self.slices.len() - from;
            let end = self.slices.len();
            match self.sends.last_mut() {
                Some(last)
                    if last.segment <= most
                        && len <= segment
                        && last.takes(to, far, len, pieces) =>
                {
                    last.end = end;
                    last.pieces += pieces;
                    last.len += len;
                }
                _ => self.sends.push(Pending {
                    to,
                    far,
                    end,
                    pieces,
                    len,
                    segment,
                }),
            }
            start += len;
            if start >= total {
                return;
            }
        }
    }

    /// Gives everything to `socket`. `most` is lowered when the host does not take datagrams of some
    /// length together. Returns what failed; true when the socket reported an error of the past.
    pub(super) fn send<S: UdpSocket>(
        &self,
        socket: &mut S,
        most: &mut usize,
        drops: &mut Drops,
    ) -> (Vec<Failure>, bool) {
        let mut failures = Vec::new();
        let mut stale = false;
        let mut start = 0;
        let messages: Vec<_> = self
            .sends
            .iter()
            .map(|send| {
                let payload = &self.slices[start..send.end];
                start = send.end;
                Message {
                    to: send.to,
                    payload,
                    segment: (send.len > send.segment)
                        .then(|| u16::try_from(send.segment).unwrap_or(u16::MAX)),
                }
            })
            .collect();
        let mut at = 0;
        while at < messages.len() {
            let error = match send_some(socket, &messages[at..], &mut stale) {
                Ok(n) => {
                    at += n;
                    continue;
                }
                Err(error) => error,
            };
            let send = &self.sends[at];
            if is_full(&error) {
                // Nor will it take the rest.
                for send in &self.sends[at..] {
                    count(drops, DropReason::Full, send.count());
                }
                break;
            }
            if messages[at].segment.is_some() && lower(most, send.segment, &error) {
                send_apart(
                    socket,
                    &messages[at],
                    send,
                    &mut stale,
                    drops,
                    &mut failures,
                );
            } else {
                count(drops, DropReason::HostRefused, send.count());
                failures.push(Failure {
                    far: send.far,
                    len: send.segment.min(send.len),
                    error,
                });
            }
            at += 1;
        }
        (failures, stale)
    }
}

/// Sends the datagrams of a message one by one.
fn send_apart<S: UdpSocket>(
    socket: &mut S,
    message: &Message<'_, '_>,
    send: &Pending,
    stale: &mut bool,
    drops: &mut Drops,
    failures: &mut Vec<Failure>,
) {
    let mut slices = Vec::new();
    let mut ends = Vec::new();
    let whole = super::Payload {
        frame: message.payload,
        at: 0,
        len: send.len,
    };
    for start in (0..send.len).step_by(send.segment) {
        let len = send.segment.min(send.len - start);
        whole
            .part(start, len)
            .for_each_slice(|slice| slices.push(slice));
        ends.push((slices.len(), len));
    }
    let mut start = 0;
    let singles: Vec<_> = ends
        .iter()
        .map(|&(end, _)| {
            let payload = &slices[start..end];
            start = end;
            Message {
                to: message.to,
                payload,
                segment: None,
            }
        })
        .collect();
    let mut at = 0;
    while at < singles.len() {
        match send_some(socket, &singles[at..], stale) {
            Ok(n) => at += n,
            Err(error) if is_full(&error) => {
                count(drops, DropReason::Full, singles.len() - at);
                return;
            }
            Err(error) => {
                count(drops, DropReason::HostRefused, 1);
                failures.push(Failure {
                    far: send.far,
                    len: ends[at].1,
                    error,
                });
                at += 1;
            }
        }
    }
}

/// Sends at least the first of `messages`, if it can be sent.
fn send_some<S: UdpSocket>(
    socket: &mut S,
    messages: &[Message<'_, '_>],
    stale: &mut bool,
) -> io::Result<usize> {
    let mut sent = socket.send(messages);
    if sent.as_ref().is_err_and(super::is_about_the_past) {
        // The error is reported once and is also in the queue, with the peer it is about.
        *stale = true;
        sent = socket.send(messages);
    }
    sent.map(|n| n.clamp(1, messages.len()))
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::ENOBUFS))
}

fn count(drops: &mut Drops, reason: DropReason, times: usize) {
    for _ in 0..times {
        drops.count(reason);
    }
}

/// True when it was for their number that datagrams of `segment` bytes were refused; then no more are
/// tried together.
///
/// EINVAL, and EMSGSIZE of newer kernels: longer than a packet on the way to the peer. Others may be
/// closer, but a flow has few peers. Anything else: its device has no checksum offload, or the like.
fn lower(most: &mut usize, segment: usize, error: &io::Error) -> bool {
    *most = match error.raw_os_error() {
        Some(libc::EINVAL | libc::EMSGSIZE) => segment.saturating_sub(1).min(*most),
        Some(libc::EIO | libc::ENOPROTOOPT | libc::EOPNOTSUPP) => 0,
        _ => return false,
    };
    true
}
