//! All talk with KVM, and errors that say what to do.
#![expect(
    unsafe_code,
    reason = "guest memory is registered by address; a signal handler kicks vCPUs"
)]

use std::cell::Cell;
use std::io;
use std::os::fd::{FromRawFd as _, IntoRawFd as _};
use std::ptr;
use std::sync::Arc;

use kvm_bindings::{
    CpuId, KVM_API_VERSION, KVM_MAX_CPUID_ENTRIES, KVM_MAX_IRQ_ROUTES, KvmIrqRouting, Msrs,
    kvm_irq_routing_entry, kvm_lapic_state, kvm_msr_entry, kvm_regs, kvm_sregs,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, IoEventAddress, NoDatamatch, VcpuExit, VcpuFd, VmFd};
use vm_memory::{GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _};
use vmm_sys_util::errno;
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

use crate::layout;

/// Most interrupt routes that a VM can have.
pub const MAX_ROUTES: u32 = KVM_MAX_IRQ_ROUTES as u32;

/// Where KVM is.
pub const DEVICE: &str = "/dev/kvm";

/// Why KVM does not do what we want.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// There is no KVM.
    #[error("cannot open `{DEVICE}`: no such device")]
    Missing,
    /// There is, but not for us.
    #[error("cannot open `{DEVICE}`: permission denied")]
    Denied,
    /// There is, but it does not open.
    #[error("cannot open `{DEVICE}`")]
    Open(#[source] io::Error),
    /// Something else answers.
    #[error("`{DEVICE}` speaks API version {0}, not {KVM_API_VERSION}")]
    Version(i32),
    /// It lacks something that cannot be done without.
    #[error("KVM lacks {0}")]
    Capability(&'static str),
    /// More CPUs than it can have.
    #[error("KVM allows {max} CPUs, not {asked}")]
    TooManyCpus {
        /// Asked for.
        asked: u8,
        /// Possible.
        max: usize,
    },
    /// A call failed.
    #[error("KVM cannot {what}")]
    Call {
        /// What it was to do.
        what: &'static str,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

impl KvmError {
    /// What to do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Missing => Some(
                "load the module kvm-intel or kvm-amd; if that fails, enable virtualization in the \
                 firmware, or nested virtualization in the hypervisor",
            ),
            Self::Denied => Some("add yourself to the group kvm, then log in again"),
            _ => None,
        }
    }

    fn open(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => Self::Missing,
            Some(libc::EACCES | libc::EPERM) => Self::Denied,
            _ => Self::Open(error),
        }
    }
}

impl From<KvmError> for io::Error {
    fn from(error: KvmError) -> Self {
        match error {
            KvmError::Call { what, source } => {
                Self::new(source.kind(), format!("KVM cannot {what}: {source}"))
            }
            other => Self::other(other),
        }
    }
}

/// Names what was tried when a call fails.
fn call<T>(what: &'static str, result: Result<T, errno::Error>) -> Result<T, KvmError> {
    result.map_err(|error| KvmError::Call {
        what,
        source: error.into(),
    })
}

/// An open `/dev/kvm`.
pub struct Kvm(kvm_ioctls::Kvm);

impl Kvm {
    /// Opens `/dev/kvm`.
    ///
    /// # Errors
    /// [`KvmError::Missing`], [`KvmError::Denied`] and [`KvmError::Version`] are the likely ones.
    pub fn open() -> Result<Self, KvmError> {
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(DEVICE)
            .map_err(KvmError::open)?;
        // SAFETY: the descriptor is open on /dev/kvm, and ownership moves with it.
        let kvm = unsafe { kvm_ioctls::Kvm::from_raw_fd(file.into_raw_fd()) };
        match kvm.get_api_version() {
            version if version == KVM_API_VERSION as i32 => Ok(Self(kvm)),
            version => Err(KvmError::Version(version)),
        }
    }

    /// The CPU features that KVM can give a guest.
    ///
    /// # Errors
    /// As the call.
    pub fn supported_cpuid(&self) -> Result<CpuId, KvmError> {
        call(
            "list CPU features",
            self.0.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES),
        )
    }

    /// Whether the local APIC has a TSC-deadline timer; KVM does not say so in CPUID.
    pub fn tsc_deadline(&self) -> bool {
        self.0.check_extension(Cap::TscDeadlineTimer)
    }

    /// A VM over `memory`, without interrupt controllers.
    ///
    /// # Errors
    /// As the calls.
    pub fn create_bare_vm(&self, memory: &GuestMemoryMmap) -> Result<Vm, KvmError> {
        let fd = call("create a VM", self.0.create_vm())?;
        if self.0.check_extension(Cap::SetTssAddr) {
            call("place its TSS", fd.set_tss_address(layout::KVM_TSS))?;
        }
        if self.0.check_extension(Cap::SetIdentityMapAddr) {
            let set = fd.set_identity_map_address(layout::KVM_IDENTITY_MAP);
            call("place its identity map", set)?;
        }
        let vm = Vm {
            fd: Arc::new(fd),
            _memory: memory.clone(),
        };
        vm.register_memory(memory)?;
        Ok(vm)
    }

    /// A VM over `memory` for up to `cpus` CPUs, with the IOAPIC and local APICs in the kernel.
    ///
    /// There is no PIT: the guest is told of none (hardware-reduced ACPI).
    ///
    /// # Errors
    /// As the calls.
    pub fn create_vm(&self, memory: &GuestMemoryMmap, cpus: u8) -> Result<Vm, KvmError> {
        let needed = [
            (Cap::Irqchip, "an in-kernel interrupt controller"),
            (Cap::Irqfd, "irqfd"),
            (Cap::IrqRouting, "interrupt routes"),
            (Cap::Ioeventfd, "ioeventfd"),
            (Cap::ImmediateExit, "immediate_exit"),
            (Cap::UserMemory, "user memory regions"),
        ];
        if let Some((_, what)) = needed
            .into_iter()
            .find(|(cap, _)| !self.0.check_extension(*cap))
        {
            return Err(KvmError::Capability(what));
        }
        let max = self.0.get_max_vcpus();
        if usize::from(cpus) > max {
            return Err(KvmError::TooManyCpus { asked: cpus, max });
        }
        let vm = self.create_bare_vm(memory)?;
        call("create interrupt controllers", vm.fd.create_irq_chip())?;
        Ok(vm)
    }
}

