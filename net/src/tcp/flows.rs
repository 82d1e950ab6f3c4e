//! The TCP flows: connections joined with host sockets.
//!
//! Everything that happens to a flow marks it *ready*; [`Flows::pump`] serves the ready flows in
//! turn, so the work of a wake-up is proportional to what happened and not to how many flows exist.
//!
//! ```text
//! guest burst  --> handle_frame .. end_burst --> sendmsg     (drain.rs, upload)
//! socket event --> handle_event ---------------> ready
//! timer        --> handle_timeout -------------> ready
//! ready        --> pump -----------------------> RX frames   (pump.rs, download and ACKs)
//! ```

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::conn::{Conn, Timeout};
pub use super::rx_path::RxPath;
use super::segment::{Flags, Header, Segment, reset_for};
use super::seq::SeqNum;
use super::socket::{TcpHost, TcpSocket};
use super::tail::Tail;
use super::window::Window;
use super::wire::{IPV4, IPV6, Macs, TCP};
use crate::flow::{FlowId, FlowKey, FlowTable};
use crate::nic::Offloads;

/// Bounds of the TCP part.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Flows at once. At the bound a guest's SYN is refused with RST, and forwards are not accepted.
    pub flows: usize,
    /// Octets in flight to the guest over all flows. A small guest with many streams runs out of TCP
    /// memory and drops data inside its own windows; this keeps it from that.
    pub in_flight: u64,
    /// Octets of ring memory over all flows. At the bound rings stop growing.
    pub rings: u64,
    /// Octets taken from the guest that wait for host sockets, over all flows. At the bound flows
    /// that have some take no more, and the guest repeats what it sent.
    pub tails: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            flows: 32 << 10,
            in_flight: 2 << 20,
            rings: 512 << 20,
            tails: 64 << 20,
        }
    }
}

impl Limits {
    /// The share of one of `count` stacks that a guest has.
    pub(crate) fn of_one_in(self, count: u8) -> Self {
        let count = count.max(1);
        Self {
            flows: self.flows / usize::from(count),
            // Enough for one flow at full speed.
            in_flight: (self.in_flight / u64::from(count)).max(1 << 20),
            rings: self.rings / u64::from(count),
            tails: self.tails / u64::from(count),
        }
    }
}

/// How the guest is reached; fixed while the driver's settings hold.
#[derive(Clone, Copy, Debug)]
pub struct TcpLink {
    /// Ends of the link.
    pub macs: Macs,
    /// Largest IP packet, in bytes.
    pub mtu: u16,
    /// What the guest takes.
    pub offloads: Offloads,
    /// Receive path.
    pub rx: RxPath,
}

impl TcpLink {
    /// Largest TCP payload per packet on the link for `ip`'s family.
    pub fn mss(&self, ip: IpAddr) -> u16 {
        let headers = TCP + if ip.is_ipv4() { IPV4 } else { IPV6 };
        self.mtu
            .saturating_sub(u16::try_from(headers).unwrap_or(60))
            .max(1)
    }
}

/// Why a host's connection attempt gave the guest this answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// RST: nobody listens there.
    Reset,
    /// ICMP: the network cannot be reached.
    NetUnreachable,
    /// ICMP: the host cannot be reached.
    HostUnreachable,
    /// ICMP: the host forbids it.
    Prohibited,
    /// Nothing: the far end did not answer either.
    Silence,
}

impl Refusal {
    fn of(error: &io::Error) -> Self {
        use io::ErrorKind as E;
        match error.kind() {
            E::NetworkUnreachable | E::NetworkDown => Self::NetUnreachable,
            E::HostUnreachable => Self::HostUnreachable,
            E::PermissionDenied => Self::Prohibited,
            E::TimedOut => Self::Silence,
            _ => Self::Reset,
        }
    }
}

/// Something for the rest of the stack to tell the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unreachable {
    /// The flow that could not be opened.
    pub key: FlowKey,
    /// The guest's SYN, for the ICMP message to quote.
    pub syn: Segment,
    /// What to say; not `Reset` or `Silence`.
    pub refusal: Refusal,
}

