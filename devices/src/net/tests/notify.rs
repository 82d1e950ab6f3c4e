//! Interrupts and notifications, with and without EVENT_IDX (VIRTIO 1.3, 2.7.7 and 2.7.10).

use std::time::Instant;

use net::nic::VnetHdr;

use super::Probe;
use crate::net::TX_INTERRUPT_DELAY;
use crate::net::engine::{NetEngine, Scratch};
use crate::testing::MockDriver;
use crate::virtio::spec::{F_EVENT_IDX, F_VERSION_1, NET_F_MRG_RXBUF};

const PLAIN: u64 = F_VERSION_1 | NET_F_MRG_RXBUF;
const EVENTS: u64 = PLAIN | F_EVENT_IDX;

struct Card {
    driver: MockDriver,
    engine: NetEngine,
    scratch: Scratch,
    probe: Probe,
}

impl Card {
    fn new(features: u64) -> Self {
        let (driver, probe) = (MockDriver::new(16), Probe::default());
        Self {
            engine: driver.engine(features, probe.boxed()),
            driver,
            scratch: Scratch::default(),
            probe,
        }
    }

    fn send(&mut self, count: usize) {
        for _ in 0..count {
            assert!(self.driver.send(&VnetHdr::default(), &[0; 60], &[]));
        }
    }

    fn tx(&mut self) -> usize {
        self.engine.process_tx(&mut self.scratch, Instant::now())
    }

    fn rx(&mut self) -> bool {
        self.engine.process_rx(&mut self.scratch, Instant::now())
    }
}

#[test]
fn one_interrupt_per_burst() {
    for features in [PLAIN, EVENTS] {
        let mut card = Card::new(features);
        card.send(10);
        assert_eq!(card.tx(), 10);
        card.rx();
        assert_eq!(card.driver.interrupt.queue(1), 1);
        for _ in 0..5 {
            card.driver.post_rx(&[100]);
            card.probe.deliver(&[0; 60]);
        }
        card.rx();
        assert_eq!(card.driver.interrupt.queue(0), 1);
        assert_eq!(card.driver.collect_rx().len(), 5);
        // Nothing moved, so nothing is said.
        card.tx();
        card.rx();
        let interrupt = &card.driver.interrupt;
        assert_eq!((interrupt.queue(0), interrupt.queue(1)), (1, 1));
    }
}

#[test]
fn the_driver_can_switch_interrupts_off() {
    let mut card = Card::new(PLAIN);
    card.driver.tx.set_avail_flags(1);
    card.send(3);
    card.tx();
    card.rx();
    assert_eq!(card.driver.interrupt.queue(1), 0);
    card.driver.tx.set_avail_flags(0);
    card.send(1);
    card.tx();
    card.rx();
    assert_eq!(card.driver.interrupt.queue(1), 1);
}

#[test]
fn used_event_is_honoured_through_the_wrap() {
    let mut card = Card::new(EVENTS);
    let mut expected = 0;
    // More than 65536 frames, three a burst, an interrupt for every seventh.
    let mut event = 6u16;
    card.driver.tx.set_used_event(event);
    let mut used = 0u16;
    for _ in 0..22_000 {
        card.send(3);
        assert_eq!(card.tx(), 3);
        card.rx();
        card.driver.collect_tx();
        let before = used;
        used = used.wrapping_add(3);
        if event.wrapping_sub(before) < 3 {
            expected += 1;
            event = event.wrapping_add(7);
            card.driver.tx.set_used_event(event);
        }
        assert_eq!(card.driver.interrupt.queue(1), expected, "at {used}");
    }
    assert!(expected > 9000);
}

/// A driver that is interrupted for frames looks for its own buffers, too: it gets the second
/// interrupt only when it has not, or when many buffers wait.
#[test]
fn an_interrupt_for_frames_stands_in_for_one_for_buffers() {
    let round = |card: &mut Card, frames: usize| {
        card.send(frames);
        card.driver.post_rx(&[100]);
        card.probe.deliver(&[0; 60]);
        card.driver.rx.set_used_event(card.driver.rx.device_idx());
        card.tx();
        card.rx();
        (
            card.driver.interrupt.queue(0),
            card.driver.interrupt.queue(1),
        )
    };
    let later = Instant::now() + 2 * TX_INTERRUPT_DELAY;

    // The driver takes its buffers and says where to go on.
    let mut card = Card::new(EVENTS);
    assert_eq!(round(&mut card, 1), (1, 0));
    assert!(card.engine.deadline().is_some());
    card.driver.tx.set_used_event(1);
    card.engine.process_rx(&mut card.scratch, later);
    assert_eq!(card.driver.interrupt.queue(1), 0);
    assert_eq!(card.engine.deadline(), None);

    // It does not.
    let mut card = Card::new(EVENTS);
    assert_eq!(round(&mut card, 1), (1, 0));
    card.engine.process_rx(&mut card.scratch, later);
    assert_eq!(card.driver.interrupt.queue(1), 1);
    // And so is not made to wait again.
    card.driver.tx.set_used_event(1);
    card.send(1);
    card.tx();
    card.driver.post_rx(&[100]);
    card.probe.deliver(&[0; 60]);
    card.driver.rx.set_used_event(card.driver.rx.device_idx());
    card.rx();
    let interrupt = &card.driver.interrupt;
    assert_eq!((interrupt.queue(0), interrupt.queue(1)), (2, 2));

    // Half of the ring waits.
    let mut card = Card::new(EVENTS);
    assert_eq!(round(&mut card, 8), (1, 1));
}

#[test]
fn tx_notifications_are_off_while_working() {
    let mut card = Card::new(PLAIN);
    card.send(1);
    card.tx();
    assert_eq!(card.driver.tx.used_flags(), 1);
    // A frame that slips in before the device asks for notifications is not lost.
    card.send(1);
    assert!(card.engine.arm_tx());
    assert_eq!(card.driver.tx.used_flags(), 0);
    assert_eq!(card.tx(), 1);
    assert!(!card.engine.arm_tx());

    let mut card = Card::new(EVENTS);
    card.send(5);
    card.tx();
    assert!(!card.engine.arm_tx());
    assert_eq!(card.driver.tx.avail_event(), 5);
    card.send(1);
    card.tx();
    assert_eq!(card.driver.tx.avail_event(), 5, "no store while working");
}

#[test]
fn rx_notifications_are_on_only_when_starved() {
    let mut card = Card::new(EVENTS);
    for _ in 0..4 {
        card.driver.post_rx(&[100]);
    }
    card.probe.deliver(&[0; 60]);
    assert!(!card.rx());
    assert_eq!(card.driver.rx.avail_event(), 0, "not armed");
    // This one takes more than the three chains that are left.
    card.probe.deliver(&[0; 900]);
    assert!(!card.rx(), "a turn at once would spin");
    assert_eq!(card.driver.rx.avail_event(), 4);
    assert!(!card.rx());
    while card.driver.rx.free() > 0 {
        card.driver.post_rx(&[100]);
    }
    assert!(!card.rx());
    assert_eq!(card.driver.collect_rx().len(), 2);

    let mut card = Card::new(PLAIN);
    card.rx();
    assert_eq!(card.driver.rx.used_flags(), 1);
    card.probe.deliver(&[0; 60]);
    card.rx();
    assert_eq!(card.driver.rx.used_flags(), 0);
    card.driver.post_rx(&[100]);
    card.rx();
    assert_eq!(card.driver.rx.used_flags(), 1);
    assert_eq!(card.driver.collect_rx().len(), 1);
}
