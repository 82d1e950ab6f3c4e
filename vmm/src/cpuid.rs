//! What `cpuid` tells the guest: all that KVM supports, and a topology of our own.
//!
//! KVM passes the host's topology through, which is wrong for the guest. Ours is one package with
//! `cpus` cores of one thread each; a CPU's APIC id is its number.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

/// Why there is no CPUID table.
#[derive(Debug, thiserror::Error)]
#[error("the CPU feature list has too many entries")]
pub struct CpuidError;

/// CPUID of CPU `id` of `cpus`, from what KVM supports.
///
/// # Errors
/// Fails when the table outgrows what KVM accepts.
pub fn for_cpu(
    supported: &CpuId,
    id: u8,
    cpus: u8,
    tsc_deadline: bool,
) -> Result<CpuId, CpuidError> {
    let topology = Topology { id, cpus };
    let mut entries: Vec<_> = supported
        .as_slice()
        .iter()
        .filter(|entry| !matches!(entry.function, LEAF_TOPOLOGY | LEAF_TOPOLOGY_V2))
        .copied()
        .collect();
    let max_leaf = entries
        .iter()
        .find(|entry| entry.function == 0)
        .map_or(0, |entry| entry.eax);
    for entry in &mut entries {
        topology.adjust(entry, tsc_deadline);
    }
    entries.extend(topology.levels(LEAF_TOPOLOGY));
    if max_leaf >= LEAF_TOPOLOGY_V2 {
        entries.extend(topology.levels(LEAF_TOPOLOGY_V2));
    }
    CpuId::from_entries(&entries).map_err(|_| CpuidError)
}

/// Extended topology enumeration.
const LEAF_TOPOLOGY: u32 = 0xb;
/// The same, version 2.
const LEAF_TOPOLOGY_V2: u32 = 0x1f;

const EDX1_HTT: u32 = 1 << 28;
const ECX1_TSC_DEADLINE: u32 = 1 << 24;
const ECX1_HYPERVISOR: u32 = 1 << 31;
/// AMD: `EBX[23:16]` of leaf 1 counts cores, not threads.
const ECX8_1_CMP_LEGACY: u32 = 1 << 1;

struct Topology {
    id: u8,
    cpus: u8,
}

impl Topology {
    fn id(&self) -> u32 {
        u32::from(self.id)
    }

    fn cpus(&self) -> u32 {
        u32::from(self.cpus)
    }

    /// Bits of an APIC id that number the cores.
    fn core_bits(&self) -> u32 {
        self.cpus().next_power_of_two().trailing_zeros()
    }

    fn adjust(&self, entry: &mut kvm_cpuid_entry2, tsc_deadline: bool) {
        match entry.function {
            0 => entry.eax = entry.eax.max(LEAF_TOPOLOGY),
            1 => {
                let ids = (1 << self.core_bits()).min(255);
                entry.ebx = (entry.ebx & 0xffff) | (ids << 16) | (self.id() << 24);
                entry.ecx |= ECX1_HYPERVISOR;
                set(&mut entry.ecx, ECX1_TSC_DEADLINE, tsc_deadline);
                set(&mut entry.edx, EDX1_HTT, self.cpus > 1);
            }
            // Deterministic cache parameters; the type is 0 past the last cache.
            4 if entry.eax & 0x1f != 0 => {
                let cores = (1 << self.core_bits()) - 1;
                entry.eax = (entry.eax & 0x3fff) | (self.sharing(entry.eax) << 14) | (cores << 26);
            }
            // Performance counters: none.
            0xa => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
            0x8000_0001 => {
                let amd_style = entry.ecx & ECX8_1_CMP_LEGACY != 0;
                set(
                    &mut entry.ecx,
                    ECX8_1_CMP_LEGACY,
                    amd_style && self.cpus > 1,
                );
            }
            0x8000_0008 => {
                entry.ecx = (entry.ecx & !0xf0ff) | (self.core_bits() << 12) | (self.cpus() - 1);
            }
            0x8000_001d if entry.eax & 0x1f != 0 => {
                entry.eax = (entry.eax & !(0xfff << 14)) | (self.sharing(entry.eax) << 14);
            }
            // One thread per core, one node.
            0x8000_001e => {
                (entry.eax, entry.ebx, entry.ecx, entry.edx) = (self.id(), self.id(), 0, 0);
            }
            _ => {}
        }
    }

    /// Number of CPUs, less one, that share a cache: all share the third level, none the others.
    fn sharing(&self, eax: u32) -> u32 {
        let level = (eax >> 5) & 7;
        if level >= 3 {
            (1 << self.core_bits()) - 1
        } else {
            0
        }
    }

