//! Drivers that break the specification. The card must notice, stop, and never panic.

use std::time::Instant;

use net::nic::VnetHdr;
use proptest::prelude::*;

use super::Probe;
use crate::net::engine::Scratch;
use crate::testing::{Buffer, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, MockDriver};
use crate::virtio::spec::{F_INDIRECT_DESC, F_VERSION_1, NET_F_MRG_RXBUF};

type Setup = fn(&mut MockDriver);

const PLAIN: u64 = F_VERSION_1 | NET_F_MRG_RXBUF;
const INDIRECT: u64 = PLAIN | F_INDIRECT_DESC;
const LAST: Buffer = Buffer {
    addr: (64 << 20) - 64,
    len: 65,
};

/// Lets the device see a chain of hand-made descriptors.
fn tx(driver: &mut MockDriver, descs: &[(Buffer, u16, u16)]) {
    for (index, &(buffer, flags, next)) in (0..).zip(descs) {
        driver.tx.set_desc(index, buffer, flags, next);
    }
    driver.tx.make_available(0);
}

fn some(driver: &mut MockDriver, len: usize) -> Buffer {
    driver.alloc(len)
}

/// A chain of one descriptor that names an indirect table of `len` bytes at `table`.
fn table(driver: &mut MockDriver, table: Buffer, len: u32) {
    let table = Buffer { len, ..table };
    tx(driver, &[(table, DESC_F_INDIRECT, 0)]);
}

const CASES: &[(&str, u64, Setup)] = &[
    ("tx loop", PLAIN, |d| {
        let b = some(d, 64);
        tx(d, &[(b, DESC_F_NEXT, 1), (b, DESC_F_NEXT, 0)]);
    }),
    ("tx next outside the table", PLAIN, |d| {
        let b = some(d, 64);
        tx(d, &[(b, DESC_F_NEXT, 16)]);
    }),
    ("tx buffer outside memory", PLAIN, |d| {
        let b = Buffer {
            addr: 1 << 50,
            len: 64,
        };
        tx(d, &[(b, 0, 0)]);
    }),
    ("tx buffer across the end of memory", PLAIN, |d| {
        tx(d, &[(LAST, 0, 0)]);
    }),
    ("tx buffer wraps around", PLAIN, |d| {
        let b = Buffer {
            addr: u64::MAX - 8,
            len: 64,
        };
        tx(d, &[(b, 0, 0)]);
    }),
    ("tx huge length", PLAIN, |d| {
        let b = Buffer {
            len: u32::MAX,
            ..some(d, 64)
        };
        tx(d, &[(b, 0, 0)]);
    }),
    ("tx writable", PLAIN, |d| {
        let b = some(d, 64);
        tx(d, &[(b, DESC_F_NEXT, 1), (b, DESC_F_WRITE, 0)]);
    }),
    ("tx shorter than the header", PLAIN, |d| {
        let b = some(d, 11);
        tx(d, &[(b, 0, 0)]);
    }),
    ("tx empty", PLAIN, |d| {
        let b = Buffer {
            len: 0,
            ..some(d, 1)
        };
        tx(d, &[(b, 0, 0)]);
    }),
    ("tx head outside the table", PLAIN, |d| {
        d.tx.make_available(16)
    }),
    ("tx avail idx jumps", PLAIN, |d| d.tx.set_avail_idx(17)),
    ("tx avail idx goes back", PLAIN, |d| {
        d.tx.set_avail_idx(0xffff)
    }),
    ("indirect not negotiated", PLAIN, |d| {
        let t = some(d, 64);
        table(d, t, 32);
    }),
    ("indirect odd length", INDIRECT, |d| {
        let t = some(d, 64);
        table(d, t, 24);
    }),
    ("indirect empty", INDIRECT, |d| {
        let t = some(d, 64);
        table(d, t, 0);
    }),
    ("indirect too long", INDIRECT, |d| {
        let t = some(d, 64);
        table(d, t, 16 * 1025);
    }),
    ("indirect length overflows 16 bits", INDIRECT, |d| {
        let t = some(d, 64);
        table(d, t, 16 * 0x1_0001);
    }),
    ("indirect outside memory", INDIRECT, |d| {
        table(
            d,
            Buffer {
                addr: 1 << 50,
                len: 0,
            },
            32,
        );
    }),
    ("indirect at the end of the address space", INDIRECT, |d| {
        table(
            d,
            Buffer {
                addr: u64::MAX - 15,
                len: 0,
            },
            32,
        );
    }),
    ("indirect and next", INDIRECT, |d| {
        let t = some(d, 64);
        tx(
            d,
            &[(Buffer { len: 32, ..t }, DESC_F_INDIRECT | DESC_F_NEXT, 1)],
        );
    }),
    ("indirect in indirect", INDIRECT, |d| {
        let t = some(d, 64);
        d.tx.set_desc_at(t.addr, 0, Buffer { len: 32, ..t }, DESC_F_INDIRECT, 0);
        table(d, t, 32);
    }),
    ("indirect loop", INDIRECT, |d| {
        let (t, b) = (some(d, 64), some(d, 64));
        d.tx.set_desc_at(t.addr, 0, b, DESC_F_NEXT, 0);
        table(d, t, 32);
    }),
    ("rx readable", PLAIN, |d| {
        let b = some(d, 2048);
        d.rx.add(&[b], 0);
    }),
    ("rx shorter than the header", PLAIN, |d| {
        let b = some(d, 11);
        d.rx.add(&[b], DESC_F_WRITE);
    }),
    ("rx shorter than the header, no merging", F_VERSION_1, |d| {
        let b = some(d, 11);
        d.rx.add(&[b], DESC_F_WRITE);
    }),
    ("rx second chain outside memory", PLAIN, |d| {
        d.post_rx(&[64]);
        d.rx.add(&[LAST], DESC_F_WRITE);
    }),
    ("rx avail idx jumps", PLAIN, |d| d.rx.set_avail_idx(1000)),
];

