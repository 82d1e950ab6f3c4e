//! A walk through VIRTIO 1.3, 4.2 and 3.1, from the driver's side.

use std::time::Duration;

use super::*;
use crate::net::loopback::Loopback;
use crate::net::{Net, NetConfig};
use crate::testing::{Buffer, MockDriver, eventually};
use crate::virtio::spec::{
    F_EVENT_IDX, F_VERSION_1, NET_F_CTRL_RX, NET_F_CTRL_VQ, NET_F_MAC, NET_F_MRG_RXBUF,
    STATUS_ACKNOWLEDGE, STATUS_DRIVER, STATUS_DRIVER_OK, STATUS_FAILED, STATUS_FEATURES_OK,
    STATUS_NEEDS_RESET,
};
use ::net::nic::VnetHdr;

const PROBED: u8 = STATUS_ACKNOWLEDGE | STATUS_DRIVER;
const READY: u8 = PROBED | STATUS_FEATURES_OK;
const RUNNING: u8 = READY | STATUS_DRIVER_OK;

struct Machine {
    driver: MockDriver,
    regs: MmioTransport,
}

impl Machine {
    fn new() -> Self {
        let driver = MockDriver::new(16);
        let net = Net::new(NetConfig::default(), Box::new(Loopback::default())).unwrap();
        let regs = MmioTransport::new(Box::new(net), driver.ram()).unwrap();
        Self { driver, regs }
    }

