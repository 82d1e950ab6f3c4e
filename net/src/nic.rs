//! The seam between a network card and what stands behind it.
//!
//! The device owns the virtqueues and lends descriptors; a [`Backend`] fills or drains them. Two
//! calls carry all traffic, always on the device's worker thread:
//!
//! ```text
//!   guest --avail TX chains--> TxBurst --Backend::transmit--> host
//!   host  --Backend::receive--> RxRing::reserve .. finish --publish--> guest RX chains
//! ```
//!
//! RX and TX are named from the guest's side, as virtio does. Guest memory appears only as
//! [`VolatileSlice`]: it may change under us at any moment, so it is copied or handed to a system
//! call, never borrowed as a Rust slice.
//!
//! # Life of a backend
//!
//! 1. [`Backend::offloads`] is asked once, and bounds the features that the device offers.
//! 2. [`Backend::configure`] tells what the guest's driver accepted; it is called again whenever
//!    the driver renegotiates. [`Backend::set_offloads`] tells of a change while the card runs.
//! 3. The worker sleeps until the guest kicks, [`Backend::poll_fd`] is readable or
//!    [`Backend::deadline`] passes. It then drains TX through [`Backend::transmit`], and *always*
//!    ends the round with one [`Backend::receive`].
//! 4. [`Backend::reset`] is called when the driver resets the device. Host-side state (flows,
//!    sockets) may be kept; anything that mirrors ring contents must go.

use std::os::fd::BorrowedFd;
use std::time::Instant;

pub use vm_memory::VolatileSlice;

bitflags::bitflags! {
    /// Work that one side may leave to the other (VIRTIO 1.3, 5.1.3).
    ///
    /// Named as the virtio feature bits, without `VIRTIO_NET_F_`: `GUEST_*` is what frames
    /// towards the guest may ask of it, the others what frames from the guest may ask of us.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Offloads: u16 {
        /// Frames from the guest may carry a partial checksum.
        const CSUM = 1 << 0;
        /// Frames to the guest may carry a partial checksum.
        const GUEST_CSUM = 1 << 1;
        /// Frames to the guest may be TCPv4 segments of up to 64 KiB.
        const GUEST_TSO4 = 1 << 2;
        /// Frames to the guest may be TCPv6 segments of up to 64 KiB.
        const GUEST_TSO6 = 1 << 3;
        /// Frames from the guest may be TCPv4 segments of up to 64 KiB.
        const HOST_TSO4 = 1 << 4;
        /// Frames from the guest may be TCPv6 segments of up to 64 KiB.
        const HOST_TSO6 = 1 << 5;
        /// Frames to the guest may be runs of UDPv4 datagrams.
        const GUEST_USO4 = 1 << 6;
        /// Frames to the guest may be runs of UDPv6 datagrams.
        const GUEST_USO6 = 1 << 7;
        /// Frames from the guest may be runs of UDP datagrams.
        const HOST_USO = 1 << 8;
    }
}

/// `flags` of [`VnetHdr`]: the checksum field holds the pseudo-header sum; the receiver finishes it.
pub const VNET_HDR_F_NEEDS_CSUM: u8 = 1;
/// `flags` of [`VnetHdr`]: the checksum was verified.
pub const VNET_HDR_F_DATA_VALID: u8 = 2;
/// `gso_type` of [`VnetHdr`]: an ordinary frame.
pub const VNET_HDR_GSO_NONE: u8 = 0;
/// `gso_type` of [`VnetHdr`]: TCP over IPv4.
pub const VNET_HDR_GSO_TCPV4: u8 = 1;
/// `gso_type` of [`VnetHdr`]: TCP over IPv6.
pub const VNET_HDR_GSO_TCPV6: u8 = 4;
/// `gso_type` of [`VnetHdr`]: a run of UDP datagrams.
pub const VNET_HDR_GSO_UDP_L4: u8 = 5;
/// Modifier of `gso_type`: the segment has ECN set.
pub const VNET_HDR_GSO_ECN: u8 = 0x80;

/// What travels beside a frame: `struct virtio_net_hdr` (VIRTIO 1.3, 5.1.6) without
/// `num_buffers`, which is the device's to fill.
///
/// From the guest it is untrusted: every field must be checked against the frame it came with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VnetHdr {
    /// `VNET_HDR_F_*`.
    pub flags: u8,
    /// `VNET_HDR_GSO_*`.
    pub gso_type: u8,
    /// Bytes of headers before the payload; a hint.
    pub hdr_len: u16,
    /// Payload bytes per segment when `gso_type` is not `NONE`.
    pub gso_size: u16,
    /// Offset in the frame at which checksumming starts.
    pub csum_start: u16,
    /// Offset of the checksum field from `csum_start`.
    pub csum_offset: u16,
}

impl VnetHdr {
    /// Size of the encoded header, without `num_buffers`.
    pub const LEN: usize = 10;

