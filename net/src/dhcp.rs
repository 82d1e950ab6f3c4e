//! The DHCPv4 server of the guest's segment (RFC 2131, RFC 2132), and BOOTP for clients without it.
//!
//! There is one guest and one address, so nothing is remembered between messages: every client,
//! whatever its MAC or client identifier, is offered that address, and a reply depends on the
//! message and the configuration alone. A guest that comes back as somebody else, forgets to
//! release, or outlives a restart of the VMM is served like the first time. For the same reason the
//! server is authoritative: where RFC 2131 has a server without a record stay silent (INIT-REBOOT),
//! it answers, with a NAK when the address is not the guest's.
//!
//! | message                                    | answer, and where it goes                       |
//! |--------------------------------------------|-------------------------------------------------|
//! | DISCOVER                                   | OFFER, to the new address or broadcast          |
//! | REQUEST naming another server              | none                                            |
//! | REQUEST for the guest's address            | ACK, to `ciaddr`, the new address, or broadcast |
//! | REQUEST for any other address              | NAK, broadcast                                  |
//! | INFORM                                     | ACK without a lease, to the sender              |
//! | RELEASE, DECLINE                           | none                                            |
//! | no message type, or no magic cookie: BOOTP | BOOTP reply, as an ACK                          |
//!
//! A REQUEST that names this server is SELECTING and asks for option 50; otherwise one with
//! `ciaddr` is RENEWING or REBINDING and asks for that, and one without is INIT-REBOOT and asks for
//! option 50. RENEWING and REBINDING differ in how they were sent only, and are answered alike.
//!
//! Bounds:
//!
//! * A reply has at least 300 bytes, which old BOOTP clients insist on. With its IP and UDP headers
//!   it has at most what option 57 allows (576 without it) and the MTU, neither taken below 576.
//!   BOOTP replies have 300 bytes exactly. Options are written in order of need; one that does not
//!   fit is left out, and the search list is cut behind the last domain that fits.
//! * Names that are not plain host names (letters, digits, `-`, `_`) are not sent: clients pass
//!   them to shell scripts. Without a search list there is neither option 15 nor 119.
//! * Options of a client that run past the end of the message end the options. Those a client put
//!   into `sname` or `file` (option 52) are not read.
//! * There is no relay on the segment: `giaddr` is copied but does not steer the reply.
//! * A client's wish for a lease time (option 51) is not followed; a lease is at least a minute.
#[cfg(test)]
mod tests;

use std::net::Ipv4Addr;
use std::time::Duration;

use smoltcp::wire::{DhcpFlags, DhcpMessageType, DhcpOpCode, DhcpPacket, EthernetAddress};
use thiserror::Error;

/// Bytes of the fixed fields and the magic cookie.
const HEADER: usize = 240;
/// Least bytes of a message: the fixed fields and the 64 octets of `vend` (RFC 951).
const MIN_MESSAGE: usize = 300;
/// Bytes of an IP datagram that every client takes (RFC 2131, 2).
const MIN_DATAGRAM: u16 = 576;
/// Bytes of an IPv4 header without options, and a UDP header.
const IP_UDP: usize = 28;
const MAGIC_COOKIE: u32 = 0x6382_5363;
const ETHERNET: u8 = 1;
const MIN_LEASE: u32 = 60;
const INFINITE: u32 = u32::MAX;
/// Least value of option 26 (RFC 2132, 5.1).
const MIN_MTU: u16 = 68;

/// Option codes (RFC 2132; 119 is RFC 3397).
mod option {
    pub(super) const MASK: u8 = 1;
    pub(super) const ROUTER: u8 = 3;
    pub(super) const DNS: u8 = 6;
    pub(super) const HOST_NAME: u8 = 12;
    pub(super) const DOMAIN: u8 = 15;
    pub(super) const MTU: u8 = 26;
    pub(super) const REQUESTED_IP: u8 = 50;
    pub(super) const LEASE: u8 = 51;
    pub(super) const MESSAGE_TYPE: u8 = 53;
    pub(super) const SERVER_ID: u8 = 54;
    pub(super) const PARAMETERS: u8 = 55;
    pub(super) const MAX_SIZE: u8 = 57;
    pub(super) const T1: u8 = 58;
    pub(super) const T2: u8 = 59;
    pub(super) const CLIENT_ID: u8 = 61;
    pub(super) const SEARCH: u8 = 119;
    pub(super) const END: u8 = 255;
}

