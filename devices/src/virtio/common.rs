//! The part of a virtio transport that does not depend on the bus: device status, feature
//! selection and queue set-up (VIRTIO 1.3, 2.1, 2.2 and 3.1).
//!
//! A transport translates its registers to the methods here. Writes that the specification does
//! not allow in the present state are ignored: a driver that makes them reads back that nothing
//! changed.
//!
//! ```text
//!   0 -> ACKNOWLEDGE -> DRIVER -> FEATURES_OK -> DRIVER_OK
//!                         features   queues        device runs
//! ```

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestAddressSpace};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::virtio::spec::{
    F_EVENT_IDX, F_VERSION_1, STATUS_ACKNOWLEDGE, STATUS_DRIVER, STATUS_DRIVER_OK, STATUS_FAILED,
    STATUS_FEATURES_OK, STATUS_NEEDS_RESET,
};
use crate::virtio::{Activation, ActiveQueue, GuestRam, Interrupt, VirtioDevice};

/// The device status field, shared with the device's threads, which may set NEEDS_RESET.
#[derive(Debug, Default)]
pub struct Status(AtomicU8);

impl Status {
    /// The present bits.
    pub fn bits(&self) -> u8 {
        self.0.load(Ordering::Acquire)
    }

    /// Sets DEVICE_NEEDS_RESET. True when the driver is to be told by a configuration interrupt,
    /// which is so only after DRIVER_OK (VIRTIO 1.3, 2.1.2).
    pub fn set_needs_reset(&self) -> bool {
        let old = self.0.fetch_or(STATUS_NEEDS_RESET, Ordering::AcqRel);
        old & STATUS_DRIVER_OK != 0 && old & STATUS_NEEDS_RESET == 0
    }

    fn add(&self, bits: u8) {
        self.0.fetch_or(bits, Ordering::AcqRel);
    }

    fn clear(&self) {
        self.0.store(0, Ordering::Release);
    }
}

/// What the driver wrote about one queue. Checked as a whole when the queue is made ready.
#[derive(Clone, Copy, Debug, Default)]
struct QueueSetup {
    size: u16,
    desc: u64,
    driver: u64,
    device: u64,
    ready: bool,
}

/// One of the three addresses of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueAddr {
    /// Descriptor table.
    Desc,
    /// Driver area: the available ring.
    Driver,
    /// Device area: the used ring.
    Device,
}

/// Transport-independent state of one device.
pub struct Common {
    device: Box<dyn VirtioDevice>,
    ram: GuestRam,
    status: Arc<Status>,
    interrupt: Arc<dyn Interrupt>,
    kicks: Vec<EventFd>,
    queues: Vec<QueueSetup>,
    driver_features: u64,
    device_features_sel: u32,
    driver_features_sel: u32,
    queue_sel: u16,
    active: bool,
}

