//! Download: from host sockets to the guest's RX descriptors.
//!
//! Each ready flow gets a turn: what the guest's window allows is cut into frames, what is due
//! without data is sent, and the flow goes back in line if there is more. A frame's text comes
//!
//! ```text
//! Window::Ring    socket --read--> ring --slices--> frame    (send_from_ring)
//! Window::Socket  socket --peek-------------------> frame    (send_from_socket)
//! ```

use std::io;
use std::time::Instant;

use vm_memory::VolatileSlice;

use super::emit::{Payload, emit, frame_room, header_len};
use super::flows::{Flow, Flows, Limits, TcpLink};
use super::segment::{Flags, Header};
use super::sender::{Grant, Sender};
use super::socket::{TcpHost, TcpSocket};
use super::window::Window;
use super::wire::MAX_HEADER;
use crate::flow::{FlowId, FlowKey};
use crate::nic::{Offloads, RxFrame, RxRing, Stop};
use crate::window::Ring;
use crate::window::ring::MIN_CAPACITY;

/// Octets that a flow may deliver before the next one gets its turn.
const TURN: u32 = 512 << 10;
/// Octets over all flows after which TX and timers get their turn.
const BURST: u32 = 1 << 20;

/// Why a flow's turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// Nothing to do until something happens to the flow.
    Done,
    /// There is more.
    More,
    /// The octets in flight over all flows are at their bound.
    Capped,
    /// No RX descriptors.
    NoBuffers,
    /// The host's connection broke.
    Broken,
}

/// A frame with data was sent, or why there is none.
type Step = Result<(), Turn>;

/// What a flow has to go by in its turn.
struct Serving<'a> {
    link: &'a TcpLink,
    limits: &'a Limits,
    in_flight: &'a mut u64,
    ring_bytes: &'a mut u64,
    scratch: &'a mut Vec<u8>,
    /// Octets left of the flow's turn.
    quota: u32,
    /// Octets left of the burst.
    budget: &'a mut u32,
    now: Instant,
}

impl<H: TcpHost> Flows<H> {
    /// Serves the ready flows.
    pub fn pump(&mut self, ring: &mut dyn RxRing, now: Instant) -> Stop {
        if !self.send_loose_segments(ring) {
            return Stop::NoBuffers;
        }
        let mut budget = BURST;
        if self.in_flight < self.limits.in_flight {
            for id in std::mem::take(&mut self.capped) {
                if let Some((_, flow)) = self.table.get_mut(id) {
                    flow.capped = false;
                    self.requeue(id);
                }
            }
        }
        let stop = loop {
            let Some(id) = self.ready.pop_front() else {
                break Stop::Idle;
            };
            let turn = self.turn(id, ring, now, &mut budget);
            match turn {
                Turn::Done => {}
                Turn::More => self.requeue(id),
                Turn::Capped => self.wait_for_room(id),
                Turn::Broken => self.host_reset(id),
                Turn::NoBuffers => {
                    self.requeue(id);
                    break Stop::NoBuffers;
                }
            }
            self.schedule(id, now);
            if budget == 0 {
                break Stop::Yield;
            }
        };
        // Flows that broke in their turn left a RST.
        if self.send_loose_segments(ring) {
            stop
        } else {
            Stop::NoBuffers
        }
    }

    /// Sees to the flows that were served, while the guest works on their frames: what it acknowledged
    /// leaves the sockets, what came meanwhile enters the rings. True when there is more to send.
    pub fn after_burst(&mut self) -> bool {
        let mut flows = std::mem::take(&mut self.aftercare);
        for id in flows.drain(..) {
            let Some((_, flow)) = self.table.get_mut(id) else {
                continue;
            };
            flow.cared_for = false;
            let before = flow.window.capacity();
            let done = match &flow.window {
                Window::Socket(_) => flow.window.settle(&mut flow.socket),
                Window::Ring(_) => flow.fill_ring(self.ring_bytes < self.limits.rings),
            };
            self.ring_bytes += flow.window.capacity() - before;
            if done.is_err() {
                self.host_reset(id);
            } else if !flow.capped && flow.may_send() {
                self.requeue(id);
            }
        }
        self.aftercare = flows;
        self.has_work()
    }

