//! The half that sends to the guest: what may leave now, and what must leave again.
//!
//! The sender sees sequence numbers and lengths only. Whoever holds the bytes asks for a [`Grant`],
//! puts that many bytes into a frame and commits it, so the bytes may live in a ring of ours or in
//! the host socket: the protocol cannot tell.
//!
//! ```text
//!            snd_una          snd_nxt        snd_max
//!   --acked--|----in flight----|--rewound-----|--queued, not sent--|
//!            |<------------- snd_wnd ------------->|
//! ```
//!
//! The link to the guest is a memory copy, so there is no congestion window in the ordinary run:
//! the guest's window is the only limit. Frames still get lost, because a guest short of TCP memory
//! drops data it had offered a window for. Then:
//!
//! * three duplicate ACKs resend from `snd_una` what one frame holds, and every partial ACK resends
//!   the next piece (RFC 6582);
//! * a time-out goes back to `snd_una` and feeds the window again in slow start (RFC 5681, 3.1),
//!   which keeps the second attempt from running into the same wall.

use std::time::{Duration, Instant};

use super::rto::Rto;
use super::seq::SeqNum;

/// Duplicate ACKs that trigger a fast retransmit (RFC 5681, 3.2).
const DUP_ACK_THRESHOLD: u32 = 3;
/// Segments that slow start begins with after a time-out (RFC 6928).
const RESTART_SEGMENTS: u32 = 10;
/// Time-outs in a row after which the guest counts as gone. With the back-off that is about ten
/// minutes, above R2's 100 s (RFC 9293, 3.8.3).
pub const MAX_RETRIES: u32 = 14;
/// A connection on which the guest owes nothing is probed after this long without a segment from it.
pub const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
/// Time between unanswered keepalive probes.
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// Unanswered keepalive probes after which the guest counts as gone.
pub const KEEPALIVE_PROBES: u32 = 8;
/// First and longest interval between zero-window probes (RFC 9293, 3.8.6.1). They go on for ever:
/// a guest that answers may keep its window shut as long as it likes.
const PERSIST_MIN: Duration = Duration::from_millis(250);
const PERSIST_MAX: Duration = Duration::from_secs(60);

/// Permission to send `len` octets that start `offset` octets past `snd_una`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Octets past `snd_una`.
    pub offset: u32,
    /// Octets, at least one.
    pub len: u32,
    /// The octets were sent before.
    retransmit: bool,
}

/// What an acknowledgment did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Acked {
    /// Octets of payload that left the window for good.
    pub released: u32,
    /// Our FIN is among what was acknowledged now.
    pub fin: bool,
}

/// The end of our stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fin {
    /// More data may come.
    Open,
    /// The stream ends at this sequence number; FIN was never sent.
    Due(SeqNum),
    /// FIN was sent with this sequence number, and a time-out made it due again.
    Rewound(SeqNum),
    /// FIN was sent with this sequence number.
    Sent(SeqNum),
    /// FIN was acknowledged.
    Acked,
}

/// What the timer of a [`Sender`] stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expired {
    /// Not due yet.
    Nothing,
    /// Data will be sent again: pump the connection.
    Retransmit,
    /// Send a segment that makes the guest repeat its acknowledgment and window.
    Probe,
    /// The guest does not answer any more.
    GuestGone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Timer {
    /// Nothing is owed; a probe is due then.
    Idle {
        at: Instant,
    },
    Retransmit {
        at: Instant,
    },
    Persist {
        at: Instant,
        interval: Duration,
    },
}

/// Sending half of a synchronized connection.
#[derive(Debug)]
pub struct Sender {
    snd_una: SeqNum,
    snd_nxt: SeqNum,
    snd_max: SeqNum,
    /// The guest's window in octets, scaled.
    snd_wnd: u32,
    /// Sequence and acknowledgment numbers of the segment that last set the window.
    snd_wl1: SeqNum,
    snd_wl2: SeqNum,
    /// The guest's window scale.
    shift: u8,
    mss: u32,
    fin: Fin,
    rto: Rto,
    timer: Timer,
    /// Timer expiries since the guest was last heard.
    unanswered: u32,
    /// The octet whose acknowledgment gives the next round-trip sample, and when it left.
    timed: Option<(SeqNum, Instant)>,
    dup_acks: u32,
    /// Fast recovery lasts until this is acknowledged.
    recover: Option<SeqNum>,
    /// The front of the window is to be sent again.
    resend_front: bool,
    /// Octets that slow start allows in flight after a time-out.
    cwnd: Option<u32>,
}