/// One flow: a connection, its host socket, and the bytes between them.
#[derive(Debug)]
pub(super) struct Flow<S> {
    pub(super) conn: Conn,
    pub(super) socket: S,
    pub(super) window: Window,
    pub(super) tail: Tail,
    /// The SYN that opened the flow, until the host has answered.
    syn: Segment,
    pub(super) queued: bool,
    /// The socket may have more to read.
    pub(super) readable: bool,
    /// The far end closed, or sent urgent data: short reads do not mean that nothing is left.
    pub(super) read_on: bool,
    /// The far end's stream was read to its end.
    pub(super) eof: bool,
    /// The guest's stream has ended: shut the socket when the tail is empty.
    shutdown_due: bool,
    /// The flow waits until octets in flight over all flows are below their bound.
    pub(super) capped: bool,
    /// The flow waits for the end of the burst.
    pub(super) cared_for: bool,
    /// An entry for this flow is in the timer heap, at this time.
    timer: Option<Instant>,
    /// When the host loses its claim on the tail of a connection that is over.
    linger: Option<Instant>,
    /// Frames to the guest (counter).
    pub(super) segments_to_guest: u64,
}

/// Counts what TCP did since the start.
#[derive(Clone, Copy, Debug, Default)]
pub struct TcpCounters {
    /// Connections the guest opened.
    pub opened: u64,
    /// Connections accepted for the guest.
    pub accepted: u64,
    /// Connection attempts that the host side answered with a failure.
    pub refused: u64,
    /// SYNs refused because the table was full or no socket could be had.
    pub exhausted: u64,
    /// Connections that ended in a reset, by either side.
    pub resets: u64,
    /// Timer expiries that sent data again.
    pub timeouts: u64,
}

/// All TCP flows.
pub struct Flows<H: TcpHost> {
    pub(super) table: FlowTable<Flow<H::Socket>>,
    pub(super) ready: VecDeque<FlowId>,
    /// Flows whose sockets or rings are to be seen to when the burst is out; each once.
    pub(super) aftercare: Vec<FlowId>,
    /// Flows that wait for octets in flight over all flows to go down; each once.
    pub(super) capped: Vec<FlowId>,
    timers: BinaryHeap<Reverse<(Instant, FlowId)>>,
    /// Answers that belong to no flow.
    pub(super) loose: VecDeque<(FlowKey, Header)>,
    unreachable: VecDeque<Unreachable>,
    pub(super) in_flight: u64,
    pub(super) ring_bytes: u64,
    pub(super) tail_bytes: u64,
    pub(super) limits: Limits,
    pub(super) link: TcpLink,
    pub(super) scratch: Vec<u8>,
    pub(super) counters: TcpCounters,
    secret: u64,
    start: Option<Instant>,
}

/// How long a far end that does not read may hold the rest of a connection that the guest has closed.
const LINGER: Duration = Duration::from_secs(120);

/// The host has nothing to give: descriptors, memory or ports.
fn is_exhaustion(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM | libc::EADDRNOTAVAIL)
    )
}

/// Answers that wait for RX descriptors and belong to no flow; more are dropped.
const MAX_LOOSE: usize = 256;

impl<H: TcpHost> Flows<H> {
    /// No flows. `secret` makes initial sequence numbers unpredictable (RFC 6528).
    pub fn new(link: TcpLink, limits: Limits, secret: u64) -> Self {
        Self {
            table: FlowTable::new(limits.flows),
            ready: VecDeque::new(),
            aftercare: Vec::new(),
            capped: Vec::new(),
            timers: BinaryHeap::new(),
            loose: VecDeque::new(),
            unreachable: VecDeque::new(),
            in_flight: 0,
            ring_bytes: 0,
            tail_bytes: 0,
            limits,
            link,
            scratch: Vec::new(),
            counters: TcpCounters::default(),
            secret,
            start: None,
        }
    }

    /// The driver's settings changed.
    pub fn set_link(&mut self, link: TcpLink) {
        self.link = link;
    }

    /// How the guest is reached.
    pub fn link(&self) -> &TcpLink {
        &self.link
    }

    /// What was done so far.
    pub fn counters(&self) -> TcpCounters {
        self.counters
    }

    /// Number of flows.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// True without flows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The two ends of each flow.
    pub fn keys(&self) -> impl Iterator<Item = &FlowKey> {
        self.table.iter().map(|(key, _)| key)
    }

