//! ACPI tables: how the guest finds its CPUs, interrupts, devices and the off switch.
//!
//! The platform is hardware-reduced (ACPI 6.5, 4.1): no PIC, PIT, SCI or fixed buttons. Linux then
//! knows no legacy interrupts, so COM1 must be described in the DSDT to have one. Stock cloud
//! kernels look at nothing but ACPI: without a MADT they see one CPU and no IOAPIC.
//!
//! ```text
//!   RSDP -> XSDT -> FADT -> DSDT (_S5_, COM1, virtio-mmio devices or a PCI root)
//!               \-> MADT (local APICs, IOAPIC, overrides)
//! ```

use acpi_tables::aml::{
    AddressSpace as Resource, AddressSpaceCacheable, Device, EISAName, IO, Interrupt,
    Memory32Fixed, Name, ONE, Package, ResourceTemplate, ZERO,
};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, AmlSink};
use devices::pci::root::{CONFIG_PORTS, CONFIG_PORTS_LEN};
use zerocopy::{Immutable, IntoBytes};

use crate::layout::{
    ACPI_TABLES, COM1_GSI, COM1_LEN, COM1_PORT, IOAPIC, LOCAL_APIC, PCI_WINDOW, POWER_PORT,
    VIRTIO_MMIO_STRIDE, VirtioPlaces, VirtioSlot,
};

const OEM: [u8; 6] = *b"WONTON";
const TABLE: [u8; 8] = *b"WONTONVM";
const REVISION: u32 = 1;
/// Written to the power port to reset.
const RESET_VALUE: u8 = 1;
/// `SLP_TYP` of S5.
const S5: u8 = 5;
/// IA-PC boot architecture: no VGA, no CMOS clock. 8042 is absent by a clear bit.
const BOOT_ARCH: u16 = (1 << 2) | (1 << 5);

/// All tables for `cpus` CPUs and virtio devices at `places`, to be put at [`ACPI_TABLES`], where
/// the RSDP then is.
pub fn tables(cpus: u8, places: &VirtioPlaces) -> Vec<u8> {
    let mut area = Area::default();
    // The RSDP comes first but must know where the XSDT is; reserve its room.
    area.append(&vec![0; Rsdp::len()]);
    let dsdt = area.append(dsdt(places).as_slice());
    let fadt = area.append(&bytes(&fadt(dsdt)));
    let madt = area.append(&bytes(&madt(cpus)));
    let mut xsdt = XSDT::new(OEM, TABLE, REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = area.append(&bytes(&xsdt));
    let rsdp = bytes(&Rsdp::new(OEM, xsdt));
    area.0[..rsdp.len()].copy_from_slice(&rsdp);
    area.0
}

/// Tables one behind the other, on 16-byte boundaries.
#[derive(Default)]
struct Area(Vec<u8>);

impl Area {
    /// Returns the guest address of what was appended.
    fn append(&mut self, table: &[u8]) -> u64 {
        let at = self.0.len().next_multiple_of(16);
        self.0.resize(at, 0);
        self.0.extend(table);
        ACPI_TABLES + at as u64
    }
}

fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

fn fadt(dsdt: u64) -> acpi_tables::fadt::FADT {
    let port = GAS::new(
        AddressSpace::SystemIo,
        8,
        0,
        AccessSize::ByteAccess,
        u64::from(POWER_PORT),
    );
    let mut fadt = FADTBuilder::new(OEM, TABLE, REVISION)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        // These two say that there is no such fixed button.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .dsdt_64(dsdt);
    fadt.reset_reg = port;
    fadt.reset_value = RESET_VALUE;
    fadt.sleep_control_reg = port;
    fadt.sleep_status_reg = port;
    fadt.iapc_boot_arch = BOOT_ARCH.into();
    fadt.finalize()
}

fn madt(cpus: u8) -> MADT {
    let mut madt = MADT::new(
        OEM,
        TABLE,
        REVISION,
        LocalInterruptController::Address(LOCAL_APIC),
    );
    for id in 0..cpus {
        madt.add_structure(ProcessorLocalApic::new(id, id, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, IOAPIC, 0));
    madt.add_structure(SourceOverride::edge_high(COM1_GSI));
    madt.add_structure(LocalApicNmi::all_lint1());
    madt
}

/// Interrupt source override (ACPI 6.5, 5.2.12.5), which `acpi_tables` lacks.
#[repr(C, packed)]
#[derive(Clone, Copy, IntoBytes, Immutable)]
struct SourceOverride {
    kind: u8,
    len: u8,
    bus: u8,
    source: u8,
    gsi: u32,
    flags: u16,
}

impl SourceOverride {
    /// ISA interrupt `gsi` is that GSI, edge-triggered and active high.
    fn edge_high(gsi: u32) -> Self {
        let source = gsi as u8;
        Self {
            kind: 2,
            len: 10,
            bus: 0,
            source,
            gsi,
            flags: 0b0101,
        }
    }
}

/// Local APIC NMI (ACPI 6.5, 5.2.12.7).
#[repr(C, packed)]
#[derive(Clone, Copy, IntoBytes, Immutable)]
struct LocalApicNmi {
    kind: u8,
    len: u8,
    processor: u8,
    flags: u16,
    lint: u8,
}

impl LocalApicNmi {
    /// NMIs come in on LINT1 of every CPU.
    fn all_lint1() -> Self {
        Self {
            kind: 4,
            len: 6,
            processor: 0xff,
            flags: 0,
            lint: 1,
        }
    }
}

impl Aml for SourceOverride {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        sink.vec(self.as_bytes());
    }
}

impl Aml for LocalApicNmi {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        sink.vec(self.as_bytes());
    }
}

