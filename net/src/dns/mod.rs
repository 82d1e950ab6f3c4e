//! The name server that the guest sees: its queries, forwarded to the host's resolvers.
//!
//! # Theory of operation
//!
//! Messages pass as they are (RFC 5625, 3): only the id is replaced, so unknown types, EDNS and the
//! truncation bit survive. Each query gets an id and a host socket, thus a port, of its own, so that
//! an answer is hard to forge (RFC 5452, 9.2); it must come from a resolver that was asked, with the
//! id and the question that were sent.
//!
//! | what happens | what is done |
//! |---|---|
//! | silence for [`PATIENCE`] | ask the next resolver, round and round; a late answer still counts |
//! | SERVFAIL, REFUSED, transport error | ask the next one now; never this one again for this query |
//! | all have failed | the last such answer, or a SERVFAIL, goes to the guest |
//! | any other answer, NXDOMAIN too | it goes to the guest |
//! | [`LIMIT`] has passed, or no resolvers at all | SERVFAIL to the guest |
//!
//! A guest that repeats a query that is still pending gets one answer. DNS over TCP is a plain
//! connection to [`Forwarder::tcp_upstream`].

mod message;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use message::Answer;

use crate::drops::DropReason;
use crate::outbox::Outbox;
use crate::udp::{Batch, Owner, Received, UdpHost, UdpSocket};
use crate::wire::Macs;
use crate::wire::datagram::{Datagram, frames};

/// How long a resolver may be silent before the next one is asked as well.
pub const PATIENCE: Duration = Duration::from_millis(1500);
/// How long the guest waits at most: what its C library waits for one server.
pub const LIMIT: Duration = Duration::from_secs(5);
/// Queries at once, each with a descriptor for every time that a resolver was asked. More are dropped, and the guest asks again.
pub const MAX_PENDING: usize = 256;
/// Longest query that is forwarded, in bytes: far more than a question with options has.
pub const MAX_QUERY: usize = 4096;
/// Frames that the outbox may hold before answers wait in their sockets.
const OUTBOX: usize = 256;

#[derive(Debug)]
struct Pending<S> {
    guest: SocketAddr,
    /// The query as the guest sent it.
    query: Vec<u8>,
    /// The id on the wire.
    id: [u8; 2],
    /// One for each time that a resolver was asked; [`LIMIT`] and [`PATIENCE`] bound them.
    sockets: Vec<S>,
    /// Resolvers at the time of the query, and whether each has been asked and has failed.
    servers: Vec<Asked>,
    /// Index of the resolver asked last.
    at: usize,
    /// An answer that says no more than that a resolver failed.
    failure: Option<Vec<u8>>,
    next_try: Instant,
    end: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Asked {
    address: SocketAddr,
    asked: bool,
    failed: bool,
}

/// Forwards the guest's queries.
#[derive(Debug)]
pub struct Forwarder<H: UdpHost> {
    servers: Vec<SocketAddr>,
    /// The resolver that answered last.
    good: Option<SocketAddr>,
    pending: HashMap<u64, Pending<H::Socket>>,
    by_guest: HashMap<(SocketAddr, [u8; 2]), u64>,
    ready: VecDeque<u64>,
    /// Answers made here, for the guest.
    answers: VecDeque<(SocketAddr, Vec<u8>)>,
    batch: Batch,
    secret: u64,
    next_number: u64,
}

impl<H: UdpHost> Forwarder<H> {
    /// A forwarder without resolvers. `secret` is a number that nobody can guess.
    pub fn new(secret: u64) -> Self {
        Self {
            servers: Vec::new(),
            good: None,
            pending: HashMap::new(),
            by_guest: HashMap::new(),
            ready: VecDeque::new(),
            answers: VecDeque::new(),
            batch: Batch::default(),
            secret,
            next_number: 0,
        }
    }

    /// Queries without an answer yet.
    pub fn len(&self) -> usize {
        self.pending.len()
    }

    /// True when no query is pending.
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Uses `servers`, in order, from the next query on.
    pub fn set_servers(&mut self, servers: &[SocketAddr]) {
        self.servers.clear();
        self.servers.extend_from_slice(servers);
        self.good = None;
    }

