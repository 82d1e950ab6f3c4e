//! Numbers of the virtio specification, as the types this crate uses them in.

use virtio_bindings::{virtio_config, virtio_ids, virtio_net, virtio_ring};

/// A feature bit as a mask.
const fn bit(number: u32) -> u64 {
    1 << number
}

// Device status field (VIRTIO 1.3, 2.1).

/// The driver has noticed the device.
pub const STATUS_ACKNOWLEDGE: u8 = 1;
/// The driver knows how to drive the device.
pub const STATUS_DRIVER: u8 = 2;
/// The driver is set up and ready.
pub const STATUS_DRIVER_OK: u8 = 4;
/// Feature negotiation is complete.
pub const STATUS_FEATURES_OK: u8 = 8;
/// The device hit an error from which only a reset recovers.
pub const STATUS_NEEDS_RESET: u8 = 64;
/// The driver gave up.
pub const STATUS_FAILED: u8 = 128;

// Device types (VIRTIO 1.3, 5).

/// Network card.
pub const ID_NET: u32 = virtio_ids::VIRTIO_ID_NET;

// Features of every device (VIRTIO 1.3, 6).

/// Not a legacy device.
pub const F_VERSION_1: u64 = bit(virtio_config::VIRTIO_F_VERSION_1);
/// Descriptors may point to tables of descriptors.
pub const F_INDIRECT_DESC: u64 = bit(virtio_ring::VIRTIO_RING_F_INDIRECT_DESC);
/// Notifications are suppressed by index.
pub const F_EVENT_IDX: u64 = bit(virtio_ring::VIRTIO_RING_F_EVENT_IDX);

/// `flags` of the available ring: the driver wants no interrupts (VIRTIO 1.3, 2.7.7).
pub const AVAIL_F_NO_INTERRUPT: u16 = 1;

// Features of the network card (VIRTIO 1.3, 5.1.3).

/// Partial checksums from the guest.
pub const NET_F_CSUM: u64 = bit(virtio_net::VIRTIO_NET_F_CSUM);
/// Partial checksums to the guest.
pub const NET_F_GUEST_CSUM: u64 = bit(virtio_net::VIRTIO_NET_F_GUEST_CSUM);
/// The config space holds an MTU.
pub const NET_F_MTU: u64 = bit(virtio_net::VIRTIO_NET_F_MTU);
/// The config space holds a MAC address.
pub const NET_F_MAC: u64 = bit(virtio_net::VIRTIO_NET_F_MAC);
/// The driver may change the offloads towards it while the device runs.
pub const NET_F_CTRL_GUEST_OFFLOADS: u64 = bit(virtio_net::VIRTIO_NET_F_CTRL_GUEST_OFFLOADS);
/// TCPv4 segments of up to 64 KiB to the guest.
pub const NET_F_GUEST_TSO4: u64 = bit(virtio_net::VIRTIO_NET_F_GUEST_TSO4);
/// TCPv6 segments of up to 64 KiB to the guest.
pub const NET_F_GUEST_TSO6: u64 = bit(virtio_net::VIRTIO_NET_F_GUEST_TSO6);
/// TCPv4 segments of up to 64 KiB from the guest.
pub const NET_F_HOST_TSO4: u64 = bit(virtio_net::VIRTIO_NET_F_HOST_TSO4);
/// TCPv6 segments of up to 64 KiB from the guest.
pub const NET_F_HOST_TSO6: u64 = bit(virtio_net::VIRTIO_NET_F_HOST_TSO6);
/// Frames to the guest may span several chains.
pub const NET_F_MRG_RXBUF: u64 = bit(virtio_net::VIRTIO_NET_F_MRG_RXBUF);
/// The config space holds a link status.
pub const NET_F_STATUS: u64 = bit(virtio_net::VIRTIO_NET_F_STATUS);
/// There is a control queue.
pub const NET_F_CTRL_VQ: u64 = bit(virtio_net::VIRTIO_NET_F_CTRL_VQ);
/// There may be more than one pair of queues.
pub const NET_F_MQ: u64 = bit(virtio_net::VIRTIO_NET_F_MQ);
/// The control queue takes receive filters.
pub const NET_F_CTRL_RX: u64 = bit(virtio_net::VIRTIO_NET_F_CTRL_RX);
/// Runs of UDPv4 datagrams to the guest.
pub const NET_F_GUEST_USO4: u64 = bit(virtio_net::VIRTIO_NET_F_GUEST_USO4);
/// Runs of UDPv6 datagrams to the guest.
pub const NET_F_GUEST_USO6: u64 = bit(virtio_net::VIRTIO_NET_F_GUEST_USO6);
/// Runs of UDP datagrams from the guest.
pub const NET_F_HOST_USO: u64 = bit(virtio_net::VIRTIO_NET_F_HOST_USO);

/// `status` of the network card's config space: the link is up.
pub const NET_S_LINK_UP: u16 = 1;

// Commands of the network card's control queue (VIRTIO 1.3, 5.1.6.5).

/// The command was carried out.
pub const NET_OK: u8 = 0;
/// The command was not carried out.
pub const NET_ERR: u8 = 1;
/// Class: receive filters by kind of address.
pub const NET_CTRL_RX: u8 = 0;
/// Promiscuous mode on or off.
pub const NET_CTRL_RX_PROMISC: u8 = 0;
/// All multicast frames, or not.
pub const NET_CTRL_RX_ALLMULTI: u8 = 1;
/// Class: receive filters by address.
pub const NET_CTRL_MAC: u8 = 1;
/// The unicast and the multicast addresses to receive.
pub const NET_CTRL_MAC_TABLE_SET: u8 = 0;
/// Class: multiple queues.
pub const NET_CTRL_MQ: u8 = 4;
/// The number of queue pairs to use from now on.
pub const NET_CTRL_MQ_VQ_PAIRS_SET: u8 = 0;
/// Class: offloads towards the guest.
pub const NET_CTRL_GUEST_OFFLOADS: u8 = 5;
/// The offloads from now on, as feature bits.
pub const NET_CTRL_GUEST_OFFLOADS_SET: u8 = 0;

/// Size of `struct virtio_net_hdr` with `num_buffers` (VIRTIO 1.3, 5.1.6).
pub const NET_HDR_LEN: usize = 12;
