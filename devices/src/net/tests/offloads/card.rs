//! A card and its driver, which posts RX buffers as Linux does and checks all it gets.

use std::time::Instant;

use net::nic::{Backend, Offloads, VnetHdr};

use super::check::{Accepted, check};
use super::packet::cut;
use crate::net::engine::{NetEngine, Scratch};
use crate::net::features::{GUEST_OFFLOADS, accepted_offloads};
use crate::testing::MockDriver;
use crate::virtio::spec::{F_INDIRECT_DESC, NET_F_MRG_RXBUF, NET_OK};

/// Queue size: many small buffers for one long frame, or a dozen long chains.
const QUEUE_SIZE: u16 = 256;
/// RX chains at most, so that long ones do not take all of the mock's memory.
const MAX_CHAINS: usize = 240;

pub(super) struct Card {
    driver: MockDriver,
    engine: NetEngine,
    scratch: Scratch,
    features: u64,
    accepted: Accepted,
    layout: Vec<usize>,
    /// Chains posted and not used.
    posted: usize,
    sent: usize,
    /// Frames received that were left to the guest to cut.
    pub(super) long_frames: usize,
}

/// How the buffers of a driver that accepted `features` may look: one small kind and one big.
pub(super) fn layouts(features: u64) -> [Vec<usize>; 2] {
    let long = accepted_offloads(features).intersects(GUEST_OFFLOADS - Offloads::GUEST_CSUM);
    if features & NET_F_MRG_RXBUF != 0 {
        [vec![300], vec![12, 4084]]
    } else if long {
        // The shortest that the specification allows (5.1.6.3.1), and Linux's `add_recvbuf_big`.
        let mut pages = vec![12, 4080];
        pages.extend([4096; 17]);
        [vec![65562], pages]
    } else {
        [vec![1526], vec![12, 4000]]
    }
}

impl Card {
    pub(super) fn new(features: u64, layout: &[usize], backend: Box<dyn Backend>) -> Self {
        let driver = MockDriver::new(QUEUE_SIZE);
        let mut card = Self {
            engine: driver.engine(features, backend),
            driver,
            scratch: Scratch::default(),
            features,
            accepted: Accepted {
                offloads: accepted_offloads(features),
                mtu: 1500,
                mergeable: features & NET_F_MRG_RXBUF != 0,
                room: layout.iter().sum(),
            },
            layout: layout.to_vec(),
            posted: 0,
            sent: 0,
            long_frames: 0,
        };
        card.refill();
        card
    }

    /// What the driver may leave to the card, and be left by it.
    pub(super) fn offloads(&self) -> Offloads {
        self.accepted.offloads
    }

    /// Sends a frame, in other pieces each time. False when the ring is full.
    pub(super) fn send(&mut self, hdr: &VnetHdr, frame: &[u8]) -> bool {
        const SPLITS: [&[usize]; 4] = [&[], &[12], &[12, 54, 4096, 4096], &[78, 1, 1447, 9000]];
        let splits = SPLITS[self.sent % SPLITS.len()];
        let sent = if self.features & F_INDIRECT_DESC != 0 {
            self.driver.send_indirect(hdr, frame, splits)
        } else {
            self.driver.send(hdr, frame, splits)
        };
        self.sent += usize::from(sent);
        sent
    }

    /// Lets the card work once; returns the packets that came of it.
    pub(super) fn step(&mut self) -> Vec<Vec<u8>> {
        let now = Instant::now();
        self.engine.process_tx(&mut self.scratch, now);
        self.engine.process_rx(&mut self.scratch, now);
        self.driver.collect_tx();
        let mut packets = Vec::new();
        for frame in self.driver.collect_rx() {
            self.posted -= usize::from(frame.num_buffers);
            let view = check(&self.accepted, &frame);
            let parts = cut(&frame.hdr, &frame.bytes);
            for part in &parts {
                assert!(view.checksum_holds(part), "a part's checksum");
            }
            self.long_frames += usize::from(parts.len() > 1);
            packets.extend(parts);
        }
        self.refill();
        assert!(!self.engine.is_broken(), "the card saw a fault");
        packets
    }

    /// Changes the offloads towards the guest. Frames from the next step on are held to it.
    pub(super) fn set_offloads(&mut self, bits: u64) {
        let request = [&[5, 0][..], &bits.to_le_bytes()].concat();
        let answer = self.driver.send_command(&request, &[2], false);
        self.engine.process_ctrl();
        assert_eq!(self.driver.collect_ctrl(), 1);
        assert_eq!(self.driver.answer(answer), Some(NET_OK));
        let host = self.accepted.offloads - GUEST_OFFLOADS;
        self.accepted.offloads = host | accepted_offloads(bits);
    }

    /// The value of a counter.
    pub(super) fn counter(&self, name: &str) -> u64 {
        let all = self.engine.counters().snapshot();
        all.iter().find(|(known, _)| *known == name).unwrap().1
    }

    fn refill(&mut self) {
        let indirect = self.features & F_INDIRECT_DESC != 0 && self.layout.len() > 1;
        // In a table each, all 17 pages of a chain take one entry: Linux posts as many then.
        let most = MAX_CHAINS
            .min(12 << 20 >> self.accepted.room.ilog2())
            .max(16);
        while self.posted < most {
            let posted = if indirect {
                self.driver.post_rx_indirect(&self.layout)
            } else {
                self.driver.post_rx(&self.layout)
            };
            if !posted {
                break;
            }
            self.posted += 1;
        }
    }
}
