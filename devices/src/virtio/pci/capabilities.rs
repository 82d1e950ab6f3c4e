//! The capabilities that tell a driver where the structures are (VIRTIO 1.3, 4.1.4).

use crate::pci::config::{CAP_VENDOR, ConfigSpace};

use super::{BAR_LEN, COMMON_CFG, DEVICE_CFG, ISR, NOTIFY, NOTIFY_STRIDE, PAGE, common_cfg};

/// `cfg_type`: common configuration.
pub(super) const TYPE_COMMON: u8 = 1;
/// `cfg_type`: notifications.
pub(super) const TYPE_NOTIFY: u8 = 2;
/// `cfg_type`: ISR status.
pub(super) const TYPE_ISR: u8 = 3;
/// `cfg_type`: device-specific configuration.
pub(super) const TYPE_DEVICE: u8 = 4;
/// `cfg_type`: access to the BAR by way of the configuration space.
pub(super) const TYPE_PCI: u8 = 5;

/// Size of `struct virtio_pci_cap`.
const CAP_LEN: u8 = 16;
/// Its fields, from the start of the capability.
const BAR: u8 = 4;
const OFFSET: u8 = 8;
const LENGTH: u8 = 12;
/// `pci_cfg_data`: an access to it is one to the BAR.
pub(super) const PCI_CFG_DATA: u8 = 16;
/// Size of `pci_cfg_data`.
pub(super) const PCI_CFG_LEN: usize = 4;

/// Appends all five; returns where the one for access by way of the configuration space is, or
/// `None` when there is no room.
pub(super) fn add(config: &mut ConfigSpace) -> Option<u8> {
    for (kind, offset, len) in [
        (TYPE_COMMON, COMMON_CFG, common_cfg::LEN as u64),
        (TYPE_ISR, ISR, 1),
        (TYPE_DEVICE, DEVICE_CFG, PAGE),
    ] {
        config.add_capability(CAP_VENDOR, &body(kind, offset, len, &[]), &[])?;
    }
    let multiplier = (NOTIFY_STRIDE as u32).to_le_bytes();
    let notify = body(TYPE_NOTIFY, NOTIFY, PAGE, &multiplier);
    config.add_capability(CAP_VENDOR, &notify, &[])?;
    let pci_cfg = body(TYPE_PCI, 0, 0, &[0; PCI_CFG_LEN]);
    let mut writable = vec![0; pci_cfg.len()];
    for (field, len) in [(BAR, 1), (OFFSET, 4), (LENGTH, 4), (PCI_CFG_DATA, 4)] {
        // Masks start behind ID and link.
        writable[usize::from(field) - 2..][..len].fill(0xff);
    }
    config.add_capability(CAP_VENDOR, &pci_cfg, &writable)
}

/// `struct virtio_pci_cap` behind its ID and link, for BAR 0. Offsets and lengths are below the BAR's size.
fn body(kind: u8, offset: u64, len: u64, more: &[u8]) -> Vec<u8> {
    let mut body = vec![CAP_LEN + more.len() as u8, kind, 0, 0, 0, 0];
    body.extend((offset as u32).to_le_bytes());
    body.extend((len as u32).to_le_bytes());
    body.extend(more);
    body
}

/// An access to the BAR, as the driver describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window {
    /// Offset in the BAR.
    pub(super) offset: u64,
    /// Number of bytes: 1, 2 or 4.
    pub(super) len: usize,
}

impl Window {
    /// What the capability at `at` says; `None` when that is no access (VIRTIO 1.3, 4.1.4.9.2).
    pub(super) fn read(config: &ConfigSpace, at: u8) -> Option<Self> {
        let (offset, len) = (config.u32(at + OFFSET), config.u32(at + LENGTH));
        let valid = config.u16(at + BAR) & 0xff == 0
            && matches!(len, 1 | 2 | 4)
            && offset.is_multiple_of(len)
            && u64::from(offset) + u64::from(len) <= BAR_LEN;
        valid.then_some(Self {
            offset: offset.into(),
            len: len as usize,
        })
    }
}
