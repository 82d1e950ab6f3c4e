//! The NAT stack as a NIC backend: frames from the guest to the protocols, events from the host to
//! the flows, and everything that is due to the guest into its RX ring.
//!
//! ```text
//!  transmit  frame --copy_head--> Ethernet --> ARP
//!                                         \--> IPv4 --> TCP  --> tcp::Flows::handle_frame
//!                                                   \-> UDP  --> DHCP | DNS | udp
//!                                                   \-> ICMP --> echo
//!  receive   host events --> flows; timers; then outbox and flows --> RX ring
//! ```
//!
//! Headers are copied out of guest memory once, and only the copy is read. Payload stays where it
//! is until a system call takes it.

mod ingress;
#[cfg(test)]
mod tests;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use crate::config::{Config, Forward, Protocol};
use crate::dhcp::{DhcpConfig, DhcpServer};
use crate::dns::Forwarder;
use crate::drops::{DropReason, Drops};
use crate::host::resolv::ResolvConf;
use crate::host::{DNS, OsHost, PING, Subject, UDP};
use crate::icmp::echo::Echo;
use crate::icmp::error::{Code, quote_syn, write_unreachable};
use crate::nic::{Backend, Link, Offloads, RxRing, Stop, TxBurst};
use crate::outbox::Outbox;
use crate::tcp::Run;
pub use crate::tcp::flows::RxPath;
use crate::tcp::flows::{Flows, Limits, Readiness, Refusal, TcpLink};
use crate::udp::{Outgoing, UdpLink, UdpTable};
use crate::wire::Macs;

/// Lease time of the one address. It is the guest's for good; renewals only show that it lives.
const LEASE: Duration = Duration::from_secs(24 * 60 * 60);

/// Descriptors that the TCP flows of a stack leave alone: for UDP flows, DNS queries, pings and the VMM itself.
const RESERVED: usize = 2048;

/// When connections that had to wait at a forward are looked at again.
const RETRY_ACCEPT: Duration = Duration::from_millis(100);

/// Rounds over the datagram protocols per turn.
const ROUNDS: usize = 4;

/// The stack of one guest.
pub struct Stack {
    config: Config,
    link: Link,
    rx: RxPath,
    host: OsHost,
    /// Kept for its allocation.
    events: Vec<(Subject, Readiness)>,
    tcp: Flows<OsHost>,
    echo: Echo<OsHost>,
    dhcp: DhcpServer,
    udp: UdpTable<OsHost>,
    dns: Forwarder<OsHost>,
    resolv: ResolvConf,
    outbox: Outbox,
    /// TCP forwards, by listener.
    forwards: Vec<Forward>,
    /// Listeners with connections that wait.
    waiting: Vec<usize>,
    retry_accept: Option<Instant>,
    /// No socket has anything to tell.
    quiet: bool,
    drops: Drops,
}

/// What of the guest's burst waits for the burst's end.
#[derive(Debug, Default)]
struct Runs<'m> {
    tcp: Run<'m>,
    udp: Outgoing<'m>,
}

/// Why a [`Stack`] cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StackError {
    /// The configuration contradicts itself.
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    /// A forward's port cannot be had.
    #[error("cannot listen on {address} for the forward to port {guest_port} of the guest")]
    Listen {
        /// The address of the host.
        address: SocketAddr,
        /// The guest's port.
        guest_port: u16,
        /// What the host reports.
        source: io::Error,
    },
    /// The host has no descriptor or no randomness to give.
    #[error("cannot set up host sockets")]
    Host(#[from] io::Error),
}

impl Stack {
    /// A stack with host sockets of its own. Opens the forwards of `config`.
    ///
    /// # Errors
    /// Fails when the configuration contradicts itself, or a forward's address cannot be bound.
    pub fn new(config: Config, rx: RxPath) -> Result<Self, StackError> {
        Self::one_of(config, rx, 1)
    }

    /// As [`Self::new`], with its part of what the process has for `count` stacks.
    pub(crate) fn one_of(config: Config, rx: RxPath, count: u8) -> Result<Self, StackError> {
        config.validate()?;
        let mut host = OsHost::new()?;
        let mut forwards = Vec::new();
        let mut udp = UdpTable::default();
        for forward in &config.forwards {
            let opened = match forward.protocol {
                Protocol::Tcp => host.listen(forward.host).map(|_| forwards.push(*forward)),
                Protocol::Udp => {
                    udp.add_forward(forward, config.guest_ip.into(), &mut host, Instant::now())
                }
            };
            opened.map_err(|source| StackError::Listen {
                address: forward.host,
                guest_port: forward.guest_port,
                source,
            })?;
        }
        let link = Link {
            guest_mac: [0; 6],
            mtu: config.mtu,
            offloads: Offloads::empty(),
        };
        let mut resolv = ResolvConf::default();
        resolv.refresh(Instant::now());
        let search = resolv.resolvers().search.clone();
        let dhcp = DhcpServer::new(dhcp_config(&config, search));
        let mut dns = Forwarder::new(host.random()?);
        dns.set_servers(&resolv.resolvers().servers);
        let secret = host.random()?;
        Ok(Self {
            tcp: Flows::new(tcp_link(&config, &link, rx), limits(count), secret),
            config,
            link,
            rx,
            host,
            events: Vec::new(),
            echo: Echo::new(),
            dhcp,
            udp,
            dns,
            resolv,
            outbox: Outbox::default(),
            forwards,
            waiting: Vec::new(),
            retry_accept: None,
            quiet: false,
            drops: Drops::default(),
        })
    }