fn dsdt(places: &VirtioPlaces) -> Sdt {
    let mut aml = bytes(&Name::new("_S5_".into(), &Package::new(vec![&S5])));
    let port = IO::new(COM1_PORT, COM1_PORT, 0, COM1_LEN as u8);
    let resources = ResourceTemplate::new(vec![&edge_high(COM1_GSI), &port]).to_bytes();
    aml.extend(device(
        "_SB_.COM1",
        &EISAName::new("PNP0501"),
        &ZERO,
        &resources,
    ));
    match places {
        VirtioPlaces::Mmio(slots) => aml.extend(mmio_devices(slots)),
        VirtioPlaces::Pci => aml.extend(pci_root()),
    }
    let mut dsdt = Sdt::new(*b"DSDT", 36, 2, OEM, TABLE, REVISION);
    dsdt.append_slice(&aml);
    dsdt
}

fn mmio_devices(slots: &[VirtioSlot]) -> Vec<u8> {
    let mut aml = Vec::new();
    for (uid, slot) in (0u8..).zip(slots) {
        // `VIRTIO_MMIO_BASE` and all slots are below the hole's end.
        let registers = Memory32Fixed::new(true, slot.base as u32, VIRTIO_MMIO_STRIDE as u32);
        let resources = ResourceTemplate::new(vec![&registers, &edge_high(slot.gsi)]).to_bytes();
        let path = format!("_SB_.V{uid:03X}");
        aml.extend(device(&path, &"LNRO0005", &uid, &resources));
    }
    aml
}

/// The root of PCI bus 0: its number, the configuration ports, and where BARs may be. There is no
/// `_PRT`, as no function has an interrupt pin.
fn pci_root() -> Vec<u8> {
    let bus = Resource::new_bus_number(0u16, 0u16);
    let (first, count) = (CONFIG_PORTS as u16, CONFIG_PORTS_LEN as u8);
    let ports = IO::new(first, first, 1, count);
    // The window is below 4 GiB.
    let (base, last) = (PCI_WINDOW.base, PCI_WINDOW.base + PCI_WINDOW.len - 1);
    let cacheable = AddressSpaceCacheable::NotCacheable;
    let memory = Resource::new_memory(cacheable, true, base as u32, last as u32, None);
    let resources = ResourceTemplate::new(vec![&bus, &ports, &memory]).to_bytes();
    device("_SB_.PCI0", &EISAName::new("PNP0A03"), &ZERO, &resources)
}

fn edge_high(gsi: u32) -> Interrupt {
    Interrupt::new(true, true, false, false, gsi)
}

