//! The control queue (VIRTIO 1.3, 5.1.6.5).

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use net::nic::{Backend, Link, Offloads, RxRing, Stop, TxBurst};
use proptest::prelude::*;
use virtio_queue::QueueT;

use super::Probe;
use crate::net::engine::{CTRL_QUEUE, NetEngine};
use crate::net::features::{GUEST_OFFLOADS, accepted_offloads, offered_features};
use crate::net::loopback::Loopback;
use crate::net::{CTRL_QUEUE_SIZE, Net, NetConfig};
use crate::testing::{Buffer, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, MockDriver};
use crate::virtio::VirtioDevice;
use crate::virtio::spec::{
    F_EVENT_IDX, F_INDIRECT_DESC, F_VERSION_1, NET_ERR, NET_F_CSUM, NET_F_CTRL_GUEST_OFFLOADS,
    NET_F_CTRL_RX, NET_F_CTRL_VQ, NET_F_GUEST_CSUM, NET_F_GUEST_TSO4, NET_F_GUEST_TSO6,
    NET_F_GUEST_USO4, NET_OK,
};

/// All that a card offers in front of a backend that can do everything.
fn everything() -> u64 {
    offered_features(Offloads::all())
}

struct Card {
    driver: MockDriver,
    engine: NetEngine,
    probe: Probe,
}

impl Card {
    fn new(features: u64) -> Self {
        let (driver, probe) = (MockDriver::new(16), Probe::default());
        Self {
            engine: driver.engine(features, probe.boxed()),
            driver,
            probe,
        }
    }

    /// Sends a command and lets it be carried out.
    fn ask(&mut self, request: &[u8]) -> Option<u8> {
        let answer = self.driver.send_command(request, &[2], false);
        self.engine.process_ctrl();
        self.driver.collect_ctrl();
        self.driver.answer(answer)
    }

    /// Takes what the backend was told since the last call.
    fn told(&self) -> Vec<Offloads> {
        let changes = std::mem::take(&mut self.probe.lock().changes);
        changes.iter().map(|link| link.offloads).collect()
    }
}

/// VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET.
fn set_offloads(bits: u64) -> Vec<u8> {
    let mut request = vec![5, 0];
    request.extend(bits.to_le_bytes());
    request
}

/// VIRTIO_NET_CTRL_MAC_TABLE_SET with tables that claim, and have, these numbers of addresses.
fn mac_table(tables: &[(u32, usize)]) -> Vec<u8> {
    let mut request = vec![1, 0];
    for &(claimed, present) in tables {
        request.extend(claimed.to_le_bytes());
        request.extend(vec![0x52; 6 * present]);
    }
    request
}

