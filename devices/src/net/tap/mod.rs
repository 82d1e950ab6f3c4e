//! A tap of the host behind the card: what the guest sends comes out of a network interface, and
//! what is sent to that interface goes to the guest.
//!
//! Both sides speak of frames with `struct virtio_net_hdr`, so a frame is one `readv` into the guest's
//! buffers or one `writev` from them, whatever its size; nothing is copied or parsed here.

mod device;
mod error;
pub(in crate::net) mod link;
pub(in crate::net) mod sys;
pub(in crate::net) mod watch;

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use net::nic::{
    Backend, Link, Offloads, RxRing, Stop, TxBurst, VNET_HDR_F_NEEDS_CSUM, VNET_HDR_GSO_ECN,
    VNET_HDR_GSO_NONE, VNET_HDR_GSO_TCPV4, VNET_HDR_GSO_TCPV6, VNET_HDR_GSO_UDP_L4, VnetHdr,
};

pub use self::device::TapDevice;
pub use self::error::TapError;
use self::link::{LinkState, State};
use crate::net::tx::MAX_FRAME;
use crate::virtio::spec::NET_HDR_LEN;

/// Frames to the guest in one turn.
const BURST: usize = 64;
/// Ethernet header with a VLAN tag.
const ETHERNET: usize = 18;

/// One queue of a tap as a backend.
///
/// With several, the host sends a flow to the queue on which the guest last sent it. All stay attached
/// whatever number of pairs the driver uses: what is in one goes to a pair in use.
#[derive(Debug)]
pub struct Tap {
    device: Arc<TapDevice>,
    queue: usize,
    offloads: Offloads,
    /// Longest frame that may come.
    room: usize,
    link: LinkState,
    /// The last `receive` left nothing behind.
    drained: bool,
    /// The next `receive` need not look.
    quiet: bool,
}

impl Tap {
    /// A backend for the first queue of `device`.
    pub fn new(device: TapDevice) -> Self {
        Self::of(Arc::new(device), 0)
    }

    /// A backend for each queue of `device`.
    ///
    /// # Errors
    /// As [`TapDevice::attach`].
    pub fn of_all_queues(mut device: TapDevice) -> io::Result<Vec<Self>> {
        let count = device.queues().len();
        device.attach(count)?;
        let device = Arc::new(device);
        Ok((0..count)
            .map(|queue| Self::of(device.clone(), queue))
            .collect())
    }

    fn of(device: Arc<TapDevice>, queue: usize) -> Self {
        Self {
            link: LinkState::new(device.name()),
            device,
            queue,
            offloads: Offloads::empty(),
            room: MAX_FRAME,
            drained: false,
            quiet: false,
        }
    }

    /// Frames may wait that nobody has looked for.
    fn forget(&mut self) {
        self.drained = false;
        self.quiet = false;
    }

    fn apply(&mut self, link: &Link) {
        self.offloads = link.offloads;
        let gso = Offloads::GUEST_TSO4
            | Offloads::GUEST_TSO6
            | Offloads::GUEST_USO4
            | Offloads::GUEST_USO6;
        self.room = if link.offloads.intersects(gso) {
            MAX_FRAME
        } else {
            usize::from(link.mtu.max(self.device.mtu())) + ETHERNET
        };
        if let Err(error) = self.device.set_offloads(link.offloads) {
            self.link.failed(&error);
        }
    }

    /// True when the guest may be given a frame with this header. One that waited in the tap may be
    /// from a time when more was allowed.
    fn is_allowed(&self, hdr: &VnetHdr) -> bool {
        let needed = match hdr.gso_type & !VNET_HDR_GSO_ECN {
            VNET_HDR_GSO_NONE => Offloads::empty(),
            VNET_HDR_GSO_TCPV4 => Offloads::GUEST_TSO4,
            VNET_HDR_GSO_TCPV6 => Offloads::GUEST_TSO6,
            VNET_HDR_GSO_UDP_L4 => Offloads::GUEST_USO4 | Offloads::GUEST_USO6,
            _ => return false,
        };
        let csum = hdr.flags & VNET_HDR_F_NEEDS_CSUM != 0;
        self.offloads.contains(needed)
            && (!csum || self.offloads.contains(Offloads::GUEST_CSUM))
            && hdr.gso_type & VNET_HDR_GSO_ECN == 0
    }
}

impl Backend for Tap {
    fn offloads(&self) -> Offloads {
        self.device.offloads()
    }

    fn configure(&mut self, link: &Link) {
        self.forget();
        self.apply(link);
    }

    fn set_offloads(&mut self, link: &Link) {
        self.apply(link);
    }

    fn transmit(&mut self, burst: &TxBurst<'_>, _now: Instant) {
        if self.link.is_gone() {
            return;
        }
        for frame in burst.iter() {
            let mut head = [0; NET_HDR_LEN];
            head[..VnetHdr::LEN].copy_from_slice(&frame.hdr.encode());
            match self.device.write(self.queue, &head, frame.slices) {
                Ok(_) => self.link.set(State::Up),
                Err(error) => self.link.failed(&error),
            }
        }
    }

    fn receive(&mut self, ring: &mut dyn RxRing, _now: Instant) -> Stop {
        if std::mem::take(&mut self.quiet) || self.link.is_gone() {
            return Stop::Idle;
        }
        self.drained = false;
        for _ in 0..BURST {
            if !ring.reserve(self.room) {
                return Stop::NoBuffers;
            }
            let mut head = [0; NET_HDR_LEN];
            let read = self.device.read(self.queue, &mut head, ring.slices(0));
            let [raw @ .., _, _] = head;
            let hdr = VnetHdr::decode(&raw);
            match read {
                Ok(len) if len > NET_HDR_LEN && self.is_allowed(&hdr) => {
                    ring.finish(&hdr, len - NET_HDR_LEN);
                }
                Ok(_) => ring.unreserve(),
                Err(error) => {
                    ring.unreserve();
                    if error.kind() == io::ErrorKind::WouldBlock {
                        self.drained = true;
                        return Stop::Idle;
                    }
                    self.link.failed(&error);
                    if self.link.is_gone() {
                        return Stop::Idle;
                    }
                }
            }
        }
        Stop::Yield
    }

    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.device.queues()[self.queue].as_fd())
    }

    fn host_is_quiet(&mut self) {
        self.quiet = self.drained;
    }

    fn reset(&mut self) {
        self.forget();
        self.offloads = Offloads::empty();
        if let Err(error) = self.device.set_offloads(Offloads::empty()) {
            self.link.failed(&error);
        }
    }
}

#[cfg(test)]
mod tests;