    /// The resolver that DNS over TCP is to be connected to: the one that answered last, else the
    /// first.
    pub fn tcp_upstream(&self) -> Option<SocketAddr> {
        self.good.or_else(|| self.servers.first().copied())
    }

    /// Takes a query that the guest sent from `guest` to the name server.
    ///
    /// # Errors
    /// It is no query, or there are too many.
    pub fn handle_from_guest(
        &mut self,
        guest: SocketAddr,
        query: &[u8],
        host: &mut H,
        now: Instant,
    ) -> Result<(), DropReason> {
        if !message::is_query(query) || query.len() > MAX_QUERY {
            return Err(DropReason::BadDns);
        }
        let key = (guest, [query[0], query[1]]);
        if let Some(number) = self.by_guest.get(&key)
            && let Some(pending) = self.pending.get(number)
            && pending.query == query
        {
            return Ok(());
        }
        if self.pending.len() + self.answers.len() >= MAX_PENDING {
            return Err(DropReason::Full);
        }
        let number = self.next_number;
        self.next_number += 1;
        let pending = Pending {
            guest,
            query: query.to_vec(),
            id: self.id(number),
            sockets: Vec::new(),
            servers: self.servers.iter().copied().map(Asked::new).collect(),
            at: usize::MAX,
            failure: None,
            next_try: now,
            end: now + LIMIT,
        };
        self.by_guest.insert(key, number);
        self.pending.insert(number, pending);
        self.ask_next(number, host, now);
        Ok(())
    }

    /// The socket with this number, as it was opened, has something to read, or an error.
    pub fn handle_event(&mut self, number: u64) {
        if self.pending.contains_key(&number) && !self.ready.contains(&number) {
            self.ready.push_back(number);
        }
    }

    /// Reads the resolvers' answers and queues those that are for the guest. `dns` is the name
    /// server's address as the guest knows it. True when something waits for room in `out`.
    pub fn pump(
        &mut self,
        dns: IpAddr,
        macs: Macs,
        mtu: u16,
        host: &mut H,
        out: &mut Outbox,
        now: Instant,
    ) -> bool {
        loop {
            while let Some((guest, answer)) = self.answers.front() {
                if out.len() + frames(answer.len(), mtu) > OUTBOX {
                    return true;
                }
                let datagram = Datagram {
                    macs,
                    from: SocketAddr::new(dns, message::PORT),
                    to: *guest,
                    ident: u16::from_be_bytes([answer[0], answer[1]]),
                    mtu,
                    payload: answer,
                };
                datagram.push(out);
                self.answers.pop_front();
            }
            let Some(number) = self.ready.pop_front() else {
                return false;
            };
            self.read(number, host, now);
        }
    }

    /// When [`Self::handle_timeout`] is due.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let due = |pending: &Pending<H::Socket>| pending.next_try.min(pending.end);
        self.pending.values().map(due).min()
    }

    /// Asks other resolvers where one has been silent, and gives up where it has taken too long.
    pub fn handle_timeout(&mut self, host: &mut H, now: Instant) {
        let due: Vec<(u64, bool)> = self
            .pending
            .iter()
            .filter(|(_, pending)| pending.next_try.min(pending.end) <= now)
            .map(|(&number, pending)| (number, pending.end <= now))
            .collect();
        for (number, over) in due {
            if over {
                self.give_up(number);
            } else {
                self.ask_next(number, host, now);
            }
        }
    }

    /// Forgets all queries: the guest that asked is gone.
    pub fn reset(&mut self) {
        self.pending.clear();
        self.by_guest.clear();
        self.ready.clear();
        self.answers.clear();
    }

    /// An id that nobody can guess.
    fn id(&self, number: u64) -> [u8; 2] {
        let mut hasher = DefaultHasher::new();
        (self.secret, number).hash(&mut hasher);
        let hash = hasher.finish().to_ne_bytes();
        [hash[0], hash[1]]
    }

    /// Sends the query to the next resolver that has not failed; gives up when all have.
    fn ask_next(&mut self, number: u64, host: &mut H, now: Instant) {
        while let Some(pending) = self.pending.get_mut(&number) {
            let Some(address) = pending.next_server() else {
                self.give_up(number);
                return;
            };
            match pending.ask(address, number, host) {
                Ok(()) => {
                    pending.next_try = now + PATIENCE;
                    return;
                }
                Err(error) => {
                    tracing::debug!(%address, %error, "cannot ask a resolver");
                    pending.servers[pending.at].failed = true;
                }
            }
        }
    }

