//! The NAT stack as a NIC backend: frames from the guest to the protocols, events from the host to
//! the flows, and everything that is due to the guest into its RX ring.
//!
//! ```text
//!  transmit  frame --copy_head--> Ethernet --> ARP
//!                                         \--> IPv4 --> TCP   --> tcp::Flows::handle_frame
//!                                                   \-> UDP   --> DHCP | DNS | udp
//!                                                   \-> ICMP  --> echo
//!  receive   host events --> flows; timers; then outbox and flows --> RX ring
//! ```
//!
//! Headers are copied out of guest memory once, and only the copy is read. Payload stays where it
//! is until a system call takes it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use crate::config::Config;
use crate::drops::{DropReason, Drops};
use crate::flow::FlowKey;
use crate::host::{OsHost, Subject};
use crate::nic::{Backend, Link, Offloads, RxRing, Stop, TxBurst, TxFrame, VolatileSlice};
use crate::tcp::Run;
use crate::tcp::flows::{Flows, Limits, Readiness, Refusal, RxPath, TcpLink};
use crate::tcp::wire::{ETHERNET, Macs, parse};

/// Longest headers that are looked at: Ethernet, IPv4 and TCP, both with all options.
const HEAD: usize = 14 + 60 + 60;

/// The stack of one guest.
pub struct Stack {
    config: Config,
    rx: RxPath,
    link: Link,
    host: OsHost,
    events: Vec<(Subject, Readiness)>,
    tcp: Flows<OsHost>,
    run: Option<Run<'static>>,
    forwards: Vec<SocketAddr>,
    drops: Drops,
}

impl Stack {
    /// A stack with host sockets of its own. Opens the forwards of `config`.
    ///
    /// # Errors
    /// Fails when a forward's address cannot be bound, or the host has no epoll instance to give.
    pub fn new(config: Config, rx: RxPath) -> io::Result<Self> {
        let mut host = OsHost::new()?;
        let link = Link { guest_mac: [0; 6], mtu: config.mtu, offloads: Offloads::empty() };
        let tcp = Flows::new(tcp_link(&config, &link, rx), Limits::default(), random_u64()?);
        Ok(Self { config, rx, link, host, events: Vec::new(), tcp, run: Some(Run::default()), drops: Drops::default() })
    }
}
