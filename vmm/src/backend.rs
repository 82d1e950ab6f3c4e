//! The network card that options ask for.

use devices::net::loopback::Loopback;
use devices::net::null::Null;
use devices::net::{Net, NetConfig};
use net::config::Config;
use net::impair::{Loss, Lossy};
use net::nic::Backend;
use net::shard;

use crate::config::{NetKind, NetOptions};

/// Makes the card that `options` ask for, and what stands behind it.
///
/// # Errors
/// Fails when the host has no sockets to give, or a forward's port is taken.
pub fn make_card(options: &NetOptions) -> anyhow::Result<Net> {
    let backends = make_backends(options)?;
    let config = NetConfig {
        mac: options.mac,
        mtu: options.mtu,
        queue_pairs: u16::try_from(backends.len())?,
        ..NetConfig::default()
    };
    Ok(Net::with_backends(config, backends)?)
}

/// One backend for each pair of queues.
fn make_backends(options: &NetOptions) -> anyhow::Result<Vec<Box<dyn Backend>>> {
    let backends: Vec<Box<dyn Backend>> = match &options.kind {
        NetKind::Loopback => vec![Box::new(Loopback::default())],
        NetKind::Null => vec![Box::new(Null)],
        NetKind::User(user) => {
            let config = Config {
                mtu: options.mtu,
                host_loopback: user.host_loopback,
                forwards: user.forwards.clone(),
                ..Config::default()
            };
            shard::stacks(&config, user.rx, u8::try_from(user.queues)?)?
        }
    };
    if options.loss.per_million == 0 {
        return Ok(backends);
    }
    let lossy = |(n, backend)| {
        let loss = Loss {
            seed: options.loss.seed.wrapping_add(n),
            ..options.loss
        };
        Box::new(Lossy::new(backend, loss)) as _
    };
    Ok((0..).zip(backends).map(lossy).collect())
}
