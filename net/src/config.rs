//! What the guest's network looks like, and what it may reach.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// Smallest MTU: what every IPv4 host must take (RFC 791, 3.2).
pub const MIN_MTU: u16 = 576;
/// Largest MTU: an IPv4 packet of 65535 bytes.
pub const MAX_MTU: u16 = 65535;

/// Transport protocol of a forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// A port of the host that leads into the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forward {
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Where the host listens.
    pub host: SocketAddr,
    /// The port in the guest.
    pub guest_port: u16,
}

/// The network of one guest. The defaults are the layout that QEMU's user network has.
#[derive(Clone, Debug)]
pub struct Config {
    /// The guest's address, given by DHCP.
    pub guest_ip: Ipv4Addr,
    /// Length of the network prefix in bits, 8 to 30.
    pub prefix_len: u8,
    /// The gateway: default route, DHCP server, and the host itself if `host_loopback`.
    pub gateway: Ipv4Addr,
    /// The name server that the guest is told of.
    pub dns: Ipv4Addr,
    /// Link-layer address of the gateway and everything behind it. Locally administered.
    pub gateway_mac: [u8; 6],
    /// Largest IP packet on the link in bytes, [`MIN_MTU`] to [`MAX_MTU`].
    pub mtu: u16,
    /// Connections to the gateway reach the host's 127.0.0.1.
    pub host_loopback: bool,
    /// The guest's name, told by DHCP.
    pub hostname: Option<String>,
    /// Search domains, told by DHCP. `None`: the host's.
    pub search: Option<Vec<String>>,
    /// Ports of the host that lead into the guest.
    pub forwards: Vec<Forward>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            guest_ip: Ipv4Addr::new(10, 0, 2, 15),
            prefix_len: 24,
            gateway: Ipv4Addr::new(10, 0, 2, 2),
            dns: Ipv4Addr::new(10, 0, 2, 3),
            gateway_mac: [0x52, 0x55, 10, 0, 2, 2],
            mtu: 1500,
            host_loopback: false,
            hostname: None,
            search: None,
            forwards: Vec::new(),
        }
    }
}

/// Why a [`Config`] cannot work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The MTU is out of bounds.
    #[error("the MTU is {0}, but must be {MIN_MTU} to {MAX_MTU}")]
    Mtu(u16),
    /// The prefix is too long or too short.
    #[error("the network prefix is /{0}, but must be /8 to /30")]
    Prefix(u8),
    /// An address is outside the network.
    #[error("{0} is not a host address of the guest's network {1}/{2}")]
    Outside(Ipv4Addr, Ipv4Addr, u8),
    /// Two roles share an address.
    #[error("{0} is given to more than one of guest, gateway and name server")]
    Shared(Ipv4Addr),
    /// A forward leads to port 0.
    #[error("a forward leads to port 0 of the guest")]
    PortZero,
}

impl Config {
    /// Checks that the parts fit together.
    ///
    /// # Errors
    /// The first contradiction found.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if !(MIN_MTU..=MAX_MTU).contains(&self.mtu) {
            return Err(ConfigError::Mtu(self.mtu));
        }
        if !(8..=30).contains(&self.prefix_len) {
            return Err(ConfigError::Prefix(self.prefix_len));
        }
        let roles = [self.guest_ip, self.gateway, self.dns];
        for (i, address) in roles.into_iter().enumerate() {
            let host_bits = address.to_bits() & !self.mask();
            if !self.is_local(address) || host_bits == 0 || host_bits == !self.mask() {
                let network = Ipv4Addr::from_bits(self.guest_ip.to_bits() & self.mask());
                return Err(ConfigError::Outside(address, network, self.prefix_len));
            }
            if roles[..i].contains(&address) {
                return Err(ConfigError::Shared(address));
            }
        }
        if self.forwards.iter().any(|forward| forward.guest_port == 0) {
            return Err(ConfigError::PortZero);
        }
        Ok(())
    }

    /// The network mask as a number.
    pub fn mask(&self) -> u32 {
        u32::MAX << (32 - u32::from(self.prefix_len.clamp(1, 32)))
    }

    /// True for addresses on the guest's own network.
    pub fn is_local(&self, address: Ipv4Addr) -> bool {
        (address.to_bits() ^ self.guest_ip.to_bits()) & self.mask() == 0
    }

    /// The far end of a connection from the host, as the guest is to see it: peers that only make
    /// sense on the host look like the gateway.
    pub fn seen_by_guest(&self, peer: SocketAddr) -> SocketAddr {
        match peer.ip().to_canonical() {
            IpAddr::V4(ip) if !ip.is_loopback() && !ip.is_unspecified() && !self.is_local(ip) => {
                SocketAddr::from((ip, peer.port()))
            }
            _ => SocketAddr::from((self.gateway, peer.port())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_fit_together() {
        assert_eq!(Config::default().validate(), Ok(()));
    }

    #[test]
    fn contradictions_are_named() {
        let gateway = Ipv4Addr::new(192, 168, 0, 1);
        let cases = [
            (
                Config {
                    mtu: 575,
                    ..Config::default()
                },
                ConfigError::Mtu(575),
            ),
            (
                Config {
                    prefix_len: 31,
                    ..Config::default()
                },
                ConfigError::Prefix(31),
            ),
            (
                Config {
                    gateway,
                    ..Config::default()
                },
                ConfigError::Outside(gateway, Ipv4Addr::new(10, 0, 2, 0), 24),
            ),
            (
                Config {
                    dns: Ipv4Addr::new(10, 0, 2, 15),
                    ..Config::default()
                },
                ConfigError::Shared(Ipv4Addr::new(10, 0, 2, 15)),
            ),
        ];
        for (config, error) in cases {
            assert_eq!(config.validate(), Err(error));
        }
    }

    #[test]
    fn peers_of_the_host_alone_look_like_the_gateway() {
        let config = Config::default();
        for (peer, seen) in [
            ("127.0.0.1:5", "10.0.2.2:5"),
            ("[::1]:5", "10.0.2.2:5"),
            ("[::ffff:192.0.2.1]:5", "192.0.2.1:5"),
            ("10.0.2.9:5", "10.0.2.2:5"),
            ("198.51.100.1:5", "198.51.100.1:5"),
        ] {
            assert_eq!(
                config.seen_by_guest(peer.parse().unwrap()),
                seen.parse().unwrap()
            );
        }
    }
}