    /// Sets a flow aside until the octets in flight over all flows are below their bound.
    fn wait_for_room(&mut self, id: FlowId) {
        if let Some((_, flow)) = self.table.get_mut(id)
            && !std::mem::replace(&mut flow.capped, true)
        {
            self.capped.push(id);
        }
    }

    fn send_loose_segments(&mut self, ring: &mut dyn RxRing) -> bool {
        while let Some((key, header)) = self.loose.front() {
            let Some(frame) = RxFrame::reserve(ring, MAX_HEADER) else {
                return false;
            };
            let (link, scratch) = (&self.link, &mut self.scratch);
            emit(frame, link, key, header, Payload::Empty, scratch);
            self.loose.pop_front();
        }
        true
    }

    fn turn(&mut self, id: FlowId, ring: &mut dyn RxRing, now: Instant, budget: &mut u32) -> Turn {
        let Some((key, flow)) = self.table.get_mut(id) else {
            return Turn::Done;
        };
        flow.queued = false;
        let mut serving = Serving {
            link: &self.link,
            limits: &self.limits,
            in_flight: &mut self.in_flight,
            ring_bytes: &mut self.ring_bytes,
            scratch: &mut self.scratch,
            quota: TURN,
            budget,
            now,
        };
        let turn = loop {
            if let Err(turn) = flow.send_data(key, ring, &mut serving) {
                break turn;
            }
        };
        if flow.wants_aftercare() && !std::mem::replace(&mut flow.cared_for, true) {
            self.aftercare.push(id);
        }
        if matches!(turn, Turn::NoBuffers | Turn::Broken) {
            return turn;
        }
        // SYN/ACK, FIN and the acknowledgments that no data carried.
        while flow.conn.control_due(flow.tail_len()) {
            let Some(frame) = RxFrame::reserve(ring, MAX_HEADER) else {
                return Turn::NoBuffers;
            };
            let Some(header) = flow.conn.poll_control(flow.tail_len(), now) else {
                break;
            };
            let (link, scratch) = (&self.link, &mut self.scratch);
            emit(frame, link, key, &header, Payload::Empty, scratch);
        }
        turn
    }
}

impl Serving<'_> {
    /// What `sender` may send now of `queued` octets at hand, in one frame.
    fn grant(&self, key: &FlowKey, sender: &Sender, queued: u32) -> Result<Grant, Turn> {
        let room = frame_room(self.link, key, sender.mss());
        let grant = sender.grant(queued, room).ok_or(Turn::Done)?;
        if self.quota == 0 || *self.budget == 0 {
            return Err(Turn::More);
        }
        // A flow with nothing in flight may always send one frame, so none starves.
        if *self.in_flight >= self.limits.in_flight
            && sender.in_flight() > 0
            && !sender.resends_front()
        {
            return Err(Turn::Capped);
        }
        Ok(grant)
    }
}

impl<S: TcpSocket> Flow<S> {
    /// There is something that can wait for the end of the burst.
    fn wants_aftercare(&self) -> bool {
        match &self.window {
            Window::Socket(peeked) => peeked.owed() > 0,
            Window::Ring(ring) => self.readable && !self.eof && ring.capacity() > 0,
        }
    }

    /// The ring has bytes that the guest's window allows, or an end to tell.
    fn may_send(&mut self) -> bool {
        let (Window::Ring(ring), Some(sender)) = (&self.window, self.conn.sender()) else {
            return false;
        };
        let queued = u32::try_from(ring.len()).unwrap_or(u32::MAX);
        (self.eof && !sender.closing()) || sender.grant(queued, sender.mss()).is_some()
    }

