//! virtio over PCI (VIRTIO 1.3, 4.1), without the legacy interface.
//!
//! The function has one memory BAR with a page for each structure; its capabilities say which:
//!
//! | offset | structure |
//! | --- | --- |
//! | `0x0000` | common configuration |
//! | `0x1000` | ISR status |
//! | `0x2000` | device-specific configuration |
//! | `0x4000` | MSI-X table |
//! | `0x5000` | MSI-X pending bits |
//! | `0x6000` | notifications, 4 bytes a queue |
//!
//! There is a vector for each queue and one for configuration changes. Two things bypass the function
//! once the driver has set them up: notifications (a doorbell per queue) and interrupts (a write to the
//! vector's event). INTx is not offered: without MSI-X a driver must poll.

mod capabilities;
mod common_cfg;
mod line;

use std::io;
use std::sync::Arc;

use crate::pci::config::{COMMAND, COMMAND_BUS_MASTER, COMMAND_MEMORY, ConfigSpace, Identity};
use crate::pci::msix::Msix;
use crate::pci::{BarRange, PciFunction, PciHost};
use crate::virtio::common::{Common, Status};
use crate::virtio::spec::ID_NET;
use crate::virtio::{GuestRam, VirtioDevice};

use self::capabilities::{PCI_CFG_DATA, PCI_CFG_LEN, Window};
use self::line::Line;

/// Size of the BAR in bytes.
pub const BAR_LEN: u64 = 0x8000;
/// Offset of the common configuration in the BAR.
pub const COMMON_CFG: u64 = 0;
/// Offset of the ISR status.
pub const ISR: u64 = 0x1000;
/// Offset of the device-specific configuration.
pub const DEVICE_CFG: u64 = 0x2000;
/// Offset of the MSI-X table.
pub const MSIX_TABLE: u64 = 0x4000;
/// Offset of the MSI-X pending bits.
pub const MSIX_PBA: u64 = 0x5000;
/// Offset of the first queue's notification.
pub const NOTIFY: u64 = 0x6000;
/// Distance of notifications in bytes: `notify_off_multiplier`.
pub const NOTIFY_STRIDE: u64 = 4;
/// Room of each structure.
const PAGE: u64 = 0x1000;
/// Queues whose vectors and notifications fit into their pages.
const MAX_QUEUES: usize = 255;

/// A virtio device as a PCI function.
pub struct PciTransport {
    config: ConfigSpace,
    common: Common,
    msix: Msix,
    line: Arc<Line>,
    host: Box<dyn PciHost>,
    /// Offset of the capability whose data is an access to the BAR.
    pci_cfg: u8,
    /// Where a BAR may be.
    window: BarRange,
    /// The BAR that the doorbells are attached for.
    doorbells_at: Option<u64>,
    /// The function may write to memory, as the driver last said.
    bus_master: bool,
}

impl PciTransport {
    /// Makes `device` a function whose BAR is at `bar`, a multiple of [`BAR_LEN`], and works as long as it is within
    /// `window`; the device uses `ram` once the driver starts it.
    ///
    /// # Errors
    /// Fails when descriptors run out, or the device has more than 255 queues.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        ram: GuestRam,
        host: Box<dyn PciHost>,
        window: BarRange,
        bar: u64,
    ) -> io::Result<Self> {
        let queues = device.queue_max_sizes().len();
        let count = u16::try_from(queues + 1)
            .ok()
            .filter(|_| queues <= MAX_QUEUES)
            .ok_or_else(|| io::Error::other("too many queues for a PCI function"))?;
        let mut config = ConfigSpace::new(&identity(device.device_type()));
        config.set_bar(BAR_LEN, bar);
        // The offsets are below `BAR_LEN`.
        let msix = Msix::new(&mut config, count, MSIX_TABLE as u32, MSIX_PBA as u32)?;
        let pci_cfg = capabilities::add(&mut config)
            .ok_or_else(|| io::Error::other("no room for the virtio capabilities"))?;
        let status = Arc::new(Status::default());
        let line = Arc::new(Line::new(status.clone(), msix.events().clone()));
        Ok(Self {
            common: Common::new(device, ram, status, line.clone())?,
            config,
            msix,
            line,
            host,
            pci_cfg,
            window,
            doorbells_at: None,
            bus_master: false,
        })
    }

    /// The configuration space was written: what depends on it follows.
    fn config_written(&mut self) {
        let master = self.config.u16(COMMAND) & COMMAND_BUS_MASTER != 0;
        if std::mem::replace(&mut self.bus_master, master) && !master {
            // Memory is not the device's any more (PCI 3.0, 6.2.2): another kernel may follow without
            // a word to the device. A driver that never set the bit is served all the same.
            self.common.set_status(0);
            self.forget_driver();
        }
        let on = self.msix.config_written(&self.config, &mut *self.host);
        self.line.set_msix(on);
        self.place_doorbells();
    }

    /// The device was reset.
    fn forget_driver(&mut self) {
        self.line.forget_driver();
        self.msix.drop_pending();
    }

    /// Attaches the doorbells to where the BAR is now.
    fn place_doorbells(&mut self) {
        let now = self.bar().map(|bar| bar.base);
        if now == self.doorbells_at {
            return;
        }
        let old = std::mem::replace(&mut self.doorbells_at, now);
        for (address, kick) in addresses(old).zip(self.common.kicks()) {
            if let Err(error) = self.host.detach_doorbell(address, kick) {
                tracing::debug!(%error, "cannot detach a doorbell");
            }
        }
        for (address, kick) in addresses(now).zip(self.common.kicks()) {
            if let Err(error) = self.host.attach_doorbell(address, kick) {
                tracing::warn!(%error, "cannot attach a doorbell; notifications will be slow");
            }
        }
    }

    /// The access that the driver describes in the capability `pci_cfg` (VIRTIO 1.3, 4.1.4.9).
    fn window(&self) -> Option<Window> {
        Window::read(&self.config, self.pci_cfg)
    }

    /// Whether an access to the configuration space touches the data of that access.
    fn touches_data(&self, offset: u8, len: usize) -> bool {
        let data = usize::from(self.pci_cfg + PCI_CFG_DATA);
        let start = usize::from(offset);
        start < data + PCI_CFG_LEN && data < start + len
    }
}

