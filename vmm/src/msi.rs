//! Message interrupts and doorbells of PCI functions, by KVM.
//!
//! KVM raises an MSI for an irqfd whose GSI is routed to that message. Pins of the IOAPIC are GSIs
//! 0 to 23; vectors get those behind them. `KVM_SET_GSI_ROUTING` replaces all routes, so the whole list
//! is kept here. A route stays when its vector is masked: that only takes away the irqfd.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use devices::pci::{MsiMessage, PciHost};
use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, kvm_irq_routing_entry, kvm_irq_routing_entry__bindgen_ty_1,
    kvm_irq_routing_irqchip, kvm_irq_routing_msi,
};
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
        if end + PIC_PINS > MAX_ROUTES {
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
        let messages = table.messages.iter();
        let mut routes = pin_routes();
        routes.extend(messages.map(|(gsi, message)| msi_route(*gsi, *message)));
        let result = self.vm.set_routes(&routes);
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

/// Pins of the two PICs, which have routes of their own.
const PIC_PINS: u32 = 16;

/// The routes that KVM makes with its interrupt controllers: each pin of the IOAPIC, and of the PICs.
fn pin_routes() -> Vec<kvm_irq_routing_entry> {
    let ioapic = (0..=LAST_GSI).map(|gsi| pin_route(gsi, KVM_IRQCHIP_IOAPIC, gsi));
    let pics = (0..PIC_PINS).map(|gsi| match gsi {
        0..8 => pin_route(gsi, KVM_IRQCHIP_PIC_MASTER, gsi),
        _ => pin_route(gsi, KVM_IRQCHIP_PIC_SLAVE, gsi - 8),
    });
    ioapic.chain(pics).collect()
}

fn pin_route(gsi: u32, irqchip: u32, pin: u32) -> kvm_irq_routing_entry {
    kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_IRQCHIP,
        u: kvm_irq_routing_entry__bindgen_ty_1 {
            irqchip: kvm_irq_routing_irqchip { irqchip, pin },
        },
        ..Default::default()
    }
}

fn msi_route(gsi: u32, MsiMessage { address, data }: MsiMessage) -> kvm_irq_routing_entry {
    let msi = kvm_irq_routing_msi {
        address_lo: address as u32,
        address_hi: (address >> 32) as u32,
        data,
        ..Default::default()
    };
    kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_MSI,
        u: kvm_irq_routing_entry__bindgen_ty_1 { msi },
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm::Kvm;
    use crate::memory::{self, Backing};
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    #[test]
    fn pins_keep_their_routes() {
        let routes = pin_routes();
        assert_eq!(routes.len(), 24 + 16);
        let gsis: Vec<u32> = routes.iter().map(|route| route.gsi).collect();
        assert_eq!(gsis[..24], (0..24).collect::<Vec<_>>());
        assert_eq!(gsis[24..], (0..16).collect::<Vec<_>>());
    }

    /// Where there is a /dev/kvm; the bare guests of this crate tell when there is none.
    #[test]
    fn vectors_come_and_go() {
        let Ok(kvm) = Kvm::open() else { return };
        let memory = memory::create(16 << 20, Backing::Private).unwrap();
        let vm = kvm.create_vm(&memory, 1).unwrap();
        let routes = MsiRoutes::new(vm);
        assert!(routes.host(5000).is_err());
        let mut first = routes.host(3).unwrap();
        let mut second = routes.host(3).unwrap();
        assert_eq!((first.gsi(2), second.gsi(0)), (26, 27));
        let event = EventFd::new(EFD_NONBLOCK).unwrap();
        let message = |data| MsiMessage {
            address: 0xfee0_0000,
            data,
        };
        first.attach_msi(0, &event, message(0x30)).unwrap();
        let again = first.attach_msi(0, &event, message(0x31)).unwrap_err();
        assert!(again.to_string().contains("cannot attach an interrupt"));
        first.detach_msi(0, &event).unwrap();
        second.attach_msi(2, &event, message(0x31)).unwrap();
        second.detach_msi(2, &event).unwrap();
        first.attach_doorbell(0xe000_6000, &event).unwrap();
        assert!(second.attach_doorbell(0xe000_6000, &event).is_err());
        first.detach_doorbell(0xe000_6000, &event).unwrap();
        assert!(first.detach_doorbell(0xe000_6000, &event).is_err());
    }
}
