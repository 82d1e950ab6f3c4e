//! Anything at any place, of any width: nothing panics, and nothing is attached where it must not be.

use std::sync::{Arc, Mutex};

use proptest::prelude::*;

use super::*;
use crate::bus::Bus;
use crate::pci::root::{BarWindow, CONFIG_PORTS, CONFIG_PORTS_LEN, ConfigPorts, RootBus};

#[derive(Clone, Debug)]
enum Access {
    /// A port, by its offset.
    Port(u64, Vec<u8>),
    /// A place in the card's configuration space, aligned as the ports want it.
    Config(u8, Vec<u8>),
    /// A place in the BAR that the driver began with.
    Bar(u64, Vec<u8>),
    /// Any place in the window.
    Window(u64, Vec<u8>),
}

fn width() -> impl Strategy<Value = usize> {
    prop_oneof![Just(1), Just(2), Just(4), Just(8)]
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let random = width().prop_flat_map(|len| prop::collection::vec(any::<u8>(), len));
    let telling = (
        width(),
        prop_oneof![Just(0u8), Just(1), Just(0xff), Just(0x0f)],
    )
        .prop_map(|(len, byte)| vec![byte; len]);
    let small = (width(), 0u8..16).prop_map(|(len, low)| {
        let mut bytes = vec![0; len];
        bytes[0] = low;
        bytes
    });
    prop_oneof![random, telling, small]
}

fn access() -> impl Strategy<Value = Access> {
    let page = prop_oneof![
        4 => 0u64..0x48,
        1 => Just(ISR),
        1 => DEVICE_CFG..DEVICE_CFG + 16,
        3 => MSIX_TABLE..MSIX_TABLE + 96,
        1 => MSIX_PBA..MSIX_PBA + 8,
        1 => NOTIFY..NOTIFY + 32,
        1 => 0..BAR_LEN,
    ];
    prop_oneof![
        (0..CONFIG_PORTS_LEN, bytes()).prop_map(|(at, data)| Access::Port(at, data)),
        (any::<u8>(), bytes()).prop_map(|(at, data)| Access::Config(at, data)),
        (page, bytes()).prop_map(|(at, data)| Access::Bar(at, data)),
        (0..WINDOW.len, bytes()).prop_map(|(at, data)| Access::Window(at, data)),
    ]
}

struct Buses {
    pio: Bus,
    mmio: Bus,
}

impl Buses {
    fn new(function: PciTransport) -> Self {
        let mut root = RootBus::default();
        root.insert(Arc::new(Mutex::new(function))).unwrap();
        let root = Arc::new(root);
        let (mut pio, mut mmio) = (Bus::new(), Bus::new());
        let ports = Arc::new(Mutex::new(ConfigPorts::new(root.clone())));
        pio.insert(CONFIG_PORTS, CONFIG_PORTS_LEN, ports).unwrap();
        let window = Arc::new(Mutex::new(BarWindow::new(root, WINDOW.base)));
        mmio.insert(WINDOW.base, WINDOW.len, window).unwrap();
        Self { pio, mmio }
    }

    fn carry(&self, access: &Access) {
        match access {
            Access::Port(at, data) => both(&self.pio, CONFIG_PORTS + at, data),
            Access::Config(at, data) => {
                let address = (1u32 << 31) | (1 << 11) | u32::from(at & !3);
                self.pio.write(CONFIG_PORTS, &address.to_le_bytes());
                both(&self.pio, CONFIG_PORTS + 4 + u64::from(at & 3), data);
            }
            Access::Bar(at, data) => both(&self.mmio, BAR + at, data),
            Access::Window(at, data) => both(&self.mmio, WINDOW.base + at, data),
        }
    }
}

fn both(bus: &Bus, address: u64, data: &[u8]) {
    bus.write(address, data);
    bus.read(address, &mut vec![0; data.len()]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_access_panics_or_leaves_its_bounds(accesses in prop::collection::vec(access(), 1..300)) {
        let Machine { host, mut function, driver: _driver } = Machine::new();
        function.write_config(COMMAND, &[6, 0]);
        let buses = Buses::new(function);
        for access in &accesses {
            buses.carry(access);
            let attached = host.attached();
            for &address in attached.doorbells.keys() {
                prop_assert!(WINDOW.offset_of(address, NOTIFY_STRIDE).is_some(), "{address:#x}");
            }
            prop_assert!(matches!(attached.doorbells.len(), 0 | 3));
            prop_assert!(attached.msi.keys().all(|&vector| vector < 4));
        }
    }

    /// Also a card that runs stays in its bounds, and stops.
    #[test]
    fn a_running_card_survives_and_is_reset(accesses in prop::collection::vec(access(), 1..100)) {
        let mut m = Machine::new();
        m.start();
        let Machine { host, function, driver: _driver } = m;
        let buses = Buses::new(function);
        for access in &accesses {
            buses.carry(access);
        }
        // Accesses on, BAR where it began, reset.
        for (at, data) in [(0x10, BAR as u32), (0x14, 0), (0x04, 6)] {
            buses.carry(&Access::Config(at, data.to_le_bytes().to_vec()));
        }
        buses.mmio.write(BAR + DEVICE_STATUS, &[0]);
        let mut status = [0xff];
        buses.mmio.read(BAR + DEVICE_STATUS, &mut status);
        prop_assert_eq!(status, [0]);
        prop_assert_eq!(host.attached().doorbells.len(), 3);
    }
}
