//! The control queue (VIRTIO 1.3, 5.1.6.5).

mod faults;
mod life;

use std::sync::atomic::Ordering;

use net::nic::Offloads;

use super::Probe;
use crate::net::engine::NetEngine;
use crate::net::features::{accepted_offloads, offered_features};
use crate::testing::{Buffer, DESC_F_WRITE, MockDriver};
use crate::virtio::spec::{
    F_EVENT_IDX, NET_ERR, NET_F_CSUM, NET_F_CTRL_GUEST_OFFLOADS, NET_F_CTRL_RX, NET_F_GUEST_CSUM,
    NET_F_GUEST_TSO4, NET_F_GUEST_TSO6, NET_F_GUEST_USO4, NET_OK,
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