    /// Sends one frame with data, if there is some and the guest's window allows it.
    fn send_data(
        &mut self,
        key: &FlowKey,
        ring: &mut dyn RxRing,
        serving: &mut Serving<'_>,
    ) -> Step {
        match &self.window {
            Window::Ring(_) => self.send_from_ring(key, ring, serving),
            Window::Socket(_) => self.send_from_socket(key, ring, serving),
        }
    }

    fn send_from_ring(
        &mut self,
        key: &FlowKey,
        ring: &mut dyn RxRing,
        serving: &mut Serving<'_>,
    ) -> Step {
        let sent = self.conn.sender().map_or(0, |sender| sender.in_flight());
        if matches!(&self.window, Window::Ring(ring) if ring.len() <= sent as usize) {
            // Nothing is at hand. What else there is to read can wait for the end of the burst.
            let before = self.window.capacity();
            let may_grow = *serving.ring_bytes < serving.limits.rings;
            let filled = self.fill_ring(may_grow);
            *serving.ring_bytes += self.window.capacity() - before;
            filled.map_err(|_| Turn::Broken)?;
        }
        let Window::Ring(window) = &self.window else {
            return Err(Turn::Done);
        };
        let queued = u32::try_from(window.len()).unwrap_or(u32::MAX);
        let sender = self.conn.sender().ok_or(Turn::Done)?;
        if self.eof {
            sender.close(queued);
        }
        let mss = sender.mss();
        let grant = match serving.grant(key, sender, queued) {
            Ok(grant) => grant,
            Err(turn) => {
                if turn == Turn::Done && queued > 0 {
                    sender.blocked(serving.now);
                }
                return Err(turn);
            }
        };
        let frame = RxFrame::reserve(ring, header_len(key) + grant.len as usize);
        let frame = frame.ok_or(Turn::NoBuffers)?;
        let last = grant.offset + grant.len == queued;
        let header = self
            .commit(grant, grant.len, last, serving)
            .ok_or(Turn::Done)?;
        let Window::Ring(window) = &self.window else {
            return Err(Turn::Done);
        };
        let (front, back) = window.slices(grant.offset as usize, grant.len as usize);
        let payload = Payload::Slices { front, back, mss };
        emit(frame, serving.link, key, &header, payload, serving.scratch);
        Ok(())
    }

    fn send_from_socket(
        &mut self,
        key: &FlowKey,
        ring: &mut dyn RxRing,
        serving: &mut Serving<'_>,
    ) -> Step {
        if matches!(&self.window, Window::Socket(peeked) if !peeked.can_owe()) {
            let settled = self.window.settle(&mut self.socket);
            settled.map_err(|_| Turn::Broken)?;
        }
        let Window::Socket(peeked) = &mut self.window else {
            return Err(Turn::Done);
        };
        let sender = self.conn.sender().ok_or(Turn::Done)?;
        // What was sent is there for certain; whether there is more only a peek can tell.
        let sent = sender.sent();
        let queued = if self.readable { u32::MAX } else { sent };
        let mss = sender.mss();
        let grant = match serving.grant(key, sender, queued) {
            Ok(grant) => grant,
            Err(Turn::Done) if self.readable && sent == 0 => {
                return self.wait_for_window(serving.now);
            }
            Err(turn) => return Err(turn),
        };
        let asked = peeked.ask(grant.len, mss);
        let at = header_len(key);
        let Some(frame) = RxFrame::reserve(ring, at + asked as usize) else {
            return Err(Turn::NoBuffers);
        };
        // The driver may have taken back its promise to finish checksums while this flow goes on.
        let blind = serving.link.offloads.contains(Offloads::GUEST_CSUM);
        let (skip, want) = ((peeked.owed() + grant.offset) as usize, asked as usize);
        let got = if blind {
            self.socket.peek_guest(skip, frame.slices(), at, want)
        } else {
            serving.scratch.resize(want, 0);
            let room = [VolatileSlice::from(&mut serving.scratch[..])];
            self.socket.peek_guest(skip, &room, 0, want)
        };
        let known = grant.offset < sent;
        let got = match got {
            Ok(0) if known => return Err(Turn::Broken),
            Ok(0) => {
                self.eof = true;
                self.readable = false;
                sender.close(grant.offset);
                return Err(Turn::Done);
            }
            Ok(n) => u32::try_from(n).unwrap_or(u32::MAX).min(asked),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && !known => {
                // Without SO_PEEK_OFF the end shows only once nothing is in flight ahead of it, and
                // no event comes for that.
                self.readable = self.read_on;
                return Err(Turn::Done);
            }
            Err(_) => return Err(Turn::Broken),
        };
        peeked.learn(asked, got);
        if got < asked {
            // The socket was drained, unless the end or urgent data is behind it.
            self.readable = self.read_on && !self.eof;
        }
        let last = got < asked || !self.readable;
        let header = self.commit(grant, got, last, serving).ok_or(Turn::Done)?;
        if blind {
            let len = got as usize;
            let payload = Payload::InPlace { len, mss };
            emit(frame, serving.link, key, &header, payload, serving.scratch);
        } else {
            let bounce = std::mem::take(serving.scratch);
            let payload = Payload::Slices {
                front: &bounce[..got as usize],
                back: &[],
                mss,
            };
            emit(frame, serving.link, key, &header, payload, serving.scratch);
            *serving.scratch = bounce;
        }
        Ok(())
    }

