//! What every backend must withstand.
//!
//! The harness plays an odd and then a hostile driver against a fresh backend, without a thread.
//! It does not know what the backend is for, so it only checks what holds for all of them: no
//! panic, no fault of the card, every TX chain comes back, every received frame is well formed,
//! frames that come back do so in order, and no turn of the backend leaves reservations behind.

use std::time::{Duration, Instant};

use net::nic::{Backend, Offloads, VnetHdr};

use crate::net::engine::{NetEngine, Scratch};
use crate::net::features::offered_features;
use crate::testing::driver::{MockDriver, Received};
use crate::virtio::spec::{F_EVENT_IDX, F_INDIRECT_DESC, F_VERSION_1, NET_F_MRG_RXBUF};

/// EtherType for local experiments (IEEE 802), so that no backend takes our frames for traffic.
const ETHERTYPE: [u8; 2] = [0x88, 0xb5];
/// Where a numbered frame has its number.
const NUMBER_AT: usize = 14;
/// Turns that a backend may ask for in a row without being given anything new.
const MAX_TURNS: usize = 10_000;
/// Queue size of the mock driver.
const QUEUE_SIZE: u16 = 64;

/// Runs all checks on backends that `make` makes.
///
/// # Panics
/// Panics at the first check that fails.
pub fn run(make: impl Fn() -> Box<dyn Backend>) {
    let offered = offered_features(make().offloads());
    let bare = F_VERSION_1;
    for features in [
        bare,
        bare | NET_F_MRG_RXBUF,
        offered & !F_EVENT_IDX,
        offered,
    ] {
        let mut bench = Bench::new(features, make());
        bench.odd_lengths();
        bench.header_lies();
        bench.order();
        bench.starvation();
        bench.timing();
        bench.finish();
    }
    reset_and_reconfigure(&make);
}

/// A card in front of one backend, and its driver.
struct Bench {
    driver: MockDriver,
    engine: NetEngine,
    scratch: Scratch,
    features: u64,
    seen: Vec<Received>,
    /// What the backend is told; never goes back.
    clock: Instant,
}

impl Bench {
    fn new(features: u64, backend: Box<dyn Backend>) -> Self {
        let mut driver = MockDriver::new(QUEUE_SIZE);
        driver.fill_rx(2048);
        Self {
            engine: driver.engine(features, backend),
            driver,
            scratch: Scratch::default(),
            features,
            seen: Vec::new(),
            clock: Instant::now(),
        }
    }

    fn send(&mut self, hdr: &VnetHdr, frame: &[u8], splits: &[usize]) {
        let sent = if self.features & F_INDIRECT_DESC != 0 {
            self.driver.send_indirect(hdr, frame, splits)
        } else {
            self.driver.send(hdr, frame, splits)
        };
        assert!(sent, "the mock driver's TX ring is full");
    }

    /// Runs the card until nothing moves, and checks what it did.
    fn settle(&mut self) {
        self.turns();
        let counters = self.engine.counters().snapshot();
        let value = |name| counters.iter().find(|(n, _)| *n == name).map(|(_, v)| *v);
        assert_eq!(
            value("driver_faults"),
            Some(0),
            "the card saw a driver fault"
        );
        assert_eq!(
            value("rx_unfinished"),
            Some(0),
            "the backend returned from receive() with frames reserved"
        );
        assert_eq!(
            self.driver.tx.free(),
            usize::from(QUEUE_SIZE),
            "TX chains are missing"
        );
    }

    fn now(&mut self) -> Instant {
        self.clock = self.clock.max(Instant::now());
        self.clock
    }

    fn turns(&mut self) {
        for _ in 0..MAX_TURNS {
            let now = self.now();
            let taken = self.engine.process_tx(&mut self.scratch, now);
            let again = self.engine.process_rx(&mut self.scratch, now);
            self.driver.collect_tx();
            let received = self.driver.collect_rx();
            let any = !received.is_empty();
            self.seen.extend(received);
            if taken == 0 && !again && !any && !self.engine.arm_tx() {
                return;
            }
        }
        panic!("the backend still asks for turns after {MAX_TURNS}");
    }

    fn refill(&mut self) {
        self.driver.fill_rx(2048);
    }

    /// Empty frames, runts, and everything up to 64 KiB, split in unkind places.
    fn odd_lengths(&mut self) {
        for len in [
            0, 1, 5, 13, 14, 15, 33, 59, 60, 1514, 1515, 9014, 65535, 65550,
        ] {
            let frame = frame(0, len);
            for splits in [&[][..], &[12], &[1, 1, 9, 1, 1, 3], &[5, 30, 0, 7, 900]] {
                self.send(&VnetHdr::default(), &frame, splits);
                self.settle();
                self.refill();
            }
        }
    }

    /// Headers that do not fit their frame. A backend must not believe any of them.
    fn header_lies(&mut self) {
        let values = [0, 1, 14, 33, 34, 1499, 0x7fff, 0xffff];
        let types = [0u8, 1, 3, 4, 5, 0x81, 0x84, 0xff];
        for (len, flags) in [
            (0, 1),
            (20, 1),
            (60, 0),
            (60, 1),
            (60, 3),
            (1514, 1),
            (4000, 0xff),
        ] {
            for (i, &gso_type) in types.iter().enumerate() {
                for (j, &value) in values.iter().enumerate() {
                    let other = values[(i + j) % values.len()];
                    let hdr = VnetHdr {
                        flags,
                        gso_type,
                        hdr_len: other,
                        gso_size: value,
                        csum_start: other,
                        csum_offset: value,
                    };
                    self.send(&hdr, &frame(0, len), &[12]);
                    self.settle();
                    self.send(&hdr, &ipv4_tcp(len), &[12, 54]);
                    self.settle();
                    self.refill();
                }
            }
        }
    }