/// A device whose `_CRS` is `resources`, already encoded.
fn device(path: &str, hid: &dyn Aml, uid: &dyn Aml, resources: &[u8]) -> Vec<u8> {
    let hid = Name::new("_HID".into(), hid);
    let uid = Name::new("_UID".into(), uid);
    let coherent = Name::new("_CCA".into(), &ONE);
    let resources = Encoded(resources);
    let resources = Name::new("_CRS".into(), &resources);
    bytes(&Device::new(
        path.into(),
        vec![&hid, &uid, &coherent, &resources],
    ))
}

/// AML that was encoded before, so that what it borrowed may be gone.
struct Encoded<'a>(&'a [u8]);

impl Aml for Encoded<'_> {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        sink.vec(self.0);
    }
}

trait ToBytes {
    fn to_bytes(&self) -> Vec<u8>;
}

impl ToBytes for ResourceTemplate<'_> {
    fn to_bytes(&self) -> Vec<u8> {
        bytes(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{ACPI_END, virtio_slots};

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
    }

    fn u32_at(bytes: &[u8], at: usize) -> usize {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
    }

    fn offset_at(bytes: &[u8], at: usize) -> usize {
        let address = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        usize::try_from(address - ACPI_TABLES).unwrap()
    }

    /// The table at `at`, its checksum verified.
    fn table<'a>(all: &'a [u8], at: usize, signature: &[u8; 4]) -> &'a [u8] {
        let table = &all[at..at + u32_at(all, at + 4)];
        assert_eq!(&table[..4], signature);
        assert_eq!(sum(table), 0, "checksum of {signature:?}");
        table
    }

    #[test]
    fn chain_is_whole_and_sums_to_zero() {
        let all = tables(3, &VirtioPlaces::Mmio(virtio_slots(2)));
        assert!(ACPI_TABLES + all.len() as u64 <= ACPI_END);
        assert_eq!(&all[..8], b"RSD PTR ");
        assert_eq!((sum(&all[..20]), sum(&all[..36])), (0, 0));
        let xsdt = table(&all, offset_at(&all, 24), b"XSDT");
        let fadt = table(&all, offset_at(xsdt, 36), b"FACP");
        let madt = table(&all, offset_at(xsdt, 44), b"APIC");
        assert_eq!(xsdt.len(), 52);
        let dsdt = table(&all, offset_at(fadt, 140), b"DSDT");
        // HW_REDUCED, RESET_REG_SUP, no fixed buttons.
        assert_eq!(
            u32_at(fadt, 112),
            (1 << 20) | (1 << 10) | (1 << 5) | (1 << 4)
        );
        // Reset register: system I/O, 8 bits; then the value.
        assert_eq!(fadt[116..120], [1, 8, 0, 1]);
        assert_eq!((u32_at(fadt, 120), fadt[128]), (usize::from(POWER_PORT), 1));
        // Three CPUs, IOAPIC, override, NMI.
        assert_eq!(madt.len(), 44 + 3 * 8 + 12 + 10 + 6);
        assert_eq!(madt[44 + 2 * 8..][..4], [0, 8, 2, 2]);
        assert_eq!(dsdt.windows(8).filter(|w| w == b"LNRO0005").count(), 2);
        assert!(dsdt.windows(4).any(|w| w == b"_S5_"));
    }

    #[test]
    fn most_devices_and_cpus_fit() {
        let all = tables(254, &VirtioPlaces::Mmio(virtio_slots(100)));
        assert!(ACPI_TABLES + all.len() as u64 <= ACPI_END);
    }

    #[test]
    fn a_pci_root_takes_the_place_of_mmio_devices() {
        let all = tables(1, &VirtioPlaces::Pci);
        let has = |bytes: &[u8]| all.windows(bytes.len()).any(|window| window == bytes);
        assert!(has(b"PCI0") && !has(b"LNRO0005"));
        // _HID PNP0A03.
        assert!(has(&[0x0c, 0x41, 0xd0, 0x0a, 0x03]));
        // Ports 0xcf8 to 0xcff, 16-bit decode.
        assert!(has(&[0x47, 1, 0xf8, 0x0c, 0xf8, 0x0c, 1, 8]));
        // A dword memory range, fixed at both ends.
        let range = [0xe000_0000u32, 0xefff_ffff].map(u32::to_le_bytes).concat();
        assert!(has(&range));
    }
}