    fn read(&mut self, number: u64, host: &mut H, now: Instant) {
        let Some(pending) = self.pending.get_mut(&number) else {
            return;
        };
        let mut failed = false;
        for socket in &mut pending.sockets {
            // A socket that reports an error of the past may still hold an answer.
            for _ in 0..MAX_READS {
                match socket.receive(&mut self.batch) {
                    Ok(()) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(_) => continue,
                }
                for index in 0..self.batch.len() {
                    // These sockets do not ask for runs: each is one datagram.
                    let Some(Received {
                        from,
                        payload: bytes,
                        ..
                    }) = self.batch.run(index)
                    else {
                        break;
                    };
                    let Some(server) = pending.servers.iter_mut().find(|s| s.is(from)) else {
                        continue;
                    };
                    match message::check(bytes, pending.id, &pending.query) {
                        Answer::Foreign => {}
                        Answer::Failure => {
                            server.failed = true;
                            failed = true;
                            pending.failure = Some(bytes.to_vec());
                        }
                        Answer::Final => {
                            self.good = Some(server.address);
                            let answer = bytes.to_vec();
                            self.finish(number, answer);
                            return;
                        }
                    }
                }
            }
            for _ in 0..MAX_READS {
                let Some(told) = socket.take_error() else {
                    break;
                };
                if let Some(server) = pending.servers.iter_mut().find(|s| s.is(told.to)) {
                    server.failed = true;
                    failed = true;
                }
            }
        }
        // The next one is asked at once only if it was the last one asked that failed.
        if failed && pending.servers.get(pending.at).is_some_and(|s| s.failed) {
            self.ask_next(number, host, now);
        }
    }

    /// Ends a query without an answer from anyone who knows.
    fn give_up(&mut self, number: u64) {
        if let Some(pending) = self.pending.get_mut(&number) {
            let failure = pending.failure.take();
            let answer = failure.unwrap_or_else(|| message::servfail(&pending.query));
            self.finish(number, answer);
        }
    }

    fn finish(&mut self, number: u64, mut answer: Vec<u8>) {
        let Some(pending) = self.pending.remove(&number) else {
            return;
        };
        let key = (pending.guest, [pending.query[0], pending.query[1]]);
        if self.by_guest.get(&key) == Some(&number) {
            self.by_guest.remove(&key);
        }
        answer[..2].copy_from_slice(&pending.query[..2]);
        self.answers.push_back((pending.guest, answer));
    }
}

impl<S: UdpSocket> Pending<S> {
    /// Moves on to the next resolver that has not failed.
    fn next_server(&mut self) -> Option<SocketAddr> {
        for step in 1..=self.servers.len() {
            // From `usize::MAX`, the first step leads to the first resolver.
            let at = self.at.wrapping_add(step) % self.servers.len();
            if !self.servers[at].failed {
                self.at = at;
                self.servers[at].asked = true;
                return Some(self.servers[at].address);
            }
        }
        None
    }

    fn ask<H: UdpHost<Socket = S>>(
        &mut self,
        to: SocketAddr,
        number: u64,
        host: &mut H,
    ) -> io::Result<()> {
        let mut query = self.query.clone();
        query[..2].copy_from_slice(&self.id);
        let any: IpAddr = match to {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let mut socket = host.open_udp(SocketAddr::new(any, 0), Owner::Dns, number)?;
        socket.send_bytes(to, &query)?;
        self.sockets.push(socket);
        Ok(())
    }
}

impl Asked {
    fn new(address: SocketAddr) -> Self {
        Self {
            address,
            asked: false,
            failed: false,
        }
    }

    /// True when an answer from `from` is this resolver's.
    fn is(&self, from: SocketAddr) -> bool {
        // Flow labels are the sender's business, scopes are not always told.
        self.asked && self.address.ip() == from.ip() && self.address.port() == from.port()
    }
}

/// Reads of one socket in a row: resolvers answer with one datagram, anything more is noise.
const MAX_READS: usize = 8;
