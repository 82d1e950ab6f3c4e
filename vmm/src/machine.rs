//! Which devices there are, and how they are wired: the one place that knows both buses and KVM.
//!
//! | device | found at | interrupt | doorbell |
//! | --- | --- | --- | --- |
//! | COM1 | ports 0x3f8.. | irqfd, GSI 4 | |
//! | ACPI sleep and reset | port 0x600 | | |
//! | keyboard controller (reset only) | port 0x64 | | |
//! | virtio-mmio device n | page n of the virtio window | irqfd, GSI 5 + n | ioeventfd per queue |
//! | PCI configuration | ports 0xcf8.. | | |
//! | virtio-pci device n | PCI device n + 1, BAR n of the PCI window | MSI-X: irqfd per vector | ioeventfd per queue |

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use devices::pci::root::{BarWindow, CONFIG_PORTS, CONFIG_PORTS_LEN, ConfigPorts, RootBus};
use devices::virtio::mmio::{MMIO_LEN, MmioTransport, QUEUE_NOTIFY};
use devices::virtio::pci::{BAR_LEN, PciTransport};
use devices::virtio::{GuestRam, VirtioDevice};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

use crate::backend::make_card;
use crate::config::{NetOptions, Transport};
use crate::event_loop::{Event, Events};
use crate::kvm::Vm;
use crate::layout::{
    COM1_GSI, COM1_LEN, COM1_PORT, I8042_PORT, PCI_WINDOW, POWER_PORT, VirtioPlaces, virtio_slots,
};
use crate::msi::MsiRoutes;
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
    pub places: VirtioPlaces,
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
        transport: Transport,
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
        let ram = GuestRam::new(memory.clone());
        let places = match transport {
            Transport::Pci => {
                let bus = Arc::new(pci_bus(vm, &ram, devices)?);
                let ports = ConfigPorts::new(bus.clone());
                pio.insert(CONFIG_PORTS, CONFIG_PORTS_LEN, Arc::new(Mutex::new(ports)))?;
                let window = BarWindow::new(bus, PCI_WINDOW.base);
                let window = Arc::new(Mutex::new(window));
                mmio.insert(PCI_WINDOW.base, PCI_WINDOW.len, window)?;
                VirtioPlaces::Pci
            }
            Transport::Mmio => add_mmio_devices(vm, &ram, devices, &mut mmio)?,
        };
        Ok(Self {
            pio,
            mmio,
            com1,
            places,
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

/// A PCI bus with `devices` on it. There is no firmware, so their BARs are assigned here.
fn pci_bus(
    vm: &Vm,
    ram: &GuestRam,
    devices: Vec<Box<dyn VirtioDevice>>,
) -> anyhow::Result<RootBus> {
    let routes = MsiRoutes::new(vm.clone());
    let mut bus = RootBus::default();
    let bars = (PCI_WINDOW.base..).step_by(BAR_LEN as usize);
    for (device, bar) in devices.into_iter().zip(bars) {
        let context = "cannot make a virtio PCI function";
        let vectors = device.queue_max_sizes().len() + 1;
        let host = routes.host(u16::try_from(vectors)?).context(context)?;
        let function = PciTransport::new(device, ram.clone(), Box::new(host), PCI_WINDOW, bar)
            .context(context)?;
        bus.insert(Arc::new(Mutex::new(function)))?;
    }
    Ok(bus)
}

/// Puts `devices` on pages of registers.
fn add_mmio_devices(
    vm: &Vm,
    ram: &GuestRam,
    devices: Vec<Box<dyn VirtioDevice>>,
    mmio: &mut Bus,
) -> anyhow::Result<VirtioPlaces> {
    let slots = virtio_slots(devices.len());
    anyhow::ensure!(slots.len() == devices.len(), "too many virtio devices");
    for (device, slot) in devices.into_iter().zip(&slots) {
        let transport =
            MmioTransport::new(device, ram.clone()).context("cannot make a virtio transport")?;
        vm.irqfd(transport.irq(), slot.gsi)?;
        for (queue, kick) in (0..).zip(transport.kicks()) {
            vm.ioeventfd(kick, slot.base + QUEUE_NOTIFY, queue)?;
        }
        mmio.insert(slot.base, MMIO_LEN, Arc::new(Mutex::new(transport)))?;
    }
    Ok(VirtioPlaces::Mmio(slots))
}

/// The virtio devices, in the order of their places.
fn virtio_devices(net: Option<&NetOptions>) -> anyhow::Result<Vec<Box<dyn VirtioDevice>>> {
    let mut devices: Vec<Box<dyn VirtioDevice>> = Vec::new();
    if let Some(options) = net {
        devices.push(make_card(options)?);
    }
    Ok(devices)
}

fn power_handler(events: &Events) -> PowerHandler {
    let events = events.clone();
    Box::new(move |event| events.send(Event::Power(event)))
}
