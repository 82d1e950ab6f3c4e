//! What was asked for, validated: no text is left to interpret after this.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::RawFd;
use std::path::PathBuf;

use devices::net::MAX_QUEUE_PAIRS;
use net::config::{Forward, Protocol};
use net::impair::Loss;
use net::stack::RxPath;

use crate::cli::{RunArgs, ServeArgs};
use crate::memory::Backing;

/// Start of every kernel command line; what the user gives is appended, so that it wins.
///
/// `reboot=a` makes the guest reset through the ACPI reset register, which tells a reset from a
/// crash; `panic=-1` makes it do so at once when it panics.
pub const DEFAULT_CMDLINE: &str = "console=ttyS0 reboot=a panic=-1";
/// CPUs have an 8-bit APIC id, of which 255 means "all".
pub const MAX_CPUS: u8 = 254;
/// Below this no kernel of today starts.
pub const MIN_MEMORY: u64 = 16 << 20;
/// 2^39: what the guest's page tables and our e820 certainly can express, and a typo cannot.
pub const MAX_MEMORY: u64 = 1 << 39;
/// Default MTU of the card.
pub const DEFAULT_MTU: u16 = 1500;
/// Default MAC address of the card: locally administered.
pub const DEFAULT_MAC: [u8; 6] = [0x52, 0x54, 0x00, 0x12, 0x34, 0x56];

/// What is wrong with the command line.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Not a number of CPUs.
    #[error("--cpus: `{0}` is not a number from 1 to {MAX_CPUS}")]
    Cpus(String),
    /// Not a size.
    #[error("--memory: `{0}` is not a size")]
    MemorySize(String),
    /// A size that cannot be.
    #[error("--memory: `{0}` is not between 16M and 512G")]
    MemoryRange(String),
    /// A control character in the command line.
    #[error("--cmdline: contains a control character ({0:#04x})")]
    Cmdline(u8),
    /// No such transport.
    #[error("--transport: unknown bus `{0}`")]
    Transport(String),
    /// No such kind of network.
    #[error("--net: unknown kind `{0}`")]
    NetKind(String),
    /// No such option for this kind.
    #[error("--net: `{kind}` has no option `{key}`")]
    NetKey {
        /// Kind of network.
        kind: String,
        /// The option.
        key: String,
    },
    /// An option given twice.
    #[error("--net: option `{0}` is given twice")]
    NetTwice(String),
    /// A value that cannot be.
    #[error("--net: `{value}` is not a value for `{key}`, expected {expected}")]
    NetValue {
        /// The option.
        key: &'static str,
        /// What was given.
        value: String,
        /// What is possible.
        expected: &'static str,
    },
    /// Not a port forward.
    #[error("-p: `{spec}`: {problem}")]
    Forward {
        /// What was given.
        spec: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A tap named in two ways.
    #[error("--net: `name` and `fd` exclude each other")]
    TwoTaps,
    /// Not as many descriptors as queues.
    #[error("--net: {fds} descriptors in `fd` do not make queues={queues}")]
    TapQueues {
        /// Descriptors given.
        fds: usize,
        /// Queues asked for.
        queues: u16,
    },
    /// Something that only frames which pass through us can have.
    #[error("--net: {0} needs vhost=off")]
    NotWithVhost(&'static str),
    /// A back-end without a network card.
    #[error("--net: there is nothing to serve with `none`")]
    NothingToServe,
    /// A forward that leads nowhere.
    #[error("-p: port forwards need --net user")]
    ForwardWithoutUser,
}

impl ConfigError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::MemorySize(_) => "write 512M or 2G, or 2G,shared",
            Self::Transport(_) => "the buses are pci and mmio",
            Self::NetKind(_) => "the kinds are user, tap, loopback, null and none",
            Self::NetKey { kind, .. } if kind == "user" => {
                "the options are rx=, host-loopback=, queues=, mtu=, mac=, loss= and seed="
            }
            Self::NetKey { kind, .. } if kind == "tap" => {
                "the options are name=, fd=, vhost=, queues=, mtu=, mac=, loss= and seed="
            }
            Self::NetKey { kind, .. } if kind == "none" => "`none` has no options",
            Self::NetKey { .. } => "the options are mtu=, mac=, loss= and seed=",
            Self::Forward { .. } => {
                "write [tcp:|udp:][ADDR:]HOSTPORT:GUESTPORT, for example 8080:80 or udp:[::1]:5353:53"
            }
            _ => return None,
        };
        Some(hint.to_owned())
    }
}