/// A VM; clones are the same one. Keeps its memory mapped for as long as it lives.
#[derive(Clone)]
pub struct Vm {
    fd: Arc<VmFd>,
    _memory: GuestMemoryMmap,
}

impl Vm {
    fn register_memory(&self, memory: &GuestMemoryMmap) -> Result<(), KvmError> {
        for (slot, region) in (0..).zip(memory.iter()) {
            let region = kvm_userspace_memory_region {
                slot,
                flags: 0,
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: region.as_ptr() as u64,
            };
            // SAFETY: the range is a live mapping of ours that `self._memory` keeps alive for as
            // long as the VM can run, and that Rust code only accesses as volatile memory.
            let result = unsafe { self.fd.set_user_memory_region(region) };
            call("register guest memory", result)?;
        }
        Ok(())
    }

    /// Makes writes to `event` raise interrupt `gsi`.
    ///
    /// # Errors
    /// As the call.
    pub fn irqfd(&self, event: &EventFd, gsi: u32) -> Result<(), KvmError> {
        call("attach an interrupt", self.fd.register_irqfd(event, gsi))
    }

    /// Makes the guest's 32-bit store of `value` to `address` write to `event`, without an exit.
    ///
    /// # Errors
    /// As the call.
    pub fn ioeventfd(&self, event: &EventFd, address: u64, value: u32) -> Result<(), KvmError> {
        let address = IoEventAddress::Mmio(address);
        call(
            "attach a doorbell",
            self.fd.register_ioevent(event, &address, value),
        )
    }

    /// Ends what [`Self::irqfd`] began.
    ///
    /// # Errors
    /// As the call.
    pub fn remove_irqfd(&self, event: &EventFd, gsi: u32) -> Result<(), KvmError> {
        call("detach an interrupt", self.fd.unregister_irqfd(event, gsi))
    }

    /// Makes the guest's store of any size to `address` write to `event`, without an exit.
    ///
    /// # Errors
    /// As the call.
    pub fn any_ioeventfd(&self, event: &EventFd, address: u64) -> Result<(), KvmError> {
        let address = IoEventAddress::Mmio(address);
        call(
            "attach a doorbell",
            self.fd.register_ioevent(event, &address, NoDatamatch),
        )
    }

    /// Ends what [`Self::any_ioeventfd`] began.
    ///
    /// # Errors
    /// As the call.
    pub fn remove_any_ioeventfd(&self, event: &EventFd, address: u64) -> Result<(), KvmError> {
        let address = IoEventAddress::Mmio(address);
        call(
            "detach a doorbell",
            self.fd.unregister_ioevent(event, &address, NoDatamatch),
        )
    }

    /// Makes `routes` all that there are, at most [`MAX_ROUTES`].
    ///
    /// # Errors
    /// As the call; the routes are then as before.
    pub fn set_routes(&self, routes: &[kvm_irq_routing_entry]) -> Result<(), KvmError> {
        let what = "route interrupts";
        let routes = KvmIrqRouting::from_entries(routes).map_err(|error| KvmError::Call {
            what,
            source: io::Error::other(format!("{error:?}")),
        })?;
        call(what, self.fd.set_gsi_routing(&routes))
    }

    /// Makes CPU `id`.
    ///
    /// # Errors
    /// As the call.
    pub fn create_vcpu(&self, id: u8) -> Result<Vcpu, KvmError> {
        let fd = call("create a CPU", self.fd.create_vcpu(u64::from(id)))?;
        Ok(Vcpu { fd })
    }
}

/// One CPU of a VM.
pub struct Vcpu {
    fd: VcpuFd,
}

impl Vcpu {
    /// Says which features the CPU has.
    ///
    /// # Errors
    /// As the call.
    pub fn set_cpuid(&self, cpuid: &CpuId) -> Result<(), KvmError> {
        call("set CPU features", self.fd.set_cpuid2(cpuid))
    }

