//! Drivers that break the specification on the control queue.

use net::nic::Offloads;
use proptest::prelude::*;

use super::{Card, everything, set_offloads};
use crate::testing::CTRL_QUEUE_SIZE;
use crate::testing::{Buffer, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, MockDriver};
use crate::virtio::spec::{F_INDIRECT_DESC, NET_OK};

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
