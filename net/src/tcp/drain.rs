//! Upload: from the guest's TX descriptors to host sockets.
//!
//! Payload that is in order is not copied: the descriptors of consecutive frames of a flow go to the
//! socket in one `sendmsg`. The guest may reuse them once the burst is over, so what the socket does
//! not take by then is copied to the flow's tail.

use std::io;
use std::net::SocketAddr;
use std::time::Instant;

use vm_memory::VolatileSlice;

use super::flows::{Flows, Refusal};
use super::segment::{Flags, Segment};
use super::socket::{TcpHost, TcpSocket};
use crate::flow::{FlowId, FlowKey};

/// Payload of one flow that has been taken and waits for the end of its run of frames.
#[derive(Debug, Default)]
pub struct Run<'m> {
    flow: Option<FlowId>,
    slices: Vec<VolatileSlice<'m>>,
}

impl<H: TcpHost> Flows<H> {
    /// A segment from the guest, whose payload starts `payload_at` bytes into `frame`.
    ///
    /// `route` says where a new flow's far end is on the host, or how to refuse it.
    #[expect(
        clippy::too_many_arguments,
        reason = "one call site, all of it context"
    )]
    pub fn handle_frame<'m>(
        &mut self,
        key: FlowKey,
        segment: &Segment,
        frame: &[VolatileSlice<'m>],
        payload_at: usize,
        run: &mut Run<'m>,
        route: impl FnOnce(&FlowKey) -> Result<SocketAddr, Refusal>,
        host: &mut H,
        now: Instant,
    ) {
        let opens = segment.flags.contains(Flags::SYN) && !segment.flags.contains(Flags::ACK);
        let found = match self.find(&key) {
            Some(id) if opens && self.may_restart(id) => {
                self.remove(id);
                None
            }
            found => found,
        };
        let Some(id) = found else {
            if !opens {
                self.handle_stray(key, segment);
            } else if !segment.flags.contains(Flags::RST) {
                match route(&key) {
                    Ok(to) => self.open(key, to, segment, host, now),
                    Err(refusal) => self.refuse(&key, segment, refusal),
                }
            }
            return;
        };
        if run.flow.is_some_and(|other| other != id) {
            self.end_run(run, now);
        }

        let Some((_, flow)) = self.table.get_mut(id) else {
            return;
        };
        if flow.conn.is_closed() {
            // Only the host still waits for what the guest sent before.
            return;
        }
        let mut segment = *segment;
        if self.tail_bytes >= self.limits.tails && !flow.tail.is_empty() {
            // No room to take anything over: the guest will send it again.
            segment.len = 0;
            segment.flags -= Flags::FIN;
        }
        let before = flow.conn.in_flight();
        let tail = flow.tail_len();
        let outcome = flow.conn.handle_segment(&segment, tail, now);
        self.in_flight -= u64::from(before - flow.conn.in_flight());
        flow.window.release(outcome.released);
        if outcome.established {
            flow.readable = true;
        }
        if outcome.take.len > 0 {
            run.flow = Some(id);
            push_range(
                frame,
                payload_at + outcome.take.skip as usize,
                outcome.take.len as usize,
                &mut run.slices,
            );
        }
        if let Some(header) = outcome.reply {
            self.send_loose(key, header);
        }
        if outcome.reset {
            self.end_run(run, now);
            self.guest_reset(id);
            return;
        }
        if outcome.take.fin {
            self.end_run(run, now);
            if let Some((_, flow)) = self.table.get_mut(id) {
                flow.end_of_guest_stream();
            }
        }
        // A run that ends later settles the flow again; this makes the ACK due in any case.
        self.settle_after_run(id, run, now);
    }

    fn may_restart(&mut self, id: FlowId) -> bool {
        self.table
            .get_mut(id)
            .is_some_and(|(_, flow)| flow.conn.is_finished() && flow.tail.is_empty())
    }

    fn settle_after_run(&mut self, id: FlowId, run: &mut Run<'_>, now: Instant) {
        let closed = self
            .table
            .get_mut(id)
            .is_some_and(|(_, flow)| flow.conn.is_closed());
        if closed {
            self.end_run(run, now);
        }
        self.settle(id, now);
    }

    /// Gives the run to its socket. Call at the end of each burst.
    pub fn end_run(&mut self, run: &mut Run<'_>, now: Instant) {
        let Some(id) = run.flow.take() else { return };
        if let Some((_, flow)) = self.table.get_mut(id) {
            let sent = if flow.tail.is_empty() {
                send_all(&mut flow.socket, &run.slices)
            } else {
                Ok(0)
            };
            match sent {
                Ok(sent) => {
                    let before = flow.tail.len();
                    flow.tail.push(&run.slices, sent);
                    self.tail_bytes += (flow.tail.len() - before) as u64;
                    self.settle(id, now);
                }
                Err(_) => self.host_reset(id),
            }
        }
        run.slices.clear();
    }
}

/// Writes until done or the socket is full; returns how much was taken.
fn send_all<S: TcpSocket>(socket: &mut S, slices: &[VolatileSlice<'_>]) -> io::Result<usize> {
    let total: usize = slices.iter().map(VolatileSlice::len).sum();
    match socket.write_guest(slices) {
        Ok(n) => Ok(n.min(total)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
        Err(error) => Err(error),
    }
}

/// Appends the part of `frame` that starts at `at` and is `len` bytes long.
fn push_range<'m>(
    frame: &[VolatileSlice<'m>],
    mut at: usize,
    mut len: usize,
    out: &mut Vec<VolatileSlice<'m>>,
) {
    for slice in frame {
        if len == 0 {
            return;
        }
        if at >= slice.len() {
            at -= slice.len();
            continue;
        }
        let n = len.min(slice.len() - at);
        if let Ok(part) = slice.subslice(at, n) {
            out.push(part);
        }
        len -= n;
        at = 0;
    }
}