    /// Decodes the little-endian wire form.
    pub fn decode(raw: &[u8; Self::LEN]) -> Self {
        let word = |at: usize| u16::from_le_bytes([raw[at], raw[at + 1]]);
        Self {
            flags: raw[0],
            gso_type: raw[1],
            hdr_len: word(2),
            gso_size: word(4),
            csum_start: word(6),
            csum_offset: word(8),
        }
    }

    /// Encodes to the little-endian wire form.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut raw = [0; Self::LEN];
        raw[0] = self.flags;
        raw[1] = self.gso_type;
        raw[2..4].copy_from_slice(&self.hdr_len.to_le_bytes());
        raw[4..6].copy_from_slice(&self.gso_size.to_le_bytes());
        raw[6..8].copy_from_slice(&self.csum_start.to_le_bytes());
        raw[8..10].copy_from_slice(&self.csum_offset.to_le_bytes());
        raw
    }
}

/// What the driver accepted, and what the device told it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// The guest's MAC address, as offered in the device's config space.
    pub guest_mac: [u8; 6],
    /// Largest IP packet on the link, in bytes (68 to 65535).
    pub mtu: u16,
    /// Accepted offloads: a subset of what [`Backend::offloads`] named.
    pub offloads: Offloads,
}

/// Frames that the guest made available in one go, in ring order.
#[derive(Debug, Default)]
pub struct TxBurst<'m> {
    frames: Vec<(VnetHdr, usize)>,
    slices: Vec<VolatileSlice<'m>>,
}

/// One frame of a [`TxBurst`]; `slices` hold it from the Ethernet header on.
#[derive(Clone, Copy, Debug)]
pub struct TxFrame<'b, 'm> {
    /// What the guest says about the frame. Untrusted.
    pub hdr: VnetHdr,
    /// The frame's bytes in guest memory, in order.
    pub slices: &'b [VolatileSlice<'m>],
}

impl<'m> TxBurst<'m> {
    /// Appends part of the frame being built; [`Self::end_frame`] completes it.
    pub fn push_slice(&mut self, slice: VolatileSlice<'m>) {
        self.slices.push(slice);
    }

    /// Ends the frame made of the slices pushed since the last frame.
    pub fn end_frame(&mut self, hdr: VnetHdr) {
        self.frames.push((hdr, self.slices.len()));
    }

    /// Appends a whole frame of another burst over the same memory.
    pub fn push_frame(&mut self, frame: &TxFrame<'_, 'm>) {
        self.slices.extend_from_slice(frame.slices);
        self.end_frame(frame.hdr);
    }

    /// Drops the slices pushed since the last complete frame.
    pub fn abandon_frame(&mut self) {
        let end = self.frames.last().map_or(0, |&(_, end)| end);
        self.slices.truncate(end);
    }

    /// Number of complete frames.
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// True when there is no complete frame.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// The frame at `index`, which must be below [`Self::len`].
    pub fn frame(&self, index: usize) -> TxFrame<'_, 'm> {
        let start = index.checked_sub(1).map_or(0, |prev| self.frames[prev].1);
        let (hdr, end) = self.frames[index];
        TxFrame {
            hdr,
            slices: &self.slices[start..end],
        }
    }

    /// The complete frames, in ring order.
    pub fn iter(&self) -> impl Iterator<Item = TxFrame<'_, 'm>> {
        (0..self.len()).map(|index| self.frame(index))
    }

    /// Empties the burst but keeps its allocations, for frames of another borrow of memory.
    pub fn recycle<'n>(mut self) -> TxBurst<'n> {
        self.frames.clear();
        self.slices.clear();
        TxBurst {
            frames: self.frames,
            // The iterator is empty; collecting reuses the allocation under a new lifetime.
            slices: self.slices.into_iter().map(|_| unreachable!()).collect(),
        }
    }
}

impl TxFrame<'_, '_> {
    /// Length of the frame in bytes.
    pub fn len(&self) -> usize {
        self.slices.iter().map(VolatileSlice::len).sum()
    }

    /// True for a frame without bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the frame's head into `buf`; returns the number of bytes copied.
    pub fn copy_head(&self, buf: &mut [u8]) -> usize {
        let mut done = 0;
        for slice in self.slices {
            if done == buf.len() {
                break;
            }
            let n = slice.len().min(buf.len() - done);
            slice.copy_to(&mut buf[done..done + n]);
            done += n;
        }
        done
    }
}

/// The guest's RX ring, lent to a backend for one [`Backend::receive`].
///
/// Frames are reserved, filled in place and finished, first in first out. Frames still reserved
/// when the call returns go back to the ring unused. Prefer [`RxFrame`], the token over this trait,
/// when one frame at a time is enough.
pub trait RxRing {
    /// Reserves room for one more frame of up to `len` bytes, behind those already reserved.
    ///
    /// The room may span several descriptor chains when the driver accepted MRG_RXBUF. `false`
    /// means that the guest has not made enough buffers available; nothing is then reserved, and
    /// the device will call [`Backend::receive`] again when the guest adds some.
    fn reserve(&mut self, len: usize) -> bool;

