//! What stands behind the network card.

use devices::net::loopback::Loopback;
use devices::net::null::Null;
use net::config::Config;
use net::impair::Lossy;
use net::nic::Backend;
use net::stack::Stack;

use crate::config::{NetKind, NetOptions};

/// Makes the backend that `options` ask for.
///
/// # Errors
/// Fails when the host has no sockets to give, or a forward's port is taken.
pub fn make_backend(options: &NetOptions) -> anyhow::Result<Box<dyn Backend>> {
    let backend: Box<dyn Backend> = match &options.kind {
        NetKind::Loopback => Box::new(Loopback::default()),
        NetKind::Null => Box::new(Null),
        NetKind::User(user) => {
            let config = Config {
                mtu: options.mtu,
                host_loopback: user.host_loopback,
                forwards: user.forwards.clone(),
                ..Config::default()
            };
            Box::new(Stack::new(config, user.rx)?)
        }
    };
    Ok(if options.loss.per_million > 0 {
        Box::new(Lossy::new(backend, options.loss))
    } else {
        backend
    })
}