#[test]
fn every_command_has_its_answer() {
    let all = everything();
    let no_rx = all & !NET_F_CTRL_RX;
    let no_offloads = all & !NET_F_CTRL_GUEST_OFFLOADS;
    let no_uso = all & !NET_F_GUEST_USO4;
    let csum = NET_F_GUEST_CSUM;
    for (features, request, want, why) in [
        (all, vec![0, 0, 1], NET_OK, "promiscuous"),
        (all, vec![0, 0, 0], NET_OK, "not promiscuous"),
        (all, vec![0, 1, 1], NET_OK, "all multicast"),
        (all, vec![0, 0, 2], NET_ERR, "neither on nor off"),
        (all, vec![0, 0], NET_ERR, "no value"),
        (all, vec![0, 0, 1, 0], NET_ERR, "too long a value"),
        (all, vec![0, 2, 1], NET_ERR, "CTRL_RX_EXTRA is not on offer"),
        (no_rx, vec![0, 0, 1], NET_ERR, "CTRL_RX is not accepted"),
        (all, mac_table(&[(0, 0), (0, 0)]), NET_OK, "empty tables"),
        (all, mac_table(&[(3, 3), (200, 200)]), NET_OK, "tables"),
        (all, mac_table(&[(3, 3)]), NET_ERR, "one table"),
        (all, mac_table(&[(3, 3), (3, 2)]), NET_ERR, "short table"),
        (all, mac_table(&[(3, 3), (3, 4)]), NET_ERR, "long table"),
        (all, mac_table(&[(u32::MAX, 9), (0, 0)]), NET_ERR, "huge"),
        (no_rx, mac_table(&[(0, 0), (0, 0)]), NET_ERR, "not accepted"),
        (all, vec![1, 1, 2, 0, 0, 0, 0, 1], NET_ERR, "address"),
        (all, vec![2, 0, 1, 0], NET_ERR, "VLAN filter"),
        (all, vec![3, 0], NET_ERR, "announcement"),
        (all, vec![4, 0, 1, 0], NET_ERR, "queue pairs"),
        (all, set_offloads(0), NET_OK, "no offload"),
        (all, set_offloads(csum), NET_OK, "one offload"),
        (
            all,
            set_offloads(NET_F_GUEST_TSO4),
            NET_ERR,
            "without checksum",
        ),
        (
            all,
            set_offloads(csum | 1 << 9),
            NET_ERR,
            "ECN is not on offer",
        ),
        (
            all,
            set_offloads(csum | NET_F_CSUM),
            NET_ERR,
            "not a guest's",
        ),
        (all, set_offloads(u64::MAX), NET_ERR, "all bits"),
        (
            no_uso,
            set_offloads(csum | NET_F_GUEST_USO4),
            NET_ERR,
            "new",
        ),
        (no_offloads, set_offloads(csum), NET_ERR, "not accepted"),
        (all, vec![5, 0, 2, 0, 0, 0], NET_ERR, "half an offload set"),
        (all, vec![5, 1, 2, 0, 0, 0, 0, 0, 0, 0], NET_ERR, "unknown"),
        (all, vec![255, 255], NET_ERR, "unknown class"),
        (all, vec![0], NET_ERR, "half a header"),
        (all, vec![], NET_ERR, "nothing"),
    ] {
        let mut card = Card::new(features);
        assert_eq!(card.ask(&request), Some(want), "{why}: {request:?}");
        assert!(!card.engine.is_broken(), "{why}");
        let told = usize::from(request[..].starts_with(&[5, 0]) && want == NET_OK);
        assert_eq!(card.told().len(), told, "{why}");
        let refused = card.engine.counters().ctrl_refused.load(Ordering::Relaxed);
        assert_eq!(refused, u64::from(want == NET_ERR), "{why}");
        assert_eq!(card.driver.interrupt.queue(2), 1, "{why}");
    }
}

#[test]
fn offloads_go_and_come_back() {
    let mut card = Card::new(everything());
    let host = Offloads::CSUM | Offloads::HOST_TSO4 | Offloads::HOST_TSO6 | Offloads::HOST_USO;
    let some = NET_F_GUEST_CSUM | NET_F_GUEST_TSO6;
    let all = everything() & !offered_features(host);
    let all = all & !NET_F_CTRL_GUEST_OFFLOADS;
    for bits in [0, some, all, 0] {
        assert_eq!(card.ask(&set_offloads(bits)), Some(NET_OK));
        assert_eq!(card.told(), [host | accepted_offloads(bits)], "{bits:#x}");
    }
    // The next driver starts with what it accepts.
    let probe = card.probe.clone();
    let engine = card.driver.engine(everything(), card.engine.into_backend());
    assert_eq!(probe.lock().links.last().unwrap().offloads, Offloads::all());
    drop(engine);
}

