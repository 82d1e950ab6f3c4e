//! Message interrupts and doorbells of PCI functions, by KVM.
//!
//! KVM raises an MSI for an irqfd whose GSI is routed to that message. Pins of the IOAPIC are GSIs
//! 0 to 23; vectors get those behind them. `KVM_SET_GSI_ROUTING` replaces all routes, so the whole list
//! is kept here. A route stays when its vector is masked: that only takes away the irqfd.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use devices::pci::{MsiMessage, PciHost};
use vmm_sys_util::eventfd::EventFd;

use crate::kvm::{KvmError, MAX_ROUTES, Vm};
use crate::layout::LAST_GSI;

/// The message routes of a VM.
pub struct MsiRoutes {
    vm: Vm,
    table: Mutex<Table>,
}

struct Table {
    messages: BTreeMap<u32, MsiMessage>,
    free_gsi: u32,
}

impl MsiRoutes {
    /// No message routes yet.
    pub fn new(vm: Vm) -> Arc<Self> {
        let table = Mutex::new(Table {
            messages: BTreeMap::new(),
            free_gsi: LAST_GSI + 1,
        });
        Arc::new(Self { vm, table })
    }

    /// The host of a function with `vectors` vectors.
    ///
    /// # Errors
    /// Fails when the VM would have more routes than KVM keeps.
    pub fn host(self: &Arc<Self>, vectors: u16) -> io::Result<FunctionHost> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let first_gsi = table.free_gsi;
        let end = first_gsi + u32::from(vectors);
        // Pins of the PICs are routes too.
        if end + 16 > MAX_ROUTES {
            return Err(io::Error::other("too many interrupt vectors for KVM"));
        }
        table.free_gsi = end;
        Ok(FunctionHost {
            routes: self.clone(),
            first_gsi,
        })
    }

    fn route(&self, gsi: u32, message: MsiMessage) -> Result<(), KvmError> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let old = table.messages.insert(gsi, message);
        if old == Some(message) {
            return Ok(());
        }
        let result = self.vm.set_msi_routes(&table.messages);
        if result.is_err() {
            // KVM still has the list from before.
            match old {
                Some(old) => table.messages.insert(gsi, old),
                None => table.messages.remove(&gsi),
            };
        }
        result
    }
}

/// [`PciHost`] of one function.
pub struct FunctionHost {
    routes: Arc<MsiRoutes>,
    first_gsi: u32,
}

impl FunctionHost {
    fn gsi(&self, vector: u16) -> u32 {
        self.first_gsi + u32::from(vector)
    }
}

impl PciHost for FunctionHost {
    fn attach_msi(&mut self, vector: u16, event: &EventFd, message: MsiMessage) -> io::Result<()> {
        let gsi = self.gsi(vector);
        // The route first: an outstanding write is sent at once when the event is attached.
        self.routes.route(gsi, message)?;
        Ok(self.routes.vm.irqfd(event, gsi)?)
    }

    fn detach_msi(&mut self, vector: u16, event: &EventFd) -> io::Result<()> {
        Ok(self.routes.vm.remove_irqfd(event, self.gsi(vector))?)
    }

    fn attach_doorbell(&mut self, address: u64, event: &EventFd) -> io::Result<()> {
        Ok(self.routes.vm.any_ioeventfd(event, address)?)
    }

    fn detach_doorbell(&mut self, address: u64, event: &EventFd) -> io::Result<()> {
        Ok(self.routes.vm.remove_any_ioeventfd(event, address)?)
    }
}
