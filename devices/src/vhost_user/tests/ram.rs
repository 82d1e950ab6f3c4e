//! A guest's memory in a file: several regions, in another order there than the guest sees them.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::VhostUserMemoryRegionInfo;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

use crate::testing::{RAM_LEN, REGION_BORDER};

const PAGE: u64 = 4096;

/// One region: its place in the guest, in the front-end and in the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Region {
    pub(super) guest: u64,
    pub(super) size: u64,
    pub(super) user: u64,
    pub(super) offset: u64,
}

pub(super) struct Ram {
    pub(super) file: Arc<File>,
    pub(super) regions: Vec<Region>,
}

pub(super) fn memfd(name: &str, len: u64) -> File {
    let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC).unwrap());
    ftruncate(&file, len).unwrap();
    file
}

impl Ram {
    pub(super) fn new() -> Self {
        // The first ring, the other rings, and the buffers, which lie across the last border.
        let borders = [0, 0x20_0000, REGION_BORDER, RAM_LEN];
        let mut offset = 0;
        let mut regions = Vec::new();
        for (guest, end) in borders.into_iter().zip(borders.into_iter().skip(1)).rev() {
            let number = regions.len() as u64;
            regions.push(Region {
                guest,
                size: end - guest,
                user: 0x7000_0000_0000 + (number << 32) + guest,
                offset,
            });
            offset += (end - guest).next_multiple_of(PAGE);
        }
        Self {
            file: Arc::new(memfd("guest", offset)),
            regions,
        }
    }

    /// The guest's own view.
    pub(super) fn guest(&self) -> GuestMemoryMmap {
        let mut ranges: Vec<_> = self
            .regions
            .iter()
            .map(|region| {
                (
                    GuestAddress(region.guest),
                    usize::try_from(region.size).unwrap(),
                    Some(FileOffset::from_arc(self.file.clone(), region.offset)),
                )
            })
            .collect();
        ranges.sort_by_key(|range| range.0);
        GuestMemoryMmap::from_ranges_with_files(ranges).unwrap()
    }

    /// What a message says of `region`.
    pub(super) fn info(&self, region: Region) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: region.guest,
            memory_size: region.size,
            userspace_addr: region.user,
            mmap_offset: region.offset,
            mmap_handle: self.file.as_raw_fd(),
        }
    }

    pub(super) fn table(&self) -> Vec<VhostUserMemoryRegionInfo> {
        self.regions.iter().map(|&region| self.info(region)).collect()
    }

    /// Where the front-end sees guest address `guest`.
    pub(super) fn user(&self, guest: u64) -> u64 {
        let region = self
            .regions
            .iter()
            .find(|region| guest >= region.guest && guest - region.guest < region.size)
            .unwrap();
        region.user + (guest - region.guest)
    }
}
