//! What a frame costs in the card itself, with a backend that does nothing:
//! `cargo test --release -p devices cost -- --ignored --nocapture`.

use std::time::{Duration, Instant};

use net::nic::{Backend, Link, RxRing, Stop, TxBurst, VnetHdr};

use crate::net::engine::Scratch;
use crate::net::null::Null;
use crate::testing::MockDriver;
use crate::virtio::spec::{F_EVENT_IDX, F_VERSION_1, NET_F_MRG_RXBUF};

const FEATURES: u64 = F_VERSION_1 | NET_F_MRG_RXBUF | F_EVENT_IDX;
const ROUNDS: u32 = 20_000;

/// Finishes frames of `len` bytes without writing them, until the buffers run out.
struct Flood {
    len: usize,
    frames: u32,
}

impl Backend for Flood {
    fn configure(&mut self, _link: &Link) {}
    fn transmit(&mut self, _burst: &TxBurst<'_>, _now: Instant) {}
    fn receive(&mut self, ring: &mut dyn RxRing, _now: Instant) -> Stop {
        for _ in 0..self.frames {
            assert!(ring.reserve(self.len));
            ring.finish(&VnetHdr::default(), self.len);
        }
        Stop::Yield
    }
}

#[test]
#[ignore = "a measurement"]
fn cost_of_tx() {
    let mut driver = MockDriver::new(256);
    let mut engine = driver.engine(FEATURES, Box::new(Null));
    let mut scratch = Scratch::default();
    for _ in 0..64 {
        driver.send(&VnetHdr::default(), &[0; 1514], &[12, 54]);
    }
    let heads: Vec<_> = (0..64).map(|i| driver.tx.avail_head(i)).collect();
    let mut spent = Duration::ZERO;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        assert_eq!(engine.process_tx(&mut scratch, start), 64);
        spent += start.elapsed();
        // The same chains again.
        heads
            .iter()
            .for_each(|&head| driver.tx.make_available(head));
    }
    println!("tx, 3 descriptors: {:?} a frame", spent / (ROUNDS * 64));
}

#[test]
#[ignore = "a measurement"]
fn cost_of_rx() {
    for (len, frames, chains) in [(1514, 64, 1), (64_000, 8, 16)] {
        let mut driver = MockDriver::new(256);
        let mut engine = driver.engine(FEATURES, Box::new(Flood { len, frames }));
        let mut scratch = Scratch::default();
        driver.fill_rx(4096);
        let count = (frames * chains) as u16;
        let heads: Vec<_> = (0..256).map(|i| driver.rx.avail_head(i)).collect();
        let mut next = heads.iter().cycle();
        let mut spent = Duration::ZERO;
        for _ in 0..ROUNDS {
            let start = Instant::now();
            engine.process_rx(&mut scratch, start);
            spent += start.elapsed();
            for _ in 0..count {
                driver.rx.make_available(*next.next().unwrap());
            }
        }
        assert!(!engine.is_broken());
        println!(
            "rx, {len} bytes, {chains} chains: {:?} a frame",
            spent / (ROUNDS * frames)
        );
    }
}
