//! Frames over several descriptors and several chains.

use std::time::Instant;

use net::nic::VnetHdr;
use proptest::prelude::*;

use super::{Probe, pattern};
use crate::net::engine::Scratch;
use crate::net::loopback::Loopback;
use crate::testing::{MockDriver, Received};
use crate::virtio::spec::{F_EVENT_IDX, F_INDIRECT_DESC, F_VERSION_1, NET_F_MRG_RXBUF};

const MERGED: u64 = F_VERSION_1 | NET_F_MRG_RXBUF;

/// Delivers what `probe` holds into chains of `sizes`.
fn deliver(features: u64, probe: &Probe, chains: &[&[usize]]) -> Vec<Received> {
    let mut driver = MockDriver::new(32);
    for sizes in chains {
        assert!(driver.post_rx(sizes));
    }
    let mut engine = driver.engine(features, probe.boxed());
    engine.process_rx(&mut Scratch::default(), Instant::now());
    assert!(!engine.is_broken());
    driver.collect_rx()
}

#[test]
fn the_header_may_straddle_descriptors() {
    for sizes in [
        &[12, 600][..],
        &[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 600],
        &[5, 6, 601],
        &[11, 601],
        &[13, 700],
        &[2000],
    ] {
        let (probe, frame) = (Probe::default(), pattern(600, 3));
        let hdr = VnetHdr {
            flags: 1,
            gso_type: 4,
            hdr_len: 0x1234,
            gso_size: 0x5678,
            csum_start: 0x9abc,
            csum_offset: 0xdef0,
        };
        let delivery = (hdr, frame.clone(), 600);
        probe.lock().deliver.push_back(delivery);
        for features in [F_VERSION_1, MERGED] {
            probe.lock().deliver.resize(1, (hdr, frame.clone(), 600));
            let got = deliver(features, &probe, &[sizes]);
            let want = Received {
                hdr,
                num_buffers: 1,
                bytes: frame.clone(),
            };
            assert_eq!(got, [want], "{sizes:?}");
        }
    }
}

#[test]
fn a_frame_spans_as_many_chains_as_it_needs() {
    for (len, num_buffers) in [(0, 1), (88, 1), (89, 2), (188, 2), (189, 3), (1888, 19)] {
        let (probe, frame) = (Probe::default(), pattern(len, len));
        probe.deliver(&frame);
        let got = deliver(MERGED, &probe, &[[100].as_slice(); 20]);
        assert_eq!((got.len(), got[0].num_buffers), (1, num_buffers), "{len}");
        assert_eq!(got[0].bytes, frame);
    }
}

#[test]
fn chains_that_were_not_needed_serve_the_next_frame() {
    // Also in the middle of a batch, where they cannot be put back into the available ring.
    for batch in [false, true] {
        let probe = Probe::default();
        probe.lock().batch = batch;
        let frames: Vec<_> = (0..4).map(|i| pattern(50 + i, i)).collect();
        for frame in &frames {
            probe.deliver_from(frame, 400);
        }
        let got = deliver(MERGED, &probe, &[[100].as_slice(); 20]);
        let bytes: Vec<_> = got.into_iter().map(|frame| frame.bytes).collect();
        assert_eq!(bytes, frames);
    }
}

#[test]
fn all_chains_come_back_in_the_end() {
    let mut driver = MockDriver::new(16);
    let probe = Probe::default();
    probe.lock().batch = true;
    let mut engine = driver.engine(MERGED, probe.boxed());
    let mut scratch = Scratch::default();
    let mut seen = Vec::new();
    for i in 0..200 {
        driver.fill_rx(100);
        probe.deliver_from(&pattern(i % 300, i), 350);
        engine.process_rx(&mut scratch, Instant::now());
        seen.extend(driver.collect_rx());
    }
    assert_eq!(seen.len(), 200);
    for (i, frame) in seen.iter().enumerate() {
        assert_eq!(frame.bytes, pattern(i % 300, i));
    }
}

#[test]
fn stopping_makes_unused_chains_available_again() {
    let mut driver = MockDriver::new(16);
    let probe = Probe::default();
    let mut engine = driver.engine(MERGED, probe.boxed());
    driver.post_rx(&[100]);
    driver.post_rx(&[100]);
    probe.deliver(&[0; 60]);
    probe.deliver(&[0; 600]);
    engine.process_rx(&mut Scratch::default(), Instant::now());
    let (_, queues) = engine.into_parts();
    let rx = &queues.iter().find(|(index, _)| *index == 0).unwrap().1;
    use virtio_queue::QueueT;
    assert_eq!((rx.next_avail(), rx.next_used()), (1, 1));
}