/// What the guest is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DhcpConfig {
    /// The guest's address.
    pub guest_ip: Ipv4Addr,
    /// Length of the segment's prefix; 32 if larger.
    pub prefix_len: u8,
    /// The default router.
    pub router: Ipv4Addr,
    /// Names this server: the gateway's address, from which replies are sent.
    pub server_id: Ipv4Addr,
    /// The resolver.
    pub dns: Ipv4Addr,
    /// MTU of the guest's link.
    pub mtu: u16,
    /// How long the address is the guest's. What does not fit 32 bits of seconds is infinite.
    pub lease: Duration,
    /// The guest's name.
    pub hostname: Option<String>,
    /// Domains to search; the first is the guest's own.
    pub search: Vec<String>,
}

/// A message to send, from port 67 of [`DhcpConfig::server_id`] to port 68.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Destination: a unicast address, or 255.255.255.255.
    pub to: Ipv4Addr,
    /// Link-layer destination: the client's, or ff:ff:ff:ff:ff:ff with a broadcast.
    pub to_mac: [u8; 6],
    /// Payload of the UDP datagram.
    pub payload: Vec<u8>,
}

/// Why a message was not understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum DhcpDrop {
    /// It ends within the fixed fields.
    #[error("{0} bytes are too short for a BOOTP message")]
    Short(usize),
    /// Its `op` is not that of a request.
    #[error("opcode {0} is not a request")]
    OpCode(u8),
    /// The client's hardware address is not one of an Ethernet card.
    #[error("no hardware address to answer to")]
    Hardware,
    /// A message type that no client sends.
    #[error("message type {0} is not a client's")]
    MessageType(u8),
    /// An option that steers the answer has the wrong length.
    #[error("option {0} has the wrong length")]
    OptionLength(u8),
    /// A REQUEST that names neither an address nor a server.
    #[error("request for no address")]
    NoAddress,
}

/// The server.
#[derive(Debug)]
pub struct DhcpServer {
    config: DhcpConfig,
    /// The search domains that can be sent, in the encoding of RFC 1035.
    search: Vec<Vec<u8>>,
    /// The first of them, as text.
    domain: Option<String>,
    hostname: Option<String>,
}

impl DhcpServer {
    /// A server that answers by `config`.
    pub fn new(config: DhcpConfig) -> Self {
        let names: Vec<_> = config
            .search
            .iter()
            .map(|name| name.strip_suffix('.').unwrap_or(name))
            .filter_map(|name| Some((name, encode_name(name)?)))
            .collect();
        let domain = names.first().map(|(name, _)| (*name).to_owned());
        let search = names.into_iter().map(|(_, encoded)| encoded).collect();
        let hostname = config
            .hostname
            .clone()
            .filter(|name| encode_name(name).is_some());
        Self {
            config,
            search,
            domain,
            hostname,
        }
    }

    /// Answers `payload`, a copy of a UDP datagram's payload sent to port 67 from `src`.
    ///
    /// `None` when the message wants no answer, or not ours.
    ///
    /// # Errors
    /// When the message is not one of a client, or lacks what the answer depends on.
    pub fn handle(&self, payload: &[u8], src: Ipv4Addr) -> Result<Option<Reply>, DhcpDrop> {
        let request = Request::parse(payload)?;
        let Some(message_type) = request.message_type else {
            return Ok(Some(self.bootp(&request)));
        };
        match message_type {
            DhcpMessageType::Discover => Ok(Some(self.offer(&request))),
            DhcpMessageType::Request => self.request(&request),
            DhcpMessageType::Inform => Ok(Some(self.inform(&request, src))),
            DhcpMessageType::Release | DhcpMessageType::Decline => Ok(None),
            other => Err(DhcpDrop::MessageType(other.into())),
        }
    }

