//! One connection on its guest side: which state, and what each event does to it.
//!
//! A connection of this stack has the guest at one end and a host socket at the other, so the states
//! before ESTABLISHED follow the host's, and those after it are two independent halves:
//!
//! | state | the RFC's | entered by | leaves by |
//! |---|---|---|---|
//! | `Connecting` | LISTEN | guest SYN; the host socket connects | connect result, guest RST |
//! | `SynReceived` | SYN-RECEIVED | host connected; SYN/ACK is sent | guest ACK, RST, time-out |
//! | `SynSent` | SYN-SENT | host accepted; SYN is sent | guest SYN/ACK, RST, time-out |
//! | `Synchronized` | ESTABLISHED to LAST-ACK | handshake done | both halves done, RST |
//! | `TimeWait` | TIME-WAIT | both done, we closed first | 2 s, a new SYN |
//! | `Closed` | CLOSED | anything final | - |
//!
//! Nothing is answered in `Connecting`: the guest learns the truth about the far end, when it is known.

use std::time::{Duration, Instant};

use super::receiver::{self, Receiver, SYN_WINDOW, Take};
use super::rto::INITIAL_RTO;
use super::segment::{Flags, Header, Segment, SynOptions, reset_for};
use super::sender::{Acked, Expired, Sender};
use super::seq::SeqNum;

/// Default MSS when the guest names none (RFC 9293, 3.7.1).
const DEFAULT_MSS: u16 = 536;
/// Smallest MSS that is believed; below it a hostile guest would cost a header per octet.
const MIN_MSS: u16 = 88;
/// SYN or SYN/ACK transmissions before the attempt is given up.
const SYN_TRIES: u32 = 6;
/// How long a finished connection stays to acknowledge a repeated FIN. RFC 9293 (3.4.2) asks for 2
/// MSL; no segment can linger on a link that is a memory copy.
pub const TIME_WAIT: Duration = Duration::from_secs(2);

/// What both sides agreed on in the handshake.
#[derive(Clone, Copy, Debug)]
struct Terms {
    irs: SeqNum,
    iss: SeqNum,
    /// Octets of payload per segment to the guest.
    mss: u16,
    /// The guest's window shift; `None` when the guest did not offer scaling.
    shift: Option<u8>,
}

#[derive(Clone, Copy, Debug)]
struct Retry {
    at: Instant,
    tries: u32,
}

#[derive(Debug)]
enum State {
    Connecting {
        terms: Terms,
    },
    SynReceived {
        terms: Terms,
        due: bool,
        retry: Retry,
    },
    SynSent {
        iss: SeqNum,
        due: bool,
        retry: Retry,
    },
    Synchronized {
        sender: Sender,
        receiver: Receiver,
    },
    TimeWait {
        snd_nxt: SeqNum,
        rcv_nxt: SeqNum,
        ack_due: bool,
        until: Instant,
    },
    Closed,
}

/// What the owner of the host socket must do after a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Payload to give to the host.
    pub take: Take,
    /// Octets that the guest acknowledged: the window may forget them.
    pub released: u32,
    /// The handshake completed with this segment.
    pub established: bool,
    /// The guest reset the connection: reset the host's.
    pub reset: bool,
    /// A segment to answer with at once.
    pub reply: Option<Header>,
}

/// What the timer did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timeout {
    /// Nothing was due, or it is dealt with by the ordinary polls.
    Handled,
    /// Send this segment now.
    Send(Header),
    /// The connection is over without a word from the guest: reset the host's.
    Abort,
    /// TIME-WAIT is over.
    Done,
}

/// A connection's guest side.
#[derive(Debug)]
pub struct Conn {
    state: State,
    /// Largest payload per segment that the link carries.
    link_mss: u16,
    /// We sent FIN before the guest did: TIME-WAIT is ours.
    active_close: bool,
}

