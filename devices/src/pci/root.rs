//! Bus 0 and the two ways to its devices: configuration ports and the memory window.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::bus::BusDevice;
use crate::pci::PciFunction;
use crate::pci::host_bridge::HostBridge;

/// First configuration port.
pub const CONFIG_PORTS: u64 = 0xcf8;
/// Number of configuration ports.
pub const CONFIG_PORTS_LEN: u64 = 8;
/// Devices that a bus can have, the host bridge included.
pub const MAX_DEVICES: usize = 32;

/// `CONFIG_ADDRESS`: accesses of `CONFIG_DATA` go to configuration spaces.
const ENABLE: u32 = 1 << 31;

/// The bus has no place left.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a PCI bus has {MAX_DEVICES} places, the host bridge included; all are taken")]
pub struct BusFull;

/// Bus 0: a device per number, one function each.
pub struct RootBus {
    devices: Vec<Arc<Mutex<dyn PciFunction>>>,
}

impl Default for RootBus {
    /// A bus with the host bridge only.
    fn default() -> Self {
        Self {
            devices: vec![Arc::new(Mutex::new(HostBridge::default()))],
        }
    }
}

impl RootBus {
    /// Puts a function on the bus and returns its device number.
    ///
    /// # Errors
    /// Fails when all numbers are taken.
    pub fn insert(&mut self, function: Arc<Mutex<dyn PciFunction>>) -> Result<u8, BusFull> {
        let number = self.devices.len();
        if number >= MAX_DEVICES {
            return Err(BusFull);
        }
        self.devices.push(function);
        // Below `MAX_DEVICES`.
        Ok(number as u8)
    }

    /// The function that `address`, as written to `CONFIG_ADDRESS`, names.
    fn at(&self, address: u32) -> Option<MutexGuard<'_, dyn PciFunction + 'static>> {
        let [_, function, bus, _] = address.to_le_bytes();
        if address & ENABLE == 0 || bus != 0 || function & 7 != 0 {
            return None;
        }
        Some(lock(self.devices.get(usize::from(function >> 3))?))
    }

    /// The function whose BAR holds all of `address..address + len`, and the offset in it.
    fn behind(
        &self,
        address: u64,
        len: usize,
    ) -> Option<(MutexGuard<'_, dyn PciFunction + 'static>, u64)> {
        let len = u64::try_from(len).ok()?;
        self.devices.iter().find_map(|device| {
            let function = lock(device);
            let offset = function.bar()?.offset_of(address, len)?;
            Some((function, offset))
        })
    }
}

fn lock<'a>(
    device: &'a Arc<Mutex<dyn PciFunction + 'static>>,
) -> MutexGuard<'a, dyn PciFunction + 'static> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Configuration mechanism #1 (PCI Local Bus 3.0, 3.2.2.3.2): `CONFIG_ADDRESS` chooses a dword of a
/// function, `CONFIG_DATA` is a window to it.
pub struct ConfigPorts {
    bus: Arc<RootBus>,
    address: u32,
}

impl ConfigPorts {
    /// The ports of `bus`, for [`CONFIG_PORTS`].
    pub fn new(bus: Arc<RootBus>) -> Self {
        Self { bus, address: 0 }
    }

    /// Offset in the configuration space of an access of `len` bytes at port `port`, if it is one.
    fn data_offset(&self, port: u64, len: usize) -> Option<u8> {
        let byte = u8::try_from(port).ok()?.checked_sub(4)?;
        let within = usize::from(byte) + len <= 4;
        let [dword, ..] = self.address.to_le_bytes();
        within.then_some((dword & 0xfc) | byte)
    }
}

impl BusDevice for ConfigPorts {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        // What nobody answers floats high.
        data.fill(0xff);
        if let (0, Ok(data)) = (offset, <&mut [u8; 4]>::try_from(&mut *data)) {
            *data = self.address.to_le_bytes();
        } else if let Some(at) = self.data_offset(offset, data.len())
            && let Some(mut function) = self.bus.at(self.address)
        {
            function.read_config(at, data);
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        // Only a dword reaches CONFIG_ADDRESS; single bytes there are other devices' ports.
        if let (0, Ok(data)) = (offset, <[u8; 4]>::try_from(data)) {
            self.address = u32::from_le_bytes(data) & (ENABLE | 0x00ff_fffc);
        } else if let Some(at) = self.data_offset(offset, data.len())
            && let Some(mut function) = self.bus.at(self.address)
        {
            function.write_config(at, data);
        }
    }
}

/// The memory that BARs may be in: carries each access to the function that answers there now.
pub struct BarWindow {
    bus: Arc<RootBus>,
    base: u64,
}

impl BarWindow {
    /// The window of `bus` at guest address `base`.
    pub fn new(bus: Arc<RootBus>, base: u64) -> Self {
        Self { bus, base }
    }
}