    /// The next connection that failed in a way ICMP tells.
    pub fn poll_unreachable(&mut self) -> Option<Unreachable> {
        self.unreachable.pop_front()
    }

    /// True when there is something to send to the guest.
    pub fn has_work(&self) -> bool {
        !self.ready.is_empty() || !self.loose.is_empty()
    }

    /// Entries in the timer heap.
    #[cfg(test)]
    pub(crate) fn timer_entries(&self) -> usize {
        self.timers.len()
    }

    /// When [`Self::handle_timeout`] wants to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.peek().map(|Reverse((at, _))| *at)
    }

    /// The flow with this key.
    pub(super) fn find(&mut self, key: &FlowKey) -> Option<FlowId> {
        self.table.find(key)
    }

    /// An initial sequence number: a clock of 4 us ticks plus a keyed hash (RFC 6528, 3).
    fn initial_seq(&mut self, key: &FlowKey, now: Instant) -> SeqNum {
        let start = *self.start.get_or_insert(now);
        let ticks = now.saturating_duration_since(start).as_micros() / 4;
        let mut hasher = DefaultHasher::new();
        (self.secret, key).hash(&mut hasher);
        // Both are meant to wrap.
        #[expect(clippy::cast_possible_truncation)]
        SeqNum((hasher.finish() as u32).wrapping_add(ticks as u32))
    }

    /// Opens a flow for the guest's SYN towards host address `to`.
    pub(super) fn open(
        &mut self,
        key: FlowKey,
        to: SocketAddr,
        syn: &Segment,
        host: &mut H,
        now: Instant,
    ) {
        if self.table.is_full() {
            self.counters.exhausted += 1;
            self.refuse(&key, syn, Refusal::Reset);
            return;
        }
        let iss = self.initial_seq(&key, now);
        let conn = Conn::from_guest(syn, self.link.mss(key.guest.ip()), iss);
        let link = &self.link;
        let opened = self.table.insert(key, |id| {
            host.connect(to, id)
                .map(|socket| Flow::new(conn, socket, *syn, link))
        });
        match opened {
            Ok(_) => self.counters.opened += 1,
            Err(error) => {
                if is_exhaustion(&error) {
                    self.counters.exhausted += 1;
                } else {
                    self.counters.refused += 1;
                }
                self.refuse(&key, syn, Refusal::of(&error));
            }
        }
    }

    /// Answers a SYN that opens no flow.
    pub fn refuse(&mut self, key: &FlowKey, syn: &Segment, refusal: Refusal) {
        match refusal {
            Refusal::Silence => {}
            Refusal::Reset => {
                if let Some(header) = reset_for(syn) {
                    self.send_loose(*key, header);
                }
            }
            _ if self.unreachable.len() < MAX_LOOSE => {
                self.unreachable.push_back(Unreachable {
                    key: *key,
                    syn: *syn,
                    refusal,
                });
            }
            _ => {}
        }
    }

    /// Queues a segment of no flow.
    pub(super) fn send_loose(&mut self, key: FlowKey, header: Header) {
        if self.loose.len() < MAX_LOOSE {
            self.loose.push_back((key, header));
        }
    }

    /// Takes what waits at listener `listener`. Connections go to `guest`; `seen_as` names the far end
    /// as the guest is to see it. False when some may be left: call again later.
    ///
    /// Callers get no more than three quarters of the table, so they cannot lock the guest out.
    pub fn accept(
        &mut self,
        listener: usize,
        guest: SocketAddr,
        seen_as: impl Fn(SocketAddr) -> SocketAddr,
        host: &mut H,
        now: Instant,
    ) -> bool {
        while self.table.len() < (self.limits.flows * 3).div_ceil(4) {
            let (accepted, peer) = match host.accept(listener) {
                Ok(accepted) => accepted,
                Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
            };
            let Some(key) = self.free_key(guest, seen_as(peer)) else {
                continue;
            };
            let iss = self.initial_seq(&key, now);
            let conn = Conn::to_guest(self.link.mss(guest.ip()), iss, now);
            let link = &self.link;
            let flow = self.table.insert(key, |id| {
                host.adopt(accepted, id)
                    .map(|socket| Flow::new(conn, socket, Segment::default(), link))
            });
            if let Ok(id) = flow {
                self.counters.accepted += 1;
                self.settle(id, now);
            }
        }
        false
    }

    /// A key for a connection to `guest`: the far port gives way when another flow has it.
    fn free_key(&self, guest: SocketAddr, mut far: SocketAddr) -> Option<FlowKey> {
        for _ in 0..1024 {
            let key = FlowKey { guest, far };
            if !self.table.contains(&key) {
                return Some(key);
            }
            far.set_port(far.port().wrapping_add(1).max(1024));
        }
        None
    }

    /// The host socket of flow `id` reported something.
    pub fn handle_event(&mut self, id: FlowId, readiness: Readiness, now: Instant) {
        let Some((_, flow)) = self.table.get_mut(id) else {
            return;
        };
        if flow.conn.is_connecting() {
            match flow.socket.connect_result() {
                Ok(()) => flow.conn.handle_connected(now),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    self.connect_failed(id, &error);
                    return;
                }
            }
        }
        flow.readable |= readiness.readable || readiness.read_closed;
        flow.read_on |= readiness.read_closed || readiness.urgent;
        // Past the far end's FIN no read would tell of a reset.
        let broken = readiness.failed && flow.eof;
        let before = flow.tail.len();
        let flushed = !readiness.writable || flow.flush_tail();
        let sent = before - flow.tail.len();
        if sent > 0 {
            flow.linger = None;
        }
        self.tail_bytes -= sent as u64;
        if broken || !flushed {
            self.host_reset(id);
            return;
        }
        self.settle(id, now);
    }

    fn connect_failed(&mut self, id: FlowId, error: &io::Error) {
        let Some((key, flow)) = self.remove(id) else {
            return;
        };
        self.counters.refused += 1;
        self.refuse(&key, &flow.syn, Refusal::of(error));
    }

    /// The host's connection is broken: reset the guest's.
    pub(super) fn host_reset(&mut self, id: FlowId) {
        if let Some((key, mut flow)) = self.remove(id) {
            self.counters.resets += 1;
            if let Some(header) = flow.conn.abort() {
                self.send_loose(key, header);
            }
        }
    }

    /// The guest's connection is broken: reset the host's.
    pub(super) fn guest_reset(&mut self, id: FlowId) {
        if let Some((_, mut flow)) = self.remove(id) {
            self.counters.resets += 1;
            flow.socket.reset();
        }
    }

    pub(super) fn remove(&mut self, id: FlowId) -> Option<(FlowKey, Flow<H::Socket>)> {
        let (key, mut flow) = self.table.remove(id)?;
        // A failure is that of a connection which is going anyway.
        let _ = flow.window.settle(&mut flow.socket);
        self.in_flight -= u64::from(flow.conn.in_flight());
        self.ring_bytes -= flow.window.capacity();
        self.tail_bytes -= flow.tail.len() as u64;
        Some((key, flow))
    }

    /// Ends all flows: far ends see a reset, not silence.
    pub fn abort_all(&mut self) {
        let ids: Vec<_> = self.table.ids().collect();
        for id in ids {
            self.guest_reset(id);
        }
    }

    /// Something happened to flow `id`: serve it, unless it still waits for the host.
    pub(super) fn settle(&mut self, id: FlowId, now: Instant) {
        let Some((_, flow)) = self.table.get_mut(id) else {
            return;
        };
        if !flow.conn.is_connecting() {
            self.requeue(id);
        }
        self.schedule(id, now);
    }

    /// Puts flow `id` in line for [`Self::pump`].
    pub(super) fn requeue(&mut self, id: FlowId) {
        if let Some((_, flow)) = self.table.get_mut(id)
            && !flow.queued
        {
            flow.queued = true;
            self.ready.push_back(id);
        }
    }

    /// Sees to it that the timer of flow `id` will be looked at; forgets the flow when it is over.
    pub(super) fn schedule(&mut self, id: FlowId, now: Instant) {
        let Some((_, flow)) = self.table.get_mut(id) else {
            return;
        };
        if flow.conn.is_finished() && !flow.tail.is_empty() {
            // The guest's side is over, but what it sent is still on its way.
            flow.linger.get_or_insert(now + LINGER);
        } else if flow.conn.is_closed() {
            self.remove(id);
            return;
        }
        if let Some(at) = flow.poll_timeout()
            && flow.timer.is_none_or(|timer| at < timer)
        {
            flow.timer = Some(at);
            self.timers.push(Reverse((at, id)));
            if self.timers.len() > 64 + 4 * self.table.len() {
                self.drop_stale_timers();
            }
        }
    }

    /// Entries of flows that ended or have an earlier one.
    fn drop_stale_timers(&mut self) {
        let table = &mut self.table;
        self.timers.retain(|Reverse((at, id))| {
            table
                .get_mut(*id)
                .is_some_and(|(_, flow)| flow.timer == Some(*at))
        });
    }

    /// Acts on every timer that is due.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some(&Reverse((at, id))) = self.timers.peek() {
            if at > now {
                return;
            }
            self.timers.pop();
            let Some((key, flow)) = self.table.get_mut(id) else {
                continue;
            };
            // A flow may have several entries: only the one it knows of counts.
            if flow.timer != Some(at) {
                continue;
            }
            flow.timer = None;
            if flow.linger.is_some_and(|linger| now >= linger) {
                self.guest_reset(id);
                continue;
            }
            let before = flow.conn.in_flight();
            let tail = flow.tail_len();
            match flow.conn.handle_timeout(tail, now) {
                Timeout::Handled => {}
                Timeout::Send(header) => {
                    let key = *key;
                    self.ring_bytes -= flow.window.capacity();
                    flow.window.shrink();
                    self.ring_bytes += flow.window.capacity();
                    self.send_loose(key, header);
                }
                Timeout::Abort => {
                    self.guest_reset(id);
                    continue;
                }
                Timeout::Done => {}
            }
            if let Some((_, flow)) = self.table.get_mut(id) {
                let after = flow.conn.in_flight();
                if after < before {
                    self.counters.timeouts += 1;
                }
                self.in_flight -= u64::from(before - after);
            }
            self.settle(id, now);
        }
    }

    /// What to do with a segment that belongs to no flow.
    pub(super) fn handle_stray(&mut self, key: FlowKey, segment: &Segment) {
        debug_assert!(!segment.flags.contains(Flags::SYN) || segment.flags.contains(Flags::ACK));
        if let Some(header) = reset_for(segment) {
            self.send_loose(key, header);
        }
    }
}