/// Where the doorbells of a BAR at `base` are.
fn addresses(base: Option<u64>) -> impl Iterator<Item = u64> {
    let first = base.map(|base| base + NOTIFY);
    first
        .into_iter()
        .flat_map(|first| (first..).step_by(NOTIFY_STRIDE as usize))
}

/// VIRTIO 1.3, 4.1.2.
fn identity(device_type: u32) -> Identity {
    const VENDOR: u16 = 0x1af4;
    const FIRST_DEVICE: u16 = 0x1040;
    // Device types are small numbers.
    let device = FIRST_DEVICE.wrapping_add(device_type as u16);
    Identity {
        vendor: VENDOR,
        device,
        revision: 1,
        class: match device_type {
            ID_NET => 0x02_00_00,
            _ => 0xff_00_00,
        },
        subsystem_vendor: VENDOR,
        subsystem: device,
    }
}

impl PciFunction for PciTransport {
    fn read_config(&mut self, offset: u8, data: &mut [u8]) {
        if self.touches_data(offset, data.len())
            && let Some(Window { offset, len }) = self.window()
        {
            let mut bytes = [0; PCI_CFG_LEN];
            self.read_bar(offset, &mut bytes[..len]);
            self.config.put(self.pci_cfg + PCI_CFG_DATA, &bytes[..len]);
        }
        self.config.read(offset, data);
    }

    fn write_config(&mut self, offset: u8, data: &[u8]) {
        self.config.write(offset, data);
        if self.touches_data(offset, data.len())
            && let Some(Window { offset, len }) = self.window()
        {
            let bytes = self.config.u32(self.pci_cfg + PCI_CFG_DATA).to_le_bytes();
            self.write_bar(offset, &bytes[..len]);
        }
        self.config_written();
    }

    fn bar(&self) -> Option<BarRange> {
        let bar = BarRange {
            base: self.config.bar(),
            len: BAR_LEN,
        };
        let enabled = self.config.u16(COMMAND) & COMMAND_MEMORY != 0;
        let reachable = self.window.offset_of(bar.base, bar.len).is_some();
        (enabled && reachable).then_some(bar)
    }

    fn read_bar(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let at = offset % PAGE;
        match offset - at {
            COMMON_CFG => common_cfg::read(&self.common, &self.line, at, data),
            ISR if at == 0 => data
                .iter_mut()
                .take(1)
                .for_each(|byte| *byte = self.line.take_isr()),
            DEVICE_CFG => self.common.read_config(at, data),
            MSIX_TABLE => self.msix.read_table(at, data),
            MSIX_PBA => self.msix.read_pending(at, data),
            _ => {}
        }
    }

    fn write_bar(&mut self, offset: u64, data: &[u8]) {
        let at = offset % PAGE;
        match offset - at {
            COMMON_CFG => {
                common_cfg::write(&mut self.common, &self.line, at, data);
                if common_cfg::is_reset(at, data) {
                    self.forget_driver();
                }
            }
            DEVICE_CFG => self.common.write_config(at, data),
            MSIX_TABLE => self.msix.write_table(at, data, &mut *self.host),
            // Without NOTIFICATION_DATA the address alone says which queue.
            NOTIFY if at.is_multiple_of(NOTIFY_STRIDE) => {
                self.common.notify((at / NOTIFY_STRIDE) as u32);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests;