impl BusDevice for BarWindow {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        let address = self.base.saturating_add(offset);
        if let Some((mut function, at)) = self.bus.behind(address, data.len()) {
            function.read_bar(at, data);
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let address = self.base.saturating_add(offset);
        if let Some((mut function, at)) = self.bus.behind(address, data.len()) {
            function.write_bar(at, data);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pci::BarRange;

    /// Remembers accesses; its BAR is 0x100 bytes at 0x1_0000.
    #[derive(Default)]
    struct Probe(Vec<(u64, Vec<u8>)>);

    impl PciFunction for Probe {
        fn read_config(&mut self, offset: u8, data: &mut [u8]) {
            data.fill(offset);
        }
        fn write_config(&mut self, offset: u8, data: &[u8]) {
            self.0.push((offset.into(), data.to_vec()));
        }
        fn bar(&self) -> Option<BarRange> {
            let (base, len) = (0x1_0000, 0x100);
            Some(BarRange { base, len })
        }
        fn read_bar(&mut self, offset: u64, data: &mut [u8]) {
            data.fill(offset as u8);
        }
        fn write_bar(&mut self, offset: u64, data: &[u8]) {
            self.0.push((offset, data.to_vec()));
        }
    }

    fn bus() -> (Arc<RootBus>, Arc<Mutex<Probe>>) {
        let probe = Arc::<Mutex<Probe>>::default();
        let mut bus = RootBus::default();
        assert_eq!(bus.insert(probe.clone()), Ok(1));
        (Arc::new(bus), probe)
    }

    fn select(ports: &mut ConfigPorts, device: u32, offset: u32) {
        let address = ENABLE | (device << 11) | offset;
        ports.write(0, &address.to_le_bytes());
    }

    fn read<const N: usize>(device: &mut dyn BusDevice, offset: u64) -> [u8; N] {
        let mut data = [0xee; N];
        device.read(offset, &mut data);
        data
    }

    /// As Linux does before it trusts mechanism #1 (`pci_check_type1`, `pci_sanity_check`).
    #[test]
    fn the_mechanism_and_a_host_bridge_are_found() {
        let mut ports = ConfigPorts::new(bus().0);
        ports.write(3, &[1]);
        let before = read::<4>(&mut ports, 0);
        ports.write(0, &ENABLE.to_le_bytes());
        assert_eq!(read(&mut ports, 0), ENABLE.to_le_bytes());
        ports.write(0, &before);
        select(&mut ports, 0, 0x08);
        assert_eq!(read(&mut ports, 6), [0, 6], "class, as a word");
        assert_eq!(read(&mut ports, 7), [6], "base class, as a byte");
        assert_eq!(read(&mut ports, 4), [0, 0, 0, 6]);
    }

    #[test]
    fn widths_and_offsets_reach_the_function() {
        let (bus, probe) = bus();
        let mut ports = ConfigPorts::new(bus);
        select(&mut ports, 1, 0x40);
        assert_eq!(read(&mut ports, 5), [0x41]);
        assert_eq!(read(&mut ports, 6), [0x42; 2]);
        assert_eq!(read(&mut ports, 4), [0x40; 4]);
        ports.write(6, &[1, 2]);
        ports.write(7, &[3]);
        let seen = &probe.lock().unwrap().0;
        assert_eq!(*seen, [(0x42, vec![1, 2]), (0x43, vec![3])]);
    }

    #[test]
    fn nobody_answers_elsewhere() {
        let (bus, probe) = bus();
        let mut ports = ConfigPorts::new(bus);
        for address in [
            1 << 11,                        // not enabled
            ENABLE | (2 << 11),             // no such device
            ENABLE | (1 << 11) | (1 << 8),  // no such function
            ENABLE | (1 << 11) | (1 << 16), // no such bus
        ] {
            ports.write(0, &u32::to_le_bytes(address));
            assert_eq!(read(&mut ports, 4), [0xff; 4], "{address:#x}");
            ports.write(4, &[0; 4]);
        }
        select(&mut ports, 1, 0);
        assert_eq!(read(&mut ports, 6), [0xff; 4], "beyond the dword");
        assert_eq!(read(&mut ports, 1), [0xff; 2], "a part of CONFIG_ADDRESS");
        assert_eq!(read(&mut ports, 2), [0xff; 4], "across both");
        assert!(probe.lock().unwrap().0.is_empty());
    }

    #[test]
    fn the_window_finds_the_bar() {
        let (bus, probe) = bus();
        let mut window = BarWindow::new(bus, 0xf000);
        assert_eq!(read(&mut window, 0x1004), [4; 2]);
        assert_eq!(read(&mut window, 0xfff), [0xff; 2], "straddles the start");
        assert_eq!(read(&mut window, 0x10ff), [0xff; 2], "straddles the end");
        window.write(0x10fc, &[7; 4]);
        window.write(0x10fd, &[7; 4]);
        assert_eq!(probe.lock().unwrap().0, [(0xfc, vec![7; 4])]);
    }

    #[test]
    fn a_bus_fills_up() {
        let mut bus = RootBus::default();
        for number in 1..32 {
            assert_eq!(bus.insert(Arc::<Mutex<Probe>>::default()), Ok(number));
        }
        assert_eq!(bus.insert(Arc::<Mutex<Probe>>::default()), Err(BusFull));
    }
}