    /// Nothing is in flight and the guest's window allows nothing: if there is anything to send, the
    /// guest is to be asked for its window now and then.
    fn wait_for_window(&mut self, now: Instant) -> Step {
        let Window::Socket(peeked) = &self.window else {
            return Err(Turn::Done);
        };
        let mut byte = [0];
        let room = [VolatileSlice::from(&mut byte[..])];
        let got = self.socket.peek_guest(peeked.owed() as usize, &room, 0, 1);
        let sender = self.conn.sender().ok_or(Turn::Done)?;
        match got {
            Ok(0) => {
                self.eof = true;
                self.readable = false;
                sender.close(0);
            }
            Ok(_) => sender.blocked(now),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            Err(_) => return Err(Turn::Broken),
        }
        Err(Turn::Done)
    }

    /// Accounts for `len` octets of `grant` that are about to leave; returns their header.
    fn commit(
        &mut self,
        grant: Grant,
        len: u32,
        last: bool,
        serving: &mut Serving<'_>,
    ) -> Option<Header> {
        let sender = self.conn.sender()?;
        let before = sender.in_flight();
        let seq = sender.commit(grant, len, serving.now);
        *serving.in_flight += u64::from(sender.in_flight() - before);
        serving.quota = serving.quota.saturating_sub(len);
        *serving.budget = serving.budget.saturating_sub(len);
        self.segments_to_guest += 1;
        let (ack, window) = self.conn.acknowledge(self.tail_len());
        Some(Header {
            seq,
            ack,
            flags: Flags::ACK | if last { Flags::PSH } else { Flags::empty() },
            window,
            ..Header::default()
        })
    }

    /// Reads the socket into the ring while there is something to read and room to put it.
    fn fill_ring(&mut self, may_grow: bool) -> io::Result<()> {
        let window = self.conn.sender().map_or(0, |sender| sender.window());
        let Window::Ring(ring) = &mut self.window else {
            return Ok(());
        };
        while self.readable && !self.eof {
            if ring.room() == 0 && !make_room(ring, window, may_grow) {
                return Ok(());
            }
            let room = ring.room();
            match ring.fill(|pieces| self.socket.read(pieces)) {
                Ok(0) => self.eof = true,
                // A short read drained the socket, unless the end or urgent data is behind it.
                Ok(n) => self.readable = n == room || self.read_on,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Grows a full ring, as far as the guest's `window` can use it: more can never be in flight.
fn make_room(ring: &mut Ring, window: u32, may_grow: bool) -> bool {
    let wanted = ring.capacity() < (window as usize).max(1);
    let allowed = may_grow || ring.capacity() < MIN_CAPACITY;
    wanted && allowed && ring.grow()
}
