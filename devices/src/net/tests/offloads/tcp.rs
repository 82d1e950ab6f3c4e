//! A small TCP client: one connection, no losses on its link, segmentation left to the card if the
//! driver may. It sends all of its data and FIN, and then waits for the far end's.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use net::nic::{Offloads, VNET_HDR_GSO_TCPV4, VNET_HDR_GSO_TCPV6, VnetHdr};

use super::packet::{
    ACK, FIN, PSH, RST, SYN, TcpFields, View, finish_checksum, leave_checksum, tcp,
};

/// MSS of the link, which both ends announce.
const MSS: usize = 1460;
/// Go back to what is not acknowledged after this long.
const PATIENCE: Duration = Duration::from_secs(1);

pub(super) struct Client {
    guest: SocketAddr,
    far: SocketAddr,
    /// Sequence number of the SYN.
    initial: u32,
    /// Octets that the client can take, shifted by what its SYN says (see [`tcp`]).
    window: u16,
    data: Vec<u8>,
    /// Octets acknowledged and sent: SYN, data and FIN.
    acked: usize,
    sent: usize,
    /// Up to where the far end takes octets, and the shift of its window.
    limit: usize,
    shift: u8,
    /// Sequence number of its SYN.
    their_initial: u32,
    connected: bool,
    pub(super) received: Vec<u8>,
    pub(super) finished: bool,
    ack_due: bool,
    progress: Instant,
    /// Times that something was sent again.
    pub(super) resent: usize,
}

impl Client {
    /// A client that is to send `data`.
    pub(super) fn new(guest: SocketAddr, far: SocketAddr, window: u16, data: Vec<u8>) -> Self {
        Self {
            guest,
            far,
            // Wraps in the middle of the data.
            initial: 0u32.wrapping_sub(u32::try_from(data.len() / 2).unwrap()),
            window,
            data,
            acked: 0,
            sent: 0,
            limit: 1,
            shift: 0,
            their_initial: 0,
            connected: false,
            received: Vec::new(),
            finished: false,
            ack_due: false,
            progress: Instant::now(),
            resent: 0,
        }
    }

    /// True when both directions are at their ends.
    pub(super) fn is_done(&self) -> bool {
        self.finished && self.acked == self.data.len() + 2
    }

    /// The next frame to send, if there is one.
    pub(super) fn poll(&mut self, offloads: Offloads) -> Option<(VnetHdr, Vec<u8>)> {
        if self.acked < self.sent && self.progress.elapsed() > PATIENCE {
            self.sent = self.acked;
            self.progress = Instant::now();
            self.resent += 1;
        }
        if self.sent == 0 {
            self.sent = 1;
            return Some(self.frame(offloads, 0, SYN, 0..0));
        }
        if !self.connected {
            return None;
        }
        let tso = if self.guest.is_ipv4() {
            Offloads::HOST_TSO4
        } else {
            Offloads::HOST_TSO6
        };
        // Whole segments, in the longest IP packet there is.
        let most = if offloads.contains(tso) {
            44 * MSS
        } else {
            MSS
        };
        let at = self.sent;
        let end = self
            .data
            .len()
            .min(self.limit.max(1) - 1)
            .min(at - 1 + most);
        if at - 1 < end {
            self.sent = end + 1;
            let last = end == self.data.len();
            let flags = ACK | if last { PSH } else { 0 };
            return Some(self.frame(offloads, at, flags, at - 1..end));
        }
        if at == self.data.len() + 1 {
            self.sent += 1;
            return Some(self.frame(offloads, at, ACK | FIN, 0..0));
        }
        let due = std::mem::take(&mut self.ack_due);
        due.then(|| self.frame(offloads, at, ACK, 0..0))
    }

    /// A segment at `offset` of what the client sends.
    fn frame(
        &mut self,
        offloads: Offloads,
        offset: usize,
        flags: u8,
        text: std::ops::Range<usize>,
    ) -> (VnetHdr, Vec<u8>) {
        self.ack_due = false;
        let taken = self.received.len() + usize::from(self.connected) + usize::from(self.finished);
        let fields = TcpFields {
            seq: self.initial.wrapping_add(u32::try_from(offset).unwrap()),
            ack: self
                .their_initial
                .wrapping_add(u32::try_from(taken).unwrap()),
            flags,
            window: self.window,
        };
        let long = text.len() > MSS;
        let mut frame = tcp(self.guest, self.far, fields, &self.data[text]);
        if !offloads.contains(Offloads::CSUM) {
            finish_checksum(&mut frame);
            return (VnetHdr::default(), frame);
        }
        let mut hdr = leave_checksum(&mut frame);
        if long {
            hdr.gso_size = u16::try_from(MSS).unwrap();
            hdr.gso_type = if self.guest.is_ipv4() {
                VNET_HDR_GSO_TCPV4
            } else {
                VNET_HDR_GSO_TCPV6
            };
        }
        (hdr, frame)
    }

    /// Takes a segment of the far end.
    ///
    /// # Panics
    /// Panics when it breaks TCP: nothing is lost or reordered on this link.
    pub(super) fn handle(&mut self, packet: &[u8]) {
        let view = View::of(packet);
        let fields = view.tcp(packet);
        assert_eq!(fields.flags & RST, 0, "reset");
        assert_ne!(fields.flags & ACK, 0, "a segment without ACK");
        let acked = fields.ack.wrapping_sub(self.initial) as usize;
        assert!(acked <= self.sent, "ACK of what was not sent");
        if acked > self.acked {
            self.acked = acked;
            self.progress = Instant::now();
        }
        let payload = &packet[view.payload..];
        if fields.flags & SYN != 0 {
            if !self.connected {
                self.connected = true;
                self.their_initial = fields.seq;
                self.shift = scale(&packet[view.transport + 20..view.payload]);
                self.limit = acked + usize::from(fields.window);
            }
            self.ack_due = true;
            return;
        }
        let window = usize::from(fields.window) << self.shift;
        self.limit = self.limit.max(acked + window);
        let offset = fields.seq.wrapping_sub(self.their_initial) as usize;
        let expected = self.received.len() + 1 + usize::from(self.finished);
        assert!(
            (1..=expected).contains(&offset),
            "at {offset} instead of {expected}: {fields:x?}, {} octets",
            payload.len()
        );
        // What came already is a retransmission: the test's machine was slow, not the stack wrong.
        let known = (expected - offset).min(payload.len());
        let end = offset + payload.len();
        self.ack_due |= !payload.is_empty() || fields.flags & FIN != 0;
        if known < payload.len() {
            assert!(!self.finished, "data behind FIN");
            assert!(
                payload.len() - known <= usize::from(self.window) << 3,
                "window"
            );
            self.received.extend(&payload[known..]);
        }
        if fields.flags & FIN != 0 && end == self.received.len() + 1 {
            self.finished = true;
        }
    }
}

/// The window scale of a SYN's options; 0 without.
fn scale(mut options: &[u8]) -> u8 {
    while let [kind, rest @ ..] = options {
        match (kind, rest) {
            (0, _) => break,
            (1, _) => options = rest,
            (3, [3, shift, ..]) => return *shift,
            (_, [len, ..]) if *len >= 2 => options = &options[usize::from(*len)..],
            _ => panic!("options"),
        }
    }
    0
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client")
            .field("acked", &self.acked)
            .field("sent", &self.sent)
            .field("limit", &self.limit)
            .field("received", &self.received.len())
            .field("finished", &self.finished)
            .field("resent", &self.resent)
            .finish_non_exhaustive()
    }
}
