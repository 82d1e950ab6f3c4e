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

/// Turns of the loop, two instructions each.
const TURNS: u32 = 10_000;
const INSTRUCTIONS: f64 = 20_000.0;
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
    // The first run pays for page faults and the like.
    let times = [measure(&kvm), measure(&kvm)];
    let best = times
        .into_iter()
        .collect::<anyhow::Result<Vec<_>>>()
        .map(|times| times.into_iter().min());
    let time = match best {
        Ok(time) => time.unwrap_or_default().max(Duration::from_nanos(1)),
        Err(error) => return no(format!("{error:#}"), None),
    };
    let mips = INSTRUCTIONS / time.as_secs_f64() / 1e6;
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

/// Times the loop, from entry to its `hlt`.
fn measure(kvm: &Kvm) -> anyhow::Result<Duration> {
    let memory = memory::create(MEMORY)?;
    let mut code = vec![0xb9]; // mov ecx, TURNS
    code.extend(TURNS.to_le_bytes());
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
