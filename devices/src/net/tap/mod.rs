//! A tap of the host behind the card: what the guest sends comes out of a network interface, and
//! what is sent to that interface goes to the guest.
//!
//! Both sides speak of frames with `struct virtio_net_hdr`, so a frame is one `readv` into the guest's
//! buffers or one `writev` from them, whatever its size; nothing is parsed here.
//!
//! A tap does not say how long its next frame is. To ask for buffers for the longest each time would cost
//! more than to read a short frame does, so after short frames a short one is expected; one that is longer
//! ends in memory of ours and is copied, and after it long ones are expected for a while.

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
    VolatileSlice, write_at,
};

pub use self::device::TapDevice;
pub use self::error::TapError;
use self::link::{LinkState, State};
use crate::net::tx::MAX_FRAME;
use crate::virtio::spec::NET_HDR_LEN;

/// Frames to the guest in one turn.
const BURST: usize = 64;
/// Frames in a row that must be short for the next to be expected so.
const SHORT_RUN: usize = 32;
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
    /// Longest frame that may come, and longest without segmentation offload.
    room: usize,
    short: usize,
    /// Short frames still to come until one is expected.
    long: usize,
    /// Where the rest of a frame goes that is longer than expected.
    spill: Box<[u8]>,
    /// A whole frame in `spill`, for which the guest had no buffers.
    pending: Option<(VnetHdr, usize)>,
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
            short: MAX_FRAME,
            long: 0,
            spill: vec![0; MAX_FRAME].into(),
            pending: None,
            drained: false,
            quiet: false,
        }
    }

    /// Frames may wait that nobody has looked for.
    fn forget(&mut self) {
        self.drained = false;
        self.quiet = false;
        self.pending = None;
    }

    fn apply(&mut self, link: &Link) {
        self.offloads = link.offloads;
        let gso = Offloads::GUEST_TSO4
            | Offloads::GUEST_TSO6
            | Offloads::GUEST_USO4
            | Offloads::GUEST_USO6;
        self.short = usize::from(link.mtu.max(self.device.mtu())) + ETHERNET;
        self.room = if link.offloads.intersects(gso) {
            MAX_FRAME
        } else {
            self.short
        };
        if let Err(error) = self.device.set_offloads(link.offloads) {
            self.link.failed(&error);
        }
    }

    /// Gives the guest the frame of `len` bytes that was read into its buffers, and may go on in `spill`.
    fn take(&mut self, ring: &mut dyn RxRing, hdr: VnetHdr, len: usize) {
        self.long = if len > self.short {
            SHORT_RUN
        } else {
            self.long.saturating_sub(1)
        };
        if !self.is_allowed(&hdr) {
            ring.unreserve();
            return;
        }
        let room = ring.slices(0).iter().map(VolatileSlice::len).sum();
        if len <= room {
            ring.finish(&hdr, len);
            return;
        }
        // The buffers' part goes ahead of the rest.
        let len = len.min(self.spill.len());
        self.spill.copy_within(..len - room, room);
        let mut at = 0;
        for slice in ring.slices(0) {
            at += slice.copy_to(&mut self.spill[at..room]);
        }
        ring.unreserve();
        self.pending = Some((hdr, len));
    }

    /// Gives the guest the frame that waits, if there is one; false when there are no buffers for it.
    fn deliver_pending(&mut self, ring: &mut dyn RxRing) -> bool {
        let Some((hdr, len)) = self.pending else {
            return true;
        };
        if !ring.reserve(len) {
            return false;
        }
        write_at(ring.slices(0), 0, &self.spill[..len]);
        ring.finish(&hdr, len);
        self.pending = None;
        true
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
            if !self.deliver_pending(ring) {
                return Stop::NoBuffers;
            }
            let short = self.long == 0 && self.short < self.room;
            if !ring.reserve(if short { self.short } else { self.room }) {
                return Stop::NoBuffers;
            }
            let tail = if short { &mut *self.spill } else { &mut [] };
            let mut head = [0; NET_HDR_LEN];
            match self
                .device
                .read(self.queue, &mut head, ring.slices(0), tail)
            {
                Ok(len) if len > NET_HDR_LEN => {
                    let [raw @ .., _, _] = head;
                    self.take(ring, VnetHdr::decode(&raw), len - NET_HDR_LEN);
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
