//! Download: from host sockets to the guest's RX descriptors.
//!
//! For each ready flow: read the socket into the ring, cut what the guest's window allows into
//! frames, send what is due without data, and put the flow back in line if there is more.

use std::io;
use std::time::Instant;

use super::flows::{Flow, Flows, RxPath, TcpLink};
use super::segment::{Flags, Header};
use super::socket::{TcpHost, TcpSocket};
use super::wire::{CHECKSUM_OFFSET, Encoded, IPV4, IPV6, MAX_HEADER, TCP, encode};
use crate::checksum::Sum;
use crate::flow::{FlowId, FlowKey};
use crate::nic::{
    Offloads, RxFrame, RxRing, Stop, VNET_HDR_F_NEEDS_CSUM, VNET_HDR_GSO_NONE, VNET_HDR_GSO_TCPV4,
    VNET_HDR_GSO_TCPV6, VnetHdr,
};
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
            emit(
                frame,
                &self.link,
                key,
                header,
                NO_PAYLOAD,
                &mut self.scratch,
            );
            self.loose.pop_front();
        }
        true
    }

    fn turn(&mut self, id: FlowId, ring: &mut dyn RxRing, now: Instant, budget: &mut u32) -> Turn {
        let Some((key, flow)) = self.table.get_mut(id) else {
            return Turn::Done;
        };
        flow.queued = false;
        let mut quota = TURN;
        let turn = loop {
            let capacity = flow.ring.capacity();
            let filled = flow.fill_ring(self.ring_bytes < self.limits.rings);
            self.ring_bytes += (flow.ring.capacity() - capacity) as u64;
            if filled.is_err() {
                return Turn::Broken;
            }
            let queued = u32::try_from(flow.ring.len()).unwrap_or(u32::MAX);
            let Some(sender) = flow.conn.sender() else {
                break Turn::Done;
            };
            if flow.eof {
                sender.close(queued);
            }
            let mss = sender.mss();
            let Some(grant) = sender.grant(queued, frame_room(&self.link, key, mss)) else {
                if queued > 0 {
                    sender.blocked(now);
                }
                break Turn::Done;
            };
            if quota == 0 || *budget == 0 {
                break Turn::More;
            }
            // A flow with nothing in flight may always send one frame, so none starves.
            if self.in_flight >= self.limits.in_flight
                && sender.in_flight() > 0
                && !sender.resends_front()
            {
                break Turn::Capped;
            }
            let len = grant.len as usize;
            let Some(frame) = RxFrame::reserve(ring, MAX_HEADER + len) else {
                break Turn::NoBuffers;
            };
            let before = sender.in_flight();
            let seq = sender.commit(grant, grant.len, now);
            self.in_flight += u64::from(sender.in_flight() - before);
            let (ack, window) = flow.conn.acknowledge(flow.tail_len());
            let last = grant.offset + grant.len == queued;
            let header = Header {
                seq,
                ack,
                flags: Flags::ACK | if last { Flags::PSH } else { Flags::empty() },
                window,
                ..Header::default()
            };
            let (front, back) = flow.ring.slices(grant.offset as usize, len);
            let payload = Payload { front, back, mss };
            emit(frame, &self.link, key, &header, payload, &mut self.scratch);
            flow.segments_to_guest += 1;
            quota = quota.saturating_sub(grant.len);
            *budget = budget.saturating_sub(grant.len);
        };
        if turn == Turn::NoBuffers {
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
            emit(
                frame,
                &self.link,
                key,
                &header,
                NO_PAYLOAD,
                &mut self.scratch,
            );
        }
        turn
    }
}

