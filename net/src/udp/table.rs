//! The table of UDP flows.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use super::{Batch, GuestDatagram, Owner, Refusal, UdpHost, UdpSocket};
use crate::config::{Config, Forward};
use crate::drops::DropReason;
use crate::outbox::Outbox;
use crate::policy;
use crate::wire::Macs;
use crate::wire::datagram::{Datagram, frames};
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
/// Frames that the outbox may hold before sockets are left alone.
const OUTBOX: usize = 256;
/// Batches received before others get their turn, even if nothing of them was for the guest.
const BATCHES_AT_ONCE: usize = 64;
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
    /// Flow and next datagram of the batch that is being delivered.
    delivering: Option<(u64, usize)>,
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

    /// Takes a datagram from the guest. `route` says where its far end is on the host.
    ///
    /// # Errors
    /// Why it was dropped. The guest may still hear of it, by [`Self::pump`].
    pub fn handle_from_guest(
        &mut self,
        datagram: &GuestDatagram<'_, '_>,
        route: impl FnOnce(SocketAddr) -> Result<SocketAddr, Refusal>,
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
        let number = match number {
            Some(number) => number,
            None => self.flow_of(datagram.guest, to, host, now)?,
        };
        let Some(flow) = self.flows.get_mut(&number) else {
            return Err(DropReason::NoSocket);
        };
        let hops = datagram.hop_limit - 1;
        if flow.hop_limit != hops {
            flow.socket.set_hop_limit(hops);
            flow.hop_limit = hops;
        }
        flow.used = now;
        flow.remember(to);
        let mut sent = flow.socket.send(to, &datagram.payload);
        if sent.as_ref().is_err_and(is_about_the_past) {
            // The error is reported once and is also in the queue, with the peer it is about.
            sent = flow.socket.send(to, &datagram.payload);
            self.note_readable(number);
        }
        let Err(failure) = sent else {
            return Ok(());
        };
        match failure.raw_os_error() {
            Some(libc::EAGAIN | libc::ENOBUFS) => return Err(DropReason::Full),
            Some(libc::ENETUNREACH) => self.tell(datagram, UNREACHABLE, NET),
            Some(libc::EHOSTUNREACH | libc::EHOSTDOWN) => self.tell(datagram, UNREACHABLE, HOST),
            Some(libc::EACCES | libc::EPERM) => self.tell(datagram, UNREACHABLE, PROHIBITED),
            _ => {}
        }
        Err(DropReason::HostRefused)
    }

    /// The socket with this number has something to read, or an error.
    pub fn handle_event(&mut self, number: u64) {
        self.note_readable(number);
    }

    /// Delivers what sockets have received, and errors, for as long as `out` has room. True when
    /// something is left for when it has room again.
    pub fn pump(
        &mut self,
        config: &Config,
        macs: Macs,
        mtu: u16,
        out: &mut Outbox,
        now: Instant,
    ) -> bool {
        // One batch per flow and turn: a flood into one does not starve the others.
        for _ in 0..BATCHES_AT_ONCE {
            self.push_errors(config, macs, out);
            if !self.deliver_batch(config, macs, mtu, out, now) {
                return true;
            }
            let Some(number) = self.ready.pop_front() else {
                return !self.errors.is_empty();
            };
            self.receive(config, number);
        }
        true
    }

    fn push_errors(&mut self, config: &Config, macs: Macs, out: &mut Outbox) {
        while !out.is_full()
            && let Some(told) = self.errors.pop_front()
        {
            // Flows are IPv4 at both ends or IPv6 at both ends, and only the former exist yet.
            out.push(|frame| {
                error::write(frame, macs, config.gateway, &told);
            });
        }
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

    /// The number of the guest's flow, opened if need be.
    fn flow_of(
        &mut self,
        guest: SocketAddr,
        to: SocketAddr,
        host: &mut H,
        now: Instant,
    ) -> Result<u64, DropReason> {
        if let Some((last, number)) = self.last
            && last == guest
        {
            return Ok(number);
        }
        if let Some(&number) = self.by_guest.get(&guest) {
            self.last = Some((guest, number));
            return Ok(number);
        }
        if self.by_guest.len() >= MAX_FLOWS {
            self.evict();
        }
        let any: IpAddr = match to {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let local = SocketAddr::new(any, 0);
        let number = match self.open(local, guest, false, host, now) {
            Err(failure) if is_out_of_descriptors(&failure) && self.evict() => {
                self.open(local, guest, false, host, now)
            }
            opened => opened,
        };
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
        let flow = Flow {
            socket: host.open_udp(local, Owner::Flows, number)?,
            guest,
            peers: HashSet::new(),
            last_peer: None,
            forward,
            used: now,
            replied: false,
            hop_limit: 0,
            ready: false,
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
    fn receive(&mut self, config: &Config, number: u64) {
        let Some(flow) = self.flows.get_mut(&number) else {
            return;
        };
        match flow.socket.receive(&mut self.batch) {
            Ok(()) => {
                self.delivering = Some((number, 0));
                self.ready.push_back(number);
            }
            Err(failure) if is_about_the_past(&failure) => {
                self.ready.push_back(number);
                self.take_errors(config, number);
            }
            Err(_) => {
                flow.ready = false;
                self.take_errors(config, number);
            }
        }
    }

    /// Reads the error queue, so that the socket does not report it again.
    fn take_errors(&mut self, config: &Config, number: u64) {
        let Some(flow) = self.flows.get_mut(&number) else {
            return;
        };
        for taken in 0.. {
            if taken == ERRORS_AT_ONCE {
                // The rest in the next turn.
                self.note_readable(number);
                return;
            }
            let Some(told) = flow.socket.take_error() else {
                return;
            };
            let reported_by = told.from.and_then(|from| {
                match policy::seen_as(config, SocketAddr::new(from, 0)).ip() {
                    IpAddr::V4(from) => Some(from),
                    IpAddr::V6(_) => None,
                }
            });
            if self.errors.len() < MAX_ERRORS && flow.admits(told.to) {
                self.errors.push_back(IcmpError {
                    from: reported_by,
                    kind: told.kind,
                    code: told.code,
                    mtu: told.mtu,
                    guest: flow.guest,
                    far: policy::seen_as(config, told.to),
                    payload_len: told.payload_len,
                });
            }
        }
    }

    /// Delivers what is left of the batch. False when `out` has no room for the next datagram.
    fn deliver_batch(
        &mut self,
        config: &Config,
        macs: Macs,
        mtu: u16,
        out: &mut Outbox,
        now: Instant,
    ) -> bool {
        let Some((number, mut index)) = self.delivering else {
            return true;
        };
        if let Some(flow) = self.flows.get_mut(&number) {
            while let Some((peer, payload)) = self.batch.datagram(index) {
                if out.len() + frames(payload.len(), mtu) > OUTBOX {
                    self.delivering = Some((number, index));
                    return false;
                }
                index += 1;
                if !flow.admits(peer) {
                    continue;
                }
                let from = if flow.forward {
                    config.seen_by_guest(peer)
                } else {
                    policy::seen_as(config, peer)
                };
                if flow.forward {
                    if self.callers.len() >= MAX_PEERS {
                        self.callers.clear();
                    }
                    let caller = Caller {
                        number,
                        peer,
                        used: now,
                    };
                    self.callers.insert((flow.guest, from), caller);
                }
                flow.used = now;
                flow.replied = true;
                self.ident = self.ident.wrapping_add(1);
                let datagram = Datagram {
                    macs,
                    from,
                    to: flow.guest,
                    ident: self.ident,
                    mtu,
                    payload,
                };
                datagram.push(out);
            }
        }
        self.delivering = None;
        true
    }

    fn tell(&mut self, datagram: &GuestDatagram<'_, '_>, kind: u8, code: u8) {
        if self.errors.len() < MAX_ERRORS {
            self.errors.push_back(IcmpError {
                from: None,
                kind,
                code,
                mtu: 0,
                guest: datagram.guest,
                far: datagram.far,
                payload_len: datagram.payload.len,
            });
        }
    }
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

fn is_out_of_descriptors(failure: &io::Error) -> bool {
    matches!(
        failure.raw_os_error(),
        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)
    )
}