    /// Frames dropped so far, by reason.
    pub fn drops(&self) -> &Drops {
        &self.drops
    }

    pub(crate) fn count_drop(&mut self, reason: DropReason) {
        self.drops.count(reason);
    }

    /// Wakes whoever waits for [`Backend::poll_fd`]. Only once per stack.
    pub(crate) fn waker(&self) -> io::Result<mio::Waker> {
        self.host.waker()
    }

    /// Names the guest's port of each flow.
    pub(crate) fn for_each_guest_port(&self, mut visit: impl FnMut(Protocol, u16)) {
        let tcp = self.tcp.keys();
        tcp.for_each(|key| visit(Protocol::Tcp, key.guest.port()));
        self.udp
            .guests()
            .for_each(|guest| visit(Protocol::Udp, guest.port()));
    }

    fn macs(&self) -> Macs {
        Macs {
            gateway: self.config.gateway_mac,
            guest: self.link.guest_mac,
        }
    }

    fn take_events(&mut self, now: Instant) {
        loop {
            let mut events = std::mem::take(&mut self.events);
            let more = self.host.poll_events(&mut events);
            for (subject, readiness) in events.drain(..) {
                match subject {
                    Subject::Tcp(id) => self.tcp.handle_event(id, readiness, now),
                    Subject::Listener(index) => self.note_waiting(index),
                    Subject::Other(PING, number) => self.echo.handle_event(number),
                    Subject::Other(UDP, number) => self.udp.handle_event(number),
                    Subject::Other(DNS, number) => self.dns.handle_event(number),
                    Subject::Other(_, _) => {}
                }
            }
            self.events = events;
            if !more {
                return;
            }
        }
    }

    fn note_waiting(&mut self, listener: usize) {
        if !self.waiting.contains(&listener) {
            self.waiting.push(listener);
        }
    }

    /// Takes the connections that wait at forwards. Where some have to go on waiting, for a descriptor
    /// or a place in the table, no event will say when: [`RETRY_ACCEPT`] does.
    fn accept(&mut self, now: Instant) {
        let config = &self.config;
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.retain(|&listener| {
            let Some(forward) = self.forwards.get(listener) else {
                return false;
            };
            let guest = SocketAddr::from((config.guest_ip, forward.guest_port));
            let seen_as = |peer| config.seen_by_guest(peer);
            !self
                .tcp
                .accept(listener, guest, seen_as, &mut self.host, now)
        });
        self.retry_accept = (!waiting.is_empty()).then_some(now + RETRY_ACCEPT);
        self.waiting = waiting;
    }

    /// Asks the host's resolvers from now on, if they changed.
    fn refresh_resolvers(&mut self, now: Instant) {
        if self.resolv.refresh(now) {
            self.dns.set_servers(&self.resolv.resolvers().servers);
        }
    }

    /// Moves what datagram sockets received to the guest, in a bounded number of rounds: TCP gets its
    /// turn even in a flood.
    fn deliver_datagrams(&mut self, ring: &mut dyn RxRing, now: Instant) -> Stop {
        let (macs, mtu, dns) = (self.macs(), self.link.mtu, self.config.dns.into());
        let udp = UdpLink {
            macs,
            mtu,
            offloads: self.link.offloads,
        };
        for _ in 0..ROUNDS {
            let out = &mut self.outbox;
            let mut more = self.echo.pump(macs, out)
                | self.dns.pump(dns, macs, mtu, &mut self.host, out, now)
                | self.udp.pump_errors(&self.config, macs, out);
            if !self.outbox.deliver(ring) {
                return Stop::NoBuffers;
            }
            match self.udp.pump(&self.config, &udp, ring, now) {
                Stop::Idle => {}
                Stop::Yield => more = true,
                Stop::NoBuffers => return Stop::NoBuffers,
            }
            if !more {
                return Stop::Idle;
            }
        }
        Stop::Yield
    }