impl<S: TcpSocket> Flow<S> {
    /// Reads the socket into the ring while there is something to read and room to put it.
    fn fill_ring(&mut self, may_grow: bool) -> io::Result<()> {
        while self.readable && !self.eof {
            if self.ring.room() == 0 {
                let window = self.conn.sender().map_or(0, |sender| sender.window());
                // More than the guest's window can never be in flight.
                let wanted = self.ring.capacity() < (window as usize).max(1);
                let allowed = may_grow || self.ring.capacity() < MIN_CAPACITY;
                if !(wanted && allowed && self.ring.grow()) {
                    return Ok(());
                }
            }
            let room = self.ring.room();
            match self.ring.fill(|pieces| self.socket.read(pieces)) {
                Ok(0) => self.eof = true,
                // A short read drained the socket, unless the end is behind it. (It may also stop at
                // urgent data; what is behind that waits for the next segment.)
                Ok(n) => self.readable = n == room || self.read_closed,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Octets of payload that one frame to the guest may carry.
fn frame_room(link: &TcpLink, key: &FlowKey, mss: u32) -> u32 {
    let (tso, ip) = if key.guest.is_ipv4() {
        (Offloads::GUEST_TSO4, IPV4)
    } else {
        (Offloads::GUEST_TSO6, IPV6)
    };
    if !link.offloads.contains(tso | Offloads::GUEST_CSUM) {
        return mss;
    }
    // The IP packet is at most 65535 bytes; whole segments, so that none ends up short.
    let most = u32::from(u16::MAX) - u32::try_from(ip + TCP).unwrap_or(60);
    (most / mss).max(1) * mss
}

/// The text of a segment: at most two ring slices.
#[derive(Clone, Copy, Debug)]
struct Payload<'r> {
    front: &'r [u8],
    back: &'r [u8],
    /// Octets per segment on the link.
    mss: u32,
}

const NO_PAYLOAD: Payload<'static> = Payload {
    front: &[],
    back: &[],
    mss: u32::MAX,
};

impl Payload<'_> {
    fn len(&self) -> usize {
        self.front.len() + self.back.len()
    }
}

/// Puts header and payload into the reserved frame and hands it to the guest.
fn emit(
    mut frame: RxFrame<'_>,
    link: &TcpLink,
    key: &FlowKey,
    header: &Header,
    payload: Payload<'_>,
    scratch: &mut Vec<u8>,
) {
    let mut encoded = encode(link.macs, key, header, payload.len());
    let hdr = vnet_hdr(link, key, &encoded, &payload);
    // With GUEST_CSUM the guest trusts its host, or finishes the sum when it passes the frame on.
    let complete = hdr.flags & VNET_HDR_F_NEEDS_CSUM == 0;
    encoded.set_checksum(encoded.pseudo);
    match link.rx {
        RxPath::Ring => {
            if complete {
                let mut sum = Sum::from_words(0);
                for part in [encoded.tcp(), payload.front, payload.back] {
                    sum.add(part);
                }
                encoded.set_checksum(sum.finish());
            }
            let at = encoded.bytes().len();
            frame.write(0, encoded.bytes());
            frame.write(at, payload.front);
            frame.write(at + payload.front.len(), payload.back);
        }
        RxPath::Copy => {
            scratch.clear();
            scratch.extend_from_slice(encoded.bytes());
            scratch.extend_from_slice(payload.front);
            scratch.extend_from_slice(payload.back);
            if complete {
                let mut sum = Sum::from_words(0);
                sum.add(&scratch[encoded.tcp_at..]);
                encoded.set_checksum(sum.finish());
                scratch[..encoded.bytes().len()].copy_from_slice(encoded.bytes());
            }
            frame.write(0, scratch);
        }
    }
    frame.finish(&hdr, encoded.bytes().len() + payload.len());
}

/// What to tell the guest beside the frame (VIRTIO 1.3, 5.1.6.4.1).
fn vnet_hdr(link: &TcpLink, key: &FlowKey, encoded: &Encoded, payload: &Payload<'_>) -> VnetHdr {
    if !link.offloads.contains(Offloads::GUEST_CSUM) {
        return VnetHdr::default();
    }
    let gso = payload.len() > payload.mss as usize;
    VnetHdr {
        flags: VNET_HDR_F_NEEDS_CSUM,
        gso_type: match (gso, key.guest.is_ipv4()) {
            (false, _) => VNET_HDR_GSO_NONE,
            (true, true) => VNET_HDR_GSO_TCPV4,
            (true, false) => VNET_HDR_GSO_TCPV6,
        },
        gso_size: if gso {
            saturating_u16(payload.mss as usize)
        } else {
            0
        },
        hdr_len: saturating_u16(encoded.bytes().len()),
        csum_start: saturating_u16(encoded.tcp_at),
        csum_offset: CHECKSUM_OFFSET,
    }
}

fn saturating_u16(n: usize) -> u16 {
    u16::try_from(n).unwrap_or(u16::MAX)
}