/// What a host socket reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    /// There may be bytes, an end of stream or an error to read.
    pub readable: bool,
    /// There may be room to write.
    pub writable: bool,
    /// The far end closed its stream or the connection.
    pub read_closed: bool,
    /// There are urgent bytes: reads stop ahead of them.
    pub urgent: bool,
    /// The connection broke.
    pub failed: bool,
}

impl<S: TcpSocket> Flow<S> {
    fn new(conn: Conn, mut socket: S, syn: Segment, link: &TcpLink) -> Self {
        Self {
            conn,
            window: Window::open(link.rx, link.offloads, &mut socket),
            socket,
            tail: Tail::default(),
            syn,
            queued: false,
            readable: false,
            read_on: false,
            eof: false,
            shutdown_due: false,
            capped: false,
            cared_for: false,
            timer: None,
            linger: None,
            segments_to_guest: 0,
        }
    }

    /// When something is due for the flow.
    fn poll_timeout(&self) -> Option<Instant> {
        [self.conn.poll_timeout(), self.linger]
            .into_iter()
            .flatten()
            .min()
    }

    /// Octets taken from the guest and not given to the host.
    pub(super) fn tail_len(&self) -> u32 {
        // Bounded by the receiver's window.
        u32::try_from(self.tail.len()).unwrap_or(u32::MAX)
    }

    /// Gives the tail to the socket as far as it takes it. False when the connection is broken.
    pub(super) fn flush_tail(&mut self) -> bool {
        while !self.tail.is_empty() {
            match self.socket.write(self.tail.bytes()) {
                Ok(n) => self.tail.consume(n),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        if std::mem::take(&mut self.shutdown_due) {
            self.socket.shutdown_write();
        }
        true
    }

    /// The guest's stream ended behind what was taken so far.
    pub(super) fn end_of_guest_stream(&mut self) {
        if self.tail.is_empty() {
            self.socket.shutdown_write();
        } else {
            self.shutdown_due = true;
        }
    }
}
