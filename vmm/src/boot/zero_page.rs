//! The zero page: `struct boot_params` of the Linux x86 boot protocol.

use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use super::Initrd;
use crate::layout::{CMDLINE, ZERO_PAGE};
use crate::memory::MapEntry;

/// "Some loader that has no number of its own."
const TYPE_OF_LOADER: u8 = 0xff;
const BOOT_FLAG: u16 = 0xaa55;
const HDRS: u32 = u32::from_le_bytes(*b"HdrS");
const KERNEL_ALIGNMENT: u32 = 0x0100_0000;

/// Writes the zero page; `header` is the bzImage's own.
pub(super) fn write(
    memory: &GuestMemoryMmap,
    header: Option<setup_header>,
    initrd: Option<Initrd>,
    cmdline_len: usize,
    map: &[MapEntry],
    rsdp: u64,
) -> Result<(), GuestMemoryError> {
    let params = build(header, initrd, cmdline_len, map, rsdp);
    memory.write_obj(params, GuestAddress(ZERO_PAGE))
}

fn build(
    header: Option<setup_header>,
    initrd: Option<Initrd>,
    cmdline_len: usize,
    map: &[MapEntry],
    rsdp: u64,
) -> boot_params {
    let mut params = boot_params {
        hdr: header.unwrap_or(setup_header {
            boot_flag: BOOT_FLAG,
            header: HDRS,
            kernel_alignment: KERNEL_ALIGNMENT,
            ..Default::default()
        }),
        acpi_rsdp_addr: rsdp,
        ..Default::default()
    };
    params.hdr.type_of_loader = TYPE_OF_LOADER;
    // Both are below 4 GiB: layout and `Image::initrd_limit` see to that.
    params.hdr.cmd_line_ptr = CMDLINE as u32;
    params.hdr.cmdline_size = cmdline_len as u32;
    if let Some(initrd) = initrd {
        params.hdr.ramdisk_image = initrd.start as u32;
        params.hdr.ramdisk_size = initrd.len as u32;
    }
    for (slot, entry) in params.e820_table.iter_mut().zip(map) {
        *slot = boot_e820_entry {
            addr: entry.start,
            size: entry.len,
            r#type: entry.kind as u32,
        };
        params.e820_entries += 1;
    }
    params
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::memory_map;

    #[test]
    fn e820_is_the_memory_map() {
        let map = memory_map(5 << 30);
        let initrd = Initrd {
            start: 0x1000,
            len: 7,
        };
        let params = build(None, Some(initrd), 9, &map, 0xe0000);
        assert_eq!(usize::from(params.e820_entries), map.len());
        for (index, entry) in map.iter().enumerate() {
            let boot_e820_entry { addr, size, r#type } = params.e820_table[index];
            assert_eq!(
                (addr, size, r#type),
                (entry.start, entry.len, entry.kind as u32)
            );
        }
        let (image, size) = (params.hdr.ramdisk_image, params.hdr.ramdisk_size);
        assert_eq!((image, size), (0x1000, 7));
        let (rsdp, magic) = (params.acpi_rsdp_addr, params.hdr.header);
        assert_eq!((rsdp, magic), (0xe0000, HDRS));
    }
}
