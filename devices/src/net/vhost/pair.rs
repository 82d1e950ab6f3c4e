//! One pair of queues in the kernel: an open `/dev/vhost-net`.
//!
//! ```text
//!   open: SET_OWNER
//!   start: SET_FEATURES, SET_MEM_TABLE, per ring NUM ADDR BASE KICK CALL ERR, per ring SET_BACKEND tap
//!   stop: per ring SET_BACKEND -1, per ring GET_VRING_BASE
//! ```

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};

use vhost::net::VhostNet as _;
use vhost::vhost_kern::VhostKernBackend;
use vhost::vhost_kern::net::Net;
use vhost::{VhostBackend as _, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_queue::{Queue, QueueT as _};
use vm_memory::{
    Address as _, GuestAddress, GuestAddressSpace as _, GuestMemoryBackend as _, GuestMemoryMmap,
    GuestMemoryRegion as _,
};
use vmm_sys_util::eventfd::EventFd;

use super::error::VhostError;
use crate::virtio::GuestRam;
use crate::virtio::spec::{F_EVENT_IDX, F_INDIRECT_DESC, F_VERSION_1, NET_F_MRG_RXBUF};

/// The features that concern vhost: how rings and headers look. The others are the tap's, or ours.
///
/// VHOST_NET_F_VIRTIO_NET_HDR is not among them: it is for taps without headers. Nor is
/// ACCESS_PLATFORM, which would make the kernel ask us for each address.
pub(super) const RING_FEATURES: u64 = F_VERSION_1 | F_EVENT_IDX | F_INDIRECT_DESC | NET_F_MRG_RXBUF;

/// A ring and its event descriptors.
pub(super) struct Ring<'a> {
    pub(super) queue: &'a Queue,
    /// Size that the device allows.
    pub(super) max_size: u16,
    /// The driver's doorbell.
    pub(super) kick: &'a EventFd,
    /// Written when the driver wants an interrupt.
    pub(super) call: &'a EventFd,
    /// Written when the ring is broken.
    pub(super) error: &'a EventFd,
}

/// A pair of queues in the kernel.
pub(super) struct Pair {
    // Its memory is empty: each start brings its own.
    net: Net<GuestRam>,
    running: bool,
}

impl Pair {
    /// Opens `/dev/vhost-net`.
    ///
    /// # Errors
    /// See [`VhostError`].
    pub(super) fn open() -> Result<Self, VhostError> {
        let net = Net::new(GuestRam::new(GuestMemoryMmap::new())).map_err(VhostError::open)?;
        net.set_owner()
            .map_err(|error| VhostError::call("take it over", error))?;
        Ok(Self {
            net,
            running: false,
        })
    }

    /// Those of [`RING_FEATURES`] that the kernel knows.
    ///
    /// # Errors
    /// As the call.
    pub(super) fn features(&self) -> Result<u64, VhostError> {
        let features = self.net.get_features();
        let features = features.map_err(|error| VhostError::call("tell its features", error))?;
        Ok(features & RING_FEATURES)
    }

    /// Lets the kernel carry frames between the RX and TX `rings` and `tap`; without one it leaves the
    /// rings alone. After a failure [`Self::stop`] is to be called.
    ///
    /// # Errors
    /// As the calls; also when a ring is not in one piece of memory.
    pub(super) fn start(
        &mut self,
        ram: &GuestRam,
        features: u64,
        rings: &[Ring<'_>],
        tap: Option<&File>,
    ) -> Result<(), VhostError> {
        let handle = Handle {
            net: &self.net,
            ram: ram.clone(),
        };
        let call = VhostError::call;
        self.running = true;
        handle
            .set_features(features & RING_FEATURES)
            .map_err(|error| call("set features", error))?;
        handle
            .set_mem_table(&regions(&ram.memory()))
            .map_err(|error| call("take guest memory", error))?;
        for (index, ring) in rings.iter().enumerate() {
            handle.set_up(index, ring)?;
        }
        for index in 0..rings.len() {
            self.net
                .set_backend(index, tap)
                .map_err(|error| call("attach to the tap", error))?;
        }
        Ok(())
    }

    /// Stops the kernel; returns the positions in the available rings of RX and TX. On return nothing
    /// touches guest memory. `None` when it was not running.
    ///
    /// # Errors
    /// As the calls.
    pub(super) fn stop(&mut self) -> Result<Option<[u16; 2]>, VhostError> {
        if !std::mem::take(&mut self.running) {
            return Ok(None);
        }
        // Both before the first position is read, and the second even if the first fails.
        let detached = [0, 1].map(|index| self.net.set_backend(index, None));
        for result in detached {
            result.map_err(|error| VhostError::call("detach from the tap", error))?;
        }
        let mut bases = [0; 2];
        for (index, base) in bases.iter_mut().enumerate() {
            let position = self.net.get_vring_base(index);
            let position = position.map_err(|error| VhostError::call("tell a position", error))?;
            *base = (position & 0xffff) as u16;
        }
        Ok(Some(bases))
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // Closing detaches as well.
        let _ = self.stop();
    }
}

fn regions(mem: &GuestMemoryMmap) -> Vec<VhostUserMemoryRegionInfo> {
    mem.iter()
        .map(|region| VhostUserMemoryRegionInfo {
            guest_phys_addr: region.start_addr().raw_value(),
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
            ..VhostUserMemoryRegionInfo::default()
        })
        .collect()
}

/// A pair with the memory of one start.
struct Handle<'n> {
    net: &'n Net<GuestRam>,
    ram: GuestRam,
}

impl Handle<'_> {
    fn set_up(&self, index: usize, ring: &Ring<'_>) -> Result<(), VhostError> {
        let queue = ring.queue;
        let config = VringConfigData {
            queue_max_size: ring.max_size,
            queue_size: queue.size(),
            desc_table_addr: queue.desc_table(),
            used_ring_addr: queue.used_ring(),
            avail_ring_addr: queue.avail_ring(),
            ..VringConfigData::default()
        };
        for (what, result) in [
            (
                "set the size of a ring",
                self.set_vring_num(index, queue.size()),
            ),
            ("find a ring", self.set_vring_addr(index, &config)),
            (
                "set a position",
                self.set_vring_base(index, queue.next_avail()),
            ),
            ("take a doorbell", self.set_vring_kick(index, ring.kick)),
            ("take an interrupt", self.set_vring_call(index, ring.call)),
            ("take an event", self.set_vring_err(index, ring.error)),
        ] {
            result.map_err(|error| VhostError::call(what, error))?;
        }
        Ok(())
    }
}

impl AsRawFd for Handle<'_> {
    fn as_raw_fd(&self) -> RawFd {
        self.net.as_raw_fd()
    }
}

impl VhostKernBackend for Handle<'_> {
    type AS = GuestRam;

    fn mem(&self) -> &GuestRam {
        &self.ram
    }

    /// Each part of the ring must be in one piece of our memory, as that is how the kernel sees it. (The
    /// default only looks at the byte behind each, and so also refuses a ring at the end of RAM.)
    fn is_valid(&self, config: &VringConfigData) -> bool {
        let mem = self.ram.memory();
        let size = usize::from(config.queue_size);
        [
            (config.desc_table_addr, 16 * size),
            (config.avail_ring_addr, 6 + 2 * size),
            (config.used_ring_addr, 6 + 8 * size),
        ]
        .into_iter()
        .all(|(at, len)| mem.get_slice(GuestAddress(at), len).is_ok())
    }
}