impl Conn {
    /// The guest sent `syn`. `link_mss` is the link's MTU less headers; `iss` must be unpredictable.
    pub fn from_guest(syn: &Segment, link_mss: u16, iss: SeqNum) -> Self {
        let terms = Terms {
            irs: syn.seq,
            iss,
            mss: agreed_mss(syn.options, link_mss),
            shift: syn.options.window_scale.map(|shift| shift.min(14)),
        };
        Self {
            state: State::Connecting { terms },
            link_mss,
            active_close: false,
        }
    }

    /// The host accepted a connection for the guest.
    pub fn to_guest(link_mss: u16, iss: SeqNum, now: Instant) -> Self {
        Self {
            state: State::SynSent {
                iss,
                due: true,
                retry: first_try(now),
            },
            link_mss,
            active_close: false,
        }
    }

    /// True until the host side is connected.
    pub fn is_connecting(&self) -> bool {
        matches!(self.state, State::Connecting { .. })
    }

    /// True once the handshake is done and until both halves are.
    pub fn is_synchronized(&self) -> bool {
        matches!(self.state, State::Synchronized { .. })
    }

    /// True in TIME-WAIT and CLOSED: the host socket is not needed any more.
    pub fn is_finished(&self) -> bool {
        matches!(self.state, State::TimeWait { .. } | State::Closed)
    }

