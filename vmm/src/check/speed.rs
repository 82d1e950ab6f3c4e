//! How fast KVM runs a guest's kernel code.
//!
//! A KVM that emulates supervisor instructions looks like any other until a kernel never finishes
//! to boot on it. So a tiny guest runs a loop at privilege level 0, and is timed.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use kvm_ioctls::VcpuExit;
use vm_memory::{Bytes as _, GuestAddress};

use super::{Item, State};
use crate::kvm::{DEVICE, Kvm, KvmError};
use crate::regs::Entry;
use crate::{memory, regs};

/// Turns of the first loop, two instructions each.
const TURNS: u32 = 10_000;
/// Turns of the second loop.
const MORE_TURNS: u32 = 10 * TURNS;
/// Instructions a turn.
const PER_TURN: f64 = 2.0;
/// A slow real CPU is far above, an emulator far below.
const USABLE_MIPS: f64 = 10.0;
const CODE_AT: u64 = 0x1_0000;
const MEMORY: u64 = 2 << 20;

/// Whether KVM works, and how many million instructions a second it runs.
pub(super) fn kvm() -> (Item, Option<f64>) {
    let name = "kvm";
    let no = |detail, hint: Option<&str>| {
        let hint = hint.unwrap_or("see the kernel log").to_owned();
        (
            Item {
                name,
                state: State::No,
                detail,
                hint: Some(hint),
            },
            None,
        )
    };
    let kvm = match Kvm::open() {
        Ok(kvm) => kvm,
        Err(error @ KvmError::Open(_)) => {
            return no(format!("{:#}", anyhow::Error::new(error)), None);
        }
        Err(error) => return no(error.to_string(), error.hint()),
    };
    let mips = match speed(&kvm) {
        Ok(mips) => mips,
        Err(error) => return no(format!("{error:#}"), None),
    };
    let detail = format!("`{DEVICE}` runs {mips:.1} million supervisor instructions a second");
    let item = if mips >= USABLE_MIPS {
        Item {
            name,
            state: State::Yes,
            detail,
            hint: None,
        }
    } else {
        let hint = "KVM emulates the guest's kernel here: tiny guests only; boot kernels elsewhere, \
                    or in a nested machine";
        Item {
            name,
            state: State::Slow,
            detail,
            hint: Some(hint.to_owned()),
        }
    };
    (item, Some(mips))
}

/// Millions of instructions a second.
///
/// Entering a guest costs page faults and, in a nested machine, many milliseconds; so what counts
/// is how much longer a longer loop takes.
fn speed(kvm: &Kvm) -> anyhow::Result<f64> {
    let best = |turns: u32| -> anyhow::Result<Duration> {
        let mut best = Duration::MAX;
        for _ in 0..3 {
            best = best.min(measure(kvm, turns)?);
            // No entry takes that long; the loop does, and again would.
            if best > Duration::from_millis(100) {
                break;
            }
        }
        Ok(best)
    };
    let (short, long) = (best(TURNS)?, best(MORE_TURNS)?);
    // Noise may make the difference vanish, but not more than this of it is noise.
    let spent = long
        .saturating_sub(short)
        .max(long / 20)
        .max(Duration::from_nanos(1));
    Ok(f64::from(MORE_TURNS - TURNS) * PER_TURN / spent.as_secs_f64() / 1e6)
}

/// Times the loop, from entry to its `hlt`.
fn measure(kvm: &Kvm, turns: u32) -> anyhow::Result<Duration> {
    let memory = memory::create(MEMORY, memory::Backing::Private)?;
    let mut code = vec![0xb9]; // mov ecx, turns
    code.extend(turns.to_le_bytes());
    code.extend([0x49, 0x75, 0xfd, 0xf4]); // 1: dec ecx; jnz 1b; hlt
    memory
        .write_slice(&code, GuestAddress(CODE_AT))
        .context("cannot write a guest")?;
    let entry = Entry::Pvh {
        rip: CODE_AT,
        start_info: 0,
    };
    regs::write_tables(&memory, entry).context("cannot write a guest")?;
    let vm = kvm.create_bare_vm(&memory)?;
    let mut vcpu = vm.create_vcpu(0)?;
    vcpu.set_cpuid(&kvm.supported_cpuid()?)?;
    regs::set_entry(&vcpu, entry)?;
    let start = Instant::now();
    loop {
        match vcpu.run() {
            Ok(VcpuExit::Hlt) => return Ok(start.elapsed()),
            Ok(VcpuExit::Intr) => {}
            Ok(exit) => anyhow::bail!("KVM cannot run a tiny guest: {exit:?}"),
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {}
            Err(error) => anyhow::bail!("KVM cannot run a tiny guest: {error}"),
        }
    }
}