impl Sender {
    /// A sender whose SYN, numbered `iss`, was acknowledged by a segment that offers `window`.
    ///
    /// `mss` is in octets of payload; `shift` is the guest's window scale.
    pub fn new(iss: SeqNum, mss: u32, shift: u8, window: u32, irs: SeqNum, now: Instant) -> Self {
        let snd_una = iss + 1;
        Self {
            snd_una,
            snd_nxt: snd_una,
            snd_max: snd_una,
            snd_wnd: window,
            snd_wl1: irs,
            snd_wl2: snd_una,
            shift,
            mss: mss.max(1),
            fin: Fin::Open,
            rto: Rto::new(),
            timer: Timer::Idle {
                at: now + KEEPALIVE_IDLE,
            },
            unanswered: 0,
            timed: None,
            dup_acks: 0,
            recover: None,
            resend_front: false,
            cwnd: None,
        }
    }

    /// Octets of payload per segment.
    pub fn mss(&self) -> u32 {
        self.mss
    }

    /// Octets sent and not acknowledged.
    pub fn in_flight(&self) -> u32 {
        self.snd_nxt - self.snd_una
    }

    /// Octets that left at least once and are not acknowledged.
    pub fn sent(&self) -> u32 {
        self.snd_max - self.snd_una
    }

    /// The guest's window, in octets from `snd_una`.
    pub fn window(&self) -> u32 {
        self.snd_wnd
    }

    /// Sequence number of the next segment that carries no data.
    pub fn snd_nxt(&self) -> SeqNum {
        match self.fin {
            Fin::Sent(at) => at + 1,
            Fin::Acked => self.snd_una,
            Fin::Open | Fin::Due(_) | Fin::Rewound(_) => self.snd_nxt,
        }
    }

    /// What may be sent, given `queued` octets at hand from `snd_una` on and `room` in a frame.
    ///
    /// Sends full segments or the end of what is queued; a window that allows neither is left to
    /// grow, unless it is all that the guest ever offers (RFC 9293, 3.8.6.2.1).
    pub fn grant(&self, queued: u32, room: u32) -> Option<Grant> {
        if self.resend_front {
            let len = (self.snd_max - self.snd_una)
                .min(queued)
                .min(room)
                .min(self.snd_wnd);
            return (len > 0).then_some(Grant {
                offset: 0,
                len,
                retransmit: true,
            });
        }
        let offset = self.in_flight();
        let limit = self
            .cwnd
            .map_or(self.snd_wnd, |cwnd| self.snd_wnd.min(cwnd));
        let usable = limit.saturating_sub(offset);
        let waiting = queued.saturating_sub(offset);
        let mut len = waiting.min(usable).min(room);
        if len < waiting && len > self.mss {
            // Whole segments, so that the rest does not become a small one.
            len -= len % self.mss;
        }
        if len == 0 || (len < waiting && len < self.mss && offset > 0) {
            return None;
        }
        Some(Grant {
            offset,
            len,
            retransmit: self.snd_nxt.before(self.snd_max),
        })
    }

    /// `filled` octets of `grant` are on their way; returns their sequence number.
    pub fn commit(&mut self, grant: Grant, filled: u32, now: Instant) -> SeqNum {
        let seq = self.snd_una + grant.offset;
        let end = seq + filled;
        if self.resend_front {
            self.resend_front = false;
        } else {
            self.snd_nxt = end;
        }
        if grant.retransmit {
            self.timed = None;
        } else if self.timed.is_none() {
            self.timed = Some((end, now));
        }
        self.snd_max = self.snd_max.max(end);
        if !matches!(self.timer, Timer::Retransmit { .. }) {
            self.arm(now);
        }
        seq
    }

