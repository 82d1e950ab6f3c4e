//! One thread per vCPU: runs the guest and carries its accesses to the buses.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kvm_bindings::{
    KVM_SYSTEM_EVENT_CRASH, KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN, kvm_segment,
};
use kvm_ioctls::VcpuExit;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::signal::Killable as _;

use crate::event_loop::{Event, Events};
use crate::exit::Exit;
use crate::kvm::{Vcpu, kick_signal};
use crate::machine::Machine;
use crate::timing;

/// Why a vCPU cannot go on.
#[derive(Debug)]
pub enum Stop {
    /// The guest powered off by way of KVM.
    PowerOff,
    /// The guest reset by way of KVM.
    Reset,
    /// The guest crashed its CPU, or KVM cannot run it: what happened, and a dump.
    Fault(String),
    /// A thread of ours died.
    Panic,
}

impl Stop {
    /// The exit it leads to.
    pub fn exit(&self) -> Exit {
        match self {
            Self::PowerOff => Exit::PowerOff,
            Self::Reset => Exit::Reset,
            Self::Fault(_) => Exit::GuestFault,
            Self::Panic => Exit::HostError,
        }
    }

    /// What to tell the user.
    pub fn describe(&self) -> Option<&str> {
        match self {
            Self::PowerOff | Self::Reset => None,
            Self::Fault(text) => Some(text),
            Self::Panic => Some("its thread panicked"),
        }
    }
}

/// What a vCPU's thread needs.
struct Context {
    id: u8,
    vcpu: Vcpu,
    machine: Arc<Machine>,
    memory: GuestMemoryMmap,
    stop: Arc<AtomicBool>,
    boot_timer: bool,
}

/// The running vCPUs.
pub struct Vcpus {
    threads: Vec<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
}

/// How long [`Vcpus::stop`] waits for a thread that is stuck in a device.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

impl Vcpus {
    /// Starts all of `vcpus`, the boot CPU last.
    ///
    /// # Errors
    /// Fails when a thread cannot be started; those that were are then stopped.
    pub fn start(
        vcpus: Vec<Vcpu>,
        machine: &Arc<Machine>,
        memory: &GuestMemoryMmap,
        events: &Events,
        boot_timer: bool,
    ) -> std::io::Result<Self> {
        let mut all = Self {
            threads: Vec::new(),
            stop: Arc::default(),
        };
        for (id, vcpu) in (0..=u8::MAX)
            .zip(vcpus)
            .collect::<Vec<_>>()
            .into_iter()
            .rev()
        {
            let context = Context {
                id,
                vcpu,
                machine: machine.clone(),
                memory: memory.clone(),
                stop: all.stop.clone(),
                boot_timer: boot_timer && id == 0,
            };
            let events = events.clone();
            let thread = thread::Builder::new()
                .name(format!("vcpu{id}"))
                .spawn(move || run_and_report(context, events))?;
            all.threads.push(thread);
        }
        Ok(all)
    }

    /// Makes them leave the guest, and waits until they have.
    fn stop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let deadline = Instant::now() + STOP_TIMEOUT;
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && Instant::now() < deadline {
                // One kick ends KVM_RUN for sure; more are for a thread in another system call.
                let _ = thread.kill(kick_signal());
                thread::sleep(Duration::from_micros(200));
            }
            if thread.is_finished() {
                let _ = thread.join();
            } else {
                tracing::warn!(
                    thread = thread.thread().name(),
                    "does not stop; leaving it behind"
                );
            }
        }
    }
}

impl Drop for Vcpus {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Tells the main thread when the vCPU's thread unwinds.
struct PanicGuard(u8, Events);

impl Drop for PanicGuard {
    fn drop(&mut self) {
        if thread::panicking() {
            self.1.send(Event::Vcpu(self.0, Stop::Panic));
        }
    }
}

fn run_and_report(context: Context, events: Events) {
    let id = context.id;
    let guard = PanicGuard(id, events);
    if let Some(stop) = context.run() {
        guard.1.send(Event::Vcpu(id, stop));
    }
}

/// What an exit leads to.
enum Next {
    Continue,
    Stop(Stop),
    /// Describe the state of the CPU.
    Dump(String),
    InternalError,
}

impl Context {
    /// Runs until the guest cannot go on, or (`None`) we are told to stop.
    fn run(mut self) -> Option<Stop> {
        self.vcpu.accept_kicks();
        if self.boot_timer {
            let time = timing::since_exec();
            eprintln!(
                "boot timer: {:.1} ms from exec to the first KVM_RUN",
                time.as_secs_f64() * 1e3
            );
        }
        loop {
            // `stop` is set before the kick, and the kick makes the next run return at once.
            if self.stop.load(Ordering::SeqCst) {
                return None;
            }
            let next = match self.vcpu.run() {
                Ok(exit) => handle(exit, &self.machine),
                Err(error) => match error.errno() {
                    libc::EINTR | libc::EAGAIN => {
                        self.vcpu.kick_done();
                        Next::Continue
                    }
                    _ => Next::Dump(format!("KVM_RUN failed: {error}")),
                },
            };
            let what = match next {
                Next::Continue => continue,
                Next::Stop(stop) => return Some(stop),
                Next::Dump(what) => what,
                Next::InternalError => {
                    let (suberror, data) = self.vcpu.internal_error();
                    format!("KVM internal error {suberror}, data {data:#x?}")
                }
            };
            return Some(Stop::Fault(self.dump(what)));
        }
    }