    /// True when the connection can be forgotten.
    pub fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed)
    }

    /// The sending half, once synchronized.
    pub fn sender(&mut self) -> Option<&mut Sender> {
        match &mut self.state {
            State::Synchronized { sender, .. } => Some(sender),
            _ => None,
        }
    }

    /// Octets in flight to the guest.
    pub fn in_flight(&self) -> u32 {
        match &self.state {
            State::Synchronized { sender, .. } => sender.in_flight(),
            _ => 0,
        }
    }

    /// The RFC's name for the state (RFC 9293, 3.3.2).
    pub fn state_name(&self) -> &'static str {
        match &self.state {
            State::Connecting { .. } => "CONNECTING",
            State::SynReceived { .. } => "SYN-RECEIVED",
            State::SynSent { .. } => "SYN-SENT",
            State::TimeWait { .. } => "TIME-WAIT",
            State::Closed => "CLOSED",
            State::Synchronized { sender, receiver } => {
                match (sender.fin_sent(), sender.closed(), receiver.finished()) {
                    (false, _, false) => "ESTABLISHED",
                    (false, _, true) => "CLOSE-WAIT",
                    (true, false, false) => "FIN-WAIT-1",
                    (true, true, false) => "FIN-WAIT-2",
                    (true, false, true) if self.active_close => "CLOSING",
                    (true, _, true) => "LAST-ACK",
                }
            }
        }
    }

    /// The host socket of a guest's connection is connected: answer the SYN.
    pub fn handle_connected(&mut self, now: Instant) {
        if let State::Connecting { terms } = self.state {
            self.state = State::SynReceived {
                terms,
                due: true,
                retry: first_try(now),
            };
        }
    }

    /// Ends the connection; the RST to send, if the guest knows of the connection.
    pub fn abort(&mut self) -> Option<Header> {
        let (seq, ack) = match &self.state {
            State::Connecting { terms } => (SeqNum(0), terms.irs + 1),
            State::SynReceived { terms, .. } => (terms.iss + 1, terms.irs + 1),
            State::Synchronized { sender, receiver } => (sender.snd_nxt(), receiver.rcv_nxt()),
            State::SynSent { .. } | State::TimeWait { .. } | State::Closed => {
                self.state = State::Closed;
                return None;
            }
        };
        self.state = State::Closed;
        Some(Header {
            seq,
            ack,
            flags: Flags::RST | Flags::ACK,
            ..Header::default()
        })
    }

    /// A segment arrived (RFC 9293, 3.10.7). `tail` is the octets taken but not given to the host.
    pub fn handle_segment(&mut self, segment: &Segment, tail: u32, now: Instant) -> Outcome {
        match &mut self.state {
            State::Connecting { terms } => {
                let reset = segment.flags.contains(Flags::RST) && segment.seq == terms.irs + 1;
                if reset {
                    self.state = State::Closed;
                }
                Outcome {
                    reset,
                    ..Outcome::default()
                }
            }
            State::SynReceived { .. } => self.in_syn_received(segment, tail, now),
            State::SynSent { .. } => self.in_syn_sent(segment, now),
            State::Synchronized { .. } => self.in_synchronized(segment, tail, now),
            State::TimeWait {
                rcv_nxt, ack_due, ..
            } => {
                if segment.flags.contains(Flags::RST) {
                    if segment.seq == *rcv_nxt {
                        self.state = State::Closed;
                    }
                } else if segment.seq_len() > 0 {
                    *ack_due = true;
                }
                Outcome::default()
            }
            State::Closed => Outcome {
                reply: reset_for(segment),
                ..Outcome::default()
            },
        }
    }

    fn in_syn_received(&mut self, segment: &Segment, tail: u32, now: Instant) -> Outcome {
        let State::SynReceived { terms, due, .. } = &mut self.state else {
            return Outcome::default();
        };
        let mut outcome = Outcome::default();
        if segment.flags.contains(Flags::RST) {
            outcome.reset = segment.seq == terms.irs + 1;
            if outcome.reset {
                self.state = State::Closed;
            }
            return outcome;
        }
        if segment.flags.contains(Flags::SYN) {
            // Repeated: our SYN/ACK was lost. Another SYN on a live pair gets an ACK (RFC 5961, 4).
            *due = true;
            return outcome;
        }
        if !segment.flags.contains(Flags::ACK) {
            return outcome;
        }
        if segment.ack != terms.iss + 1 {
            outcome.reply = reset_for(segment);
            return outcome;
        }
        let terms = *terms;
        self.synchronize(terms, segment, now);
        outcome = self.in_synchronized(segment, tail, now);
        outcome.established = true;
        outcome
    }

    fn in_syn_sent(&mut self, segment: &Segment, now: Instant) -> Outcome {
        let State::SynSent { iss, .. } = self.state else {
            return Outcome::default();
        };
        let mut outcome = Outcome::default();
        let flags = segment.flags;
        let acks_syn = flags.contains(Flags::ACK) && segment.ack == iss + 1;
        if flags.contains(Flags::ACK) && !acks_syn {
            outcome.reply = reset_for(segment);
        } else if flags.contains(Flags::RST) {
            outcome.reset = acks_syn;
            if acks_syn {
                self.state = State::Closed;
            }
        } else if flags.contains(Flags::SYN) && acks_syn {
            let terms = Terms {
                irs: segment.seq,
                iss,
                mss: agreed_mss(segment.options, self.link_mss),
                shift: segment.options.window_scale.map(|shift| shift.min(14)),
            };
            self.synchronize(terms, segment, now);
            outcome.established = true;
            if let State::Synchronized { receiver, .. } = &mut self.state {
                receiver.owe_ack();
            }
        } else if flags.contains(Flags::SYN) {
            // Simultaneous open (RFC 9293, 3.5): answer with SYN/ACK and go on as the passive side.
            self.state = State::SynReceived {
                terms: Terms {
                    irs: segment.seq,
                    iss,
                    mss: agreed_mss(segment.options, self.link_mss),
                    shift: segment.options.window_scale.map(|shift| shift.min(14)),
                },
                due: true,
                retry: first_try(now),
            };
        }
        outcome
    }

    fn synchronize(&mut self, terms: Terms, segment: &Segment, now: Instant) {
        // The window of a SYN is never scaled.
        let syn = segment.flags.contains(Flags::SYN);
        let shift = terms.shift.unwrap_or(0);
        let window = u32::from(segment.window) << if syn { 0 } else { shift };
        self.state = State::Synchronized {
            sender: Sender::new(
                terms.iss,
                u32::from(terms.mss),
                shift,
                window,
                terms.irs,
                now,
            ),
            receiver: Receiver::new(terms.irs, terms.shift.is_some(), u32::from(SYN_WINDOW)),
        };
    }

    fn in_synchronized(&mut self, segment: &Segment, tail: u32, now: Instant) -> Outcome {
        let State::Synchronized { sender, receiver } = &mut self.state else {
            return Outcome::default();
        };
        let mut outcome = Outcome::default();
        let flags = segment.flags;
        let mut challenge = |receiver: &mut Receiver, sender: &Sender| {
            outcome.reply = Some(ack_header(sender, receiver, tail));
        };
        if flags.contains(Flags::RST) {
            // RFC 9293, 3.10.7.4 (RFC 5961, 3): exact match resets, inside the window is challenged.
            if segment.seq == receiver.rcv_nxt() {
                outcome.reset = true;
                self.state = State::Closed;
            } else if receiver.acceptable(segment.seq, 0) {
                challenge(receiver, sender);
            }
            return outcome;
        }
        if flags.contains(Flags::SYN) {
            challenge(receiver, sender);
            return outcome;
        }
        if !receiver.acceptable(segment.seq, segment.seq_len()) {
            // Old, beyond the window, or a probe of either kind: tell where we are. What a keepalive
            // or an old segment acknowledges is still true.
            if flags.contains(Flags::ACK) && !sender.is_beyond(segment.ack) {
                let Acked { released, .. } =
                    sender.handle_ack(segment.ack, segment.window, segment.seq, 1, now);
                outcome.released = released;
            }
            receiver.owe_ack();
            self.settle(now);
            return outcome;
        }
        if !flags.contains(Flags::ACK) {
            return outcome;
        }
        if sender.is_beyond(segment.ack) {
            challenge(receiver, sender);
            return outcome;
        }
        let Acked { released, .. } = sender.handle_ack(
            segment.ack,
            segment.window,
            segment.seq,
            segment.seq_len(),
            now,
        );
        outcome.released = released;
        outcome.take = receiver.handle_text(segment.seq, segment.len, flags.contains(Flags::FIN));
        self.settle(now);
        outcome
    }

    /// Leaves the synchronized state when both halves are done.
    fn settle(&mut self, now: Instant) {
        if let State::Synchronized { sender, receiver } = &self.state
            && sender.closed()
            && receiver.finished()
        {
            self.state = if self.active_close {
                State::TimeWait {
                    snd_nxt: sender.snd_nxt(),
                    rcv_nxt: receiver.rcv_nxt(),
                    ack_due: true,
                    until: now + TIME_WAIT,
                }
            } else {
                State::Closed
            };
        }
    }

    /// True when [`Self::poll_control`] has something.
    pub fn control_due(&self, tail: u32) -> bool {
        match &self.state {
            State::Connecting { .. } | State::Closed => false,
            State::SynReceived { due, .. }
            | State::SynSent { due, .. }
            | State::TimeWait { ack_due: due, .. } => *due,
            State::Synchronized { sender, receiver } => {
                sender.fin_due() || receiver.wants_ack(tail)
            }
        }
    }

    /// SYN, SYN/ACK, FIN or ACK: whatever is due without data. Call until `None`, after data.
    ///
    /// `tail` is the octets taken but not yet given to the host.
    pub fn poll_control(&mut self, tail: u32, now: Instant) -> Option<Header> {
        match &mut self.state {
            State::Connecting { .. } | State::Closed => None,
            State::SynReceived { terms, due, .. } => std::mem::take(due).then(|| Header {
                seq: terms.iss,
                ack: terms.irs + 1,
                flags: Flags::SYN | Flags::ACK,
                window: SYN_WINDOW,
                options: SynOptions {
                    mss: Some(self.link_mss),
                    window_scale: terms.shift.map(|_| receiver::SHIFT),
                },
            }),
            State::SynSent { iss, due, .. } => std::mem::take(due).then_some(Header {
                seq: *iss,
                ack: SeqNum(0),
                flags: Flags::SYN,
                window: SYN_WINDOW,
                options: SynOptions {
                    mss: Some(self.link_mss),
                    window_scale: Some(receiver::SHIFT),
                },
            }),
            State::Synchronized { sender, receiver } => {
                if let Some(seq) = sender.poll_fin(now) {
                    self.active_close |= !receiver.finished();
                    let (ack, window) = receiver.acknowledge(tail);
                    return Some(Header {
                        seq,
                        ack,
                        flags: Flags::FIN | Flags::ACK,
                        window,
                        ..Header::default()
                    });
                }
                if receiver.wants_ack(tail) {
                    Some(ack_header(sender, receiver, tail))
                } else {
                    None
                }
            }
            State::TimeWait {
                snd_nxt,
                rcv_nxt,
                ack_due,
                ..
            } => std::mem::take(ack_due).then(|| Header {
                seq: *snd_nxt,
                ack: *rcv_nxt,
                flags: Flags::ACK,
                ..Header::default()
            }),
        }
    }

    /// The acknowledgment and window fields for a data segment.
    pub fn acknowledge(&mut self, tail: u32) -> (SeqNum, u16) {
        match &mut self.state {
            State::Synchronized { receiver, .. } => receiver.acknowledge(tail),
            _ => (SeqNum(0), 0),
        }
    }

    /// When [`Self::handle_timeout`] wants to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        match &self.state {
            State::Connecting { .. } | State::Closed => None,
            State::SynReceived { retry, .. } | State::SynSent { retry, .. } => Some(retry.at),
            State::Synchronized { sender, .. } => Some(sender.poll_timeout()),
            State::TimeWait { until, .. } => Some(*until),
        }
    }

    /// Acts on the timer if it is due.
    pub fn handle_timeout(&mut self, tail: u32, now: Instant) -> Timeout {
        if self.poll_timeout().is_none_or(|at| now < at) {
            return Timeout::Handled;
        }
        match &mut self.state {
            State::Connecting { .. } | State::Closed => Timeout::Handled,
            State::SynReceived { due, retry, .. } | State::SynSent { due, retry, .. } => {
                if retry.tries == SYN_TRIES {
                    self.state = State::Closed;
                    return Timeout::Abort;
                }
                *due = true;
                retry.at = now + INITIAL_RTO * (1 << retry.tries);
                retry.tries += 1;
                Timeout::Handled
            }
            State::Synchronized { sender, receiver } => match sender.handle_timeout(now) {
                Expired::Nothing | Expired::Retransmit => Timeout::Handled,
                Expired::Probe => Timeout::Send(Header {
                    // One octet back, as keepalives are (RFC 9293, 3.8.4): the guest must answer.
                    seq: sender.snd_nxt() - 1,
                    ..ack_header(sender, receiver, tail)
                }),
                Expired::GuestGone => Timeout::Abort,
            },
            State::TimeWait { .. } => {
                self.state = State::Closed;
                Timeout::Done
            }
        }
    }
}

fn ack_header(sender: &Sender, receiver: &mut Receiver, tail: u32) -> Header {
    let (ack, window) = receiver.acknowledge(tail);
    Header {
        seq: sender.snd_nxt(),
        ack,
        flags: Flags::ACK,
        window,
        ..Header::default()
    }
}

fn agreed_mss(options: SynOptions, link_mss: u16) -> u16 {
    options
        .mss
        .unwrap_or(DEFAULT_MSS)
        .max(MIN_MSS)
        .min(link_mss)
}

fn first_try(now: Instant) -> Retry {
    Retry {
        at: now + INITIAL_RTO,
        tries: 1,
    }
}
