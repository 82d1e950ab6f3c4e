//! The state in which a boot CPU enters the kernel.

use kvm_bindings::{kvm_lapic_state, kvm_regs, kvm_segment, kvm_sregs};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use crate::kvm::{KvmError, Vcpu};
use crate::layout::{BOOT_GDT, BOOT_IDT, BOOT_STACK, PAGE_DIRECTORIES, PDPT, PML4, ZERO_PAGE};

/// How the boot CPU starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Linux's 64-bit entry: long mode, identity-mapped, RSI points to the zero page.
    Long {
        /// First instruction.
        rip: u64,
    },
    /// PVH: 32-bit protected mode without paging, EBX points to the start info.
    Pvh {
        /// First instruction.
        rip: u64,
        /// `hvm_start_info`.
        start_info: u64,
    },
}

const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// Reserved bit 1, always set.
const RFLAGS: u64 = 2;

/// Page is present and writable.
const PRESENT_WRITABLE: u64 = 3;
/// Entry maps a 2 MiB page.
const LARGE: u64 = 1 << 7;
const GIGABYTES: u64 = 4;

// Boot protocol: selectors 0x10 and 0x18 are flat code and data.
const CODE: u16 = 0x10;
const DATA: u16 = 0x18;
const TSS: u16 = 0x20;

/// Bits of a descriptor from its access byte up: as `kvm_segment` has them, one by one.
#[derive(Clone, Copy)]
struct Flags {
    kind: u8,
    system: bool,
    long: bool,
    wide: bool,
    granular: bool,
}

const CODE64: Flags = Flags {
    kind: 0xb,
    system: false,
    long: true,
    wide: false,
    granular: true,
};
const CODE32: Flags = Flags {
    kind: 0xb,
    system: false,
    long: false,
    wide: true,
    granular: true,
};
const FLAT: Flags = Flags {
    kind: 0x3,
    system: false,
    long: false,
    wide: true,
    granular: true,
};
const BUSY_TSS: Flags = Flags {
    kind: 0xb,
    system: true,
    long: false,
    wide: false,
    granular: false,
};

fn segment(selector: u16, flags: Flags) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: if flags.granular { u32::MAX } else { 0x67 },
        selector,
        type_: flags.kind,
        present: 1,
        dpl: 0,
        db: u8::from(flags.wide),
        s: u8::from(!flags.system),
        l: u8::from(flags.long),
        g: u8::from(flags.granular),
        ..Default::default()
    }
}

/// The 8-byte descriptor of `segment`, whose base is 0.
fn descriptor(segment: &kvm_segment) -> u64 {
    let limit = if segment.g == 1 {
        segment.limit >> 12
    } else {
        segment.limit
    };
    let access = segment.type_ | (segment.s << 4) | (segment.dpl << 5) | (segment.present << 7);
    let flags = (segment.l << 1) | (segment.db << 2) | (segment.g << 3);
    u64::from(limit & 0xffff)
        | (u64::from(access) << 40)
        | (u64::from(limit >> 16) << 48)
        | (u64::from(flags) << 52)
}

fn segments(entry: Entry) -> [kvm_segment; 3] {
    let code = if matches!(entry, Entry::Long { .. }) {
        CODE64
    } else {
        CODE32
    };
    [
        segment(CODE, code),
        segment(DATA, FLAT),
        segment(TSS, BUSY_TSS),
    ]
}

/// Writes the tables in memory that the registers will point to.
///
/// # Errors
/// Fails when guest memory ends before them.
pub fn write_tables(memory: &GuestMemoryMmap, entry: Entry) -> Result<(), GuestMemoryError> {
    let [code, data, tss] = segments(entry).map(|segment| descriptor(&segment));
    for (at, entry) in (BOOT_GDT..).step_by(8).zip([0, 0, code, data, tss]) {
        memory.write_obj(entry, GuestAddress(at))?;
    }
    memory.write_obj(0u64, GuestAddress(BOOT_IDT))?;
    if matches!(entry, Entry::Pvh { .. }) {
        return Ok(());
    }
    memory.write_obj(PDPT | PRESENT_WRITABLE, GuestAddress(PML4))?;
    for gigabyte in 0..GIGABYTES {
        let directory = PAGE_DIRECTORIES + gigabyte * 0x1000;
        memory.write_obj(
            directory | PRESENT_WRITABLE,
            GuestAddress(PDPT + gigabyte * 8),
        )?;
        let mut page = [0; 0x1000];
        for (index, slot) in (0..).zip(page.chunks_exact_mut(8)) {
            let address = (gigabyte << 30) + (index << 21);
            slot.copy_from_slice(&(address | PRESENT_WRITABLE | LARGE).to_le_bytes());
        }
        memory.write_slice(&page, GuestAddress(directory))?;
    }
    Ok(())
}

