//! What a network card is to its driver, whatever carries its frames: features, queues and the
//! configuration space.

use std::io;

use virtio_queue::QueueT as _;

use crate::net::features;
use crate::virtio::ActiveQueue;
use crate::virtio::spec::{NET_F_CTRL_VQ, NET_F_MQ, NET_S_LINK_UP};

/// Largest number of queue pairs (VIRTIO 1.3, 5.1.2).
pub const MAX_QUEUE_PAIRS: u16 = 8;

/// What can be chosen about a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetConfig {
    /// The guest's MAC address.
    pub mac: [u8; 6],
    /// Largest IP packet on the link, in bytes.
    pub mtu: u16,
    /// Largest size of each RX and TX queue, a power of two.
    pub queue_size: u16,
    /// Pairs of an RX and a TX queue, 1 to [`MAX_QUEUE_PAIRS`].
    pub queue_pairs: u16,
}

impl Default for NetConfig {
    fn default() -> Self {
        Self {
            mac: [0x52, 0x54, 0x00, 0x12, 0x34, 0x56],
            mtu: 1500,
            queue_size: 256,
            queue_pairs: 1,
        }
    }
}

/// Why a [`NetConfig`] is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum NetConfigError {
    /// The queue size is not one that a card can have.
    #[error("queue size {0} is not a power of two from 2 to 1024")]
    QueueSize(u16),
    /// The number of queue pairs is not one that a card can have.
    #[error("{0} queue pairs are not from 1 to {MAX_QUEUE_PAIRS}")]
    QueuePairs(u16),
    /// The MTU is below what VIRTIO 1.3, 5.1.4.1 allows.
    #[error("mtu {0} is below 68")]
    Mtu(u16),
    /// The MAC address is not one that a card can have.
    #[error("mac address {0:02x?} is a group address")]
    Mac([u8; 6]),
}

/// Index of the receive queue of `pair` (VIRTIO 1.3, 5.1.2).
pub const fn rx_queue(pair: u16) -> u16 {
    2 * pair
}

/// Index of the transmit queue of `pair`.
pub const fn tx_queue(pair: u16) -> u16 {
    2 * pair + 1
}

/// The queues that a driver enabled.
pub(crate) struct CardQueues {
    /// The receive and the transmit queue of each pair, from 0 on.
    pub(crate) pairs: Vec<[ActiveQueue; 2]>,
    /// The control queue.
    pub(crate) ctrl: Option<ActiveQueue>,
}

impl CardQueues {
    /// True when the driver has a control queue and has not sent a command yet: what an earlier one
    /// chose is no longer so.
    pub(crate) fn start_anew(&self) -> bool {
        let ctrl = self.ctrl.as_ref();
        ctrl.is_some_and(|ctrl| ctrl.queue.next_avail() == 0)
    }
}

/// Why there is nothing to run without a pair of queues.
pub(crate) fn no_pairs() -> io::Error {
    io::Error::other("the driver did not enable the RX and the TX queue")
}

/// The face of a card.
#[derive(Clone, Debug)]
pub(crate) struct Card {
    config: NetConfig,
    features: u64,
    queue_sizes: Vec<u16>,
}

impl Card {
    /// A card that offers `features`, and MQ if it has more than one pair of queues.
    ///
    /// # Errors
    /// Fails when a value of `config` is not allowed.
    pub(crate) fn new(config: NetConfig, features: u64) -> Result<Self, NetConfigError> {
        let (size, pairs) = (config.queue_size, config.queue_pairs);
        if !size.is_power_of_two() || !(2..=1024).contains(&size) {
            return Err(NetConfigError::QueueSize(size));
        }
        if !(1..=MAX_QUEUE_PAIRS).contains(&pairs) {
            return Err(NetConfigError::QueuePairs(pairs));
        }
        if config.mtu < 68 {
            return Err(NetConfigError::Mtu(config.mtu));
        }
        if config.mac[0] & 1 != 0 {
            return Err(NetConfigError::Mac(config.mac));
        }
        let mq = if pairs > 1 { NET_F_MQ } else { 0 };
        Ok(Self {
            config,
            features: features | mq,
            queue_sizes: vec![size; usize::from(2 * pairs) + 1],
        })
    }

    pub(crate) fn config(&self) -> &NetConfig {
        &self.config
    }

    /// Offered features.
    pub(crate) fn features(&self) -> u64 {
        self.features
    }

    /// Hides features from the driver, and those that require them.
    pub(crate) fn mask_features(&mut self, hidden: u64) {
        self.features = features::consistent(self.features & !hidden);
    }

    /// Pairs of queues that a driver which accepted `accepted` may use.
    pub(crate) fn pairs(&self, accepted: u64) -> u16 {
        if accepted & NET_F_MQ != 0 {
            self.config.queue_pairs
        } else {
            1
        }
    }

    /// Index of the control queue: behind the pairs, of which there is one to a driver that did not
    /// accept MQ (VIRTIO 1.3, 5.1.2).
    pub(crate) fn ctrl_queue(&self, accepted: u64) -> u16 {
        2 * self.pairs(accepted)
    }

    /// Takes apart the queues that a driver which accepted `accepted` enabled. A pair without both of
    /// its queues cannot be used, nor those behind it.
    pub(crate) fn sort(&self, queues: Vec<ActiveQueue>, accepted: u64) -> CardQueues {
        let mut queues = queues;
        let mut take = |index| {
            let at = queues.iter().position(|queue| queue.index == index)?;
            Some(queues.swap_remove(at))
        };
        let pair = |pair| Some([take(rx_queue(pair))?, take(tx_queue(pair))?]);
        CardQueues {
            pairs: (0..self.pairs(accepted)).map_while(pair).collect(),
            ctrl: take(self.ctrl_queue(accepted)),
        }
    }

    /// Largest size of each queue.
    pub(crate) fn queue_max_sizes(&self) -> &[u16] {
        // Without CTRL_VQ on offer there is no control queue (VIRTIO 1.3, 5.1.2).
        let without_ctrl = usize::from(self.features & NET_F_CTRL_VQ == 0);
        &self.queue_sizes[..self.queue_sizes.len() - without_ctrl]
    }

    /// Reads the configuration space; bytes out of range read as zero.
    pub(crate) fn read_config(&self, offset: u64, data: &mut [u8]) {
        let space = self.config_space();
        for (at, byte) in (offset..).zip(data) {
            let at = usize::try_from(at).unwrap_or(usize::MAX);
            *byte = space.get(at).copied().unwrap_or(0);
        }
    }

    /// `struct virtio_net_config` (VIRTIO 1.3, 5.1.4), up to `mtu`.
    fn config_space(&self) -> [u8; 12] {
        let mut space = [0; 12];
        space[..6].copy_from_slice(&self.config.mac);
        space[6..8].copy_from_slice(&NET_S_LINK_UP.to_le_bytes());
        space[8..10].copy_from_slice(&self.config.queue_pairs.to_le_bytes());
        space[10..].copy_from_slice(&self.config.mtu.to_le_bytes());
        space
    }
}