    /// Leaf 0xB or 0x1F: a level of threads, one of cores, and the end.
    fn levels(&self, function: u32) -> [kvm_cpuid_entry2; 3] {
        const THREADS: u32 = 1 << 8;
        const CORES: u32 = 2 << 8;
        let level = |index, bits, count, kind| kvm_cpuid_entry2 {
            function,
            index,
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            eax: bits,
            ebx: count,
            ecx: kind | index,
            edx: self.id(),
            ..Default::default()
        };
        [
            level(0, 0, 1, THREADS),
            level(1, self.core_bits(), self.cpus(), CORES),
            level(2, 0, 0, 0),
        ]
    }
}

fn set(word: &mut u32, bit: u32, on: bool) {
    if on { *word |= bit } else { *word &= !bit }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(function: u32, index: u32, regs: [u32; 4]) -> kvm_cpuid_entry2 {
        let [eax, ebx, ecx, edx] = regs;
        kvm_cpuid_entry2 {
            function,
            index,
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        }
    }

    fn guest(id: u8, cpus: u8) -> Vec<kvm_cpuid_entry2> {
        let host = [
            leaf(0, 0, [0x1f, 0, 0, 0]),
            leaf(1, 0, [0, 0x7710_0800, 1, EDX1_HTT]),
            leaf(4, 0, [0xfc00_4121, 0, 0, 0]),
            leaf(4, 3, [0xfc00_4163, 0, 0, 0]),
            leaf(4, 4, [0; 4]),
            leaf(0xa, 0, [7; 4]),
            leaf(0xb, 0, [9; 4]),
            leaf(0xb, 1, [9; 4]),
            leaf(0x1f, 0, [9; 4]),
            leaf(0x8000_0008, 0, [0x3028, 0, 0x503f, 0]),
            leaf(0x8000_001e, 0, [9; 4]),
        ];
        let host = CpuId::from_entries(&host).unwrap();
        for_cpu(&host, id, cpus, true).unwrap().as_slice().to_vec()
    }

    fn find(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> [u32; 4] {
        let mut found = entries
            .iter()
            .filter(|e| e.function == function && e.index == index);
        let e = found.next().expect("no such leaf");
        assert!(found.next().is_none(), "leaf {function:#x}.{index} twice");
        [e.eax, e.ebx, e.ecx, e.edx]
    }

    #[test]
    fn apic_ids_agree_everywhere() {
        let entries = guest(2, 3);
        assert_eq!(find(&entries, 1, 0)[1], 0x0204_0800);
        for function in [0xb, 0x1f] {
            for index in 0..3 {
                assert_eq!(find(&entries, function, index)[3], 2);
            }
        }
        assert_eq!(find(&entries, 0x8000_001e, 0), [2, 2, 0, 0]);
    }

    #[test]
    fn three_cores_of_one_thread() {
        let entries = guest(0, 3);
        assert_eq!(find(&entries, 0xb, 0)[..3], [0, 1, 0x100]);
        assert_eq!(find(&entries, 0xb, 1)[..3], [2, 3, 0x201]);
        assert_eq!(find(&entries, 0xb, 2)[..3], [0, 0, 2]);
        assert_eq!(find(&entries, 0x8000_0008, 0)[2], 0x2002);
        // Cores - 1 in the top six bits; L1 is private, L3 shared by four ids.
        assert_eq!(find(&entries, 4, 0)[0], 0x0c00_0121);
        assert_eq!(find(&entries, 4, 3)[0], 0x0c00_c163);
        assert_eq!(find(&entries, 4, 4)[0], 0);
    }

    #[test]
    fn one_cpu_has_no_siblings() {
        let entries = guest(0, 1);
        let [_, ebx, ecx, edx] = find(&entries, 1, 0);
        assert_eq!((ebx >> 16, edx & EDX1_HTT), (1, 0));
        assert_eq!(
            ecx & (ECX1_HYPERVISOR | ECX1_TSC_DEADLINE),
            ECX1_HYPERVISOR | ECX1_TSC_DEADLINE
        );
        assert_eq!(find(&entries, 0xb, 1)[..3], [0, 1, 0x201]);
        assert_eq!(find(&entries, 0xa, 0), [0; 4]);
    }

    #[test]
    fn most_cpus_fit() {
        let entries = guest(253, 254);
        assert_eq!(find(&entries, 1, 0)[1] >> 16, 0xfdff);
        assert_eq!(find(&entries, 0x8000_0008, 0)[2], 0x80fd);
    }
}