    /// `what` happened, then registers and instruction bytes as far as they can be had.
    fn dump(&self, what: String) -> String {
        let mut text = what;
        let (Ok(r), Ok(s)) = (self.vcpu.regs(), self.vcpu.sregs()) else {
            text.push_str("\nits registers cannot be read");
            return text;
        };
        let words = [
            [
                ("rip", r.rip),
                ("rflags", r.rflags),
                ("rsp", r.rsp),
                ("rbp", r.rbp),
            ],
            [
                ("rax", r.rax),
                ("rbx", r.rbx),
                ("rcx", r.rcx),
                ("rdx", r.rdx),
            ],
            [("rsi", r.rsi), ("rdi", r.rdi), ("r8", r.r8), ("r9", r.r9)],
            [
                ("r10", r.r10),
                ("r11", r.r11),
                ("r12", r.r12),
                ("r13", r.r13),
            ],
            [
                ("r14", r.r14),
                ("r15", r.r15),
                ("cr0", s.cr0),
                ("cr2", s.cr2),
            ],
            [
                ("cr3", s.cr3),
                ("cr4", s.cr4),
                ("efer", s.efer),
                ("apic", s.apic_base),
            ],
        ];
        if (s.cs.base, r.rip) == RESET_VECTOR {
            text.push_str("\nKVM has reset the CPU, as it does on AMD: what it was doing is lost");
        }
        // Writing to a String cannot fail.
        for row in words {
            text.push('\n');
            for (name, value) in row {
                let _ = write!(text, "  {name:>6} {value:016x}");
            }
        }
        for (name, segment) in [("cs", &s.cs), ("ss", &s.ss), ("ds", &s.ds), ("tr", &s.tr)] {
            let kvm_segment {
                base,
                limit,
                selector,
                type_,
                l,
                db,
                ..
            } = *segment;
            let _ = write!(
                text,
                "\n  {name:>6} {selector:04x} base {base:x} limit {limit:x} type {type_:x} l {l} db {db}"
            );
        }
        let _ = write!(
            text,
            "\n     gdt {:x}+{:x}  idt {:x}+{:x}",
            s.gdt.base, s.gdt.limit, s.idt.base, s.idt.limit
        );
        let mut code = [0; 16];
        let bytes = self
            .vcpu
            .translate(s.cs.base.wrapping_add(r.rip))
            .and_then(|address| {
                self.memory
                    .read_slice(&mut code, GuestAddress(address))
                    .ok()
            });
        match bytes {
            Some(()) => {
                let _ = write!(text, "\n    code {code:02x?}");
            }
            None => text.push_str("\n    code not mapped"),
        }
        text
    }
}

/// Code segment base and instruction pointer of a CPU after reset.
const RESET_VECTOR: (u64, u64) = (0xffff_0000, 0xfff0);

fn handle(exit: VcpuExit<'_>, machine: &Machine) -> Next {
    match exit {
        VcpuExit::IoIn(port, data) => {
            // Nothing there: the lines float high, as on a real bus.
            if !machine.pio.read(u64::from(port), data) {
                data.fill(0xff);
            }
        }
        VcpuExit::IoOut(port, data) => {
            machine.pio.write(u64::from(port), data);
        }
        VcpuExit::MmioRead(address, data) => {
            if !machine.mmio.read(address, data) {
                data.fill(0xff);
            }
        }
        VcpuExit::MmioWrite(address, data) => {
            machine.mmio.write(address, data);
        }
        // With the interrupt controller in the kernel, a halted CPU waits there.
        VcpuExit::Hlt | VcpuExit::Intr | VcpuExit::IrqWindowOpen | VcpuExit::IoapicEoi(_) => {}
        VcpuExit::Shutdown => return Next::Dump("triple fault: the guest crashed".to_owned()),
        VcpuExit::SystemEvent(kind, _) => match kind {
            KVM_SYSTEM_EVENT_SHUTDOWN => return Next::Stop(Stop::PowerOff),
            KVM_SYSTEM_EVENT_RESET => return Next::Stop(Stop::Reset),
            KVM_SYSTEM_EVENT_CRASH => return Next::Dump("the guest reports a crash".to_owned()),
            _ => return Next::Dump(format!("unknown system event {kind}")),
        },
        VcpuExit::FailEntry(reason, cpu) => {
            return Next::Dump(format!(
                "CPU refuses to enter the guest: reason {reason:#x} on host cpu {cpu}"
            ));
        }
        VcpuExit::InternalError => return Next::InternalError,
        other => return Next::Dump(format!("unexpected exit {other:?}")),
    }
    Next::Continue
}