    /// Frames that come back do so in the order in which they went.
    fn order(&mut self) {
        self.seen.clear();
        for round in 0..8 {
            for i in 0..16 {
                self.send(&VnetHdr::default(), &frame(1 + round * 16 + i, 200), &[12]);
            }
            self.settle();
            self.refill();
        }
        self.settle();
        assert_in_order(&self.seen);
    }

    /// The guest has no RX buffers for a while; afterwards the backend goes on.
    fn starvation(&mut self) {
        self.seen.clear();
        for i in 0..4 * u32::from(QUEUE_SIZE) {
            self.send(&VnetHdr::default(), &frame(1 + i, 300), &[]);
            self.settle();
        }
        for _ in 0..8 {
            self.refill();
            self.settle();
        }
        assert_in_order(&self.seen);
    }

    /// The deadline moves on when it is served, and the descriptor stays the same.
    fn timing(&mut self) {
        use std::os::fd::AsRawFd;

        let fd = self.engine.backend().poll_fd().map(|fd| fd.as_raw_fd());
        for _ in 0..100 {
            let horizon = self.now() + Duration::from_secs(3600);
            let Some(deadline) = self.engine.backend().deadline() else {
                break;
            };
            if deadline > horizon {
                break;
            }
            self.clock = self.clock.max(deadline);
            self.turns();
            self.refill();
            let next = self.engine.backend().deadline();
            assert!(
                next.is_none_or(|next| next > deadline),
                "the deadline does not move when it is served"
            );
        }
        let after = self.engine.backend().poll_fd().map(|fd| fd.as_raw_fd());
        assert_eq!(fd, after, "poll_fd changed");
    }

    fn finish(mut self) {
        self.settle();
        assert!(!self.driver.interrupt.wants_reset(), "the card broke down");
    }
}

/// The driver resets the card, amid traffic, and starts again with other features.
fn reset_and_reconfigure(make: &impl Fn() -> Box<dyn Backend>) {
    let mut backend = make();
    let all = backend.offloads();
    let singles = all
        .iter()
        .map(|one| one | (Offloads::CSUM | Offloads::GUEST_CSUM) & all);
    for offloads in [Offloads::empty(), all].into_iter().chain(singles) {
        for base in [F_VERSION_1, F_VERSION_1 | F_EVENT_IDX | NET_F_MRG_RXBUF] {
            // Only the offload bits of what would be offered for `offloads`.
            let bits = offered_features(offloads) & !offered_features(Offloads::empty());
            let mut bench = Bench::new(base | bits, backend);
            for i in 0..8 {
                bench.send(&VnetHdr::default(), &frame(1 + i, 700), &[12, 14]);
            }
            bench.settle();
            // Left in the ring, and in the backend, when the reset comes.
            bench.send(&VnetHdr::default(), &frame(1, 100), &[]);
            let now = bench.now();
            bench.engine.process_tx(&mut bench.scratch, now);
            bench.send(&VnetHdr::default(), &frame(2, 100), &[]);
            backend = bench.engine.into_backend();
            assert_eq!(backend.offloads(), all, "offloads changed");
        }
    }
}

/// A broadcast frame of `len` bytes with a number, as far as there is room for one.
fn frame(number: u32, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xff; 6];
    bytes.extend([0x52, 0x54, 0, 0x12, 0x34, 0x56]);
    bytes.extend(ETHERTYPE);
    bytes.extend(number.to_be_bytes());
    bytes.resize(len, (number & 0xff) as u8);
    bytes
}

/// The start of a TCPv4 segment to nobody, cut or filled to `len` bytes.
fn ipv4_tcp(len: usize) -> Vec<u8> {
    let mut bytes = frame(0, 14);
    bytes[12..].copy_from_slice(&[0x08, 0x00]);
    let total = u16::try_from(len.saturating_sub(14)).unwrap_or(u16::MAX);
    bytes.extend([0x45, 0]);
    bytes.extend(total.to_be_bytes());
    bytes.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 2, 15, 192, 0, 2, 1]);
    bytes.extend([
        0xc0, 0, 0, 9, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 0x10, 1, 0, 0, 0, 0, 0,
    ]);
    bytes.resize(len, 0x2e);
    bytes
}

fn assert_in_order(frames: &[Received]) {
    let numbers: Vec<u32> = frames
        .iter()
        .filter(|frame| frame.bytes.get(12..14) == Some(&ETHERTYPE))
        .filter_map(|frame| frame.bytes.get(NUMBER_AT..NUMBER_AT + 4))
        .map(|bytes| u32::from_be_bytes(bytes.try_into().unwrap()))
        .collect();
    assert!(
        numbers.is_sorted_by(|a, b| a < b),
        "frames came back out of order: {numbers:?}"
    );
}

#[cfg(test)]
mod tests;
