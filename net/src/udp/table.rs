//! The table of UDP flows.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use super::outgoing::{MAX_PIECES, Queue};
use super::{
    Batch, GuestDatagram, Outgoing, Owner, Payload, Refusal, UdpHost, UdpSocket, is_about_the_past,
};
use crate::config::{Config, Forward};
use crate::drops::{DropReason, Drops};
use crate::nic::{Offloads, RxFrame, RxRing, Stop};
use crate::outbox::Outbox;
use crate::policy;
use crate::wire::Macs;
use crate::wire::datagram::{Datagram, Finish, HEADERS, MAX_PAYLOAD, finish_in_place, fits};
use crate::wire::error::{self, HOST, IcmpError, NET, PROHIBITED, TIME_EXCEEDED, UNREACHABLE};

/// How long a flow lives without traffic while only one side has sent.
pub const ONE_WAY: Duration = Duration::from_secs(30);
/// How long it lives without traffic once both have (RFC 4787, REQ-5: at least two minutes).
pub const TWO_WAY: Duration = Duration::from_secs(120);
/// Flows at once. Each holds a descriptor, and 1024 is a common limit for all that a process has;
/// when one more is needed, the one idle longest ends.
pub const MAX_FLOWS: usize = 512;
/// Peers remembered per flow, and callers per table of forwards. When there are more, all are
/// forgotten: until the guest sends to a peer again, what that peer sends is dropped.
pub const MAX_PEERS: usize = 4096;
/// Errors kept for the guest; it need not hear of more at once (RFC 1812, 4.3.2.8).
const MAX_ERRORS: usize = 64;
/// Bytes delivered before others get their turn.
const BURST: usize = 512 << 10;
/// What a frame costs in bytes of [`BURST`], beside the bytes that it carries.
const FRAME: usize = 512;
/// What a system call costs, whether what it brings is for the guest or not.
const CALL: usize = 2 << 10;
/// Bytes of a run that is worth to be received by a call of its own, into the guest's descriptors.
const LONG: usize = 8 << 10;
/// Entries taken off an error queue at once.
const ERRORS_AT_ONCE: usize = 32;

#[derive(Debug)]
struct Flow<S> {
    socket: S,
    /// The guest's end.
    guest: SocketAddr,
    /// Whom the guest has sent to, as the host names them. Unused by forwards.
    peers: HashSet<SocketAddr>,
    /// The peer sent to last: saves the look-up.
    last_peer: Option<SocketAddr>,
    /// Anyone may send, and time does not end it.
    forward: bool,
    used: Instant,
    replied: bool,
    hop_limit: u8,
    ready: bool,
    /// Length up to which datagrams may leave together: what the host was found to take.
    most: usize,
    /// What arrives comes in long runs that the guest takes apart.
    bulk: bool,
}

/// What frames to the guest depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpLink {
    /// The link-layer ends.
    pub macs: Macs,
    /// Largest IP packet on the link, in bytes.
    pub mtu: u16,
    /// What the guest takes.
    pub offloads: Offloads,
}

/// How far the batch is delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    flow: u64,
    /// Run of the batch.
    index: usize,
    /// Where its next datagram starts.
    start: usize,
    /// Where the next fragment of that starts, if it goes in fragments.
    fragment: usize,
}

/// How a delivery ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Delivery {
    Done,
    NoBuffers,
    Spent,
}

impl<S> Flow<S> {
    fn deadline(&self) -> Option<Instant> {
        let idle = if self.replied { TWO_WAY } else { ONE_WAY };
        (!self.forward).then(|| self.used + idle)
    }

    fn remember(&mut self, peer: SocketAddr) {
        if self.last_peer == Some(peer) {
            return;
        }
        if self.peers.len() >= MAX_PEERS {
            self.peers.clear();
        }
        self.peers.insert(peer);
        self.last_peer = Some(peer);
    }

