//! `wonton run`: from a validated configuration to an exit code.

use std::sync::Arc;

use anyhow::Context as _;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

use crate::boot::{self, Source};
use crate::config::RunConfig;
use crate::event_loop::{self, Input, STOP_SIGNALS};
use crate::exit::Exit;
use crate::kvm::{self, Kvm, Vcpu, Vm};
use crate::layout::ACPI_TABLES;
use crate::machine::Machine;
use crate::regs::Entry;
use crate::sys::{self, SignalFd};
use crate::terminal::RawMode;
use crate::vcpu::Vcpus;
use crate::{acpi, cpuid, memory, msrs, regs};

/// Boots the guest and stays until something ends it.
///
/// # Errors
/// Fails when the host cannot do what `config` asks for.
pub fn run(config: RunConfig) -> anyhow::Result<Exit> {
    sys::raise_descriptor_limit();
    // Before any thread: they inherit the mask.
    let signals = SignalFd::new(&STOP_SIGNALS).context("cannot collect signals")?;
    kvm::install_kick_handler()?;
    let kvm = Kvm::open()?;
    let memory = memory::create(config.memory, config.backing)?;
    let source = Source {
        kernel: &config.kernel,
        initrd: config.initrd.as_deref(),
        cmdline: &config.cmdline,
    };
    let entry = boot::load(&memory, config.memory, source)?;
    let vm = kvm.create_vm(&memory, config.cpus)?;
    let (events, queue) = event_loop::event_queue().context("cannot make an event queue")?;
    let machine = Arc::new(Machine::new(
        &vm,
        &memory,
        config.net.as_ref(),
        config.transport,
        &events,
    )?);
    write_platform(&memory, config.cpus, entry, &machine)?;
    let vcpus = make_vcpus(&kvm, &vm, config.cpus, entry)?;

    let room = machine
        .serial_room()
        .context("cannot watch the serial port")?;
    let raw = RawMode::enter().context("cannot set up the terminal")?;
    let escape = raw.is_some() && config.escape;
    if escape {
        eprintln!("Ctrl-A X quits, Ctrl-A Ctrl-A sends Ctrl-A");
    }
    let input = Input::new(machine.com1.clone(), room, escape);
    let vcpus = Vcpus::start(vcpus, &machine, &memory, &events, config.boot_timer)
        .context("cannot start a vCPU")?;
    let exit = event_loop::run(&queue, &signals, input).context("cannot wait for events")?;
    drop(vcpus);
    Ok(exit)
}

/// What firmware would have left in memory: ACPI tables, descriptor and page tables.
fn write_platform(
    memory: &GuestMemoryMmap,
    cpus: u8,
    entry: Entry,
    machine: &Machine,
) -> anyhow::Result<()> {
    let tables = acpi::tables(cpus, &machine.places);
    memory
        .write_slice(&tables, GuestAddress(ACPI_TABLES))
        .context("cannot write ACPI tables")?;
    regs::write_tables(memory, entry).context("cannot write boot tables")
}

/// CPUs ready to run: the first at `entry`, the others waiting for its start-up interrupt.
fn make_vcpus(kvm: &Kvm, vm: &Vm, cpus: u8, entry: Entry) -> anyhow::Result<Vec<Vcpu>> {
    let supported = kvm.supported_cpuid()?;
    let tsc_deadline = kvm.tsc_deadline();
    let mut vcpus = Vec::new();
    for id in 0..cpus {
        let vcpu = vm.create_vcpu(id)?;
        vcpu.set_cpuid(&cpuid::for_cpu(&supported, id, cpus, tsc_deadline)?)?;
        msrs::set_boot_msrs(&vcpu)?;
        regs::set_lapic(&vcpu)?;
        if id == 0 {
            regs::set_entry(&vcpu, entry)?;
        }
        vcpus.push(vcpu);
    }
    Ok(vcpus)
}
