//! A walk through VIRTIO 1.3, 4.1 and 3.1, from the driver's side, and what a hostile one may try.

use super::capabilities::{TYPE_COMMON, TYPE_DEVICE, TYPE_ISR, TYPE_NOTIFY, TYPE_PCI};
use super::common_cfg::*;
use super::line::{ISR_CONFIG, ISR_QUEUE, NO_VECTOR};
use super::*;
use crate::net::loopback::Loopback;
use crate::net::{Net, NetConfig};
use crate::pci::config::{BAR0, CAP_MSIX, CAP_VENDOR, CAPABILITIES};
use crate::testing::{MockDriver, MockPciHost, eventually};
use crate::virtio::Interrupt as _;
use crate::virtio::spec::{
    F_EVENT_IDX, F_VERSION_1, NET_F_CTRL_RX, NET_F_CTRL_VQ, NET_F_MAC, NET_F_MRG_RXBUF,
    STATUS_ACKNOWLEDGE, STATUS_DRIVER, STATUS_DRIVER_OK, STATUS_FEATURES_OK,
};
use ::net::nic::VnetHdr;

mod hostile;

const WINDOW: BarRange = BarRange {
    base: 0xe000_0000,
    len: 0x10_0000,
};
const BAR: u64 = WINDOW.base + BAR_LEN;
const PROBED: u8 = STATUS_ACKNOWLEDGE | STATUS_DRIVER;
const READY: u8 = PROBED | STATUS_FEATURES_OK;
const RUNNING: u8 = READY | STATUS_DRIVER_OK;
/// Message Control of MSI-X.
const MSIX_ON: u16 = 1 << 15;
const MSIX_MASK: u16 = 1 << 14;
const FEATURES: u64 = F_VERSION_1 | F_EVENT_IDX | NET_F_MAC | NET_F_MRG_RXBUF;

struct Machine {
    driver: MockDriver,
    host: MockPciHost,
    function: PciTransport,
}

impl Machine {
    fn new() -> Self {
        let driver = MockDriver::new(16);
        let host = MockPciHost::default();
        let net = Net::new(NetConfig::default(), Box::new(Loopback::default())).unwrap();
        let function = PciTransport::new(
            Box::new(net),
            driver.ram(),
            Box::new(host.clone()),
            WINDOW,
            BAR,
        )
        .unwrap();
        Self {
            driver,
            host,
            function,
        }
    }

    fn config<const N: usize>(&mut self, offset: u8) -> u64 {
        let mut data = [0; 8];
        self.function.read_config(offset, &mut data[..N]);
        u64::from_le_bytes(data)
    }

    fn set_config<const N: usize>(&mut self, offset: u8, value: u64) {
        let bytes = value.to_le_bytes();
        self.function.write_config(offset, &bytes[..N]);
    }

    fn read<const N: usize>(&mut self, offset: u64) -> u64 {
        let mut data = [0; 8];
        self.function.read_bar(offset, &mut data[..N]);
        u64::from_le_bytes(data)
    }

    fn write<const N: usize>(&mut self, offset: u64, value: u64) {
        let bytes = value.to_le_bytes();
        self.function.write_bar(offset, &bytes[..N]);
    }

    /// Offset and ID of each capability, in order.
    fn capabilities(&mut self) -> Vec<(u8, u8)> {
        assert_ne!(self.config::<2>(0x06) & (1 << 4), 0, "the list is there");
        let mut found = Vec::new();
        let mut at = self.config::<1>(CAPABILITIES) as u8;
        while at != 0 {
            assert!(at >= 0x40 && at.is_multiple_of(4) && found.len() < 48);
            found.push((at, self.config::<1>(at) as u8));
            at = self.config::<1>(at + 1) as u8;
        }
        found
    }