/// A validated `wonton run`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunConfig {
    /// Kernel file.
    pub kernel: PathBuf,
    /// Initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// The whole kernel command line.
    pub cmdline: String,
    /// Number of CPUs, 1 to [`MAX_CPUS`].
    pub cpus: u8,
    /// Bytes of guest memory, a multiple of 2 MiB.
    pub memory: u64,
    /// What guest memory is made of.
    pub backing: Backing,
    /// The network card, if any.
    pub net: Option<NetOptions>,
    /// How the guest reaches its devices.
    pub transport: Transport,
    /// Whether Ctrl-A on a terminal is the escape key.
    pub escape: bool,
    /// Whether to print the time to the first `KVM_RUN`.
    pub boot_timer: bool,
}

/// How the guest reaches its virtio devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// As PCI functions with MSI-X.
    Pci,
    /// As pages of registers that ACPI names.
    Mmio,
}

/// A validated `--net`, with its `-p`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetOptions {
    /// What stands behind the card.
    pub kind: NetKind,
    /// The guest's MAC address.
    pub mac: [u8; 6],
    /// Largest IP packet on the link.
    pub mtu: u16,
    /// How bad the link is made.
    pub loss: Loss,
}

/// What stands behind the card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NetKind {
    /// The NAT stack.
    User(UserOptions),
    /// Every frame comes back.
    Loopback,
    /// Every frame is dropped.
    Null,
    /// A tap of the host.
    Tap(TapOptions),
}

/// Options of a tap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TapOptions {
    /// Which tap.
    pub source: TapSource,
    /// Whether the kernel carries the frames.
    pub vhost: Vhost,
    /// Pairs of queues, 1 to [`devices::net::MAX_QUEUE_PAIRS`].
    pub queues: u16,
    /// The MTU that was asked for; otherwise the card has that of the tap.
    pub mtu: Option<u16>,
}

/// Where a tap comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TapSource {
    /// An interface, made if there is none.
    Name(String),
    /// Inherited descriptors, one for each queue.
    Fds(Vec<RawFd>),
}

/// Whether the kernel carries frames between the card and its tap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Vhost {
    /// If it can.
    #[default]
    Auto,
    /// Yes, or there is no card.
    On,
    /// No.
    Off,
}

/// Options of the NAT stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserOptions {
    /// How downloaded bytes reach the guest.
    pub rx: RxPath,
    /// Whether the guest may reach the host's loopback addresses.
    pub host_loopback: bool,
    /// Ports of the host that lead to the guest.
    pub forwards: Vec<Forward>,
    /// Pairs of queues, each with a thread and a stack, 1 to [`MAX_QUEUE_PAIRS`].
    pub queues: u16,
}

impl Default for UserOptions {
    fn default() -> Self {
        Self {
            rx: RxPath::default(),
            host_loopback: false,
            forwards: Vec::new(),
            queues: 1,
        }
    }
}

impl TryFrom<RunArgs> for RunConfig {
    type Error = ConfigError;

    fn try_from(args: RunArgs) -> Result<Self, ConfigError> {
        let RunArgs {
            kernel,
            initrd,
            cmdline,
            cpus,
            memory,
            net,
            transport,
            publish,
            no_escape,
            boot_timer,
        } = args;
        let (memory, backing) = match memory.split_once(',') {
            Some((size, "shared")) => (parse_memory(size)?, Backing::Shared),
            _ => (parse_memory(&memory)?, Backing::Private),
        };
        let net = parse_card(&net, &publish)?;
        Ok(Self {
            kernel,
            initrd,
            cmdline: full_cmdline(&cmdline)?,
            cpus: parse_cpus(&cpus)?,
            memory,
            backing,
            net,
            transport: parse_transport(transport)?,
            escape: !no_escape,
            boot_timer,
        })
    }
}

/// A validated `wonton serve`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServeConfig {
    /// Where to listen.
    pub socket: PathBuf,
    /// The network card.
    pub net: NetOptions,
    /// Where counters go.
    pub stats: Option<PathBuf>,
    /// Whether to end with the first front-end.
    pub once: bool,
}

impl TryFrom<ServeArgs> for ServeConfig {
    type Error = ConfigError;

