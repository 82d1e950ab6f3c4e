//! `struct virtio_pci_common_cfg` (VIRTIO 1.3, 4.1.4.3), up to `queue_device`.
//!
//! Reads may be of any size. Writes are of one field, of its size (4.1.3.1); the 64-bit fields also
//! take halves. The fields that follow belong to features that are not offered (NOTIFICATION_DATA,
//! RING_RESET, ADMIN_VQ).

use crate::virtio::common::{Common, QueueAddr};

use super::line::Line;

/// Size of the structure in bytes.
pub(super) const LEN: usize = 0x38;

pub(super) const DEVICE_FEATURE_SELECT: u64 = 0x00;
pub(super) const DEVICE_FEATURE: u64 = 0x04;
pub(super) const DRIVER_FEATURE_SELECT: u64 = 0x08;
pub(super) const DRIVER_FEATURE: u64 = 0x0c;
pub(super) const CONFIG_MSIX_VECTOR: u64 = 0x10;
pub(super) const NUM_QUEUES: u64 = 0x12;
pub(super) const DEVICE_STATUS: u64 = 0x14;
pub(super) const CONFIG_GENERATION: u64 = 0x15;
pub(super) const QUEUE_SELECT: u64 = 0x16;
pub(super) const QUEUE_SIZE: u64 = 0x18;
pub(super) const QUEUE_MSIX_VECTOR: u64 = 0x1a;
pub(super) const QUEUE_ENABLE: u64 = 0x1c;
pub(super) const QUEUE_NOTIFY_OFF: u64 = 0x1e;
pub(super) const QUEUE_DESC: u64 = 0x20;
pub(super) const QUEUE_DRIVER: u64 = 0x28;
pub(super) const QUEUE_DEVICE: u64 = 0x30;

/// Reads at `offset`; what is beyond the structure reads as zero.
pub(super) fn read(common: &Common, line: &Line, offset: u64, data: &mut [u8]) {
    let image = image(common, line);
    let rest = usize::try_from(offset).ok().and_then(|at| image.get(at..));
    for (byte, value) in data.iter_mut().zip(rest.unwrap_or_default()) {
        *byte = *value;
    }
}

fn image(common: &Common, line: &Line) -> [u8; LEN] {
    let mut image = [0; LEN];
    let mut put =
        |at: u64, field: &[u8]| image[at as usize..][..field.len()].copy_from_slice(field);
    let queue = common.selected_queue();
    let exists = queue < common.num_queues();
    put(
        DEVICE_FEATURE_SELECT,
        &common.device_features_select().to_le_bytes(),
    );
    put(DEVICE_FEATURE, &common.device_features().to_le_bytes());
    put(
        DRIVER_FEATURE_SELECT,
        &common.driver_features_select().to_le_bytes(),
    );
    put(DRIVER_FEATURE, &common.driver_features().to_le_bytes());
    put(CONFIG_MSIX_VECTOR, &line.config_vector().to_le_bytes());
    put(NUM_QUEUES, &common.num_queues().to_le_bytes());
    put(DEVICE_STATUS, &[common.status()]);
    put(CONFIG_GENERATION, &[line.generation()]);
    put(QUEUE_SELECT, &queue.to_le_bytes());
    put(QUEUE_SIZE, &common.queue_size().to_le_bytes());
    put(QUEUE_MSIX_VECTOR, &line.queue_vector(queue).to_le_bytes());
    put(QUEUE_ENABLE, &u16::from(common.queue_ready()).to_le_bytes());
    // Queue n is notified at n times the multiplier.
    put(
        QUEUE_NOTIFY_OFF,
        &(if exists { queue } else { 0 }).to_le_bytes(),
    );
    put(
        QUEUE_DESC,
        &common.queue_addr(QueueAddr::Desc).to_le_bytes(),
    );
    put(
        QUEUE_DRIVER,
        &common.queue_addr(QueueAddr::Driver).to_le_bytes(),
    );
    put(
        QUEUE_DEVICE,
        &common.queue_addr(QueueAddr::Device).to_le_bytes(),
    );
    image
}

/// Whether a write of `data` at `offset` resets the device.
pub(super) fn is_reset(offset: u64, data: &[u8]) -> bool {
    offset == DEVICE_STATUS && *data == [0]
}

/// Writes the field at `offset`; what is not one, or may not be written, is ignored.
pub(super) fn write(common: &mut Common, line: &Line, offset: u64, data: &[u8]) {
    match *data {
        [value] if offset == DEVICE_STATUS => common.set_status(value),
        [a, b] => write_u16(common, line, offset, u16::from_le_bytes([a, b])),
        [a, b, c, d] => write_u32(common, offset, u32::from_le_bytes([a, b, c, d])),
        [a, b, c, d, e, f, g, h] if offset.is_multiple_of(8) => {
            write_u32(common, offset, u32::from_le_bytes([a, b, c, d]));
            write_u32(common, offset + 4, u32::from_le_bytes([e, f, g, h]));
        }
        _ => {}
    }
}

fn write_u16(common: &mut Common, line: &Line, offset: u64, value: u16) {
    match offset {
        CONFIG_MSIX_VECTOR => line.set_config_vector(value),
        QUEUE_SELECT => common.select_queue(value),
        QUEUE_SIZE => common.set_queue_size(value),
        QUEUE_MSIX_VECTOR => line.set_queue_vector(common.selected_queue(), value),
        // A driver cannot disable a queue without RING_RESET.
        QUEUE_ENABLE if value == 1 => common.set_queue_ready(true),
        _ => {}
    }
}

fn write_u32(common: &mut Common, offset: u64, value: u32) {
    let which = match offset {
        DEVICE_FEATURE_SELECT => return common.select_device_features(value),
        DRIVER_FEATURE_SELECT => return common.select_driver_features(value),
        DRIVER_FEATURE => return common.set_driver_features(value),
        QUEUE_DESC | 0x24 => QueueAddr::Desc,
        QUEUE_DRIVER | 0x2c => QueueAddr::Driver,
        QUEUE_DEVICE | 0x34 => QueueAddr::Device,
        _ => return,
    };
    common.set_queue_addr(which, offset & 4 != 0, value);
}