#[test]
fn each_is_noticed_and_cured_by_a_reset() {
    for (name, features, setup) in CASES {
        let mut driver = MockDriver::new(16);
        let probe = Probe::default();
        let mut engine = driver.engine(*features, probe.boxed());
        let mut scratch = Scratch::default();
        setup(&mut driver);
        probe.deliver(&[1; 600]);
        for _ in 0..3 {
            engine.process_tx(&mut scratch, Instant::now());
            engine.process_rx(&mut scratch, Instant::now());
        }
        assert!(engine.is_broken(), "{name}");
        assert_eq!(
            driver
                .interrupt
                .resets
                .load(std::sync::atomic::Ordering::Relaxed),
            1,
            "{name}"
        );
        assert!(probe.lock().taken.is_empty(), "{name}");

        driver.reset();
        let mut engine = driver.engine(*features, engine.into_backend());
        assert_eq!(probe.lock().resets, 1);
        driver.send(&VnetHdr::default(), &[2; 60], &[]);
        assert_eq!(engine.process_tx(&mut scratch, Instant::now()), 1, "{name}");
        assert_eq!(probe.lock().taken.len(), 1, "{name}");
    }
}

#[test]
fn frames_ahead_of_a_fault_are_sent() {
    let mut driver = MockDriver::new(16);
    let probe = Probe::default();
    let mut engine = driver.engine(PLAIN, probe.boxed());
    driver.send(&VnetHdr::default(), &[2; 60], &[]);
    let b = driver.alloc(4);
    driver.tx.add(&[b], 0);
    engine.process_tx(&mut Scratch::default(), Instant::now());
    assert!(engine.is_broken());
    assert_eq!(driver.collect_tx(), 1);
    assert_eq!(probe.lock().taken.len(), 1);
}

#[test]
fn an_oversized_frame_is_dropped_without_a_fault() {
    let mut driver = MockDriver::new(16);
    let probe = Probe::default();
    let mut engine = driver.engine(PLAIN, probe.boxed());
    driver.send(&VnetHdr::default(), &vec![0; 70_000], &[12]);
    driver.send(&VnetHdr::default(), &[3; 60], &[12]);
    engine.process_tx(&mut Scratch::default(), Instant::now());
    assert!(!engine.is_broken());
    assert_eq!(driver.collect_tx(), 2);
    assert_eq!(probe.lock().taken.len(), 1);
}

fn any_desc() -> impl Strategy<Value = (Buffer, u16, u16)> {
    let addr = prop_oneof![
        5 => 0x40_0000u64..0x42_0000,
        1 => any::<u64>(),
        1 => (64u64 << 20) - 100..(64 << 20) + 1,
        1 => Just(0x10_0000), // the rings themselves
    ];
    let len = prop_oneof![4 => 0u32..3000, 1 => any::<u32>(), 1 => Just(32)];
    (addr, len, 0u16..8, 0u16..18)
        .prop_map(|(addr, len, flags, next)| (Buffer { addr, len }, flags, next))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever is in the rings, the card does not panic, hang or run on after a fault.
    #[test]
    fn garbage_is_survived(
        tables in proptest::collection::vec((any_desc(), any_desc()), 16),
        heads in proptest::collection::vec((0u16..18, 0u16..18), 0..20),
        features in prop_oneof![Just(PLAIN), Just(INDIRECT), Just(F_VERSION_1)],
    ) {
        let mut driver = MockDriver::new(16);
        let probe = Probe::default();
        let mut engine = driver.engine(features, probe.boxed());
        let mut scratch = Scratch::default();
        for (index, (rx, tx)) in (0..).zip(tables) {
            driver.rx.set_desc(index, rx.0, rx.1 | DESC_F_WRITE, rx.2);
            driver.tx.set_desc(index, tx.0, tx.1 & !DESC_F_WRITE, tx.2);
        }
        for (rx, tx) in heads {
            driver.rx.make_available(rx);
            driver.tx.make_available(tx);
            probe.deliver(&[1; 3000]);
            engine.process_rx(&mut scratch, Instant::now());
            engine.process_tx(&mut scratch, Instant::now());
            engine.arm_tx();
        }
    }
}