    fn try_from(args: ServeArgs) -> Result<Self, ConfigError> {
        let net = parse_card(&args.net, &args.publish)?.ok_or(ConfigError::NothingToServe)?;
        if matches!(&net.kind, NetKind::Tap(tap) if tap.vhost == Vhost::On) {
            return Err(ConfigError::NotWithVhost("wonton serve"));
        }
        Ok(Self {
            net,
            socket: args.socket,
            stats: args.stats,
            once: args.once,
        })
    }
}

/// Reads `--net` and its `-p`.
fn parse_card(spec: &str, publish: &[String]) -> Result<Option<NetOptions>, ConfigError> {
    let mut net = parse_net(spec)?;
    let forwards = publish
        .iter()
        .map(|spec| parse_forward(spec))
        .collect::<Result<Vec<_>, _>>()?;
    if !forwards.is_empty() {
        let Some(NetOptions {
            kind: NetKind::User(user),
            ..
        }) = &mut net
        else {
            return Err(ConfigError::ForwardWithoutUser);
        };
        user.forwards = forwards;
    }
    Ok(net)
}

fn full_cmdline(user: &str) -> Result<String, ConfigError> {
    if let Some(control) = user
        .bytes()
        .find(|byte| byte.is_ascii_control() && *byte != b'\t')
    {
        return Err(ConfigError::Cmdline(control));
    }
    let user = user.trim();
    let gap = if user.is_empty() { "" } else { " " };
    Ok(format!("{DEFAULT_CMDLINE}{gap}{user}"))
}

fn parse_transport(text: String) -> Result<Transport, ConfigError> {
    match text.as_str() {
        "pci" => Ok(Transport::Pci),
        "mmio" => Ok(Transport::Mmio),
        _ => Err(ConfigError::Transport(text)),
    }
}

fn parse_cpus(text: &str) -> Result<u8, ConfigError> {
    match text.parse() {
        Ok(cpus @ 1..=MAX_CPUS) => Ok(cpus),
        _ => Err(ConfigError::Cpus(text.to_owned())),
    }
}

/// Sizes are rounded up to 2 MiB, the granule of large pages.
fn parse_memory(text: &str) -> Result<u64, ConfigError> {
    let not_a_size = || ConfigError::MemorySize(text.to_owned());
    let upper = text.to_ascii_uppercase();
    let number = upper.trim_end_matches("IB").trim_end_matches('B');
    let (digits, shift) = match number.as_bytes().last() {
        Some(b'K') => (&number[..number.len() - 1], 10),
        Some(b'M') => (&number[..number.len() - 1], 20),
        Some(b'G') => (&number[..number.len() - 1], 30),
        // A bare number is more likely a forgotten suffix than bytes.
        _ => return Err(not_a_size()),
    };
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(not_a_size());
    }
    let count: u64 = digits.parse().map_err(|_| not_a_size())?;
    count
        .checked_mul(1 << shift)
        .filter(|size| (MIN_MEMORY..=MAX_MEMORY).contains(size))
        .map(|size| size.next_multiple_of(2 << 20))
        .ok_or_else(|| ConfigError::MemoryRange(text.to_owned()))
}

fn parse_net(spec: &str) -> Result<Option<NetOptions>, ConfigError> {
    let mut parts = spec.split(',');
    let name = parts.next().unwrap_or_default();
    let kind = match name {
        "user" => Some(NetKind::User(UserOptions::default())),
        "loopback" => Some(NetKind::Loopback),
        "null" => Some(NetKind::Null),
        "tap" => Some(NetKind::Tap(TapOptions::default())),
        "none" => None,
        _ => return Err(ConfigError::NetKind(name.to_owned())),
    };
    let mut net = kind.map(|kind| NetOptions {
        kind,
        mac: DEFAULT_MAC,
        mtu: DEFAULT_MTU,
        loss: Loss::default(),
    });
    let mut seen: Vec<&str> = Vec::new();
    for part in parts {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        if seen.contains(&key) {
            return Err(ConfigError::NetTwice(key.to_owned()));
        }
        seen.push(key);
        let unknown = || ConfigError::NetKey {
            kind: name.to_owned(),
            key: key.to_owned(),
        };
        let net = net.as_mut().ok_or_else(unknown)?;
        match (key, &mut net.kind) {
            ("mac", _) => net.mac = parse_mac(value)?,
            ("mtu", _) => net.mtu = parse_mtu(value)?,
            ("loss", _) => net.loss.per_million = parse_percent(value)?,
            ("seed", _) => {
                net.loss.seed = choose("seed", value, "a number", |text| text.parse().ok())?;
            }
            ("rx", NetKind::User(user)) => {
                let expected = "ring, direct, direct-discard or copy";
                user.rx = choose("rx", value, expected, RxPath::named)?;
            }
            ("queues", NetKind::User(user)) => user.queues = parse_queues(value)?,
            ("host-loopback", NetKind::User(user)) => {
                let allow = |value: &str| match value {
                    "allow" => Some(true),
                    "deny" => Some(false),
                    _ => None,
                };
                user.host_loopback = choose("host-loopback", value, "allow or deny", allow)?;
            }
            ("name" | "fd" | "vhost" | "queues", NetKind::Tap(tap)) => tap.set(key, value)?,
            _ => return Err(unknown()),
        }
    }
    if let Some(net) = &mut net
        && let NetKind::Tap(tap) = &mut net.kind
    {
        tap.finish(&seen, net.mtu)?;
    }
    Ok(net)
}