    /// Something came from `peer` for the guest. Returns what the guest calls the peer.
    fn note_received(
        &mut self,
        number: u64,
        peer: SocketAddr,
        config: &Config,
        callers: &mut HashMap<(SocketAddr, SocketAddr), Caller>,
        now: Instant,
    ) -> SocketAddr {
        self.used = now;
        self.replied = true;
        if !self.forward {
            return policy::seen_as(config, peer);
        }
        let from = config.seen_by_guest(peer);
        let key = (self.guest, from);
        if callers.len() >= MAX_PEERS && !callers.contains_key(&key) {
            callers.clear();
        }
        let caller = Caller {
            number,
            peer,
            used: now,
        };
        callers.insert(key, caller);
        from
    }

    fn admits(&self, peer: SocketAddr) -> bool {
        self.forward || self.last_peer == Some(peer) || self.peers.contains(&peer)
    }
}

/// Who called a forward.
#[derive(Clone, Copy, Debug)]
struct Caller {
    number: u64,
    peer: SocketAddr,
    used: Instant,
}

/// The UDP flows of one guest. The order of calls is in the [module's](super) diagram.
#[derive(Debug)]
pub struct UdpTable<H: UdpHost> {
    flows: HashMap<u64, Flow<H::Socket>>,
    by_guest: HashMap<SocketAddr, u64>,
    /// Callers of forwards: guest's port and the name it knows the caller by, to the forward's flow
    /// and the caller's own name. An entry counts for as long as a flow would live.
    callers: HashMap<(SocketAddr, SocketAddr), Caller>,
    /// The flow found last.
    last: Option<(SocketAddr, u64)>,
    next_number: u64,
    /// Flows with something to read, each once.
    ready: VecDeque<u64>,
    batch: Batch,
    /// What of the batch is next, until all of it is delivered.
    delivering: Option<Place>,
    errors: VecDeque<IcmpError>,
    ident: u16,
    /// No flow ends before this.
    due: Option<Instant>,
}

impl<H: UdpHost> Default for UdpTable<H> {
    fn default() -> Self {
        Self {
            flows: HashMap::new(),
            by_guest: HashMap::new(),
            callers: HashMap::new(),
            last: None,
            next_number: 0,
            ready: VecDeque::new(),
            batch: Batch::default(),
            delivering: None,
            errors: VecDeque::new(),
            ident: 0,
            due: None,
        }
    }
}

impl<H: UdpHost> UdpTable<H> {
    /// Flows in the table, forwards included.
    pub fn len(&self) -> usize {
        self.flows.len()
    }

    /// True without flows.
    pub fn is_empty(&self) -> bool {
        self.flows.is_empty()
    }

    /// The guest's ends of all flows.
    pub fn guests(&self) -> impl Iterator<Item = &SocketAddr> {
        self.by_guest.keys()
    }

    /// Opens a forward into the guest. `guest_ip` is the guest's address.
    ///
    /// # Errors
    /// The host's address cannot be bound.
    pub fn add_forward(
        &mut self,
        forward: &Forward,
        guest_ip: IpAddr,
        host: &mut H,
        now: Instant,
    ) -> io::Result<()> {
        let guest = SocketAddr::new(guest_ip, forward.guest_port);
        self.open(forward.host, guest, true, host, now).map(drop)
    }