    fn request(&self, request: &Request) -> Result<Option<Reply>, DhcpDrop> {
        let wanted = match request.server_id {
            Some(id) if id != self.config.server_id => return Ok(None),
            // A client that took the offer can mean one address only.
            Some(_) => request
                .requested
                .or(request.ciaddr)
                .unwrap_or(self.config.guest_ip),
            None => request
                .ciaddr
                .or(request.requested)
                .ok_or(DhcpDrop::NoAddress)?,
        };
        Ok(Some(if wanted == self.config.guest_ip {
            self.ack(request)
        } else {
            self.nak(request)
        }))
    }

    fn offer(&self, request: &Request) -> Reply {
        let mut options = self.options(DhcpMessageType::Offer, request);
        self.lease(&mut options);
        self.parameters(&mut options, request);
        let to = self.destination(None, request);
        request.reply(
            to,
            Addresses {
                yiaddr: self.config.guest_ip,
                ..Addresses::NONE
            },
            options,
        )
    }

    fn ack(&self, request: &Request) -> Reply {
        let mut options = self.options(DhcpMessageType::Ack, request);
        self.lease(&mut options);
        self.parameters(&mut options, request);
        request.reply(
            self.destination(request.ciaddr, request),
            Addresses {
                ciaddr: request.ciaddr.unwrap_or(Ipv4Addr::UNSPECIFIED),
                yiaddr: self.config.guest_ip,
                ..Addresses::NONE
            },
            options,
        )
    }

    fn nak(&self, request: &Request) -> Reply {
        let options = self.options(DhcpMessageType::Nak, request);
        request.reply(Ipv4Addr::BROADCAST, Addresses::NONE, options)
    }

    fn inform(&self, request: &Request, src: Ipv4Addr) -> Reply {
        let mut options = self.options(DhcpMessageType::Ack, request);
        self.parameters(&mut options, request);
        let to = request
            .ciaddr
            .into_iter()
            .chain([src])
            .find(|&ip| is_unicast(ip));
        request.reply(
            to.unwrap_or(Ipv4Addr::BROADCAST),
            Addresses {
                ciaddr: request.ciaddr.unwrap_or(Ipv4Addr::UNSPECIFIED),
                ..Addresses::NONE
            },
            options,
        )
    }

    /// RFC 951, with the options that RFC 1534 lets a DHCP server send.
    fn bootp(&self, request: &Request) -> Reply {
        let mut options = Options::new(MIN_MESSAGE - HEADER);
        self.parameters(&mut options, request);
        request.reply(
            self.destination(request.ciaddr, request),
            Addresses {
                ciaddr: request.ciaddr.unwrap_or(Ipv4Addr::UNSPECIFIED),
                yiaddr: self.config.guest_ip,
                siaddr: self.config.server_id,
            },
            options,
        )
    }

    /// Where a reply with the guest's address goes (RFC 2131, 4.1).
    fn destination(&self, ciaddr: Option<Ipv4Addr>, request: &Request) -> Ipv4Addr {
        match ciaddr.filter(|&ip| is_unicast(ip)) {
            Some(ciaddr) => ciaddr,
            None if request.flags.contains(DhcpFlags::BROADCAST) => Ipv4Addr::BROADCAST,
            None => self.config.guest_ip,
        }
    }

    /// The options of every DHCP reply.
    fn options(&self, message_type: DhcpMessageType, request: &Request) -> Options {
        let limit = request
            .max_size
            .unwrap_or(MIN_DATAGRAM)
            .min(self.config.mtu)
            .max(MIN_DATAGRAM);
        let mut options = Options::new(usize::from(limit) - IP_UDP - HEADER);
        options.push(option::MESSAGE_TYPE, &[message_type.into()]);
        options.push(option::SERVER_ID, &self.config.server_id.octets());
        options.push(option::CLIENT_ID, &request.client_id); // RFC 6842
        options
    }

    fn lease(&self, options: &mut Options) {
        let lease = u32::try_from(self.config.lease.as_secs())
            .unwrap_or(INFINITE)
            .max(MIN_LEASE);
        options.push(option::LEASE, &lease.to_be_bytes());
        if lease != INFINITE {
            options.push(option::T1, &(lease / 2).to_be_bytes());
            options.push(option::T2, &(lease - lease / 8).to_be_bytes());
        }
    }

