//! PVH start info: how an ELF kernel with a PVH note is told where everything is.

use linux_loader::loader::elf::start_info::{
    hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use super::Initrd;
use crate::layout::{CMDLINE, PVH_MEMMAP, PVH_MODULES, PVH_START_INFO};
use crate::memory::MapEntry;

const MAGIC: u32 = 0x336e_c578;
/// The first version with a memory map.
const VERSION: u32 = 1;

/// Writes start info, module list and memory map.
pub(super) fn write(
    memory: &GuestMemoryMmap,
    initrd: Option<Initrd>,
    map: &[MapEntry],
    rsdp: u64,
) -> Result<(), GuestMemoryError> {
    let mut info = hvm_start_info {
        magic: MAGIC,
        version: VERSION,
        cmdline_paddr: CMDLINE,
        rsdp_paddr: rsdp,
        memmap_paddr: PVH_MEMMAP,
        ..Default::default()
    };
    if let Some(initrd) = initrd {
        let module = hvm_modlist_entry {
            paddr: initrd.start,
            size: initrd.len,
            ..Default::default()
        };
        memory.write_obj(module, GuestAddress(PVH_MODULES))?;
        info.nr_modules = 1;
        info.modlist_paddr = PVH_MODULES;
    }
    let len = size_of::<hvm_memmap_table_entry>();
    for (at, entry) in (PVH_MEMMAP..).step_by(len).zip(map) {
        let entry = hvm_memmap_table_entry {
            addr: entry.start,
            size: entry.len,
            type_: entry.kind as u32,
            reserved: 0,
        };
        memory.write_obj(entry, GuestAddress(at))?;
        info.memmap_entries += 1;
    }
    memory.write_obj(info, GuestAddress(PVH_START_INFO))
}
