//! The half that receives from the guest: what to take over, what to acknowledge.
//!
//! Only in-order data is taken. It goes straight from guest memory to the host socket; what the
//! socket does not want at once waits in a bounded tail. So the window is a constant minus that
//! tail: derived from SO_SNDBUF room it would shut and nobody would say when to open it again.
//!
//! Data is acknowledged when it was taken over, once per burst and not per segment. Segments behind a
//! hole are not taken, but counted: each is owed an acknowledgment of its own (RFC 5681, 4.2), since
//! the guest's fast retransmit counts those, and without it every loss costs a retransmission timeout.

use super::seq::SeqNum;

/// Octets that the guest may have under way, and the bound of the unsent tail.
pub const WINDOW: u32 = 1 << 20;
/// Our window scale (RFC 7323, 2.3): the field counts units of 128 octets.
pub const SHIFT: u8 = 7;

/// Most acknowledgments that one burst can ask for. The guest needs three to see a loss, and each one
/// more lets it send a segment during recovery.
const MOST_OWED: u8 = 32;

/// What of a segment's payload to take over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Take {
    /// Octets at the front that were taken before.
    pub skip: u32,
    /// Octets to take now.
    pub len: u32,
    /// The guest's stream ends behind them.
    pub fin: bool,
}

/// Receiving half of a synchronized connection.
#[derive(Debug)]
pub struct Receiver {
    rcv_nxt: SeqNum,
    /// The right edge of the window as last advertised; never moves back (RFC 9293, 3.8.6).
    edge: SeqNum,
    /// Window scaling is in use.
    scaled: bool,
    /// Acknowledgments owed: one for whatever was taken since the last, and one for each segment
    /// behind a hole since then; at most [`MOST_OWED`].
    owed: u8,
    /// `rcv_nxt` as last acknowledged.
    acked: SeqNum,
    /// The last window shown was cut by the tail: say so when it grows again.
    squeezed: bool,
    fin: bool,
}

impl Receiver {
    /// A receiver whose peer's SYN was numbered `irs`. `window` is what the SYN/ACK offered.
    pub fn new(irs: SeqNum, scaled: bool, window: u32) -> Self {
        let rcv_nxt = irs + 1;
        Self {
            rcv_nxt,
            edge: rcv_nxt + window,
            scaled,
            owed: 0,
            acked: rcv_nxt,
            squeezed: false,
            fin: false,
        }
    }

    /// Next octet expected.
    pub fn rcv_nxt(&self) -> SeqNum {
        self.rcv_nxt
    }

    /// The guest's FIN was taken.
    pub fn finished(&self) -> bool {
        self.fin
    }

    /// The segment acceptability test (RFC 9293, 3.10.7.4, table 6).
    pub fn acceptable(&self, seq: SeqNum, seq_len: u32) -> bool {
        let last = seq + seq_len.saturating_sub(1);
        let window = self.edge - self.rcv_nxt;
        let inside = |n: SeqNum| self.rcv_nxt.at_or_before(n) && n.before(self.edge);
        match (seq_len, window) {
            (0, 0) => seq == self.rcv_nxt,
            (0, _) => inside(seq),
            (_, 0) => false,
            _ => inside(seq) || inside(last),
        }
    }

    /// Takes an acceptable segment's text; what lies past the window or behind a hole is left for
    /// the guest to send again. An acknowledgment is owed whenever the segment takes sequence space.
    pub fn handle_text(&mut self, seq: SeqNum, len: u32, fin: bool) -> Take {
        if len == 0 && !fin {
            return Take::default();
        }
        if seq.after(self.rcv_nxt) {
            self.owed = (self.owed + 1).min(MOST_OWED);
            return Take::default();
        }
        self.owed = 1;
        if self.fin {
            return Take::default();
        }
        let skip = self.rcv_nxt - seq;
        if skip > len {
            return Take::default();
        }
        let fresh = len - skip;
        let taken = fresh.min(self.edge - self.rcv_nxt);
        self.rcv_nxt += taken;
        // A FIN takes a number, but no room: it may come with the window full.
        let fin = fin && taken == fresh;
        if fin {
            self.rcv_nxt += 1;
            self.edge = self.edge.max(self.rcv_nxt);
            self.fin = true;
        }
        Take {
            skip,
            len: taken,
            fin,
        }
    }

    /// An acknowledgment is owed.
    pub fn owe_ack(&mut self) {
        self.owed = self.owed.max(1);
    }

    /// True when an acknowledgment should leave now. `tail` is the octets taken but not yet given
    /// to the host.
    ///
    /// Besides what is owed, that is a window which has become worth announcing: it was too small
    /// for a segment, or half of it came free (RFC 9293, 3.8.6.2.2).
    pub fn wants_ack(&self, tail: u32) -> bool {
        if self.owed > 0 || self.acked != self.rcv_nxt {
            return true;
        }
        let shown = self.edge - self.rcv_nxt;
        let gained = self.window(tail).saturating_sub(shown);
        self.squeezed && !self.fin && gained > 0 && (shown < 2 * 1460 || gained >= self.limit() / 2)
    }

    /// The acknowledgment and window fields of a segment that leaves now.
    pub fn acknowledge(&mut self, tail: u32) -> (SeqNum, u16) {
        let shift = if self.scaled { SHIFT } else { 0 };
        let field = (self.window(tail) >> shift).min(u32::from(u16::MAX));
        self.edge = self.edge.max(self.rcv_nxt + (field << shift));
        self.owed = self.owed.saturating_sub(1);
        self.acked = self.rcv_nxt;
        self.squeezed = tail > 0;
        // `field` was clamped to 16 bits above.
        #[expect(clippy::cast_possible_truncation)]
        (self.rcv_nxt, field as u16)
    }

    /// The window that would be offered now: never less than what was offered before.
    fn window(&self, tail: u32) -> u32 {
        let limit = self.limit();
        limit
            .saturating_sub(tail)
            .max(self.edge - self.rcv_nxt)
            .min(limit)
    }

    /// The largest window that can be shown.
    fn limit(&self) -> u32 {
        if self.scaled {
            WINDOW
        } else {
            u32::from(u16::MAX)
        }
    }
}

/// The window field of our SYN or SYN/ACK, which is never scaled (RFC 7323, 2.2), in octets.
pub const SYN_WINDOW: u16 = u16::MAX;