    /// Where the capability of structure `kind` is.
    fn structure(&mut self, kind: u8) -> u8 {
        let all = self.capabilities();
        let vendor = all.iter().filter(|(_, id)| *id == CAP_VENDOR);
        let mut found = vendor.filter(|(at, _)| self.config::<1>(at + 3) as u8 == kind);
        found.next().unwrap().0
    }

    fn msix_capability(&mut self) -> u8 {
        let all = self.capabilities();
        all.iter().find(|(_, id)| *id == CAP_MSIX).unwrap().0
    }

    fn enable(&mut self) {
        self.set_config::<2>(COMMAND, 0x0006);
    }

    fn set_status(&mut self, value: u8) -> u8 {
        self.write::<1>(DEVICE_STATUS, value.into());
        self.read::<1>(DEVICE_STATUS) as u8
    }

    /// `vp_get_features`, `vp_finalize_features`.
    fn negotiate(&mut self, features: u64) {
        assert_eq!(self.set_status(0), 0);
        assert_eq!(self.set_status(STATUS_ACKNOWLEDGE), STATUS_ACKNOWLEDGE);
        assert_eq!(self.set_status(PROBED), PROBED);
        let mut offered = 0;
        for half in 0..2 {
            self.write::<4>(DEVICE_FEATURE_SELECT, half);
            offered |= self.read::<4>(DEVICE_FEATURE) << (32 * half);
        }
        assert_eq!(offered & features, features);
        for half in 0..2 {
            self.write::<4>(DRIVER_FEATURE_SELECT, half);
            self.write::<4>(DRIVER_FEATURE, features >> (32 * half));
            let accepted = self.read::<4>(DRIVER_FEATURE);
            assert_eq!(accepted, (features >> (32 * half)) & 0xffff_ffff);
        }
        assert_eq!(self.set_status(READY), READY);
    }

    /// `pci_alloc_irq_vectors`, then an interrupt requested for each of the three vectors used.
    fn set_up_msix(&mut self) {
        let control = self.msix_capability() + 2;
        let count = (self.config::<2>(control) & 0x7ff) + 1;
        assert_eq!(count, 4, "a vector for each queue and the configuration");
        self.set_config::<2>(control, (MSIX_ON | MSIX_MASK).into());
        for vector in 0..count {
            self.write::<4>(MSIX_TABLE + vector * 16 + 12, 1);
        }
        self.set_config::<2>(control, MSIX_ON.into());
        for vector in 0..3 {
            let entry = MSIX_TABLE + vector * 16;
            self.write::<4>(entry, 0xfee0_0000);
            self.write::<4>(entry + 4, 0);
            self.write::<4>(entry + 8, 0x20 + vector);
            self.write::<4>(entry + 12, 0);
        }
        self.write::<2>(CONFIG_MSIX_VECTOR, 0);
        assert_eq!(self.read::<2>(CONFIG_MSIX_VECTOR), 0);
    }

    /// `setup_vq`, and after all of them `vp_modern_find_vqs`.
    fn set_up_queues(&mut self) {
        assert_eq!(self.read::<2>(NUM_QUEUES), 3);
        for index in 0..2u64 {
            let (ring, size) = {
                let ring = [&self.driver.rx, &self.driver.tx][index as usize];
                (ring.addresses(), ring.size)
            };
            self.write::<2>(QUEUE_SELECT, index);
            assert_eq!(self.read::<2>(QUEUE_SIZE), 256);
            assert_eq!(self.read::<2>(QUEUE_ENABLE), 0);
            self.write::<2>(QUEUE_SIZE, size.into());
            for (field, address) in [QUEUE_DESC, QUEUE_DRIVER, QUEUE_DEVICE]
                .into_iter()
                .zip(ring)
            {
                self.write::<4>(field, address);
                self.write::<4>(field + 4, address >> 32);
                assert_eq!(self.read::<8>(field), address);
            }
            self.write::<2>(QUEUE_MSIX_VECTOR, index + 1);
            assert_eq!(self.read::<2>(QUEUE_MSIX_VECTOR), index + 1);
            assert_eq!(self.read::<2>(QUEUE_NOTIFY_OFF), index);
        }
        for index in 0..2 {
            self.write::<2>(QUEUE_SELECT, index);
            self.write::<2>(QUEUE_ENABLE, 1);
            assert_eq!(self.read::<2>(QUEUE_ENABLE), 1);
        }
    }