    /// The configuration: what every client needs, and what this one asked for.
    fn parameters(&self, options: &mut Options, request: &Request) {
        let config = &self.config;
        let host_bits = 32 - u32::from(config.prefix_len.min(32));
        let mask = u32::MAX.checked_shl(host_bits).unwrap_or(0);
        options.push(option::MASK, &mask.to_be_bytes());
        options.push(option::ROUTER, &config.router.octets());
        options.push(option::DNS, &config.dns.octets());
        if config.mtu >= MIN_MTU && request.asks_for(option::MTU) {
            options.push(option::MTU, &config.mtu.to_be_bytes());
        }
        if let Some(name) = &self.hostname
            && request.asks_for(option::HOST_NAME)
        {
            options.push(option::HOST_NAME, name.as_bytes());
        }
        if let Some(domain) = &self.domain
            && request.asks_for(option::DOMAIN)
        {
            options.push(option::DOMAIN, domain.as_bytes());
        }
        if request.asks_for(option::SEARCH) {
            let mut list = Vec::new();
            for name in &self.search {
                if !options.fits(list.len() + name.len()) {
                    break;
                }
                list.extend_from_slice(name);
            }
            options.push(option::SEARCH, &list);
        }
    }
}

/// What is read of a client's message.
#[derive(Debug)]
struct Request {
    xid: u32,
    secs: u16,
    flags: DhcpFlags,
    /// Not 0.0.0.0.
    ciaddr: Option<Ipv4Addr>,
    giaddr: Ipv4Addr,
    chaddr: EthernetAddress,
    /// `None`: a BOOTP client.
    message_type: Option<DhcpMessageType>,
    requested: Option<Ipv4Addr>,
    server_id: Option<Ipv4Addr>,
    parameters: Option<Vec<u8>>,
    max_size: Option<u16>,
    /// Empty when there is none.
    client_id: Vec<u8>,
}

impl Request {
    // `DhcpRepr::parse` refuses BOOTP and client identifiers that are no MAC.
    fn parse(payload: &[u8]) -> Result<Self, DhcpDrop> {
        let packet =
            DhcpPacket::new_checked(payload).map_err(|_| DhcpDrop::Short(payload.len()))?;
        if packet.opcode() != DhcpOpCode::Request {
            return Err(DhcpDrop::OpCode(packet.opcode().into()));
        }
        let chaddr = packet.client_hardware_address();
        let ethernet = u16::from(packet.hardware_type()) == u16::from(ETHERNET);
        let card = chaddr.is_unicast() && chaddr.0 != [0; 6];
        if !ethernet || packet.hardware_len() != 6 || !card {
            return Err(DhcpDrop::Hardware);
        }
        let mut request = Self {
            xid: packet.transaction_id(),
            secs: packet.secs(),
            flags: packet.flags(),
            ciaddr: Some(packet.client_ip()).filter(|ip| !ip.is_unspecified()),
            giaddr: packet.relay_agent_ip(),
            chaddr,
            message_type: None,
            requested: None,
            server_id: None,
            parameters: None,
            max_size: None,
            client_id: Vec::new(),
        };
        if packet.magic_number() != MAGIC_COOKIE {
            return Ok(request);
        }
        for field in packet.options() {
            let wrong = |_| DhcpDrop::OptionLength(field.kind);
            match field.kind {
                option::MESSAGE_TYPE => {
                    let [value] = <[u8; 1]>::try_from(field.data).map_err(wrong)?;
                    request.message_type = Some(value.into());
                }
                option::REQUESTED_IP => {
                    let octets = <[u8; 4]>::try_from(field.data).map_err(wrong)?;
                    request.requested = Some(octets.into());
                }
                option::SERVER_ID => {
                    let octets = <[u8; 4]>::try_from(field.data).map_err(wrong)?;
                    request.server_id = Some(octets.into());
                }
                option::MAX_SIZE => {
                    let octets = <[u8; 2]>::try_from(field.data).map_err(wrong)?;
                    request.max_size = Some(u16::from_be_bytes(octets));
                }
                // These two may come in parts (RFC 3396).
                option::PARAMETERS => request
                    .parameters
                    .get_or_insert_default()
                    .extend_from_slice(field.data),
                option::CLIENT_ID => request.client_id.extend_from_slice(field.data),
                _ => {}
            }
        }
        Ok(request)
    }