    /// Sets one model-specific register; false when KVM refuses the value.
    ///
    /// # Errors
    /// As the call.
    pub fn set_msr(&self, index: u32, data: u64) -> Result<bool, KvmError> {
        let entry = kvm_msr_entry {
            index,
            data,
            ..Default::default()
        };
        let what = "set a model-specific register";
        // The list is too long only beyond KVM_MAX_MSR_ENTRIES.
        let Ok(msrs) = Msrs::from_entries(&[entry]) else {
            return Ok(false);
        };
        Ok(call(what, self.fd.set_msrs(&msrs))? == 1)
    }

    /// The general registers.
    ///
    /// # Errors
    /// As the call.
    pub fn regs(&self) -> Result<kvm_regs, KvmError> {
        call("read registers", self.fd.get_regs())
    }

    /// Sets the general registers.
    ///
    /// # Errors
    /// As the call.
    pub fn set_regs(&self, regs: &kvm_regs) -> Result<(), KvmError> {
        call("set registers", self.fd.set_regs(regs))
    }

    /// The segment and control registers.
    ///
    /// # Errors
    /// As the call.
    pub fn sregs(&self) -> Result<kvm_sregs, KvmError> {
        call("read system registers", self.fd.get_sregs())
    }

    /// Sets the segment and control registers.
    ///
    /// # Errors
    /// As the call.
    pub fn set_sregs(&self, sregs: &kvm_sregs) -> Result<(), KvmError> {
        call("set system registers", self.fd.set_sregs(sregs))
    }

    /// The local APIC's registers.
    ///
    /// # Errors
    /// As the call.
    pub fn lapic(&self) -> Result<kvm_lapic_state, KvmError> {
        call("read the local APIC", self.fd.get_lapic())
    }

    /// Sets the local APIC's registers.
    ///
    /// # Errors
    /// As the call.
    pub fn set_lapic(&self, lapic: &kvm_lapic_state) -> Result<(), KvmError> {
        call("set the local APIC", self.fd.set_lapic(lapic))
    }

    /// The guest physical address behind a guest virtual one.
    pub fn translate(&self, address: u64) -> Option<u64> {
        let found = self.fd.translate_gva(address).ok()?;
        (found.valid != 0).then_some(found.physical_address)
    }

    /// KVM's own words on an internal error: suberror and data.
    pub fn internal_error(&mut self) -> (u32, Vec<u64>) {
        let run = self.fd.get_kvm_run();
        // SAFETY: plain integers, for which any bits are valid; the caller saw that exit.
        let internal = unsafe { run.__bindgen_anon_1.internal };
        let len = (internal.ndata as usize).min(internal.data.len());
        (internal.suberror, internal.data[..len].to_vec())
    }

    /// Runs the CPU until something needs us.
    ///
    /// # Errors
    /// EINTR and EAGAIN mean "nothing yet"; the rest is fatal.
    pub fn run(&mut self) -> Result<VcpuExit<'_>, errno::Error> {
        self.fd.run()
    }

    /// Makes [`kick_signal`] sent to this thread end the current or the next [`Self::run`].
    pub fn accept_kicks(&mut self) {
        let flag: *mut u8 = &raw mut self.fd.get_kvm_run().immediate_exit;
        IMMEDIATE_EXIT.set(flag);
    }

    /// Lets [`Self::run`] run again after a kick.
    pub fn kick_done(&mut self) {
        self.fd.set_kvm_immediate_exit(0);
    }
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        // The page that the flag is in goes away with the CPU. Others' flags are in other threads.
        IMMEDIATE_EXIT.set(ptr::null_mut());
    }
}

thread_local! {
    /// `immediate_exit` of the CPU that this thread runs.
    static IMMEDIATE_EXIT: Cell<*mut u8> = const { Cell::new(ptr::null_mut()) };
}

/// The signal that kicks a vCPU's thread out of the guest.
pub fn kick_signal() -> libc::c_int {
    SIGRTMIN()
}

/// Installs the handler of [`kick_signal`].
///
/// # Errors
/// Fails when the system has no real-time signals.
pub fn install_kick_handler() -> Result<(), KvmError> {
    call(
        "install a signal handler",
        register_signal_handler(kick_signal(), on_kick),
    )
}

extern "C" fn on_kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let flag = IMMEDIATE_EXIT.get();
    if !flag.is_null() {
        // A signal that comes just before KVM_RUN would be lost; the flag, which KVM reads first,
        // is not.
        // SAFETY: points to a byte of this thread's kvm_run page; `Vcpu::drop` clears the pointer
        // before the page is unmapped, and only this thread and the kernel touch the byte.
        unsafe { flag.write_volatile(1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_errors_are_told_apart() {
        let error = |code| KvmError::open(io::Error::from_raw_os_error(code));
        assert!(matches!(error(libc::ENOENT), KvmError::Missing));
        assert!(matches!(error(libc::EACCES), KvmError::Denied));
        assert!(matches!(error(libc::EMFILE), KvmError::Open(_)));
        assert!(error(libc::ENOENT).hint().is_some());
        assert!(error(libc::EACCES).hint().is_some());
    }
}
