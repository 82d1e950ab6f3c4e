//! virtio over MMIO, version 2 (VIRTIO 1.3, 4.2).
//!
//! The transport is one page of registers. Two things bypass it when the VMM wires them up: the
//! driver's notifications (an ioeventfd per queue at `base + `[`QUEUE_NOTIFY`], matched on the
//! queue's index as a 32-bit value) and our interrupts (an irqfd on [`MmioTransport::irq`]).

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::bus::BusDevice;
use crate::virtio::common::{Common, QueueAddr, Status};
use crate::virtio::{GuestRam, Interrupt, VirtioDevice};

/// Size of the register page.
pub const MMIO_LEN: u64 = 0x1000;

// Register offsets (VIRTIO 1.3, 4.2.2).

/// `MagicValue`: "virt".
pub const MAGIC_VALUE: u64 = 0x000;
/// `Version`.
pub const VERSION: u64 = 0x004;
/// `DeviceID`.
pub const DEVICE_ID: u64 = 0x008;
/// `VendorID`.
pub const VENDOR_ID: u64 = 0x00c;
/// `DeviceFeatures`.
pub const DEVICE_FEATURES: u64 = 0x010;
/// `DeviceFeaturesSel`.
pub const DEVICE_FEATURES_SEL: u64 = 0x014;
/// `DriverFeatures`.
pub const DRIVER_FEATURES: u64 = 0x020;
/// `DriverFeaturesSel`.
pub const DRIVER_FEATURES_SEL: u64 = 0x024;
/// `QueueSel`.
pub const QUEUE_SEL: u64 = 0x030;
/// `QueueSizeMax`.
pub const QUEUE_SIZE_MAX: u64 = 0x034;
/// `QueueSize`.
pub const QUEUE_SIZE: u64 = 0x038;
/// `QueueReady`.
pub const QUEUE_READY: u64 = 0x044;
/// `QueueNotify`.
pub const QUEUE_NOTIFY: u64 = 0x050;
/// `InterruptStatus`.
pub const INTERRUPT_STATUS: u64 = 0x060;
/// `InterruptACK`.
pub const INTERRUPT_ACK: u64 = 0x064;
/// `Status`.
pub const STATUS: u64 = 0x070;
/// `QueueDescLow`; the high half follows.
pub const QUEUE_DESC_LOW: u64 = 0x080;
/// `QueueDriverLow`; the high half follows.
pub const QUEUE_DRIVER_LOW: u64 = 0x090;
/// `QueueDeviceLow`; the high half follows.
pub const QUEUE_DEVICE_LOW: u64 = 0x0a0;
/// `SHMLenLow`; the high half and the base follow. All ones: there is no such region.
pub const SHM_LEN_LOW: u64 = 0x0b0;
/// `ConfigGeneration`.
pub const CONFIG_GENERATION: u64 = 0x0fc;
/// Start of the device-specific configuration.
pub const CONFIG: u64 = 0x100;

/// `InterruptStatus`: used buffers were added.
pub const INT_VRING: u32 = 1;
/// `InterruptStatus`: the configuration changed.
pub const INT_CONFIG: u32 = 2;

const MAGIC: u32 = u32::from_le_bytes(*b"virt");
const VENDOR: u32 = u32::from_le_bytes(*b"wntn");

/// The interrupt line of the transport, and the registers behind it.
struct Line {
    status: Arc<Status>,
    pending: AtomicU32,
    generation: AtomicU32,
    /// Others than [`Line::raise`] write to `irq`, and do not say why.
    shared: AtomicBool,
    irq: EventFd,
}

impl Line {
    fn raise(&self, cause: u32) {
        self.pending.fetch_or(cause, Ordering::AcqRel);
        // Fails only when 2^64 interrupts are outstanding; then one more is not needed.
        let _ = self.irq.write(1);
    }

    /// `InterruptStatus`.
    fn causes(&self) -> u32 {
        let vring = if self.shared.load(Ordering::Acquire) {
            INT_VRING
        } else {
            0
        };
        self.pending.load(Ordering::Acquire) | vring
    }

    /// The driver reset the device.
    fn reset(&self) {
        self.pending.store(0, Ordering::Release);
        self.shared.store(false, Ordering::Release);
    }
}

impl Interrupt for Line {
    fn signal_queue(&self, _index: u16) {
        self.raise(INT_VRING);
    }