    /// Turns failed connections into ICMP messages.
    fn tell_unreachable(&mut self) {
        while !self.outbox.is_full() {
            let Some(failed) = self.tcp.poll_unreachable() else {
                return;
            };
            let code = match failed.refusal {
                Refusal::NetUnreachable => Code::Net,
                Refusal::HostUnreachable => Code::Host,
                Refusal::Prohibited => Code::Prohibited,
                Refusal::Reset | Refusal::Silence => continue,
            };
            let Some(quote) = quote_syn(&failed.key, &failed.syn) else {
                continue;
            };
            let macs = self.macs();
            let (gateway, guest) = (self.config.gateway, self.config.guest_ip);
            self.outbox
                .push(|frame| write_unreachable(frame, macs, gateway, guest, code, &quote));
        }
    }
}

/// Bounds that follow from how many descriptors the process may have for `count` stacks: each flow
/// needs one, and some are left for everything else.
fn limits(count: u8) -> Limits {
    let limits = Limits::default();
    let descriptors = crate::host::descriptor_limit();
    let most = descriptors
        .saturating_sub(RESERVED * usize::from(count))
        .max(descriptors / 2);
    let share = limits.of_one_in(count);
    Limits {
        flows: share.flows.min(most / usize::from(count.max(1))),
        ..share
    }
}

/// What DHCP tells the guest. `host_search` is the host's own search list.
fn dhcp_config(config: &Config, host_search: Vec<String>) -> DhcpConfig {
    DhcpConfig {
        guest_ip: config.guest_ip,
        prefix_len: config.prefix_len,
        router: config.gateway,
        server_id: config.gateway,
        dns: config.dns,
        mtu: config.mtu,
        lease: LEASE,
        hostname: config.hostname.clone(),
        search: config.search.clone().unwrap_or(host_search),
    }
}

fn tcp_link(config: &Config, link: &Link, rx: RxPath) -> TcpLink {
    TcpLink {
        macs: Macs {
            gateway: config.gateway_mac,
            guest: link.guest_mac,
        },
        mtu: link.mtu,
        offloads: link.offloads,
        rx,
    }
}

impl Backend for Stack {
    fn offloads(&self) -> Offloads {
        Offloads::CSUM
            | Offloads::GUEST_CSUM
            | Offloads::GUEST_TSO4
            | Offloads::HOST_TSO4
            | Offloads::GUEST_USO4
            | Offloads::HOST_USO
    }

    /// Flows live on: each frame asks the link anew what it may leave to the guest, so this is also
    /// what a change of the offloads takes.
    fn configure(&mut self, link: &Link) {
        self.link = Link {
            mtu: link.mtu.min(self.config.mtu),
            ..*link
        };
        self.tcp
            .set_link(tcp_link(&self.config, &self.link, self.rx));
    }

    fn transmit(&mut self, burst: &TxBurst<'_>, now: Instant) {
        let mut runs = Runs::default();
        for frame in burst.iter() {
            if let Err(reason) = self.handle_frame(&frame, &mut runs, now) {
                self.drops.count(reason);
            }
        }
        self.tcp.end_run(&mut runs.tcp, now);
        self.udp.end_run(&mut runs.udp, &mut self.drops);
    }

    fn receive(&mut self, ring: &mut dyn RxRing, now: Instant) -> Stop {
        if !std::mem::take(&mut self.quiet) {
            self.take_events(now);
        }
        if !self.waiting.is_empty() {
            self.accept(now);
        }
        self.tcp.handle_timeout(now);
        self.echo.handle_timeout(now);
        self.udp.handle_timeout(now);
        self.dns.handle_timeout(&mut self.host, now);
        self.tell_unreachable();
        let more = match self.deliver_datagrams(ring, now) {
            Stop::NoBuffers => return Stop::NoBuffers,
            stop => stop == Stop::Yield,
        };
        match self.tcp.pump(ring, now) {
            Stop::Idle if more => Stop::Yield,
            stop => stop,
        }
    }

    fn after_burst(&mut self) -> bool {
        self.tcp.after_burst()
    }

    fn host_is_quiet(&mut self) {
        self.quiet = true;
    }

    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.host.as_fd())
    }

    fn deadline(&self) -> Option<Instant> {
        [
            self.retry_accept,
            self.tcp.poll_timeout(),
            self.echo.poll_timeout(),
            self.udp.poll_timeout(),
            self.dns.poll_timeout(),
        ]
        .into_iter()
        .flatten()
        .min()
    }
}

impl Drop for Stack {
    /// Far ends see a reset instead of silence.
    fn drop(&mut self) {
        self.tcp.abort_all();
    }
}

/// Where a guest's destination is on the host, for TCP.
fn tcp_route(
    config: &Config,
    resolver: Option<SocketAddr>,
    far: SocketAddr,
) -> Result<SocketAddr, Refusal> {
    use crate::policy::Route;
    match crate::policy::route(config, far.ip()) {
        Route::Host(ip) => Ok(SocketAddr::new(ip, far.port())),
        Route::Dns if far.port() == 53 => resolver.ok_or(Refusal::Reset),
        Route::Gateway | Route::Dns => Err(Refusal::Reset),
        Route::Vacant => Err(Refusal::HostUnreachable),
        Route::Unroutable => Err(Refusal::Silence),
    }
}