    fn start(&mut self) {
        self.enable();
        self.negotiate(FEATURES);
        self.set_up_msix();
        self.set_up_queues();
        assert_eq!(self.set_status(RUNNING), RUNNING);
    }

    /// Sends a frame and waits for it to come back.
    fn echo(&mut self, frame: &[u8]) {
        self.driver.fill_rx(2048);
        assert!(self.driver.send(&VnetHdr::default(), frame, &[]));
        self.write::<2>(NOTIFY + NOTIFY_STRIDE, 1);
        let received = eventually(|| self.driver.collect_rx().pop());
        assert_eq!(received.bytes, frame);
    }

    /// Data of the messages sent since the last call.
    fn sent(&self) -> Vec<u32> {
        let sent = self.host.attached().sent();
        sent.iter().map(|message| message.data).collect()
    }

    fn doorbells(&self) -> Vec<u64> {
        self.host.attached().doorbells.keys().copied().collect()
    }
}

#[test]
fn identity_is_that_of_a_modern_network_card() {
    let mut m = Machine::new();
    assert_eq!(m.config::<4>(0x00), 0x1041_1af4);
    assert_eq!(m.config::<1>(0x08), 1);
    assert_eq!(m.config::<2>(0x0a), 0x0200);
    assert_eq!(m.config::<1>(0x3d), 0, "no interrupt pin");
}

#[test]
fn capabilities_name_all_structures() {
    let mut m = Machine::new();
    let ids: Vec<_> = m.capabilities().into_iter().map(|(_, id)| id).collect();
    assert_eq!(ids, [CAP_MSIX, 9, 9, 9, 9, 9]);
    for (kind, offset, least) in [
        (TYPE_COMMON, COMMON_CFG, 56),
        (TYPE_NOTIFY, NOTIFY, 3 * NOTIFY_STRIDE),
        (TYPE_ISR, ISR, 1),
        (TYPE_DEVICE, DEVICE_CFG, 12),
    ] {
        let at = m.structure(kind);
        assert_eq!(m.config::<1>(at + 4), 0, "BAR");
        assert_eq!(m.config::<4>(at + 8), offset);
        let len = m.config::<4>(at + 12);
        assert!(len >= least && offset + len <= BAR_LEN, "{kind}: {len}");
    }
    let notify = m.structure(TYPE_NOTIFY);
    assert_eq!(m.config::<1>(notify + 2), 20, "with the multiplier");
    assert_eq!(m.config::<4>(notify + 16), NOTIFY_STRIDE);
    let access = m.structure(TYPE_PCI);
    assert_eq!(m.config::<1>(access + 2), 20, "with the data");
}

#[test]
fn a_driver_starts_as_linux_does_and_exchanges_frames() {
    let mut m = Machine::new();
    m.start();
    m.echo(b"a frame of some bytes");
    let mut sent = Vec::new();
    eventually(|| {
        sent.extend(m.sent());
        sent.contains(&0x21).then_some(())
    });
    assert!(!sent.contains(&0x20), "no configuration interrupt");
    assert_eq!(
        m.read::<1>(ISR),
        0,
        "with MSI-X, queues leave the ISR alone"
    );
}

#[test]
fn a_reset_forgets_the_driver() {
    let mut m = Machine::new();
    m.start();
    m.echo(b"before");
    assert_eq!(m.set_status(0), 0);
    assert_eq!(m.read::<2>(CONFIG_MSIX_VECTOR), u64::from(NO_VECTOR));
    for index in 0..3 {
        m.write::<2>(QUEUE_SELECT, index);
        assert_eq!(m.read::<2>(QUEUE_MSIX_VECTOR), u64::from(NO_VECTOR));
        assert_eq!(m.read::<2>(QUEUE_ENABLE), 0);
        assert_eq!(m.read::<2>(QUEUE_SIZE), 256);
        assert_eq!(m.read::<8>(QUEUE_DESC), 0);
    }
}