#[test]
fn any_layout_of_descriptors_will_do() {
    let bits = NET_F_GUEST_CSUM | NET_F_GUEST_TSO4;
    let long = mac_table(&[(40, 40), (50, 50)]);
    for request in [set_offloads(bits), set_offloads(0), long] {
        for splits in [&[][..], &[1], &[2], &[1, 1, 1, 3, 1], &[3], &[9], &[2, 244]] {
            for indirect in [false, true] {
                let mut card = Card::new(everything());
                // Twice, so that one lies across the border of two memory regions sometimes.
                for skew in 0..2 {
                    card.driver.alloc(0x8000 + 37 * splits.len() + skew);
                    let answer = card.driver.send_command(&request, splits, indirect);
                    assert!(!card.engine.process_ctrl());
                    assert_eq!(card.driver.answer(answer), Some(NET_OK), "{splits:?}");
                    assert_eq!(card.driver.collect_ctrl(), 1);
                }
                let told = if request[0] == 5 { 2 } else { 0 };
                assert_eq!(card.told().len(), told);
            }
        }
    }
}

#[test]
fn only_the_first_byte_of_a_long_answer_is_written() {
    let mut card = Card::new(everything());
    let (request, empty) = (card.driver.alloc(3), card.driver.alloc(0));
    let (first, second) = (card.driver.alloc(4), card.driver.alloc(4));
    card.driver.write(request, &[0, 1, 1]);
    let chain = [
        (empty, 0),
        (request, 0),
        (empty, DESC_F_WRITE),
        (first, DESC_F_WRITE),
        (second, DESC_F_WRITE),
    ];
    card.driver.send_ctrl_chain(&chain, false);
    card.engine.process_ctrl();
    assert_eq!(card.driver.collect_ctrl(), 1);
    let rest = Buffer {
        addr: first.addr + 1,
        len: 1,
    };
    assert_eq!(card.driver.answer(first), Some(NET_OK));
    assert_eq!(card.driver.answer(rest), None);
    assert_eq!(card.driver.answer(second), None);
}

type Setup = fn(&mut MockDriver, Buffer);

/// Each is given a buffer of 16 readable bytes.
const FAULTS: &[(&str, Setup)] = &[
    ("no room for an answer", |d, b| {
        d.send_ctrl_chain(&[(b, 0)], false);
    }),
    ("an empty answer", |d, b| {
        let answer = Buffer { len: 0, ..b };
        d.send_ctrl_chain(&[(b, 0), (answer, DESC_F_WRITE)], false);
    }),
    ("data behind the answer", |d, b| {
        d.send_ctrl_chain(&[(b, 0), (b, DESC_F_WRITE), (b, 0)], false);
    }),
    ("data behind the answer, indirect", |d, b| {
        d.send_ctrl_chain(&[(b, 0), (b, DESC_F_WRITE), (b, 0)], true);
    }),
    ("data outside memory", |d, b| {
        let outside = Buffer { addr: 1 << 50, ..b };
        d.send_ctrl_chain(&[(outside, 0), (b, DESC_F_WRITE)], false);
    }),
    ("answer outside memory", |d, b| {
        let outside = Buffer {
            addr: u64::MAX,
            ..b
        };
        d.send_ctrl_chain(&[(b, 0), (outside, DESC_F_WRITE)], false);
    }),
    ("a loop", |d, b| {
        d.ctrl.set_desc(0, b, DESC_F_NEXT, 0);
        d.ctrl.make_available(0);
    }),
    ("a table in a table", |d, b| {
        let table = d.alloc(16);
        d.ctrl.set_desc_at(table.addr, 0, b, DESC_F_INDIRECT, 0);
        d.ctrl.add_table(table);
    }),
    ("a head outside the ring", |d, _| {
        d.ctrl.make_available(CTRL_QUEUE_SIZE)
    }),
    ("an index that jumps", |d, _| d.ctrl.set_avail_idx(1000)),
];

