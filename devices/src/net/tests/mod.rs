//! Tests of the card as a whole, through the driver-side mock.

mod cost;
mod ctrl;
mod malformed;
mod merge;
mod notify;
mod offloads;
mod threads;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use net::nic::{Backend, Link, RxRing, Stop, TxBurst, VnetHdr};

/// A backend that a test looks into: what it got, and what it is to deliver.
#[derive(Default)]
pub(crate) struct State {
    /// Frames from the guest.
    pub(crate) taken: Vec<(VnetHdr, Vec<u8>)>,
    /// Frames to the guest, each with the room to reserve for it.
    pub(crate) deliver: VecDeque<(VnetHdr, Vec<u8>, usize)>,
    /// Reserve all frames before the first is filled.
    pub(crate) batch: bool,
    /// What `configure` was told.
    links: Vec<Link>,
    /// What `set_offloads` was told.
    changes: Vec<Link>,
    pub(crate) resets: usize,
}

#[derive(Clone, Default)]
pub(crate) struct Probe(Arc<Mutex<State>>);

impl Probe {
    pub(crate) fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    pub(crate) fn deliver(&self, frame: &[u8]) {
        self.deliver_from(frame, frame.len());
    }

    pub(crate) fn deliver_from(&self, frame: &[u8], room: usize) {
        let frame = (VnetHdr::default(), frame.to_vec(), room);
        self.lock().deliver.push_back(frame);
    }

    pub(crate) fn boxed(&self) -> Box<dyn Backend> {
        Box::new(self.clone())
    }
}

impl Backend for Probe {
    fn set_offloads(&mut self, link: &Link) {
        self.lock().changes.push(*link);
    }

    fn configure(&mut self, link: &Link) {
        self.lock().links.push(*link);
    }

    fn transmit(&mut self, burst: &TxBurst<'_>, _now: Instant) {
        for frame in burst.iter() {
            let mut bytes = vec![0; frame.len()];
            frame.copy_head(&mut bytes);
            self.lock().taken.push((frame.hdr, bytes));
        }
    }

    fn receive(&mut self, ring: &mut dyn RxRing, _now: Instant) -> Stop {
        let mut state = self.lock();
        let mut reserved = 0;
        let limit = if state.batch { usize::MAX } else { 1 };
        loop {
            let next = state.deliver.get(reserved).map(|(_, _, room)| *room);
            let got = next.is_some_and(|room| ring.reserve(room));
            reserved += usize::from(got);
            if got && reserved < limit {
                continue;
            }
            if reserved == 0 {
                return match next {
                    Some(_) => Stop::NoBuffers,
                    None => Stop::Idle,
                };
            }
            for index in 0..reserved {
                net::nic::write_at(ring.slices(index), 0, &state.deliver[index].1);
            }
            for _ in 0..std::mem::take(&mut reserved) {
                let (hdr, bytes, _) = state.deliver.pop_front().unwrap();
                ring.finish(&hdr, bytes.len());
            }
        }
    }

    fn reset(&mut self) {
        self.lock().resets += 1;
    }
}

/// `len` bytes, no two neighbours alike.
pub(crate) fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len)
        .map(|i| ((i * 7 + i / 256 + seed) % 255) as u8)
        .collect()
}