#[test]
fn the_same_function_starts_again_after_a_reset() {
    let mut m = Machine::new();
    m.start();
    m.echo(b"before");
    assert_eq!(m.set_status(0), 0);
    m.driver.reset();
    m.start();
    m.echo(b"after");
}

/// As when a kernel hands over to the next by kexec.
#[test]
fn without_bus_mastering_the_device_leaves_memory_alone() {
    let mut m = Machine::new();
    m.start();
    m.echo(b"before");
    m.set_config::<2>(COMMAND, 0x0002);
    assert_eq!(m.read::<1>(DEVICE_STATUS), 0);
    assert_eq!(m.read::<2>(CONFIG_MSIX_VECTOR), u64::from(NO_VECTOR));
    m.driver.reset();
    m.start();
    m.echo(b"after");
}

#[test]
fn vectors_that_do_not_exist_read_back_as_none() {
    let mut m = Machine::new();
    for (field, last) in [(CONFIG_MSIX_VECTOR, 3), (QUEUE_MSIX_VECTOR, 3)] {
        m.write::<2>(field, last);
        assert_eq!(m.read::<2>(field), last);
        m.write::<2>(field, last + 1);
        assert_eq!(m.read::<2>(field), u64::from(NO_VECTOR));
    }
    m.write::<2>(QUEUE_SELECT, 3);
    m.write::<2>(QUEUE_MSIX_VECTOR, 0);
    assert_eq!(
        m.read::<2>(QUEUE_MSIX_VECTOR),
        u64::from(NO_VECTOR),
        "no such queue"
    );
    assert_eq!(m.read::<2>(QUEUE_SIZE), 0);
}

#[test]
fn a_call_is_the_vectors_event() {
    let mut m = Machine::new();
    m.start();
    let line = m.function.line.clone();
    assert!(line.queue_call(2).unwrap().is_none(), "no vector");
    let call = line.queue_call(1).unwrap().unwrap();
    m.sent();
    call.write(1).unwrap();
    assert_eq!(m.sent(), [0x22]);
}

#[test]
fn configuration_changes_have_their_own_vector() {
    let mut m = Machine::new();
    m.start();
    m.function.line.signal_config();
    assert_eq!(m.sent(), [0x20]);
    assert_eq!(m.read::<1>(CONFIG_GENERATION), 1);
    assert_eq!(m.read::<1>(ISR), u64::from(ISR_CONFIG));
    assert_eq!(m.read::<1>(ISR), 0, "reading clears");
}

#[test]
fn without_msix_a_driver_polls() {
    let mut m = Machine::new();
    m.function.line.signal_queue(0);
    assert_eq!(m.read::<1>(ISR), u64::from(ISR_QUEUE));
    assert!(m.host.attached().msi.is_empty());
}

