//! What every virtio device and every transport agree on.
//!
//! A transport ([`pci`], [`mmio`]) shows registers to the driver and drives the state that all transports
//! share ([`common`]). At DRIVER_OK it hands the queues to the [`VirtioDevice`], which runs them
//! through [`vring`] and [`chain`] on a thread of its own.

pub mod chain;
pub mod common;
pub mod fault;
pub mod mmio;
pub mod pci;
pub mod spec;
pub mod vring;
pub mod window;

use std::os::fd::AsRawFd;
use std::sync::Arc;

use virtio_queue::Queue;
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

/// Guest RAM as all devices see it. Swappable, because a vhost-user front-end may replace it.
pub type GuestRam = GuestMemoryAtomic<GuestMemoryMmap>;

/// How a device tells its driver something. Implemented by each transport; called from any thread.
pub trait Interrupt: Send + Sync {
    /// Used buffers were added to queue `index` (VIRTIO 1.3, 2.3). The caller has already asked the
    /// queue whether the driver wants to know.
    fn signal_queue(&self, index: u16);
    /// A descriptor whose writes signal queue `index` as [`Self::signal_queue`] does, for a device whose
    /// queues are worked outside this process (vhost). `None` when there is no such thing.
    ///
    /// # Errors
    /// Fails when descriptors run out.
    fn queue_call(&self, index: u16) -> std::io::Result<Option<EventFd>> {
        let _ = index;
        Ok(None)
    }
    /// The configuration changed.
    fn signal_config(&self);
    /// The driver broke the specification: set DEVICE_NEEDS_RESET (VIRTIO 1.3, 2.1.2).
    fn needs_reset(&self);
}

/// One virtqueue as the driver set it up, with the doorbell that announces new buffers.
pub struct ActiveQueue {
    /// Index of the queue in the device.
    pub index: u16,
    /// The ring.
    pub queue: Queue,
    /// Becomes readable (by ioeventfd or by the transport) when the driver notifies the queue.
    pub kick: Doorbell,
}

/// A descriptor that announces new buffers. It is watched edge-triggered and never read.
pub type Doorbell = Arc<dyn AsRawFd + Send + Sync>;

/// Everything a device needs to run, handed over at DRIVER_OK.
pub struct Activation {
    /// Guest RAM.
    pub ram: GuestRam,
    /// Features that the driver accepted.
    pub features: u64,
    /// Queues that the driver enabled, by index.
    pub queues: Vec<ActiveQueue>,
    /// The way back to the driver.
    pub interrupt: Arc<dyn Interrupt>,
}

/// A virtio device, seen from its transport. All calls come from under the transport's lock.
pub trait VirtioDevice: Send {
    /// Device type (VIRTIO 1.3, 5).
    fn device_type(&self) -> u32;
    /// Largest size of each queue, a power of two; the length is the number of queues.
    fn queue_max_sizes(&self) -> &[u16];
    /// Offered features, VERSION_1 included.
    fn device_features(&self) -> u64;
    /// Reads the device-specific configuration; bytes out of range read as zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);
    /// Writes the device-specific configuration; what is not writable is ignored.
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let _ = (offset, data);
    }
    /// The driver set DRIVER_OK: take the queues and run.
    ///
    /// # Errors
    /// Fails when a worker cannot be started; the transport then sets DEVICE_NEEDS_RESET.
    fn activate(&mut self, activation: Activation) -> std::io::Result<()>;
    /// The driver reset the device. On return no thread touches the queues or guest memory any
    /// more, and the device can be activated again.
    fn reset(&mut self);
    /// Stops the device without a reset; the queues come back with their positions, so that
    /// [`Self::activate`] can go on from there. Empty when the device was not running.
    fn suspend(&mut self) -> Vec<(u16, Queue)>;
}