/// Reads `queues=`.
fn parse_queues(value: &str) -> Result<u16, ConfigError> {
    choose("queues", value, "a number from 1 to 8", |text| {
        let queues = text.parse().ok();
        queues.filter(|queues| (1..=MAX_QUEUE_PAIRS).contains(queues))
    })
}

fn choose<T>(
    key: &'static str,
    value: &str,
    expected: &'static str,
    pick: impl FnOnce(&str) -> Option<T>,
) -> Result<T, ConfigError> {
    pick(value).ok_or_else(|| ConfigError::NetValue {
        key,
        value: value.to_owned(),
        expected,
    })
}

fn parse_mtu(text: &str) -> Result<u16, ConfigError> {
    choose("mtu", text, "576 to 65535", |text| {
        text.parse().ok().filter(|mtu| *mtu >= 576)
    })
}

/// A share as a number of a million, from `2.5` or `2.5%`.
fn parse_percent(text: &str) -> Result<u32, ConfigError> {
    choose("loss", text, "a percentage from 0 to 100", |text| {
        let percent: f64 = text.strip_suffix('%').unwrap_or(text).parse().ok()?;
        // Within the range, so the product fits.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        (0.0..=100.0)
            .contains(&percent)
            .then_some((percent * 10_000.0).round() as u32)
    })
}

fn parse_mac(text: &str) -> Result<[u8; 6], ConfigError> {
    choose(
        "mac",
        text,
        "a unicast address such as 52:54:00:12:34:56",
        |text| {
            let mut mac = [0; 6];
            let mut parts = text.split(':');
            for byte in &mut mac {
                let part = parts.next().filter(|part| part.len() == 2)?;
                *byte = u8::from_str_radix(part, 16).ok()?;
            }
            let unicast = mac[0] & 1 == 0 && mac != [0; 6];
            (parts.next().is_none() && unicast).then_some(mac)
        },
    )
}

/// Reads `[tcp:|udp:][ADDR:]HOSTPORT:GUESTPORT`.
fn parse_forward(spec: &str) -> Result<Forward, ConfigError> {
    let fail = |problem| ConfigError::Forward {
        spec: spec.to_owned(),
        problem,
    };
    let port = |text: &str, problem| match text.parse() {
        Ok(0) | Err(_) => Err(fail(problem)),
        Ok(port) => Ok(port),
    };
    let (protocol, rest) = match spec.split_once(':') {
        Some(("tcp", rest)) => (Protocol::Tcp, rest),
        Some(("udp", rest)) => (Protocol::Udp, rest),
        _ => (Protocol::Tcp, spec),
    };
    let (host, guest) = rest
        .rsplit_once(':')
        .ok_or_else(|| fail("the guest's port is missing"))?;
    let guest_port = port(guest, "the guest's port is not a number from 1 to 65535")?;
    let (address, host_port) = match host.rsplit_once(':') {
        None => (IpAddr::V4(Ipv4Addr::LOCALHOST), host),
        Some((address, host_port)) => {
            let bare = address
                .strip_prefix('[')
                .and_then(|rest| rest.strip_suffix(']'));
            let address = match bare {
                Some(v6) => v6.parse().map(IpAddr::V6),
                None => address.parse().map(IpAddr::V4),
            };
            let problem = "the address is neither IPv4 nor IPv6 in brackets";
            (address.map_err(|_| fail(problem))?, host_port)
        }
    };
    let host_port = port(host_port, "the host's port is not a number from 1 to 65535")?;
    Ok(Forward {
        protocol,
        host: SocketAddr::new(address, host_port),
        guest_port,
    })
}

mod tap;
#[cfg(test)]
mod tests;
