//! Model-specific registers that firmware would have set; all others start as KVM makes them.

use crate::kvm::{KvmError, Vcpu};

/// `IA32_MISC_ENABLE`.
const MISC_ENABLE: u32 = 0x1a0;
/// Fast string operations are on.
const MISC_ENABLE_FAST_STRING: u64 = 1;
/// `IA32_MTRR_DEF_TYPE`.
const MTRR_DEF_TYPE: u32 = 0x2ff;
/// MTRRs are on, and without any range all memory is write-back. Linux takes memory for uncached,
/// and complains, when they are off.
const MTRR_ON_WRITE_BACK: u64 = (1 << 11) | 6;

/// What to set, on every CPU.
const BOOT: [(u32, u64); 2] = [
    (MISC_ENABLE, MISC_ENABLE_FAST_STRING),
    (MTRR_DEF_TYPE, MTRR_ON_WRITE_BACK),
];

/// Sets them. One that KVM refuses is logged: the guest runs without, if slower.
///
/// # Errors
/// Fails when the call does.
pub fn set_boot_msrs(vcpu: &Vcpu) -> Result<(), KvmError> {
    for (index, value) in BOOT {
        if !vcpu.set_msr(index, value)? {
            tracing::warn!(index = format_args!("{index:#x}"), "KVM refuses a register");
        }
    }
    Ok(())
}