    /// The stream ends `queued` octets past `snd_una`.
    pub fn close(&mut self, queued: u32) {
        if self.fin == Fin::Open {
            self.fin = Fin::Due(self.snd_una + queued);
        }
    }

    /// True when FIN should be sent: everything before it was.
    pub fn fin_due(&self) -> bool {
        match self.fin {
            Fin::Due(at) | Fin::Rewound(at) => self.snd_nxt == at && !self.resend_front,
            Fin::Open | Fin::Sent(_) | Fin::Acked => false,
        }
    }

    /// FIN, if it is due. Returns its sequence number.
    pub fn poll_fin(&mut self, now: Instant) -> Option<SeqNum> {
        let (Fin::Due(at) | Fin::Rewound(at)) = self.fin else {
            return None;
        };
        if !self.fin_due() {
            return None;
        }
        self.fin = Fin::Sent(at);
        if !matches!(self.timer, Timer::Retransmit { .. }) {
            self.arm(now);
        }
        Some(at)
    }

    /// The end of the stream is known.
    pub fn closing(&self) -> bool {
        self.fin != Fin::Open
    }

    /// FIN was sent (again) or acknowledged.
    pub fn fin_sent(&self) -> bool {
        matches!(self.fin, Fin::Sent(_) | Fin::Acked)
    }

    /// The next grant repeats the front of the window: it adds nothing to what is in flight.
    pub fn resends_front(&self) -> bool {
        self.resend_front
    }

    /// FIN was acknowledged: this half is done.
    pub fn closed(&self) -> bool {
        self.fin == Fin::Acked
    }

    /// True for an acknowledgment of something that was never sent.
    pub fn is_beyond(&self, ack: SeqNum) -> bool {
        let end = match self.fin {
            Fin::Sent(at) | Fin::Rewound(at) => at + 1,
            Fin::Open | Fin::Due(_) | Fin::Acked => self.snd_max,
        };
        ack.after(end)
    }

    /// Takes the acknowledgment and window of an acceptable segment (RFC 9293, 3.10.7.4).
    ///
    /// `seq` and `len` are the segment's own sequence number and its length in sequence space.
    pub fn handle_ack(
        &mut self,
        ack: SeqNum,
        window: u16,
        seq: SeqNum,
        len: u32,
        now: Instant,
    ) -> Acked {
        let mut acked = Acked::default();
        let window = u32::from(window) << self.shift;
        let window_was = self.snd_wnd;
        if self.snd_wl1.before(seq) || (self.snd_wl1 == seq && self.snd_wl2.at_or_before(ack)) {
            self.snd_wnd = window;
            self.snd_wl1 = seq;
            self.snd_wl2 = ack;
        }
        self.unanswered = 0;
        if let Timer::Idle { at } = &mut self.timer {
            *at = now + KEEPALIVE_IDLE;
        }
        if ack.after(self.snd_una) && !self.is_beyond(ack) {
            acked = self.advance(ack, now);
        } else if ack == self.snd_una
            && len == 0
            && window == window_was
            && window > 0
            && self.snd_max.after(self.snd_una)
        {
            self.dup_acks += 1;
            if self.dup_acks == DUP_ACK_THRESHOLD && self.recover.is_none() {
                self.recover = Some(self.snd_max);
                self.resend_front = true;
            }
        }
        self.arm_after_ack(window_was, now);
        acked
    }