    fn read(&mut self, offset: u64) -> u32 {
        let mut data = [0xee; 4];
        self.regs.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn write(&mut self, offset: u64, value: u32) {
        self.regs.write(offset, &value.to_le_bytes());
    }

    fn status(&mut self) -> u8 {
        self.read(STATUS) as u8
    }

    fn set_status(&mut self, value: u8) -> u8 {
        self.write(STATUS, value.into());
        self.status()
    }

    fn accept(&mut self, features: u64) {
        for sel in 0..2 {
            self.write(DRIVER_FEATURES_SEL, sel);
            self.write(DRIVER_FEATURES, (features >> (32 * sel)) as u32);
        }
    }

    fn offered(&mut self) -> u64 {
        (0..2).fold(0, |sum, sel| {
            self.write(DEVICE_FEATURES_SEL, sel);
            sum | u64::from(self.read(DEVICE_FEATURES)) << (32 * sel)
        })
    }

    fn negotiate(&mut self, features: u64) {
        assert_eq!(self.set_status(STATUS_ACKNOWLEDGE), STATUS_ACKNOWLEDGE);
        assert_eq!(self.set_status(PROBED), PROBED);
        self.accept(features);
        assert_eq!(self.set_status(READY), READY);
    }

    fn write_queue(&mut self, index: u32, size: u32, ring: [u64; 3]) {
        self.write(QUEUE_SEL, index);
        self.write(QUEUE_SIZE, size);
        for (base, addr) in [QUEUE_DESC_LOW, QUEUE_DRIVER_LOW, QUEUE_DEVICE_LOW]
            .into_iter()
            .zip(ring)
        {
            self.write(base, addr as u32);
            self.write(base + 4, (addr >> 32) as u32);
        }
        self.write(QUEUE_READY, 1);
    }

    fn set_up_queues(&mut self) {
        for index in 0..2 {
            let (ring, size) = {
                let ring = [&self.driver.rx, &self.driver.tx][index as usize];
                (ring.addresses(), ring.size)
            };
            self.write_queue(index, size.into(), ring);
            assert_eq!(self.read(QUEUE_READY), 1);
        }
    }

    fn start(&mut self, features: u64) {
        self.negotiate(features);
        self.set_up_queues();
        assert_eq!(self.set_status(RUNNING), RUNNING);
    }

    /// Sends a frame and waits for it to come back.
    fn echo(&mut self, frame: &[u8]) {
        self.driver.fill_rx(2048);
        assert!(self.driver.send(&VnetHdr::default(), frame, &[]));
        self.write(QUEUE_NOTIFY, 1);
        let received = eventually(|| self.driver.collect_rx().pop());
        assert_eq!(received.bytes, frame);
    }
}

#[test]
fn identity() {
    let mut m = Machine::new();
    assert_eq!(m.read(MAGIC_VALUE), 0x7472_6976);
    assert_eq!(m.read(VERSION), 2);
    assert_eq!(m.read(DEVICE_ID), 1);
    assert_eq!(m.read(STATUS), 0);
    assert_eq!(m.read(SHM_LEN_LOW), u32::MAX);
    assert_eq!(m.read(0x0ff & !3), 0, "config generation starts at 0");
    m.write(QUEUE_SEL, 1);
    assert_eq!(m.read(QUEUE_SIZE_MAX), 256);
    m.write(QUEUE_SEL, 2);
    assert_eq!(m.read(QUEUE_SIZE_MAX), 256, "the control queue");
    m.write(QUEUE_SEL, 3);
    assert_eq!(m.read(QUEUE_SIZE_MAX), 0);
    m.write(QUEUE_SEL, 0x1_0000);
    assert_eq!(m.read(QUEUE_SIZE_MAX), 0, "index is not cut to 16 bits");
}

#[test]
fn registers_take_aligned_words_only() {
    let mut m = Machine::new();
    let mut data = [0xee; 8];
    m.regs.read(MAGIC_VALUE, &mut data[..2]);
    m.regs.read(MAGIC_VALUE + 1, &mut data[4..]);
    assert_eq!(data, [0, 0, 0xee, 0xee, 0, 0, 0, 0]);
    m.regs.write(STATUS, &[1]);
    m.regs.write(STATUS, &[1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(m.status(), 0);
    for offset in (0..MMIO_LEN).chain([u64::MAX]) {
        for len in [0, 1, 2, 4, 8] {
            m.regs.read(offset, &mut [0; 8][..len]);
        }
    }
}

#[test]
fn config_space() {
    let mut m = Machine::new();
    let mut mac = [0; 6];
    m.regs.read(CONFIG, &mut mac);
    assert_eq!(mac, NetConfig::default().mac);
    let mut rest = [0xee; 8];
    m.regs.read(CONFIG + 6, &mut rest);
    assert_eq!(rest, [1, 0, 1, 0, 0xdc, 0x05, 0, 0]);
    m.regs.write(CONFIG, &[0; 6]);
    m.regs.read(CONFIG, &mut mac);
    assert_eq!(mac, NetConfig::default().mac);
}

#[test]
fn status_bits_come_in_order() {
    let mut m = Machine::new();
    assert_eq!(m.set_status(STATUS_DRIVER), 0);
    assert_eq!(m.set_status(STATUS_ACKNOWLEDGE), STATUS_ACKNOWLEDGE);
    assert_eq!(
        m.set_status(STATUS_ACKNOWLEDGE | STATUS_FEATURES_OK),
        STATUS_ACKNOWLEDGE
    );
    assert_eq!(m.set_status(PROBED), PROBED);
    assert_eq!(m.set_status(PROBED | STATUS_DRIVER_OK), PROBED);
    assert_eq!(m.set_status(STATUS_DRIVER), PROBED, "bits are not cleared");
    assert_eq!(m.set_status(PROBED | STATUS_FAILED), PROBED | STATUS_FAILED);
    m.accept(F_VERSION_1);
    assert_eq!(m.set_status(READY), PROBED | STATUS_FAILED);
    assert_eq!(m.set_status(0), 0);
    assert_eq!(m.set_status(STATUS_NEEDS_RESET), 0, "the device's own bit");
}

#[test]
fn features_are_checked() {
    let mut m = Machine::new();
    let offered = m.offered();
    assert_ne!(offered & F_VERSION_1, 0);
    m.accept(F_VERSION_1);
    m.set_status(PROBED);
    for bad in [0, NET_F_MAC, F_VERSION_1 | 1 << 60, F_VERSION_1 | !offered] {
        m.accept(bad);
        assert_eq!(m.set_status(READY), PROBED, "{bad:#x}");
    }
    m.accept(F_VERSION_1);
    m.write(DRIVER_FEATURES_SEL, 2);
    m.write(DRIVER_FEATURES, u32::MAX);
    assert_eq!(m.set_status(READY), READY);
    // Accepted is accepted.
    m.accept(offered);
    assert_eq!(m.regs.common.driver_features(), 1);
}

#[test]
fn queues_are_checked() {
    let mut m = Machine::new();
    let good = m.driver.rx.addresses();
    m.write_queue(0, 16, good);
    assert_eq!(m.read(QUEUE_READY), 0, "before FEATURES_OK");
    m.negotiate(F_VERSION_1);
    let [desc, avail, used] = good;
    for (size, ring, why) in [
        (0, good, "size 0"),
        (3, good, "size 3"),
        (512, good, "size above the maximum"),
        (0x1_0010, good, "size beyond 16 bits"),
        (16, [desc + 8, avail, used], "descriptor alignment"),
        (16, [desc, avail + 1, used], "avail alignment"),
        (16, [desc, avail, used + 2], "used alignment"),
        (16, [1 << 40, avail, used], "descriptors outside RAM"),
        (16, [desc, u64::MAX - 1, used], "avail wraps around"),
        (16, [desc, avail, (64 << 20) - 16], "used crosses the end"),
    ] {
        m.write_queue(0, size, ring);
        assert_eq!(m.read(QUEUE_READY), 0, "{why}");
    }
    m.write_queue(0, 16, good);
    assert_eq!(m.read(QUEUE_READY), 1);
    m.write(QUEUE_DESC_LOW, 0);
    assert_eq!(m.regs.common.queue_addr(QueueAddr::Desc), desc, "locked");
    m.write_queue(7, 16, good);
    assert_eq!(m.read(QUEUE_READY), 0, "no such queue");
}

#[test]
fn a_missing_queue_needs_reset() {
    let mut m = Machine::new();
    m.negotiate(F_VERSION_1);
    let ring = m.driver.rx.addresses();
    m.write_queue(0, 16, ring);
    assert_eq!(m.set_status(RUNNING), RUNNING | STATUS_NEEDS_RESET);
    assert_eq!(m.read(INTERRUPT_STATUS), INT_CONFIG);
    m.set_status(0);
    assert_eq!(m.read(INTERRUPT_STATUS), 0);
    m.start(F_VERSION_1);
    m.echo(b"and it works after all");
}

#[test]
fn commands_on_the_control_queue() {
    let mut m = Machine::new();
    m.negotiate(F_VERSION_1 | NET_F_CTRL_VQ | NET_F_CTRL_RX);
    m.set_up_queues();
    let ring = m.driver.ctrl.addresses();
    m.write_queue(2, 64, ring);
    assert_eq!(m.read(QUEUE_READY), 1);
    assert_eq!(m.set_status(RUNNING), RUNNING);
    for (request, want) in [([0, 0, 1], 0), ([9, 9, 1], 1)] {
        let answer = m.driver.send_command(&request, &[2], false);
        m.write(QUEUE_NOTIFY, 2);
        assert_eq!(eventually(|| m.driver.answer(answer)), want);
    }
    m.echo(&[3; 64]);
}

#[test]
fn a_control_queue_that_was_not_asked_for_is_left_alone() {
    let mut m = Machine::new();
    m.negotiate(F_VERSION_1);
    m.set_up_queues();
    let ring = m.driver.ctrl.addresses();
    m.write_queue(2, 64, ring);
    assert_eq!(m.set_status(RUNNING), RUNNING);
    let answer = m.driver.send_command(&[0, 0, 1], &[2], false);
    m.write(QUEUE_NOTIFY, 2);
    m.echo(&[3; 64]);
    assert_eq!(m.driver.answer(answer), None);
    // And one that was, but is not used, is no harm.
    assert_eq!(m.set_status(0), 0);
    m.driver.reset();
    m.start(F_VERSION_1 | NET_F_CTRL_VQ);
    m.echo(&[4; 64]);
}

#[test]
fn traffic_interrupts_and_reset() {
    let mut m = Machine::new();
    for features in [
        F_VERSION_1,
        F_VERSION_1 | NET_F_MRG_RXBUF,
        F_VERSION_1 | NET_F_MRG_RXBUF | F_EVENT_IDX,
    ] {
        m.start(features);
        m.echo(&[0x11; 60]);
        m.echo(&[0x22; 1514]);
        eventually(|| m.regs.irq().read().ok());
        assert_eq!(m.read(INTERRUPT_STATUS), INT_VRING);
        m.write(INTERRUPT_ACK, INT_CONFIG);
        assert_eq!(m.read(INTERRUPT_STATUS), INT_VRING);
        m.write(INTERRUPT_ACK, INT_VRING);
        assert_eq!(m.read(INTERRUPT_STATUS), 0);
        assert_eq!(m.set_status(0), 0);
        assert_eq!(m.read(QUEUE_READY), 0);
        // Nothing runs any more: a notification now has no effect.
        m.driver.reset();
        m.driver.send(&VnetHdr::default(), &[0; 60], &[]);
        m.write(QUEUE_NOTIFY, 1);
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(m.driver.collect_tx(), 0);
        m.driver.reset();
    }
}

#[test]
fn a_doorbell_also_works_without_the_transport() {
    let mut m = Machine::new();
    m.start(F_VERSION_1);
    m.driver.fill_rx(2048);
    m.driver.send(&VnetHdr::default(), &[7; 80], &[]);
    m.regs.kicks()[1].write(1).unwrap();
    assert_eq!(eventually(|| m.driver.collect_rx().pop()).bytes, [7; 80]);
    m.write(QUEUE_NOTIFY, 99);
    m.write(QUEUE_NOTIFY, u32::MAX);
}

#[test]
fn a_driver_fault_shows_and_a_reset_cures_it() {
    let mut m = Machine::new();
    m.start(F_VERSION_1);
    let generation = m.read(CONFIG_GENERATION);
    let outside = Buffer {
        addr: 1 << 40,
        len: 100,
    };
    m.driver.tx.add(&[outside], 0);
    m.write(QUEUE_NOTIFY, 1);
    eventually(|| (m.status() & STATUS_NEEDS_RESET != 0).then_some(()));
    eventually(|| (m.read(INTERRUPT_STATUS) & INT_CONFIG != 0).then_some(()));
    assert_eq!(m.read(CONFIG_GENERATION), generation);
    m.driver.reset();
    assert_eq!(m.set_status(0), 0);
    m.start(F_VERSION_1);
    m.echo(&[1; 64]);
}

#[test]
fn a_line_that_the_kernel_may_raise_always_names_its_cause() {
    let mut machine = Machine::new();
    let line = machine.regs.line.clone();
    let call = line.queue_call(1).unwrap().expect("a descriptor");
    call.write(1).unwrap();
    assert_eq!(machine.regs.irq().read().unwrap(), 1);
    assert_eq!(machine.read(INTERRUPT_STATUS), INT_VRING);
    machine.write(INTERRUPT_ACK, INT_VRING);
    assert_eq!(machine.read(INTERRUPT_STATUS), INT_VRING);
    line.signal_config();
    assert_eq!(machine.read(INTERRUPT_STATUS), INT_VRING | INT_CONFIG);
    machine.write(INTERRUPT_ACK, INT_VRING | INT_CONFIG);
    assert_eq!(machine.read(INTERRUPT_STATUS), INT_VRING);
    machine.set_status(0);
    assert_eq!(machine.read(INTERRUPT_STATUS), 0);
}
