//! Which devices there are, and how they are wired: the one place that knows both buses and KVM.
//!
//! | device | found at | interrupt | doorbell |
//! | --- | --- | --- | --- |
//! | COM1 | ports 0x3f8.. | irqfd, GSI 4 | |
//! | ACPI sleep and reset | port 0x600 | | |
//! | keyboard controller (reset only) | port 0x64 | | |
//! | virtio device n | page n of the virtio window | irqfd, GSI 5 + n | ioeventfd per queue |

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;

use devices::virtio::mmio::{MMIO_LEN, MmioTransport, QUEUE_NOTIFY};
use devices::virtio::{GuestRam, VirtioDevice};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

use crate::backend::make_card;
use crate::config::NetOptions;
use crate::event_loop::{Event, Events};
use crate::kvm::Vm;
use crate::layout::{
    COM1_GSI, COM1_LEN, COM1_PORT, I8042_PORT, POWER_PORT, VirtioSlot, virtio_slots,
};
use devices::bus::Bus;
use devices::power::{AcpiPower, I8042Reset, PowerHandler};
use devices::serial::Com1;

/// The devices of a VM, ready to be reached.
pub struct Machine {
    /// Port accesses.
    pub pio: Bus,
    /// Memory-mapped accesses.
    pub mmio: Bus,
    /// The serial port, for its input.
    pub com1: Arc<Mutex<Com1>>,
    /// Where the virtio devices are; the DSDT is made from it.
    pub slots: Vec<VirtioSlot>,
}

impl Machine {
    /// Makes the devices and wires them to `vm`; `events` hears of power events.
    ///
    /// # Errors
    /// Fails when the host is out of descriptors, or lacks what a device needs.
    pub fn new(
        vm: &Vm,
        memory: &GuestMemoryMmap,
        net: Option<&NetOptions>,
        events: &Events,
    ) -> anyhow::Result<Self> {
        let (mut pio, mut mmio) = (Bus::new(), Bus::new());

        let com1 = Com1::new(Box::new(io::stdout())).context("cannot make the serial port")?;
        vm.irqfd(com1.irq(), COM1_GSI)?;
        let com1 = Arc::new(Mutex::new(com1));
        pio.insert(u64::from(COM1_PORT), u64::from(COM1_LEN), com1.clone())?;

        let acpi = AcpiPower::new(power_handler(events));
        pio.insert(u64::from(POWER_PORT), 1, Arc::new(Mutex::new(acpi)))?;
        let i8042 = I8042Reset::new(power_handler(events));
        pio.insert(u64::from(I8042_PORT), 1, Arc::new(Mutex::new(i8042)))?;

        let devices = virtio_devices(net)?;
        let slots = virtio_slots(devices.len());
        anyhow::ensure!(slots.len() == devices.len(), "too many virtio devices");
        let ram = GuestRam::new(memory.clone());
        for (device, slot) in devices.into_iter().zip(&slots) {
            let transport = MmioTransport::new(device, ram.clone())
                .context("cannot make a virtio transport")?;
            vm.irqfd(transport.irq(), slot.gsi)?;
            for (queue, kick) in (0..).zip(transport.kicks()) {
                vm.ioeventfd(kick, slot.base + QUEUE_NOTIFY, queue)?;
            }
            mmio.insert(slot.base, MMIO_LEN, Arc::new(Mutex::new(transport)))?;
        }
        Ok(Self {
            pio,
            mmio,
            com1,
            slots,
        })
    }

    /// Readable when the serial port takes input again.
    ///
    /// # Errors
    /// Fails when descriptors run out.
    pub fn serial_room(&self) -> io::Result<EventFd> {
        self.com1
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .room_event()
            .try_clone()
    }
}

/// The virtio devices, in the order of their slots.
fn virtio_devices(net: Option<&NetOptions>) -> anyhow::Result<Vec<Box<dyn VirtioDevice>>> {
    let mut devices: Vec<Box<dyn VirtioDevice>> = Vec::new();
    if let Some(options) = net {
        devices.push(Box::new(make_card(options)?));
    }
    Ok(devices)
}

fn power_handler(events: &Events) -> PowerHandler {
    let events = events.clone();
    Box::new(move |event| events.send(Event::Power(event)))
}