    fn advance(&mut self, ack: SeqNum, now: Instant) -> Acked {
        let fin = matches!(self.fin, Fin::Sent(at) | Fin::Rewound(at) if ack == at + 1);
        // FIN takes a number but no room in the window of bytes.
        let data_end = if fin { ack - 1 } else { ack };
        let released = data_end - self.snd_una;
        self.snd_una = data_end;
        self.snd_nxt = self.snd_nxt.max(data_end);
        self.snd_max = self.snd_max.max(data_end);
        self.dup_acks = 0;
        self.resend_front = false;
        self.rto.progress();
        if let Some((end, left)) = self.timed
            && end.at_or_before(ack)
        {
            self.rto.sample(now.saturating_duration_since(left));
            self.timed = None;
        }
        if let Some(cwnd) = self.cwnd {
            let cwnd = cwnd.saturating_add(released.max(self.mss));
            self.cwnd = (cwnd < self.snd_wnd).then_some(cwnd);
        }
        if let Some(recover) = self.recover {
            if ack.before(recover) {
                // A partial ACK: the next hole starts here (RFC 6582, 3.2).
                self.resend_front = true;
            } else {
                self.recover = None;
            }
        }
        if fin {
            self.fin = Fin::Acked;
            self.snd_una = ack;
            self.snd_nxt = ack;
            self.snd_max = ack;
        }
        self.timer = Timer::Idle {
            at: now + KEEPALIVE_IDLE,
        };
        Acked { released, fin }
    }

    fn owes(&self) -> bool {
        self.snd_max.after(self.snd_una) || matches!(self.fin, Fin::Sent(_))
    }

    fn arm_after_ack(&mut self, window_was: u32, now: Instant) {
        match self.timer {
            Timer::Idle { .. } if self.owes() => self.arm(now),
            Timer::Persist { .. } if self.snd_wnd > window_was => {
                self.timer = Timer::Idle {
                    at: now + KEEPALIVE_IDLE,
                };
            }
            _ => {}
        }
    }

    fn arm(&mut self, now: Instant) {
        self.timer = Timer::Retransmit {
            at: now + self.rto.timeout(),
        };
    }

    /// Data waits, nothing is in flight and the window is shut: only a probe can open it.
    pub fn blocked(&mut self, now: Instant) {
        if !self.owes() && !matches!(self.timer, Timer::Persist { .. }) {
            self.timer = Timer::Persist {
                at: now + PERSIST_MIN,
                interval: PERSIST_MIN,
            };
        }
    }

    /// When [`Self::handle_timeout`] wants to be called.
    pub fn poll_timeout(&self) -> Instant {
        match self.timer {
            Timer::Retransmit { at } | Timer::Persist { at, .. } | Timer::Idle { at } => at,
        }
    }

    /// Acts on the timer if it is due.
    pub fn handle_timeout(&mut self, now: Instant) -> Expired {
        if now < self.poll_timeout() {
            return Expired::Nothing;
        }
        let limit = match self.timer {
            Timer::Idle { .. } => KEEPALIVE_PROBES,
            Timer::Persist { .. } | Timer::Retransmit { .. } => MAX_RETRIES,
        };
        if self.unanswered >= limit {
            return Expired::GuestGone;
        }
        self.unanswered += 1;
        match self.timer {
            Timer::Idle { .. } => {
                // From now, not from when it was due: a process that was stopped for a while has not
                // asked yet.
                self.timer = Timer::Idle {
                    at: now + KEEPALIVE_INTERVAL,
                };
                Expired::Probe
            }
            Timer::Persist { interval, .. } => {
                let interval = (interval * 2).min(PERSIST_MAX);
                self.timer = Timer::Persist {
                    at: now + interval,
                    interval,
                };
                Expired::Probe
            }
            Timer::Retransmit { .. } => {
                self.rewind();
                self.rto.back_off();
                self.arm(now);
                // With the window shut the rewound data may not leave; the probe keeps asking.
                if self.snd_wnd == 0 {
                    Expired::Probe
                } else {
                    Expired::Retransmit
                }
            }
        }
    }

    /// Goes back to `snd_una`: all that is in flight counts as lost.
    fn rewind(&mut self) {
        self.snd_nxt = self.snd_una;
        if let Fin::Sent(at) = self.fin {
            self.fin = Fin::Rewound(at);
        }
        self.cwnd = Some(self.mss.saturating_mul(RESTART_SEGMENTS));
        self.timed = None;
        self.dup_acks = 0;
        self.recover = None;
        self.resend_front = false;
    }
}