impl Common {
    /// Wraps `device`; `status` is what `interrupt` sets NEEDS_RESET in.
    ///
    /// # Errors
    /// Fails when a doorbell cannot be made.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        ram: GuestRam,
        status: Arc<Status>,
        interrupt: Arc<dyn Interrupt>,
    ) -> io::Result<Self> {
        let kicks = device
            .queue_max_sizes()
            .iter()
            .map(|_| EventFd::new(EFD_NONBLOCK))
            .collect::<io::Result<_>>()?;
        let mut common = Self {
            device,
            ram,
            status,
            interrupt,
            kicks,
            queues: Vec::new(),
            driver_features: 0,
            device_features_sel: 0,
            driver_features_sel: 0,
            queue_sel: 0,
            active: false,
        };
        common.forget_driver();
        Ok(common)
    }

    /// The device.
    pub fn device(&self) -> &dyn VirtioDevice {
        &*self.device
    }

    /// The doorbells, by queue.
    pub fn kicks(&self) -> &[EventFd] {
        &self.kicks
    }

    /// The device status field.
    pub fn status(&self) -> u8 {
        self.status.bits()
    }

    /// The driver wrote the device status field (VIRTIO 1.3, 2.1.1 and 3.1.1).
    pub fn set_status(&mut self, value: u8) {
        if value == 0 {
            self.reset();
            return;
        }
        for (bit, needs) in [
            (STATUS_ACKNOWLEDGE, 0),
            (STATUS_DRIVER, STATUS_ACKNOWLEDGE),
            (STATUS_FEATURES_OK, STATUS_DRIVER),
            (STATUS_DRIVER_OK, STATUS_FEATURES_OK),
            (STATUS_FAILED, 0),
        ] {
            let now = self.status.bits();
            if value & bit == 0 || now & bit != 0 {
                continue;
            }
            if now & needs != needs || now & STATUS_FAILED != 0 {
                tracing::debug!(status = now, value, "driver sets a status bit out of order");
                continue;
            }
            match bit {
                STATUS_FEATURES_OK if !self.features_ok() => {}
                STATUS_DRIVER_OK => self.activate(),
                _ => self.status.add(bit),
            }
        }
    }

    /// Stops the device and forgets the driver. On return nothing touches guest memory.
    fn reset(&mut self) {
        if self.active {
            self.device.reset();
            self.active = false;
        }
        for kick in &self.kicks {
            // An old doorbell is harmless, but there is no reason to answer it.
            let _ = kick.read();
        }
        self.forget_driver();
        self.status.clear();
    }

    fn forget_driver(&mut self) {
        self.driver_features = 0;
        self.device_features_sel = 0;
        self.driver_features_sel = 0;
        self.queue_sel = 0;
        self.queues = self
            .device
            .queue_max_sizes()
            .iter()
            .map(|&size| QueueSetup {
                size,
                ..QueueSetup::default()
            })
            .collect();
    }

    fn features_ok(&self) -> bool {
        let unknown = self.driver_features & !self.device.device_features();
        let ok = unknown == 0 && self.driver_features & F_VERSION_1 != 0;
        if !ok {
            tracing::warn!(
                accepted = format_args!("{:#x}", self.driver_features),
                unknown = format_args!("{unknown:#x}"),
                "driver features refused"
            );
        }
        ok
    }

    fn activate(&mut self) {
        // DRIVER_OK first: a fault found at once must be reported as one of a live device.
        self.status.add(STATUS_DRIVER_OK);
        let result = self.active_queues().and_then(|queues| {
            self.device.activate(Activation {
                ram: self.ram.clone(),
                features: self.driver_features,
                queues,
                interrupt: self.interrupt.clone(),
            })
        });
        // Also after a failure: `reset` is what brings the device back to a known state.
        self.active = true;
        if let Err(error) = result {
            tracing::error!(%error, "cannot start the device");
            self.interrupt.needs_reset();
        }
    }

    fn active_queues(&self) -> io::Result<Vec<ActiveQueue>> {
        let mut queues = Vec::new();
        for (index, (setup, kick)) in (0u16..).zip(self.queues.iter().zip(&self.kicks)) {
            if !setup.ready {
                continue;
            }
            let queue = self
                .build_queue(index)
                .ok_or_else(|| io::Error::other(format!("queue {index} is not valid any more")))?;
            queues.push(ActiveQueue {
                index,
                queue,
                kick: Arc::new(kick.try_clone()?),
            });
        }
        Ok(queues)
    }

    /// Chooses which 32 feature bits [`Self::device_features`] shows.
    pub fn select_device_features(&mut self, sel: u32) {
        self.device_features_sel = sel;
    }

    /// Chooses which 32 feature bits [`Self::set_driver_features`] sets.
    pub fn select_driver_features(&mut self, sel: u32) {
        self.driver_features_sel = sel;
    }

    /// What [`Self::select_device_features`] chose.
    pub fn device_features_select(&self) -> u32 {
        self.device_features_sel
    }

    /// What [`Self::select_driver_features`] chose.
    pub fn driver_features_select(&self) -> u32 {
        self.driver_features_sel
    }

    /// The selected half of the offered features.
    pub fn device_features(&self) -> u32 {
        half(self.device.device_features(), self.device_features_sel)
    }

    /// The selected half of the accepted features.
    pub fn driver_features(&self) -> u32 {
        half(self.driver_features, self.driver_features_sel)
    }

    /// Sets the selected half of the accepted features; only between DRIVER and FEATURES_OK.
    pub fn set_driver_features(&mut self, value: u32) {
        let state = self.status() & (STATUS_DRIVER | STATUS_FEATURES_OK | STATUS_FAILED);
        if state != STATUS_DRIVER {
            return;
        }
        match self.driver_features_sel {
            0 => set_low(&mut self.driver_features, value),
            1 => set_high(&mut self.driver_features, value),
            _ => {}
        }
    }

    /// Number of queues.
    pub fn num_queues(&self) -> u16 {
        // More than 16 bits cannot be addressed.
        u16::try_from(self.device.queue_max_sizes().len()).unwrap_or(u16::MAX)
    }

    /// The queue that [`Self::select_queue`] chose.
    pub fn selected_queue(&self) -> u16 {
        self.queue_sel
    }

    /// Chooses the queue that the methods below speak of.
    pub fn select_queue(&mut self, index: u16) {
        self.queue_sel = index;
    }

    /// Largest size of the selected queue, 0 when there is no such queue.
    pub fn queue_max_size(&self) -> u16 {
        let index = usize::from(self.queue_sel);
        self.device
            .queue_max_sizes()
            .get(index)
            .map_or(0, |&max| max)
    }

    /// Size of the selected queue.
    pub fn queue_size(&self) -> u16 {
        self.selected().map_or(0, |queue| queue.size)
    }

    /// Sets the size of the selected queue.
    pub fn set_queue_size(&mut self, size: u16) {
        if let Some(queue) = self.configurable() {
            queue.size = size;
        }
    }

    /// Sets half of an address of the selected queue.
    pub fn set_queue_addr(&mut self, which: QueueAddr, high: bool, value: u32) {
        let Some(queue) = self.configurable() else {
            return;
        };
        let addr = match which {
            QueueAddr::Desc => &mut queue.desc,
            QueueAddr::Driver => &mut queue.driver,
            QueueAddr::Device => &mut queue.device,
        };
        if high {
            set_high(addr, value);
        } else {
            set_low(addr, value);
        }
    }

    /// An address of the selected queue.
    pub fn queue_addr(&self, which: QueueAddr) -> u64 {
        self.selected().map_or(0, |queue| match which {
            QueueAddr::Desc => queue.desc,
            QueueAddr::Driver => queue.driver,
            QueueAddr::Device => queue.device,
        })
    }

    /// True when the selected queue is ready.
    pub fn queue_ready(&self) -> bool {
        self.selected().is_some_and(|queue| queue.ready)
    }

    /// Makes the selected queue ready, or (before DRIVER_OK) not ready again.
    ///
    /// A queue with a bad size or address stays as it is, which the driver sees by reading back.
    pub fn set_queue_ready(&mut self, ready: bool) {
        if !self.may_configure_queues() {
            return;
        }
        let index = self.queue_sel;
        let valid = !ready || self.build_queue(index).is_some();
        if !valid {
            tracing::warn!(index, setup = ?self.selected(), "queue set-up refused");
        }
        if let Some(queue) = self.queues.get_mut(usize::from(index))
            && valid
        {
            queue.ready = ready;
        }
    }

    /// The driver notified queue `index` by a write that no ioeventfd caught.
    pub fn notify(&self, index: u32) {
        let kick = usize::try_from(index).ok().and_then(|i| self.kicks.get(i));
        if let Some(kick) = kick
            && self.status() & STATUS_DRIVER_OK != 0
        {
            // Fails only when 2^64 notifications are outstanding; then one more is not needed.
            let _ = kick.write(1);
        }
    }

    /// Reads the device-specific configuration.
    pub fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.device.read_config(offset, data);
    }

    /// Writes the device-specific configuration; only from DRIVER on.
    pub fn write_config(&mut self, offset: u64, data: &[u8]) {
        if self.status() & STATUS_DRIVER != 0 {
            self.device.write_config(offset, data);
        }
    }

    fn selected(&self) -> Option<&QueueSetup> {
        self.queues.get(usize::from(self.queue_sel))
    }

    /// The selected queue, when its size and addresses may be changed.
    fn configurable(&mut self) -> Option<&mut QueueSetup> {
        if !self.may_configure_queues() {
            return None;
        }
        let queue = self.queues.get_mut(usize::from(self.queue_sel))?;
        (!queue.ready).then_some(queue)
    }

    /// Queues are set up between FEATURES_OK and DRIVER_OK (VIRTIO 1.3, 3.1.1, step 7).
    fn may_configure_queues(&self) -> bool {
        let phase = STATUS_FEATURES_OK | STATUS_DRIVER_OK | STATUS_FAILED;
        self.status() & phase == STATUS_FEATURES_OK
    }

    /// Queue `index` as the driver described it; `None` when it is not usable.
    fn build_queue(&self, index: u16) -> Option<Queue> {
        let index = usize::from(index);
        let setup = self.queues.get(index)?;
        let mut queue = Queue::new(*self.device.queue_max_sizes().get(index)?).ok()?;
        queue.try_set_size(setup.size).ok()?;
        queue
            .try_set_desc_table_address(GuestAddress(setup.desc))
            .ok()?;
        queue
            .try_set_avail_ring_address(GuestAddress(setup.driver))
            .ok()?;
        queue
            .try_set_used_ring_address(GuestAddress(setup.device))
            .ok()?;
        queue.set_event_idx(self.driver_features & F_EVENT_IDX != 0);
        queue.set_ready(true);
        queue.is_valid(&*self.ram.memory()).then_some(queue)
    }
}

impl Drop for Common {
    fn drop(&mut self) {
        self.reset();
    }
}

fn half(value: u64, sel: u32) -> u32 {
    match sel {
        0 => (value & u64::from(u32::MAX)) as u32,
        1 => (value >> 32) as u32,
        _ => 0,
    }
}

fn set_low(value: &mut u64, low: u32) {
    *value = (*value >> 32 << 32) | u64::from(low);
}

fn set_high(value: &mut u64, high: u32) {
    *value = (*value & u64::from(u32::MAX)) | (u64::from(high) << 32);
}
