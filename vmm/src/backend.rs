//! The network card that options ask for, and what stands behind it.

use devices::net::loopback::Loopback;
use devices::net::null::Null;
use devices::net::tap::{Tap, TapDevice, TapError};
use devices::net::vhost::{VhostError, VhostNet, VhostPairs};
use devices::net::{Net, NetConfig};
use devices::virtio::VirtioDevice;
use net::config::Config;
use net::impair::{Loss, Lossy};
use net::nic::Backend;
use net::shard;

use crate::config::{NetKind, NetOptions, TapOptions, TapSource, Vhost};

/// Makes the card that `options` ask for.
///
/// # Errors
/// Fails when the host lacks what the card needs.
pub fn make_card(options: &NetOptions) -> anyhow::Result<Box<dyn VirtioDevice>> {
    if let NetKind::Tap(tap) = &options.kind
        && let Some(vhost) = open_vhost(tap, options.loss.per_million > 0)?
    {
        let device = open_tap(tap)?;
        let config = card_config(options, tap.mtu.unwrap_or(device.mtu()));
        return Ok(Box::new(VhostNet::new(config, vhost, device)?));
    }
    Ok(Box::new(make_own_card(options)?))
}

/// Opens vhost-net if it is to be used; `lossy` tells if the link is to lose frames, which the kernel
/// does not do.
fn open_vhost(tap: &TapOptions, lossy: bool) -> Result<Option<VhostPairs>, VhostError> {
    match tap.vhost {
        Vhost::Off => Ok(None),
        Vhost::Auto if lossy => Ok(None),
        Vhost::On => VhostPairs::open(tap.queues).map(Some),
        Vhost::Auto => Ok(VhostPairs::open(tap.queues)
            .inspect_err(|error| {
                tracing::warn!("{error}: the tap works without vhost, which takes more CPU time");
            })
            .ok()),
    }
}

/// As [`make_card`], but the frames always pass through this process.
///
/// # Errors
/// Fails when the host has no sockets to give, a forward's port is taken, or the tap cannot be had.
pub fn make_own_card(options: &NetOptions) -> anyhow::Result<Net> {
    let (mut backends, mtu) = make_backends(options)?;
    if options.loss.per_million > 0 {
        let lossy = |(n, backend)| {
            let loss = Loss {
                seed: options.loss.seed.wrapping_add(n),
                ..options.loss
            };
            Box::new(Lossy::new(backend, loss)) as _
        };
        backends = (0..).zip(backends).map(lossy).collect();
    }
    let config = NetConfig {
        queue_pairs: u16::try_from(backends.len())?,
        ..card_config(options, mtu)
    };
    Ok(Net::with_backends(config, backends)?)
}

/// One backend for each pair of queues, and the MTU.
fn make_backends(options: &NetOptions) -> anyhow::Result<(Vec<Box<dyn Backend>>, u16)> {
    Ok(match &options.kind {
        NetKind::Loopback => (vec![Box::new(Loopback::default())], options.mtu),
        NetKind::Null => (vec![Box::new(Null)], options.mtu),
        NetKind::User(user) => {
            let config = Config {
                mtu: options.mtu,
                host_loopback: user.host_loopback,
                forwards: user.forwards.clone(),
                ..Config::default()
            };
            let count = u8::try_from(user.queues)?;
            (shard::stacks(&config, user.rx, count)?, options.mtu)
        }
        NetKind::Tap(tap) => {
            let device = open_tap(tap)?;
            let mtu = tap.mtu.unwrap_or(device.mtu());
            let taps = Tap::of_all_queues(device)?.into_iter();
            (taps.map(|tap| Box::new(tap) as _).collect(), mtu)
        }
    })
}

fn card_config(options: &NetOptions, mtu: u16) -> NetConfig {
    NetConfig {
        mac: options.mac,
        mtu,
        ..NetConfig::default()
    }
}

fn open_tap(options: &TapOptions) -> Result<TapDevice, TapError> {
    match &options.source {
        TapSource::Name(name) => TapDevice::open(name, options.queues, options.mtu),
        TapSource::Fds(fds) => TapDevice::adopt(fds),
    }
}