#[test]
fn doorbells_follow_the_bar() {
    let at = |base: u64| [0, 4, 8].map(|offset| base + NOTIFY + offset).to_vec();
    let mut m = Machine::new();
    assert_eq!(m.doorbells(), [] as [u64; 0], "memory accesses are off");
    m.enable();
    assert_eq!(m.doorbells(), at(BAR));
    // Sizing, as Linux does it: accesses off, all ones, address back, accesses on.
    m.set_config::<2>(COMMAND, 0);
    assert_eq!((m.doorbells(), m.function.bar()), (vec![], None));
    m.set_config::<4>(BAR0, u64::MAX);
    m.set_config::<4>(BAR0 + 4, u64::MAX);
    let size = m.config::<4>(BAR0) & !0xf | m.config::<4>(BAR0 + 4) << 32;
    assert_eq!(!size + 1, BAR_LEN);
    m.set_config::<4>(BAR0, WINDOW.base);
    m.set_config::<4>(BAR0 + 4, 0);
    m.enable();
    assert_eq!(m.doorbells(), at(WINDOW.base));
    // A move while accesses are on; then to where nothing may be.
    m.set_config::<4>(BAR0, BAR);
    assert_eq!(m.doorbells(), at(BAR));
    for outside in [0, WINDOW.base - BAR_LEN, WINDOW.base + WINDOW.len] {
        m.set_config::<4>(BAR0, outside);
        assert_eq!((m.doorbells(), m.function.bar()), (vec![], None));
    }
    m.set_config::<4>(BAR0 + 4, u64::MAX);
    assert_eq!(m.function.bar(), None);
}

#[test]
fn a_moved_card_still_works() {
    let mut m = Machine::new();
    m.start();
    m.echo(b"before");
    m.set_config::<4>(BAR0, WINDOW.base);
    m.echo(b"after");
}

#[test]
fn the_bar_is_reached_by_way_of_the_configuration_space() {
    let mut m = Machine::new();
    let at = m.structure(TYPE_PCI);
    let window = |m: &mut Machine, offset: u64, len: u64| {
        m.set_config::<4>(at + 8, offset);
        m.set_config::<4>(at + 12, len);
    };
    window(&mut m, DEVICE_STATUS, 1);
    m.set_config::<1>(at + 16, STATUS_ACKNOWLEDGE.into());
    assert_eq!(m.read::<1>(DEVICE_STATUS), u64::from(STATUS_ACKNOWLEDGE));
    assert_eq!(m.config::<1>(at + 16), u64::from(STATUS_ACKNOWLEDGE));
    window(&mut m, DEVICE_CFG, 4);
    assert_eq!(m.config::<4>(at + 16), 0x1200_5452, "the MAC address");
    assert_eq!(m.config::<2>(at + 18), 0x1200, "a part of it");
    // What is no access does nothing.
    window(&mut m, DEVICE_STATUS, 1);
    for (bar, offset, len) in [
        (1, DEVICE_STATUS, 1),
        (0, DEVICE_STATUS, 3),
        (0, DEVICE_STATUS, 0),
        (0, DEVICE_STATUS + 1, 2),
        (0, BAR_LEN, 4),
        (0, u64::from(u32::MAX), 1),
    ] {
        m.set_config::<1>(at + 4, bar);
        window(&mut m, offset, len);
        m.set_config::<4>(at + 16, 0);
        assert_eq!(m.config::<4>(at + 16), 0);
        assert_eq!(m.read::<1>(DEVICE_STATUS), u64::from(STATUS_ACKNOWLEDGE));
    }
}

#[test]
fn fields_take_their_own_size() {
    let mut m = Machine::new();
    m.negotiate(F_VERSION_1 | NET_F_CTRL_VQ | NET_F_CTRL_RX);
    m.write::<4>(QUEUE_SELECT, 1);
    assert_eq!(m.read::<2>(QUEUE_SELECT), 0);
    m.write::<1>(QUEUE_SIZE, 8);
    assert_eq!(m.read::<2>(QUEUE_SIZE), 256);
    m.write::<8>(QUEUE_DESC, 0x1_2345_6780);
    assert_eq!(m.read::<8>(QUEUE_DESC), 0x1_2345_6780);
    m.write::<4>(NUM_QUEUES, 9);
    assert_eq!(m.read::<2>(NUM_QUEUES), 3);
    m.write::<2>(QUEUE_ENABLE, 1);
    assert_eq!(m.read::<2>(QUEUE_ENABLE), 0, "the rings are nowhere");
    let mut data = [0xee; 16];
    m.function.read_bar(0x30, &mut data);
    assert_eq!(data[8..], [0; 8], "behind the structure");
}