    /// Takes a datagram from the guest, or a run of them. `route` says where its far end is on the
    /// host. It is sent by [`Self::end_run`] at the latest.
    ///
    /// # Errors
    /// Why it was dropped. The guest may still hear of it, by [`Self::pump_errors`].
    pub fn handle_from_guest<'m>(
        &mut self,
        datagram: &GuestDatagram<'_, 'm>,
        route: impl FnOnce(SocketAddr) -> Result<SocketAddr, Refusal>,
        run: &mut Outgoing<'m>,
        host: &mut H,
        now: Instant,
    ) -> Result<(), DropReason> {
        let caller = self
            .callers
            .get_mut(&(datagram.guest, datagram.far))
            .filter(|caller| now < caller.used + TWO_WAY);
        let (number, to) = if let Some(caller) = caller {
            caller.used = now;
            (Some(caller.number), caller.peer)
        } else {
            let to = route(datagram.far).map_err(|refusal| {
                if let Some(code) = refusal.code {
                    self.tell(datagram, UNREACHABLE, code);
                }
                refusal.reason
            })?;
            (None, to)
        };
        // The gateway is the first hop (RFC 1812, 5.3.1). Datagrams to groups do not get here, and
        // must not be answered with errors.
        if datagram.hop_limit <= 1 {
            self.tell(datagram, TIME_EXCEEDED, 0);
            return Err(DropReason::Unroutable);
        }
        let number = match number.or_else(|| self.find(datagram.guest)) {
            Some(number) => number,
            None => self.open_for(datagram.guest, to, run, host, now)?,
        };
        let hops = datagram.hop_limit - 1;
        let index = match run.queue(number) {
            Some(index) if run.queues[index].hops == hops => index,
            Some(index) => {
                // Hops are the socket's: what has others goes first.
                let queue = run.queues.remove(index);
                self.send(&queue, &mut run.drops);
                run.open(number, hops, datagram.guest)
            }
            None => {
                if run.is_full() {
                    self.send_all(run);
                }
                run.open(number, hops, datagram.guest)
            }
        };
        let Some(flow) = self.flows.get_mut(&number) else {
            return Err(DropReason::NoSocket);
        };
        flow.used = now;
        flow.remember(to);
        run.queues[index].push(datagram, to, flow.most);
        Ok(())
    }

    /// Sends what the guest's burst has left in `run`. Counts in `drops` what was dropped.
    pub fn end_run(&mut self, run: &mut Outgoing<'_>, drops: &mut Drops) {
        self.send_all(run);
        drops.add(&std::mem::take(&mut run.drops));
    }

    fn send_all(&mut self, run: &mut Outgoing<'_>) {
        for queue in run.queues.drain(..) {
            self.send(&queue, &mut run.drops);
        }
    }

    fn send(&mut self, queue: &Queue<'_>, drops: &mut Drops) {
        // Flows end between bursts only.
        let Some(flow) = self.flows.get_mut(&queue.flow) else {
            return;
        };
        if flow.hop_limit != queue.hops {
            flow.socket.set_hop_limit(queue.hops);
            flow.hop_limit = queue.hops;
        }
        let (failures, stale) = queue.send(&mut flow.socket, &mut flow.most, drops);
        if stale {
            self.note_readable(queue.flow);
        }
        for failure in failures {
            let code = match failure.error.raw_os_error() {
                Some(libc::ENETUNREACH) => NET,
                Some(libc::EHOSTUNREACH | libc::EHOSTDOWN) => HOST,
                Some(libc::EACCES | libc::EPERM) => PROHIBITED,
                _ => continue,
            };
            self.push_error(IcmpError {
                from: None,
                kind: UNREACHABLE,
                code,
                mtu: 0,
                guest: queue.guest,
                far: failure.far,
                payload_len: failure.len,
            });
        }
    }

    /// The socket with this number has something to read, or an error.
    pub fn handle_event(&mut self, number: u64) {
        self.note_readable(number);
    }

    /// Delivers what sockets have received, up to a bound.
    pub fn pump(
        &mut self,
        config: &Config,
        link: &UdpLink,
        ring: &mut dyn RxRing,
        now: Instant,
    ) -> Stop {
        let mut budget = BURST;
        loop {
            match self.deliver_batch(config, link, ring, &mut budget, now) {
                Delivery::Done => {}
                Delivery::NoBuffers => return Stop::NoBuffers,
                Delivery::Spent => return Stop::Yield,
            }
            if budget == 0 {
                return Stop::Yield;
            }
            // One batch per flow and turn: a flood into one does not starve the others.
            let Some(number) = self.ready.pop_front() else {
                return if self.errors.is_empty() {
                    Stop::Idle
                } else {
                    Stop::Yield
                };
            };
            let direct = self.flows.get(&number).is_some_and(|flow| flow.bulk);
            budget = budget.saturating_sub(CALL);
            if direct
                && link.takes_runs()
                && let Some(room) = RxFrame::reserve(ring, HEADERS + MAX_PAYLOAD)
                && room.slices().len() <= MAX_PIECES
            {
                let len = self.receive_into(room, config, link, number, now);
                budget = budget.saturating_sub(len);
            } else {
                self.receive(config, link, number);
            }
        }
    }

    /// Queues ICMP errors for the guest while `out` has room. True when some are left.
    pub fn pump_errors(&mut self, config: &Config, macs: Macs, out: &mut Outbox) -> bool {
        while !out.is_full()
            && let Some(told) = self.errors.pop_front()
        {
            // Flows are IPv4 at both ends or IPv6 at both ends, and only the former exist yet.
            out.push(|frame| {
                error::write(frame, macs, config.gateway, &told);
            });
        }
        !self.errors.is_empty()
    }

    /// When [`Self::handle_timeout`] is due. It may be too early, never too late.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.due
    }

    /// Ends flows that have been idle for too long.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.due.is_none_or(|due| now < due) {
            return;
        }
        let expired: Vec<u64> = self
            .flows
            .iter()
            .filter(|(_, flow)| flow.deadline().is_some_and(|deadline| deadline <= now))
            .map(|(&number, _)| number)
            .collect();
        for number in expired {
            self.remove(number);
        }
        self.due = self.flows.values().filter_map(Flow::deadline).min();
    }

    /// Ends all flows but the forwards: the guest that opened them is gone.
    pub fn reset(&mut self) {
        self.flows.retain(|_, flow| flow.forward);
        self.by_guest.clear();
        self.callers.clear();
        self.errors.clear();
        self.delivering = None;
        self.last = None;
        self.due = None;
    }

    /// The number of the guest's flow.
    fn find(&mut self, guest: SocketAddr) -> Option<u64> {
        if let Some((last, number)) = self.last
            && last == guest
        {
            return Some(number);
        }
        let number = *self.by_guest.get(&guest)?;
        self.last = Some((guest, number));
        Some(number)
    }

    /// Opens a flow of the guest. Another may have to end for it; what it has in `run` goes before.
    fn open_for(
        &mut self,
        guest: SocketAddr,
        to: SocketAddr,
        run: &mut Outgoing<'_>,
        host: &mut H,
        now: Instant,
    ) -> Result<u64, DropReason> {
        if self.by_guest.len() >= MAX_FLOWS {
            self.send_all(run);
            self.evict();
        }
        let any: IpAddr = match to {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let local = SocketAddr::new(any, 0);
        let mut number = self.open(local, guest, false, host, now);
        if number.as_ref().is_err_and(is_out_of_descriptors) {
            self.send_all(run);
            if self.evict() {
                number = self.open(local, guest, false, host, now);
            }
        }
        number.map_err(|failure| {
            tracing::debug!(%failure, "cannot open a UDP socket");
            DropReason::NoSocket
        })
    }

    fn open(
        &mut self,
        local: SocketAddr,
        guest: SocketAddr,
        forward: bool,
        host: &mut H,
        now: Instant,
    ) -> io::Result<u64> {
        let number = self.next_number;
        let socket = host.open_udp(local, Owner::Flows, number)?;
        let flow = Flow {
            most: if socket.takes_runs() { MAX_PAYLOAD } else { 0 },
            socket,
            guest,
            peers: HashSet::new(),
            last_peer: None,
            forward,
            used: now,
            replied: false,
            hop_limit: 0,
            ready: false,
            bulk: false,
        };
        self.next_number += 1;
        if let Some(deadline) = flow.deadline() {
            self.due = Some(self.due.map_or(deadline, |due| due.min(deadline)));
            self.by_guest.insert(guest, number);
            self.last = Some((guest, number));
        }
        self.flows.insert(number, flow);
        Ok(number)
    }

    /// Ends the flow idle longest. False when there is none to end.
    fn evict(&mut self) -> bool {
        let oldest = self
            .flows
            .iter()
            .filter(|(_, flow)| !flow.forward)
            .min_by_key(|(_, flow)| flow.used)
            .map(|(&number, _)| number);
        if let Some(number) = oldest {
            self.remove(number);
        }
        oldest.is_some()
    }

    fn remove(&mut self, number: u64) {
        if let Some(flow) = self.flows.remove(&number) {
            self.by_guest.remove(&flow.guest);
            self.last = None;
        }
    }

    fn note_readable(&mut self, number: u64) {
        if let Some(flow) = self.flows.get_mut(&number)
            && !flow.ready
        {
            flow.ready = true;
            self.ready.push_back(number);
        }
    }

    /// Receives the flow's next batch. The flow stays ready until its socket is empty.
    fn receive(&mut self, config: &Config, link: &UdpLink, number: u64) {
        let Some(flow) = self.flows.get_mut(&number) else {
            return;
        };
        match flow.socket.receive(&mut self.batch) {
            Ok(()) => {
                let mut runs = (0..self.batch.len()).filter_map(|index| self.batch.run(index));
                flow.bulk = runs.any(|run| link.takes_whole(run.payload.len(), run.segment));
                self.deliver_next(number);
                self.ready.push_back(number);
            }
            Err(failure) => self.note_failure(config, number, &failure),
        }
    }

    /// Receives the flow's next run in place and delivers it; returns its length. What cannot be
    /// delivered as it lies becomes a batch.
    fn receive_into(
        &mut self,
        room: RxFrame<'_>,
        config: &Config,
        link: &UdpLink,
        number: u64,
        now: Instant,
    ) -> usize {
        let Some(flow) = self.flows.get_mut(&number) else {
            return 0;
        };
        let place = Payload {
            frame: room.slices(),
            at: HEADERS,
            len: MAX_PAYLOAD,
        };
        let entry = match flow.socket.receive_into(&place) {
            Ok(entry) => entry,
            Err(failure) => {
                drop(room);
                self.note_failure(config, number, &failure);
                return 0;
            }
        };
        self.ready.push_back(number);
        flow.bulk = link.takes_whole(entry.len, entry.segment());
        if !flow.admits(entry.from) {
            return entry.len;
        }
        let (len, finish) = link.next(entry.len, entry.segment());
        if len < entry.len || !(matches!(finish, Finish::Run(_)) || fits(len, link.mtu)) {
            let mut bytes = Vec::with_capacity(entry.len);
            place.part(0, entry.len).copy_to(&mut bytes);
            self.batch.clear();
            self.batch.push(entry.from, &bytes, entry.segment);
            self.deliver_next(number);
            return entry.len;
        }
        let from = flow.note_received(number, entry.from, config, &mut self.callers, now);
        let ends = (from, flow.guest);
        finish_in_place(room, link.macs, ends, self.ident, len, finish);
        self.ident = self.ident.wrapping_add(1);
        entry.len
    }

    /// The batch is the flow's, and none of it is delivered.
    fn deliver_next(&mut self, number: u64) {
        self.delivering = Some(Place {
            flow: number,
            index: 0,
            start: 0,
            fragment: 0,
        });
    }

    fn note_failure(&mut self, config: &Config, number: u64, failure: &io::Error) {
        if is_about_the_past(failure) {
            // There may be something to read behind it.
            self.ready.push_back(number);
        } else if let Some(flow) = self.flows.get_mut(&number) {
            flow.ready = false;
        }
        self.take_errors(config, number);
    }

    /// Reads the error queue, so that the socket does not report it again.
    fn take_errors(&mut self, config: &Config, number: u64) {
        for taken in 0.. {
            if taken == ERRORS_AT_ONCE {
                // The rest in the next turn.
                self.note_readable(number);
                return;
            }
            let Some(flow) = self.flows.get_mut(&number) else {
                return;
            };
            let Some(told) = flow.socket.take_error() else {
                return;
            };
            let reported_by = told.from.and_then(|from| {
                match policy::seen_as(config, SocketAddr::new(from, 0)).ip() {
                    IpAddr::V4(from) => Some(from),
                    IpAddr::V6(_) => None,
                }
            });
            if flow.admits(told.to) {
                let guest = flow.guest;
                self.push_error(IcmpError {
                    from: reported_by,
                    kind: told.kind,
                    code: told.code,
                    mtu: told.mtu,
                    guest,
                    far: policy::seen_as(config, told.to),
                    payload_len: told.payload_len,
                });
            }
        }
    }

    /// Delivers what is left of the batch.
    fn deliver_batch(
        &mut self,
        config: &Config,
        link: &UdpLink,
        ring: &mut dyn RxRing,
        budget: &mut usize,
        now: Instant,
    ) -> Delivery {
        let Some(mut place) = self.delivering else {
            return Delivery::Done;
        };
        let Some(flow) = self.flows.get_mut(&place.flow) else {
            self.delivering = None;
            return Delivery::Done;
        };
        let number = place.flow;
        while let Some(received) = self.batch.run(place.index) {
            let peer = received.from;
            if !flow.admits(peer) {
                place.next_run();
                continue;
            }
            let from = flow.note_received(number, peer, config, &mut self.callers, now);
            while place.is_open(received.payload.len()) {
                if *budget == 0 {
                    self.delivering = Some(place);
                    return Delivery::Spent;
                }
                let rest = &received.payload[place.start..];
                let (len, finish) = link.next(rest.len(), received.segment);
                let datagram = Datagram {
                    macs: link.macs,
                    from,
                    to: flow.guest,
                    ident: self.ident,
                    mtu: link.mtu,
                    payload: &rest[..len],
                };
                // One that the guest cannot be told of is passed over.
                if let Some(frame) = datagram.frame(place.fragment, finish) {
                    if !frame.deliver(ring) {
                        self.delivering = Some(place);
                        return Delivery::NoBuffers;
                    }
                    *budget = budget.saturating_sub(frame.len() + FRAME);
                    if let Some(next) = frame.next {
                        place.fragment = next;
                        continue;
                    }
                }
                self.ident = self.ident.wrapping_add(1);
                place.fragment = 0;
                place.start += len.max(1);
            }
            place.next_run();
        }
        self.delivering = None;
        Delivery::Done
    }

    fn tell(&mut self, datagram: &GuestDatagram<'_, '_>, kind: u8, code: u8) {
        self.push_error(IcmpError {
            from: None,
            kind,
            code,
            mtu: 0,
            guest: datagram.guest,
            far: datagram.far,
            payload_len: datagram.payload.len.min(datagram.segment),
        });
    }

    fn push_error(&mut self, told: IcmpError) {
        if self.errors.len() < MAX_ERRORS {
            self.errors.push_back(told);
        }
    }
}

