//! Where everything is in the guest's physical address space.
//!
//! | address | what |
//! | --- | --- |
//! | `0x0000_0500` | boot GDT and, at `0x520`, an empty IDT |
//! | `0x0000_6000` | PVH start info, module list, memory map |
//! | `0x0000_7000` | zero page (`struct boot_params`) |
//! | `0x0000_8ff0` | top of the boot stack |
//! | `0x0000_9000` | boot page tables: PML4, PDPT, four page directories (first 4 GiB, identity) |
//! | `0x0002_0000` | kernel command line |
//! | `0x0009_fc00` | end of low RAM as told to the guest |
//! | `0x000e_0000` | ACPI tables, RSDP first |
//! | `0x0010_0000` | high RAM: kernel, initrd at its top |
//! | `0xc000_0000` | the hole below 4 GiB: no RAM |
//! | `0xd000_0000` | virtio-mmio register pages |
//! | `0xe000_0000` | window for the BARs of PCI functions |
//! | `0xfec0_0000` | IOAPIC |
//! | `0xfee0_0000` | local APICs |
//! | `0xfffb_c000` | KVM's identity-map page and, behind it, its TSS (three pages) |
//! | `0x1_0000_0000` | the rest of RAM |
//!
//! | port | what |
//! | --- | --- |
//! | `0x064` | keyboard controller command: reset only |
//! | `0x3f8` | COM1, GSI 4 |
//! | `0x600` | ACPI sleep control, sleep status and reset |
//! | `0xcf8` | PCI configuration mechanism #1 |

use devices::pci::BarRange;

/// Boot GDT.
pub const BOOT_GDT: u64 = 0x500;
/// Boot IDT, empty.
pub const BOOT_IDT: u64 = 0x520;
/// PVH `hvm_start_info`.
pub const PVH_START_INFO: u64 = 0x6000;
/// PVH module list.
pub const PVH_MODULES: u64 = 0x6100;
/// PVH memory map.
pub const PVH_MEMMAP: u64 = 0x6200;
/// Zero page.
pub const ZERO_PAGE: u64 = 0x7000;
/// Top of the boot stack.
pub const BOOT_STACK: u64 = 0x8ff0;
/// Top-level boot page table.
pub const PML4: u64 = 0x9000;
/// Second-level boot page table.
pub const PDPT: u64 = 0xa000;
/// First of four boot page directories.
pub const PAGE_DIRECTORIES: u64 = 0xb000;
/// Kernel command line.
pub const CMDLINE: u64 = 0x2_0000;
/// Room for the command line, its final NUL included.
pub const CMDLINE_MAX: usize = 0x1_0000;
/// End of low RAM.
pub const LOW_RAM_END: u64 = 0x9_fc00;
/// ACPI tables. Guests also look for the RSDP from here to 1 MiB, on 16-byte boundaries.
pub const ACPI_TABLES: u64 = 0xe_0000;
/// End of the ACPI tables.
pub const ACPI_END: u64 = 0x10_0000;
/// Start of high RAM.
pub const HIGH_RAM: u64 = 0x10_0000;
/// Start of the hole below 4 GiB.
pub const HOLE_START: u64 = 0xc000_0000;
/// End of the hole.
pub const HOLE_END: u64 = 0x1_0000_0000;
/// First virtio-mmio register page.
pub const VIRTIO_MMIO_BASE: u64 = 0xd000_0000;
/// Distance between, and size of, virtio-mmio register pages.
pub const VIRTIO_MMIO_STRIDE: u64 = 0x1000;
/// Interrupt of the first virtio-mmio device; the others follow.
pub const VIRTIO_MMIO_GSI: u32 = 5;
/// Memory window for the BARs of PCI functions.
pub const PCI_WINDOW: BarRange = BarRange {
    base: 0xe000_0000,
    len: 0x1000_0000,
};
/// Last interrupt of the IOAPIC.
pub const LAST_GSI: u32 = 23;
/// IOAPIC registers.
pub const IOAPIC: u32 = 0xfec0_0000;
/// Local APIC registers.
pub const LOCAL_APIC: u32 = 0xfee0_0000;
/// KVM's identity-map page.
pub const KVM_IDENTITY_MAP: u64 = 0xfffb_c000;
/// KVM's TSS.
pub const KVM_TSS: usize = 0xfffb_d000;
/// Keyboard controller command port.
pub const I8042_PORT: u16 = 0x64;
/// COM1's first port.
pub const COM1_PORT: u16 = 0x3f8;
/// Number of COM1's ports.
pub const COM1_LEN: u16 = 8;
/// COM1's interrupt.
pub const COM1_GSI: u32 = 4;
/// ACPI sleep and reset port.
pub const POWER_PORT: u16 = 0x600;

/// Where one virtio-mmio device is: drives both its DSDT entry and its wiring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VirtioSlot {
    /// Its register page.
    pub base: u64,
    /// Its interrupt.
    pub gsi: u32,
}

/// How the guest finds the virtio devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VirtioPlaces {
    /// By these slots.
    Mmio(Vec<VirtioSlot>),
    /// On PCI bus 0, by looking.
    Pci,
}

/// Slots of the first `count` virtio-mmio devices; fewer when interrupts run out.
pub fn virtio_slots(count: usize) -> Vec<VirtioSlot> {
    (VIRTIO_MMIO_GSI..=LAST_GSI)
        .zip((VIRTIO_MMIO_BASE..).step_by(VIRTIO_MMIO_STRIDE as usize))
        .take(count)
        .map(|(gsi, base)| VirtioSlot { base, gsi })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_distinct_and_bounded() {
        let slots = virtio_slots(100);
        assert_eq!(slots.len(), 19);
        assert_eq!(
            slots[0],
            VirtioSlot {
                base: 0xd000_0000,
                gsi: 5
            }
        );
        assert_eq!(
            slots[18],
            VirtioSlot {
                base: 0xd001_2000,
                gsi: 23
            }
        );
    }

    #[test]
    fn boot_structures_do_not_overlap() {
        let starts = [
            BOOT_GDT,
            BOOT_IDT,
            PVH_START_INFO,
            PVH_MODULES,
            PVH_MEMMAP,
            ZERO_PAGE,
        ];
        assert!(starts.is_sorted());
        let ends = [
            BOOT_STACK,
            PML4,
            PDPT,
            PAGE_DIRECTORIES,
            CMDLINE,
            LOW_RAM_END,
            ACPI_TABLES,
        ];
        assert!(ends.is_sorted());
        assert!(CMDLINE + CMDLINE_MAX as u64 <= LOW_RAM_END);
    }
}
