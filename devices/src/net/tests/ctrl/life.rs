//! The control queue from its start to its end: which cards have one, the worker, and suspension.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use net::nic::{Backend, Link, Offloads, RxRing, Stop, TxBurst};
use virtio_queue::QueueT;

use super::{Card, Probe, everything, set_offloads};
use crate::net::features::GUEST_OFFLOADS;
use crate::net::loopback::Loopback;
use crate::net::{Net, NetConfig};
use crate::testing::MockDriver;
use crate::virtio::VirtioDevice;
use crate::virtio::spec::{F_VERSION_1, NET_F_CTRL_GUEST_OFFLOADS, NET_F_CTRL_VQ, NET_OK};

#[test]
fn without_ctrl_vq_there_is_no_control_queue() {
    let mut card = Card::new(F_VERSION_1);
    card.driver.send_command(&[0, 0, 1], &[], false);
    assert!(!card.engine.process_ctrl());
    assert_eq!(card.driver.collect_ctrl(), 0);
    assert_eq!(card.engine.into_parts().1.len(), 2);

    let mut net = Net::new(NetConfig::default(), Box::new(Loopback::default())).unwrap();
    assert_eq!(net.queue_max_sizes(), [256; 3]);
    assert_eq!(net.device_features() & NET_F_CTRL_GUEST_OFFLOADS, 0);
    net.mask_features(NET_F_CTRL_VQ);
    assert_eq!(net.queue_max_sizes(), [256, 256]);
}

#[test]
fn the_queue_comes_back_with_its_indices() {
    let mut card = Card::new(everything());
    for _ in 0..3 {
        assert_eq!(card.ask(&[0, 1, 0]), Some(NET_OK));
    }
    let (_, queues) = card.engine.into_parts();
    let ctrl = &queues.iter().find(|(index, _)| *index == 2).unwrap().1;
    assert_eq!((ctrl.next_avail(), ctrl.next_used()), (3, 3));
}

/// A suspended card goes on with what its driver chose; a driver that starts anew has not chosen yet.
#[test]
fn changed_offloads_outlive_a_suspension() {
    let all = Offloads::all();
    for (forget, want) in [(false, all - GUEST_OFFLOADS), (true, all)] {
        let mut driver = MockDriver::new(16);
        let probe = Probe::default();
        let mut net = Net::new(NetConfig::default(), probe.boxed()).unwrap();
        let (activation, kicks) = driver.activation(everything());
        net.activate(activation).unwrap();
        let answer = driver.send_command(&set_offloads(0), &[], false);
        kicks[2].write(1).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while driver.answer(answer).is_none() {
            assert!(Instant::now() < deadline, "no answer");
            std::thread::yield_now();
        }
        let queues = net.suspend();
        assert_eq!(queues.len(), 3);
        let (mut activation, _) = driver.activation(everything());
        for ((_, queue), active) in queues.into_iter().zip(&mut activation.queues) {
            if !forget {
                active.queue = queue;
            }
        }
        net.activate(activation).unwrap();
        let told = probe.lock().links.last().unwrap().offloads;
        assert_eq!(told, want);
        net.reset();
    }
}

/// Has something to do at all times.
struct Busy;

impl Backend for Busy {
    fn configure(&mut self, _link: &Link) {}
    fn transmit(&mut self, _burst: &TxBurst<'_>, _now: Instant) {}
    fn receive(&mut self, _ring: &mut dyn RxRing, _now: Instant) -> Stop {
        Stop::Yield
    }
}

#[test]
fn the_worker_answers_asleep_or_busy() {
    let backends: [Box<dyn Backend>; 2] = [Box::new(Busy), Box::new(Loopback::default())];
    for backend in backends {
        let mut driver = MockDriver::new(16);
        let mut net = Net::new(NetConfig::default(), backend).unwrap();
        let (activation, kicks) = driver.activation(net.device_features());
        net.activate(activation).unwrap();
        for round in 0..200u16 {
            if round % 50 == 49 {
                std::thread::sleep(Duration::from_millis(5));
            }
            let answer = driver.send_command(&[0, 0, 1], &[2], round % 2 == 0);
            // As a driver that spins for the answer, and notifies only if asked to.
            std::sync::atomic::fence(Ordering::SeqCst);
            if driver.ctrl.avail_event() == round {
                kicks[2].write(1).unwrap();
            }
            let deadline = Instant::now() + Duration::from_secs(20);
            while driver.answer(answer).is_none() || driver.collect_ctrl() == 0 {
                assert!(Instant::now() < deadline, "no answer in round {round}");
                std::thread::yield_now();
            }
            assert_eq!(driver.answer(answer), Some(NET_OK));
        }
        net.reset();
    }
}
