//! Where the guest may go: the one place that every path asks.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use crate::config::Config;

/// What stands behind a destination that the guest named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// An address of the host's world.
    Host(IpAddr),
    /// The gateway itself, without the host behind it.
    Gateway,
    /// The name server.
    Dns,
    /// An address of the guest's network that nobody has.
    Vacant,
    /// Not an address that one host talks to: multicast, broadcast, this-network, loopback.
    Unroutable,
}

/// Decides about `to`, an address that the guest sends to.
pub fn route(config: &Config, to: IpAddr) -> Route {
    let IpAddr::V4(to) = to else {
        return Route::Unroutable;
    };
    if to == config.gateway {
        if config.host_loopback {
            Route::Host(Ipv4Addr::LOCALHOST.into())
        } else {
            Route::Gateway
        }
    } else if to == config.dns {
        Route::Dns
    } else if to.is_loopback() || to.is_multicast() || to.octets()[0] == 0 || to.octets()[0] >= 240
    {
        // 240/4 is reserved and holds the limited broadcast address.
        Route::Unroutable
    } else if config.is_local(to) {
        Route::Vacant
    } else {
        Route::Host(to.into())
    }
}

/// What the guest calls an address of the host: undoes [`route`].
pub fn seen_as(config: &Config, from: SocketAddr) -> SocketAddr {
    if from.ip().is_loopback() {
        SocketAddr::from((config.gateway, from.port()))
    } else {
        from
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_destination_has_its_route() {
        let closed = Config::default();
        let open = Config {
            host_loopback: true,
            ..Config::default()
        };
        let host = |text: &str| Route::Host(text.parse().unwrap());
        for (to, when_closed, when_open) in [
            ("10.0.2.2", Route::Gateway, host("127.0.0.1")),
            ("10.0.2.3", Route::Dns, Route::Dns),
            ("10.0.2.77", Route::Vacant, Route::Vacant),
            ("10.0.2.255", Route::Vacant, Route::Vacant),
            ("127.0.0.1", Route::Unroutable, Route::Unroutable),
            ("0.0.0.0", Route::Unroutable, Route::Unroutable),
            ("224.0.0.251", Route::Unroutable, Route::Unroutable),
            ("255.255.255.255", Route::Unroutable, Route::Unroutable),
            ("192.0.2.1", host("192.0.2.1"), host("192.0.2.1")),
        ] {
            let to = to.parse().unwrap();
            assert_eq!(route(&closed, to), when_closed, "{to}");
            assert_eq!(route(&open, to), when_open, "{to}");
        }
    }
}
