//! The card with its worker.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use net::nic::{Backend, Link, RxRing, Stop, TxBurst, VnetHdr};

use super::{Probe, pattern};
use crate::net::loopback::Loopback;
use crate::net::{Net, NetConfig, NetConfigError};
use crate::testing::MockDriver;
use crate::virtio::VirtioDevice;
use crate::virtio::spec::{F_EVENT_IDX, F_VERSION_1, NET_F_MRG_RXBUF};

const FEATURES: u64 = F_VERSION_1 | NET_F_MRG_RXBUF | F_EVENT_IDX;

fn wait_until(mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "it never happened");
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// A driver that kicks only when the device asks for it finds that no frame gets stuck.
#[test]
fn no_wake_up_is_lost() {
    const FRAMES: usize = 20_000;
    let mut driver = MockDriver::new(64);
    let mut net = Net::new(NetConfig::default(), Box::new(Loopback::default())).unwrap();
    let (activation, kicks) = driver.activation(FEATURES);
    net.activate(activation).unwrap();
    let (mut sent, mut got) = (0, 0);
    // avail idx at the last look at avail_event, by queue
    let mut old = [0u16; 2];
    let deadline = Instant::now() + Duration::from_secs(60);
    while got < FRAMES {
        assert!(
            Instant::now() < deadline,
            "stuck: {sent} sent, {got} received"
        );
        driver.fill_rx(300);
        // Bounded, so that the backend has no need to drop.
        while sent < FRAMES && sent - got < 100 {
            if !driver.send(&VnetHdr::default(), &pattern(60 + sent % 900, sent), &[]) {
                break;
            }
            sent += 1;
        }
        for (i, ring) in [&driver.rx, &driver.tx].into_iter().enumerate() {
            std::sync::atomic::fence(Ordering::SeqCst);
            let (event, new) = (ring.avail_event(), ring.avail_idx());
            if new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old[i]) {
                kicks[i].write(1).unwrap();
            }
            old[i] = new;
        }
        driver.collect_tx();
        for frame in driver.collect_rx() {
            assert_eq!(frame.bytes, pattern(60 + got % 900, got));
            got += 1;
        }
    }
    net.reset();
}

#[test]
fn an_idle_card_sleeps() {
    let driver = MockDriver::new(16);
    let mut net = Net::new(NetConfig::default(), Box::new(Loopback::default())).unwrap();
    let counters = net.counters();
    let (activation, _kicks) = driver.activation(FEATURES);
    net.activate(activation).unwrap();
    wait_until(|| counters.get("sleeps") > 0);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(counters.get("sleeps"), 1);
}

#[test]
fn starved_with_too_few_buffers_the_card_sleeps() {
    let mut driver = MockDriver::new(16);
    driver.post_rx(&[100]);
    let probe = Probe::default();
    probe.deliver(&[0; 900]);
    let mut net = Net::new(NetConfig::default(), probe.boxed()).unwrap();
    let counters = net.counters();
    let (activation, kicks) = driver.activation(FEATURES);
    net.activate(activation).unwrap();
    wait_until(|| counters.get("sleeps") > 0);
    // It looks at the host now and then at first, and soon no more.
    let sleeps = || counters.get("sleeps");
    std::thread::sleep(Duration::from_millis(500));
    let before = sleeps();
    assert!(before <= 10, "{before}");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(sleeps(), before);
    driver.fill_rx(100);
    kicks[0].write(1).unwrap();
    wait_until(|| driver.collect_rx().len() == 1);
}

#[test]
fn the_backend_survives_resets() {
    let mut driver = MockDriver::new(16);
    let probe = Probe::default();
    let mut net = Net::new(NetConfig::default(), probe.boxed()).unwrap();
    for round in 1..=20 {
        let (activation, kicks) = driver.activation(FEATURES);
        net.activate(activation).unwrap();
        driver.send(&VnetHdr::default(), &[0; 60], &[]);
        kicks[1].write(1).unwrap();
        if round % 2 == 0 {
            wait_until(|| driver.collect_tx() == 1);
        }
        net.reset();
        net.reset();
        let state = probe.lock();
        assert_eq!((state.resets, state.links.len()), (round, round));
        drop(state);
        driver.reset();
    }
}

/// Wants to be called every few milliseconds, and counts.
struct Clock(u64, Option<Instant>, std::sync::mpsc::Sender<u64>);

impl Backend for Clock {
    fn configure(&mut self, _link: &Link) {}
    fn transmit(&mut self, _burst: &TxBurst<'_>, _now: Instant) {}
    fn receive(&mut self, _ring: &mut dyn RxRing, now: Instant) -> Stop {
        if self.1.is_none_or(|due| due <= now) {
            self.1 = Some(now + Duration::from_millis(3));
            self.0 += 1;
            let _ = self.2.send(self.0);
        }
        Stop::Idle
    }
    fn deadline(&self) -> Option<Instant> {
        self.1
    }
}

#[test]
fn deadlines_are_kept() {
    let driver = MockDriver::new(16);
    let (sender, ticks) = std::sync::mpsc::channel();
    let mut net = Net::new(NetConfig::default(), Box::new(Clock(0, None, sender))).unwrap();
    let (activation, _kicks) = driver.activation(FEATURES);
    net.activate(activation).unwrap();
    for want in 1..=5 {
        assert_eq!(ticks.recv_timeout(Duration::from_secs(10)), Ok(want));
    }
}

struct Broken;

impl Backend for Broken {
    fn configure(&mut self, _link: &Link) {}
    fn transmit(&mut self, _burst: &TxBurst<'_>, _now: Instant) {}
    fn receive(&mut self, _ring: &mut dyn RxRing, _now: Instant) -> Stop {
        panic!("a bug in the backend (this is a test)")
    }
}

#[test]
fn a_panic_of_the_backend_is_told_and_the_reset_still_works() {
    let driver = MockDriver::new(16);
    let mut net = Net::new(NetConfig::default(), Box::new(Broken)).unwrap();
    let (activation, _kicks) = driver.activation(FEATURES);
    net.activate(activation).unwrap();
    wait_until(|| driver.interrupt.wants_reset());
    net.reset();
    let (activation, _kicks) = driver.activation(FEATURES);
    assert!(net.activate(activation).is_err());
}

#[test]
fn configurations_are_checked() {
    let good = NetConfig::default();
    let new = |config| Net::new(config, Box::new(Loopback::default())).err();
    assert_eq!(new(good), None);
    for queue_size in [0, 1, 3, 300, 2048] {
        let config = NetConfig { queue_size, ..good };
        assert_eq!(new(config), Some(NetConfigError::QueueSize(queue_size)));
    }
    assert_eq!(
        new(NetConfig { mtu: 67, ..good }),
        Some(NetConfigError::Mtu(67))
    );
    assert!(
        new(NetConfig {
            mac: [1; 6],
            ..good
        })
        .is_some()
    );
}