#[test]
fn faults_are_noticed_behind_the_answers_that_were_due() {
    for (name, setup) in FAULTS {
        let mut card = Card::new(everything());
        let answer = card.driver.send_command(&set_offloads(0), &[], false);
        card.engine.process_ctrl();
        assert_eq!(card.driver.answer(answer), Some(NET_OK), "{name}");
        let second = card.driver.send_command(&set_offloads(0), &[], false);
        let buffer = card.driver.alloc(16);
        setup(&mut card.driver, buffer);
        assert!(!card.engine.process_ctrl(), "{name}");
        assert!(card.engine.is_broken(), "{name}");
        assert!(card.driver.interrupt.wants_reset(), "{name}");
        // An index that jumps hides what is behind it.
        if *name != "an index that jumps" {
            assert_eq!(card.driver.answer(second), Some(NET_OK), "{name}");
            assert_eq!(card.driver.collect_ctrl(), 2, "{name}");
        }
        assert!(!card.engine.process_ctrl(), "nothing more happens");
    }
    // Without INDIRECT_DESC a table is one.
    let mut card = Card::new(everything() & !F_INDIRECT_DESC);
    card.driver.send_command(&[0, 0, 1], &[], true);
    card.engine.process_ctrl();
    assert!(card.engine.is_broken());
}

#[test]
fn many_commands_take_several_turns_and_none_is_missed() {
    for features in [everything(), everything() & !F_EVENT_IDX] {
        let mut card = Card::new(features);
        let mut sent = 0u16;
        for round in 0..3000 {
            let commands = 1 + round % 30;
            for _ in 0..commands {
                card.driver.send_command(&[0, 0, 1], &[], false);
            }
            sent = sent.wrapping_add(commands);
            let mut turns = 1;
            while card.engine.process_ctrl() {
                turns += 1;
            }
            assert_eq!(turns, 1 + (commands - 1) / 16, "work is bounded");
            assert_eq!(card.driver.collect_ctrl(), usize::from(commands));
            if features & F_EVENT_IDX != 0 {
                assert_eq!(card.driver.ctrl.avail_event(), sent);
            }
            assert_eq!(card.driver.ctrl.used_flags(), 0, "notifications are on");
            // The mock does not reuse what it allocated for commands.
            if round % 500 == 499 {
                card.driver.reset();
                card = Card::new(features);
                sent = 0;
            }
        }
    }
}

#[test]
fn without_ctrl_vq_there_is_no_control_queue() {
    let mut card = Card::new(F_VERSION_1);
    card.driver.send_command(&[0, 0, 1], &[], false);
    assert!(!card.engine.process_ctrl());
    assert_eq!(card.driver.collect_ctrl(), 0);
    assert!(card.engine.into_parts().2.is_none());

    let mut net = Net::new(NetConfig::default(), Box::new(Loopback::default())).unwrap();
    assert_eq!(net.queue_max_sizes(), [256, 256, CTRL_QUEUE_SIZE]);
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
    let (_, _, ctrl) = card.engine.into_parts();
    let ctrl = ctrl.unwrap();
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
                kicks[usize::from(CTRL_QUEUE)].write(1).unwrap();
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever is on the control queue, the card answers or stops; the work is bounded.
    #[test]
    fn garbage_is_survived(
        descs in proptest::collection::vec(
            (prop_oneof![5 => 0x40_0000u64..0x42_0000, 1 => any::<u64>(), 1 => Just(0x30_0000)],
             prop_oneof![4 => 0u32..16, 1 => any::<u32>(), 1 => Just(32), 1 => Just(48 << 20)],
             0u16..8, 0u16..66),
            64,
        ),
        bytes in proptest::collection::vec(any::<u8>(), 0x400),
        heads in proptest::collection::vec(0u16..66, 0..40),
        indirect in any::<bool>(),
    ) {
        let features = if indirect { everything() } else { everything() & !F_INDIRECT_DESC };
        let mut card = Card::new(features);
        for at in (0x40_0000..0x42_0000).step_by(0x400) {
            card.driver.write(Buffer { addr: at, len: 0x400 }, &bytes);
        }
        for (index, (addr, len, flags, next)) in (0..).zip(descs) {
            card.driver.ctrl.set_desc(index, Buffer { addr, len }, flags, next);
        }
        for head in heads {
            card.driver.ctrl.make_available(head);
            for _ in 0..3 {
                card.engine.process_ctrl();
            }
        }
        prop_assert!(card.told().iter().all(|offloads| offloads.contains(Offloads::CSUM)));
    }
}