#[test]
fn without_merging_a_short_buffer_does_not_block_the_ring() {
    let probe = Probe::default();
    probe.deliver(&pattern(1000, 1));
    probe.deliver(&pattern(60, 2));
    let got = deliver(F_VERSION_1, &probe, &[&[100], &[2000]]);
    let lens: Vec<_> = got.iter().map(|frame| frame.bytes.len()).collect();
    assert_eq!(lens, [1000, 60]);

    // When there are only short ones, the long frame is dropped.
    let mut driver = MockDriver::new(16);
    driver.fill_rx(100);
    probe.deliver(&pattern(1000, 1));
    probe.deliver(&pattern(60, 2));
    let mut engine = driver.engine(F_VERSION_1, probe.boxed());
    engine.process_rx(&mut Scratch::default(), Instant::now());
    let lens: Vec<_> = driver.collect_rx().iter().map(|f| f.bytes.len()).collect();
    assert_eq!(lens, [60]);
    let dropped = &engine.counters().rx_undeliverable;
    assert_eq!(dropped.load(std::sync::atomic::Ordering::Relaxed), 1);
}

#[test]
fn a_frame_longer_than_the_whole_ring_is_dropped() {
    let mut driver = MockDriver::new(4);
    driver.fill_rx(100);
    let probe = Probe::default();
    probe.deliver(&pattern(1000, 1));
    probe.deliver(&pattern(60, 2));
    let mut engine = driver.engine(MERGED, probe.boxed());
    engine.process_rx(&mut Scratch::default(), Instant::now());
    let lens: Vec<_> = driver.collect_rx().iter().map(|f| f.bytes.len()).collect();
    assert_eq!(lens, [60]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Bytes out are bytes in, however either side cuts them.
    #[test]
    fn any_split_carries_the_same_bytes(
        frames in proptest::collection::vec((0usize..9000, proptest::collection::vec(0usize..700, 0..8)), 1..20),
        rx in proptest::collection::vec(proptest::collection::vec(1usize..900, 1..5), 1..6),
        event_idx in any::<bool>(),
        indirect in any::<bool>(),
    ) {
        let mut features = MERGED;
        if event_idx { features |= F_EVENT_IDX; }
        if indirect { features |= F_INDIRECT_DESC; }
        // No frame is longer than what the whole ring holds.
        let room = |shape: &Vec<usize>| 124 / shape.len() * (shape.iter().sum::<usize>() + 11);
        let longest = rx.iter().map(room).min().unwrap() * 3 / 4 - 12;
        let frames: Vec<_> = frames
            .into_iter()
            .map(|(len, splits)| (len.min(longest), splits))
            .collect();
        let mut driver = MockDriver::new(128);
        let mut engine = driver.engine(features, Box::new(Loopback::default()));
        let mut scratch = Scratch::default();
        let mut shapes = rx.iter().cycle();
        let (mut got, mut turns) = (Vec::new(), 0);
        let mut to_send = frames.iter().enumerate();
        let mut pending = to_send.next();
        while got.len() < frames.len() {
            turns += 1;
            prop_assert!(turns < 5000, "stuck");
            while let Some((i, (len, splits))) = pending {
                let frame = pattern(*len, i);
                let sent = if indirect {
                    driver.send_indirect(&VnetHdr::default(), &frame, splits)
                } else {
                    driver.send(&VnetHdr::default(), &frame, splits)
                };
                if !sent { break }
                pending = to_send.next();
            }
            loop {
                let mut shape = shapes.next().unwrap().clone();
                shape[0] += 11; // so that the header fits
                if !driver.post_rx(&shape) { break }
            }
            engine.process_tx(&mut scratch, Instant::now());
            engine.process_rx(&mut scratch, Instant::now());
            prop_assert!(!engine.is_broken());
            driver.collect_tx();
            got.extend(driver.collect_rx());
        }
        for (i, (frame, (len, _))) in got.iter().zip(&frames).enumerate() {
            prop_assert_eq!(&frame.bytes, &pattern(*len, i));
        }
    }
}