/// General registers at `entry`.
pub fn general(entry: Entry) -> kvm_regs {
    match entry {
        Entry::Long { rip } => kvm_regs {
            rip,
            rsi: ZERO_PAGE,
            rsp: BOOT_STACK,
            rbp: BOOT_STACK,
            rflags: RFLAGS,
            ..Default::default()
        },
        Entry::Pvh { rip, start_info } => kvm_regs {
            rip,
            rbx: start_info,
            rflags: RFLAGS,
            ..Default::default()
        },
    }
}

/// Segment and control registers at `entry`; what is not ours (the APIC base) stays.
pub fn system(entry: Entry, mut sregs: kvm_sregs) -> kvm_sregs {
    let [code, data, tss] = segments(entry);
    sregs.cs = code;
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = tss;
    (sregs.gdt.base, sregs.gdt.limit) = (BOOT_GDT, 5 * 8 - 1);
    (sregs.idt.base, sregs.idt.limit) = (BOOT_IDT, 7);
    sregs.cr0 = CR0_PE | CR0_ET;
    sregs.cr4 = 0;
    if matches!(entry, Entry::Long { .. }) {
        sregs.cr0 |= CR0_PG;
        sregs.cr3 = PML4;
        sregs.cr4 = CR4_PAE;
        sregs.efer |= EFER_LME | EFER_LMA;
    }
    sregs
}

/// Puts a boot CPU at `entry`.
///
/// # Errors
/// Fails when KVM refuses.
pub fn set_entry(vcpu: &Vcpu, entry: Entry) -> Result<(), KvmError> {
    vcpu.set_sregs(&system(entry, vcpu.sregs()?))?;
    vcpu.set_regs(&general(entry))
}

/// Wires the local APIC as firmware leaves it: LINT0 takes the PIC's interrupts, LINT1 NMIs.
///
/// # Errors
/// Fails when KVM refuses.
pub fn set_lapic(vcpu: &Vcpu) -> Result<(), KvmError> {
    const LVT_LINT0: usize = 0x350;
    const LVT_LINT1: usize = 0x360;
    const EXT_INT: u32 = 7 << 8;
    const NMI: u32 = 4 << 8;
    let mut lapic = vcpu.lapic()?;
    set_delivery_mode(&mut lapic, LVT_LINT0, EXT_INT);
    set_delivery_mode(&mut lapic, LVT_LINT1, NMI);
    vcpu.set_lapic(&lapic)
}

fn set_delivery_mode(lapic: &mut kvm_lapic_state, at: usize, mode: u32) {
    let mut bytes = [0; 4];
    for (byte, reg) in bytes.iter_mut().zip(&lapic.regs[at..]) {
        *byte = reg.to_ne_bytes()[0];
    }
    let value = (u32::from_le_bytes(bytes) & !0x700) | mode;
    for (byte, reg) in value.to_le_bytes().into_iter().zip(&mut lapic.regs[at..]) {
        *reg = std::ffi::c_char::from_ne_bytes([byte]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_the_well_known_ones() {
        let [code, data, tss] = segments(Entry::Long { rip: 0 }).map(|s| descriptor(&s));
        assert_eq!(code, 0x00af_9b00_0000_ffff);
        assert_eq!(data, 0x00cf_9300_0000_ffff);
        assert_eq!(tss, 0x0000_8b00_0000_0067);
        let [code, ..] = segments(Entry::Pvh {
            rip: 0,
            start_info: 0,
        })
        .map(|s| descriptor(&s));
        assert_eq!(code, 0x00cf_9b00_0000_ffff);
    }

    #[test]
    fn page_tables_map_four_gigabytes() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        write_tables(&memory, Entry::Long { rip: 0 }).unwrap();
        let at = |address| memory.read_obj::<u64>(GuestAddress(address)).unwrap();
        assert_eq!(at(PML4), PDPT | 3);
        assert_eq!(at(PDPT + 24), (PAGE_DIRECTORIES + 0x3000) | 3);
        assert_eq!(at(PAGE_DIRECTORIES + 0x3ff8), 0xffe0_0083);
    }

    #[test]
    fn delivery_mode_keeps_the_rest() {
        let mut lapic = kvm_lapic_state::default();
        lapic.regs[0x352] = 1; // masked
        set_delivery_mode(&mut lapic, 0x350, 0x700);
        assert_eq!((lapic.regs[0x351], lapic.regs[0x352]), (7, 1));
    }
}
