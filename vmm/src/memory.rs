//! Guest RAM, in one or two regions around the hole below 4 GiB.
//!
//! Nothing is touched or reserved up front, so a page costs host memory only once the guest or the
//! loader writes to it.
//!
//! RAM is private memory by default, because the host gives that huge pages, which a memfd gets only
//! where the administrator changed `shmem_enabled`. Fewer faults and shorter walks make a guest boot
//! faster: `cargo xtask bench lab` shows it. Where another process is to map the same RAM (a
//! vhost-user back-end), `--memory SIZE,shared` makes it a memfd.

use std::io;
use std::sync::Arc;

use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, VolatileMemory as _};

use crate::layout::{ACPI_END, ACPI_TABLES, HIGH_RAM, HOLE_END, HOLE_START, LOW_RAM_END};
use crate::sys;

/// Why guest RAM cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// No memfd of that size.
    #[error("cannot create a memory file of {0} MiB")]
    Memfd(u64, #[source] io::Error),
    /// The file could not be mapped.
    #[error("cannot map {0} MiB of guest memory")]
    Map(u64, #[source] vm_memory::mmap::MmapRegionError),
    /// The regions do not make an address space.
    #[error("cannot lay out guest memory")]
    Layout(#[source] vm_memory::GuestRegionCollectionError),
    /// A region ends beyond the address space.
    #[error("guest memory of {0} MiB exceeds the address space")]
    TooLarge(u64),
}

/// One range of guest RAM, and where it is in the memfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RamRange {
    /// First guest physical address.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// Offset in the memfd.
    pub offset: u64,
}

/// Lays out `size` bytes of RAM around the hole.
pub fn ram_ranges(size: u64) -> Vec<RamRange> {
    let low = size.min(HOLE_START);
    let mut ranges = vec![RamRange {
        start: 0,
        len: low,
        offset: 0,
    }];
    if size > low {
        ranges.push(RamRange {
            start: HOLE_END,
            len: size - low,
            offset: low,
        });
    }
    ranges
}

/// What guest RAM is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Memory of this process alone, in huge pages where the host has them.
    Private,
    /// A memfd that other processes can map.
    Shared,
}

/// Maps `size` bytes of guest RAM; `size` is a multiple of the page size.
///
/// # Errors
/// Fails when the host refuses the file or the mapping.
pub fn create(size: u64, backing: Backing) -> Result<GuestMemoryMmap, MemoryError> {
    let mib = size >> 20;
    let memfd = match backing {
        Backing::Private => None,
        Backing::Shared => Some(Arc::new(
            sys::memfd(c"wonton-ram", size).map_err(|error| MemoryError::Memfd(mib, error))?,
        )),
    };
    let mut regions = Vec::new();
    for range in ram_ranges(size) {
        let len = usize::try_from(range.len).map_err(|_| MemoryError::TooLarge(mib))?;
        let builder =
            MmapRegionBuilder::new(len).with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE);
        let builder = match &memfd {
            Some(memfd) => builder
                .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
                .with_file_offset(FileOffset::from_arc(memfd.clone(), range.offset)),
            None => builder
                .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE),
        };
        let mapping = builder
            .build()
            .map_err(|error| MemoryError::Map(mib, error))?;
        if memfd.is_none() {
            sys::prefer_huge_pages(&mapping.as_volatile_slice());
        }
        let region = GuestRegionMmap::new(mapping, GuestAddress(range.start))
            .ok_or(MemoryError::TooLarge(mib))?;
        regions.push(region);
    }
    GuestMemoryMmap::from_regions(regions).map_err(MemoryError::Layout)
}

/// What a range of the memory map is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MapKind {
    /// RAM.
    Ram = 1,
    /// Not for the guest to use.
    Reserved = 2,
    /// ACPI tables.
    Acpi = 3,
}

/// One entry of the memory map that the guest is told (e820, and PVH's own).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapEntry {
    /// First address.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// What it is.
    pub kind: MapKind,
}

/// The memory map for a guest with `size` bytes of RAM.
pub fn memory_map(size: u64) -> Vec<MapEntry> {
    let entry = |start, end: u64, kind| MapEntry {
        start,
        len: end - start,
        kind,
    };
    let mut map = vec![
        entry(0, LOW_RAM_END, MapKind::Ram),
        entry(LOW_RAM_END, ACPI_TABLES, MapKind::Reserved),
        entry(ACPI_TABLES, ACPI_END, MapKind::Acpi),
    ];
    for range in ram_ranges(size) {
        let start = range.start.max(HIGH_RAM);
        map.push(entry(start, range.start + range.len, MapKind::Ram));
    }
    map
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes as _, GuestMemoryBackend as _};

    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn ram_goes_around_the_hole() {
        let range = |start, len, offset| RamRange { start, len, offset };
        assert_eq!(ram_ranges(GIB), [range(0, GIB, 0)]);
        assert_eq!(ram_ranges(3 * GIB), [range(0, 3 * GIB, 0)]);
        assert_eq!(
            ram_ranges(5 * GIB),
            [range(0, 3 * GIB, 0), range(4 * GIB, 2 * GIB, 3 * GIB)]
        );
    }

    #[test]
    fn memory_map_is_sorted_and_holds_all_high_ram() {
        for size in [128 << 20, 3 * GIB, 3 * GIB + 4096, 8 * GIB] {
            let map = memory_map(size);
            for pair in map.windows(2) {
                assert!(pair[0].start + pair[0].len <= pair[1].start, "{pair:?}");
            }
            let ram: u64 = map
                .iter()
                .filter(|e| e.kind == MapKind::Ram)
                .map(|e| e.len)
                .sum();
            assert_eq!(ram, size - (HIGH_RAM - LOW_RAM_END));
        }
    }

    #[test]
    fn shared_memory_is_a_file_of_which_only_what_is_touched_takes_room() {
        let memory = create(5 * GIB, Backing::Shared).unwrap();
        memory.write_obj(7u8, GuestAddress(4 * GIB)).unwrap();
        assert!(memory.write_obj(7u8, GuestAddress(HOLE_START)).is_err());
        let region = memory.iter().next().unwrap();
        let file = region.file_offset().unwrap().arc().clone();
        use std::os::unix::fs::MetadataExt as _;
        assert!(file.metadata().unwrap().blocks() * 512 <= 4 << 20);
    }

    #[test]
    fn private_memory_spans_the_hole_and_is_no_file() {
        let memory = create(5 * GIB, Backing::Private).unwrap();
        memory.write_obj(7u8, GuestAddress(4 * GIB)).unwrap();
        assert_eq!(memory.read_obj::<u8>(GuestAddress(4 * GIB)).unwrap(), 7);
        assert!(memory.write_obj(7u8, GuestAddress(HOLE_START)).is_err());
        assert!(memory.iter().all(|region| region.file_offset().is_none()));
    }
}