impl Place {
    /// True while the run, `len` bytes long, has a datagram to deliver. An empty one counts.
    fn is_open(&self, len: usize) -> bool {
        self.start < len.max(1)
    }

    fn next_run(&mut self) {
        self.index += 1;
        self.start = 0;
        self.fragment = 0;
    }
}

impl UdpLink {
    /// True when the guest takes runs apart.
    fn takes_runs(&self) -> bool {
        let needed = Offloads::GUEST_CSUM | Offloads::GUEST_USO4;
        self.offloads.contains(needed)
    }

    /// True for a run of `len` bytes that is worth to be received where the guest reads it.
    fn takes_whole(&self, len: usize, segment: usize) -> bool {
        len >= LONG && self.takes_runs() && fits(segment, self.mtu)
    }

    /// How many of `left` bytes of a run go into the next datagram, or into the next frame that the
    /// guest takes apart, and how much of the work is left to it.
    fn next(&self, left: usize, segment: usize) -> (usize, Finish) {
        if !self.offloads.contains(Offloads::GUEST_CSUM) {
            return (segment.min(left), Finish::Nothing);
        }
        // Whole datagrams, unless all fit.
        let len = match left {
            ..=MAX_PAYLOAD => left,
            _ => MAX_PAYLOAD / segment * segment,
        };
        if self.takes_runs()
            && len > segment
            && fits(segment, self.mtu)
            && let Ok(size) = u16::try_from(segment)
        {
            return (len, Finish::Run(size));
        }
        (segment.min(left), Finish::Checksum)
    }
}

fn is_out_of_descriptors(failure: &io::Error) -> bool {
    matches!(
        failure.raw_os_error(),
        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)
    )
}