    /// The reserved room of frame `index` (0 is the oldest): where the Ethernet header starts, on.
    ///
    /// Holds at least the `len` bytes asked for, and may hold more.
    fn slices(&self, index: usize) -> &[VolatileSlice<'_>];

    /// Completes the oldest reserved frame with `len` bytes used, and queues it for the guest.
    ///
    /// The device writes `virtio_net_hdr` and `num_buffers`, and takes back whole chains that the
    /// frame did not need; it may do so only if no later frame is finished after a short one.
    fn finish(&mut self, hdr: &VnetHdr, len: usize);

    /// Gives back all reserved frames.
    fn unreserve(&mut self);
}

/// One reserved RX frame. Finishing consumes it; dropping it gives the descriptors back.
pub struct RxFrame<'r> {
    ring: &'r mut dyn RxRing,
}

impl<'r> RxFrame<'r> {
    /// Reserves a frame of up to `len` bytes; `None` when the guest has no buffers for it.
    ///
    /// No other frame may be reserved on `ring`.
    pub fn reserve(ring: &'r mut dyn RxRing, len: usize) -> Option<Self> {
        ring.reserve(len).then_some(Self { ring })
    }

    /// Copies `bytes` into the frame at `offset`; bytes beyond the reserved room are cut off.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) {
        write_at(self.ring.slices(0), offset, bytes);
    }

    /// The reserved room.
    pub fn slices(&self) -> &[VolatileSlice<'_>] {
        self.ring.slices(0)
    }

    /// Hands the frame, `len` bytes long, to the guest (visible at the end of the burst).
    pub fn finish(self, hdr: &VnetHdr, len: usize) {
        self.ring.finish(hdr, len);
        std::mem::forget(self);
    }
}

impl Drop for RxFrame<'_> {
    fn drop(&mut self) {
        self.ring.unreserve();
    }
}

/// Copies `bytes` to `offset` of the room that `slices` make up; what does not fit is cut off.
pub fn write_at(slices: &[VolatileSlice<'_>], mut offset: usize, mut bytes: &[u8]) {
    for slice in slices {
        if bytes.is_empty() {
            return;
        }
        if offset >= slice.len() {
            offset -= slice.len();
            continue;
        }
        let n = bytes.len().min(slice.len() - offset);
        let (now, later) = bytes.split_at(n);
        if let Ok(room) = slice.subslice(offset, n) {
            room.copy_from(now);
        }
        bytes = later;
        offset = 0;
    }
}

/// Why [`Backend::receive`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Nothing more to deliver until the backend's fd, its deadline or guest traffic says so.
    Idle,
    /// There is more, but the guest has no RX buffers: call again when it adds some.
    NoBuffers,
    /// There is more; the burst ended so that TX and other work get their turn. Call again soon.
    Yield,
}

/// What stands behind a network card.
pub trait Backend: Send {
    /// The offloads that this backend can honour.
    fn offloads(&self) -> Offloads {
        Offloads::empty()
    }

    /// The driver accepted `link`.
    fn configure(&mut self, link: &Link);

    /// The driver changed what frames towards it may ask of it, without a reset: `link` is what
    /// [`Self::configure`] was told, but for the `GUEST_*` bits of its `offloads`. They are a subset
    /// of what the driver accepted at first, so a bit may come back, too.
    ///
    /// All frames that are finished from now on must keep to the new set, those of flows that exist
    /// already included; no flow may be lost. A backend whose `configure` does more than note the
    /// link has to tell the two apart.
    fn set_offloads(&mut self, link: &Link) {
        self.configure(link);
    }

    /// Takes frames from the guest. All of them are consumed; a backend that cannot place one
    /// drops it and counts the drop. The guest may reuse the memory once this returns.
    fn transmit(&mut self, burst: &TxBurst<'_>, now: Instant);

    /// Does what is due (sockets, timers) and delivers frames to the guest.
    fn receive(&mut self, ring: &mut dyn RxRing, now: Instant) -> Stop;

    /// The burst of the last [`Self::receive`] is visible to the guest: does what it need not wait
    /// for. True when `receive` has work again.
    fn after_burst(&mut self) -> bool {
        false
    }

    /// A descriptor that becomes readable, edge-triggered, when [`Self::receive`] has work.
    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// [`Self::poll_fd`] has not become readable since it was last watched: the next
    /// [`Self::receive`] need not look. Without this call it has to.
    fn host_is_quiet(&mut self) {}

    /// When [`Self::receive`] wants to be called although nothing happened.
    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// The driver reset the device.
    fn reset(&mut self) {}
}