    /// All queues have the one line. Whoever writes to it does not set `InterruptStatus`, so from now
    /// on, until the reset, that always says that buffers may have been used; a driver finds out.
    fn queue_call(&self, _index: u16) -> io::Result<Option<EventFd>> {
        let call = self.irq.try_clone()?;
        self.shared.store(true, Ordering::Release);
        Ok(Some(call))
    }

    fn signal_config(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.raise(INT_CONFIG);
    }

    fn needs_reset(&self) {
        if self.status.set_needs_reset() {
            self.raise(INT_CONFIG);
        }
    }
}

/// A virtio device on a page of registers.
pub struct MmioTransport {
    common: Common,
    line: Arc<Line>,
}

impl MmioTransport {
    /// Puts `device` behind registers; it uses `ram` once the driver starts it.
    ///
    /// # Errors
    /// Fails when an event descriptor cannot be made.
    pub fn new(device: Box<dyn VirtioDevice>, ram: GuestRam) -> io::Result<Self> {
        let status = Arc::new(Status::default());
        let line = Arc::new(Line {
            status: status.clone(),
            pending: AtomicU32::new(0),
            generation: AtomicU32::new(0),
            shared: AtomicBool::new(false),
            irq: EventFd::new(EFD_NONBLOCK)?,
        });
        Ok(Self {
            common: Common::new(device, ram, status, line.clone())?,
            line,
        })
    }

    /// Written for each interrupt; to be registered as an (edge-triggered) irqfd.
    pub fn irq(&self) -> &EventFd {
        &self.line.irq
    }

    /// The doorbells by queue; to be registered as ioeventfds on [`QUEUE_NOTIFY`].
    pub fn kicks(&self) -> &[EventFd] {
        self.common.kicks()
    }

    fn read_register(&self, offset: u64) -> u32 {
        let common = &self.common;
        match offset {
            MAGIC_VALUE => MAGIC,
            VERSION => 2,
            DEVICE_ID => common.device().device_type(),
            VENDOR_ID => VENDOR,
            DEVICE_FEATURES => common.device_features(),
            QUEUE_SIZE_MAX => common.queue_max_size().into(),
            QUEUE_READY => common.queue_ready().into(),
            INTERRUPT_STATUS => self.line.causes(),
            STATUS => common.status().into(),
            CONFIG_GENERATION => self.line.generation.load(Ordering::Acquire),
            _ if (SHM_LEN_LOW..SHM_LEN_LOW + 16).contains(&offset) => u32::MAX,
            _ => 0,
        }
    }

    fn write_register(&mut self, offset: u64, value: u32) {
        let common = &mut self.common;
        match offset {
            DEVICE_FEATURES_SEL => common.select_device_features(value),
            DRIVER_FEATURES_SEL => common.select_driver_features(value),
            DRIVER_FEATURES => common.set_driver_features(value),
            // An index beyond 16 bits names no queue either.
            QUEUE_SEL => common.select_queue(u16::try_from(value).unwrap_or(u16::MAX)),
            // 0 is no valid size, so an impossible one is refused at QueueReady.
            QUEUE_SIZE => common.set_queue_size(u16::try_from(value).unwrap_or(0)),
            QUEUE_READY => common.set_queue_ready(value & 1 != 0),
            QUEUE_NOTIFY => common.notify(value),
            INTERRUPT_ACK => {
                self.line.pending.fetch_and(!value, Ordering::AcqRel);
            }
            STATUS => {
                common.set_status((value & 0xff) as u8);
                if value & 0xff == 0 {
                    self.line.reset();
                }
            }
            _ => {
                let which = match offset & !7 {
                    QUEUE_DESC_LOW => QueueAddr::Desc,
                    QUEUE_DRIVER_LOW => QueueAddr::Driver,
                    QUEUE_DEVICE_LOW => QueueAddr::Device,
                    _ => return,
                };
                common.set_queue_addr(which, offset & 4 != 0, value);
            }
        }
    }
}

/// Registers below [`CONFIG`] take aligned 32-bit accesses only (VIRTIO 1.3, 4.2.2.2).
impl BusDevice for MmioTransport {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if offset >= CONFIG {
            self.common.read_config(offset - CONFIG, data);
        } else if let Ok(data) = <&mut [u8; 4]>::try_from(data)
            && offset.is_multiple_of(4)
        {
            *data = self.read_register(offset).to_le_bytes();
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if offset >= CONFIG {
            self.common.write_config(offset - CONFIG, data);
        } else if let Ok(data) = <&[u8; 4]>::try_from(data)
            && offset.is_multiple_of(4)
        {
            self.write_register(offset, u32::from_le_bytes(*data));
        }
    }
}

#[cfg(test)]
mod tests;