    /// True when the client listed the option, or has no list.
    fn asks_for(&self, kind: u8) -> bool {
        self.parameters
            .as_ref()
            .is_none_or(|list| list.contains(&kind))
    }

    // `DhcpRepr::emit` always writes a message type.
    fn reply(&self, to: Ipv4Addr, addresses: Addresses, options: Options) -> Reply {
        let mut payload = vec![0; HEADER];
        let mut packet = DhcpPacket::new_unchecked(&mut payload[..]);
        packet.set_opcode(DhcpOpCode::Reply);
        packet.set_hardware_type(u16::from(ETHERNET).into());
        packet.set_hardware_len(6);
        packet.set_transaction_id(self.xid);
        packet.set_secs(self.secs);
        packet.set_flags(self.flags);
        packet.set_client_ip(addresses.ciaddr);
        packet.set_your_ip(addresses.yiaddr);
        packet.set_server_ip(addresses.siaddr);
        packet.set_relay_agent_ip(self.giaddr);
        packet.set_client_hardware_address(self.chaddr);
        packet.set_magic_number(MAGIC_COOKIE);
        payload.extend(options.finish());
        payload.resize(payload.len().max(MIN_MESSAGE), 0);
        Reply {
            to,
            to_mac: if to.is_broadcast() {
                EthernetAddress::BROADCAST.0
            } else {
                self.chaddr.0
            },
            payload,
        }
    }
}

/// The address fields that a reply does not copy.
#[derive(Clone, Copy, Debug)]
struct Addresses {
    ciaddr: Ipv4Addr,
    yiaddr: Ipv4Addr,
    siaddr: Ipv4Addr,
}

impl Addresses {
    const NONE: Self = Self {
        ciaddr: Ipv4Addr::UNSPECIFIED,
        yiaddr: Ipv4Addr::UNSPECIFIED,
        siaddr: Ipv4Addr::UNSPECIFIED,
    };
}

/// Options being written, in bounded room.
#[derive(Debug)]
struct Options {
    bytes: Vec<u8>,
    room: usize,
}

impl Options {
    /// No options yet, in `room` bytes with the end mark, which is one.
    fn new(room: usize) -> Self {
        Self {
            bytes: Vec::new(),
            room: room - 1,
        }
    }

    fn fits(&self, len: usize) -> bool {
        self.bytes.len() + len + 2 * len.div_ceil(255) <= self.room
    }

    /// Adds an option if it fits, in parts of 255 bytes (RFC 3396). Nothing when `data` is empty.
    fn push(&mut self, kind: u8, data: &[u8]) {
        if !self.fits(data.len()) {
            return;
        }
        for part in data.chunks(255) {
            let len = u8::try_from(part.len()).unwrap_or(u8::MAX);
            self.bytes.extend([kind, len]);
            self.bytes.extend_from_slice(part);
        }
    }

    fn finish(mut self) -> Vec<u8> {
        self.bytes.push(option::END);
        self.bytes
    }
}

/// A host or domain name as length-prefixed labels (RFC 1035, 3.1). `None` when it cannot be sent.
fn encode_name(name: &str) -> Option<Vec<u8>> {
    let mut encoded = Vec::with_capacity(name.len() + 2);
    for label in name.split('.') {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        if label.is_empty() || label.len() > 63 || !label.bytes().all(plain) {
            return None;
        }
        encoded.push(u8::try_from(label.len()).ok()?);
        encoded.extend_from_slice(label.as_bytes());
    }
    encoded.push(0);
    (encoded.len() <= 255).then_some(encoded)
}

fn is_unicast(ip: Ipv4Addr) -> bool {
    !(ip.is_unspecified() || ip.is_broadcast() || ip.is_multicast())
}
