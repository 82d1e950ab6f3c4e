//! The harness finds what it is there to find.

use std::time::Instant;

use net::nic::{Backend, Link, RxFrame, RxRing, Stop, TxBurst, VnetHdr};

use super::run;

#[derive(Clone, Copy, PartialEq)]
enum Flaw {
    LeavesReserved,
    NeverIdle,
    Reorders,
    StuckDeadline,
    TrustsTheHeader,
}

struct Flawed {
    flaw: Flaw,
    since: Instant,
    held: Vec<Vec<u8>>,
}

impl Backend for Flawed {
    fn configure(&mut self, _link: &Link) {}

    fn transmit(&mut self, burst: &TxBurst<'_>, _now: Instant) {
        for frame in burst.iter() {
            let mut bytes = vec![0; frame.len()];
            frame.copy_head(&mut bytes);
            if self.flaw == Flaw::TrustsTheHeader && frame.hdr.flags & 1 != 0 {
                bytes[usize::from(frame.hdr.csum_start)] = 0;
            }
            self.held.push(bytes);
        }
    }

    fn receive(&mut self, ring: &mut dyn RxRing, _now: Instant) -> Stop {
        match self.flaw {
            Flaw::LeavesReserved => {
                ring.reserve(60);
            }
            Flaw::NeverIdle => return Stop::Yield,
            Flaw::Reorders => {
                // The last comes first.
                while let Some(bytes) = self.held.pop() {
                    let Some(mut frame) = RxFrame::reserve(ring, bytes.len()) else {
                        return Stop::NoBuffers;
                    };
                    frame.write(0, &bytes);
                    frame.finish(&VnetHdr::default(), bytes.len());
                }
            }
            Flaw::StuckDeadline | Flaw::TrustsTheHeader => self.held.clear(),
        }
        Stop::Idle
    }

    fn deadline(&self) -> Option<Instant> {
        (self.flaw == Flaw::StuckDeadline).then_some(self.since)
    }
}

fn run_with(flaw: Flaw) {
    run(|| {
        Box::new(Flawed {
            flaw,
            since: Instant::now(),
            held: Vec::new(),
        })
    });
}

#[test]
#[should_panic(expected = "frames reserved")]
fn reservations_left_behind() {
    run_with(Flaw::LeavesReserved);
}

#[test]
#[should_panic(expected = "still asks for turns")]
fn a_backend_that_is_never_idle() {
    run_with(Flaw::NeverIdle);
}

#[test]
#[should_panic(expected = "out of order")]
fn frames_in_reverse() {
    run_with(Flaw::Reorders);
}

#[test]
#[should_panic(expected = "deadline does not move")]
fn a_deadline_that_stays() {
    run_with(Flaw::StuckDeadline);
}

#[test]
#[should_panic(expected = "index out of bounds")]
fn a_checksum_offset_that_is_believed() {
    run_with(Flaw::TrustsTheHeader);
}
