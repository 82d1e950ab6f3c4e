//! The receive queue: frames to the guest.
//!
//! [`RxBurst`] lends the guest's buffers to the backend, as an [`RxRing`]. Chains move between
//! three places:
//!
//! ```text
//!   avail ring --pop--> spare --reserve--> reserved frames --finish--> used ring
//!                         ^------- not needed, not finished --------|
//! ```
//!
//! A chain that was popped but not used waits in `spare`, ahead of the available ring. Moving
//! `next_avail` back instead would not do: with a frame waiting for more buffers than there are,
//! the ring would look as if it had new ones each time notifications are enabled, and the worker
//! would spin. It would not work either for a chain in the middle of a burst.

use std::collections::VecDeque;

use net::nic::{RxRing, VnetHdr};
use vm_memory::{GuestMemoryMmap, VolatileSlice};

use crate::virtio::chain::Access;
use crate::virtio::fault::DriverFault;
use crate::virtio::spec::NET_HDR_LEN;
use crate::virtio::vring::{RingView, Vring};

/// A chain that is popped and not used.
#[derive(Clone, Copy, Debug)]
struct Chain {
    /// Its place in the available ring.
    position: u16,
    /// Its first descriptor.
    head: u16,
    /// Bytes it can hold.
    room: usize,
}

/// A reserved frame: ranges of [`RxBurst::slices`], and the number of chains they come from.
#[derive(Clone, Copy, Debug)]
struct Frame {
    hdr: usize,
    payload: usize,
    end: usize,
    chains: usize,
}

/// The receive queue between bursts.
#[derive(Debug)]
pub(crate) struct RxQueue {
    vring: Vring,
    mergeable: bool,
    armed: bool,
    /// A worker waits for buffers, and none came since: notifications have to stay on.
    awaited: bool,
    /// Chains taken off the available ring so far; wraps.
    taken: u32,
    spare: VecDeque<Chain>,
    // Empty between bursts; here to keep their allocations.
    reserved: VecDeque<Chain>,
    frames: VecDeque<Frame>,
}

/// What happened in one burst.
#[derive(Debug, Default)]
pub(crate) struct RxDone {
    pub(crate) frames: u64,
    pub(crate) bytes: u64,
    pub(crate) undeliverable: u64,
    pub(crate) unfinished: u64,
    /// A reservation failed for want of buffers.
    pub(crate) starved: bool,
    /// The driver wants an interrupt.
    pub(crate) signal: bool,
}

impl RxQueue {
    pub(crate) fn new(vring: Vring, mergeable: bool) -> Self {
        Self {
            vring,
            mergeable,
            // The driver notifies until told otherwise.
            armed: true,
            awaited: false,
            taken: 0,
            spare: VecDeque::new(),
            reserved: VecDeque::new(),
            frames: VecDeque::new(),
        }
    }

    /// Gives the ring back, with spare chains made available again as far as they are its tail.
    pub(crate) fn into_vring(mut self) -> Vring {
        let is_last = |chain: &Chain, next: u16| chain.position.wrapping_add(1) == next;
        while let Some(index) = self
            .spare
            .iter()
            .position(|chain| is_last(chain, self.vring.next_avail()))
        {
            self.spare.remove(index);
            self.vring.unpop();
        }
        self.vring
    }

    /// Asks for notifications; true when there are new buffers already.
    pub(crate) fn arm(&mut self, mem: &GuestMemoryMmap) -> Result<bool, DriverFault> {
        (self.armed, self.awaited) = (true, true);
        self.vring.enable_notification(mem)
    }

    /// Chains taken off the available ring so far; wraps.
    pub(crate) fn taken(&self) -> u32 {
        self.taken
    }
}

/// Adds an unused chain to the others, oldest first: chains are to be used in the order of the ring,
/// so that those left over at a stop are its tail. A stopped ring has one position, and no others.
fn put_back(spare: &mut VecDeque<Chain>, chain: Chain) {
    let older = |other: &Chain| other.position.wrapping_sub(chain.position) > u16::MAX / 2;
    let at = spare.partition_point(older);
    spare.insert(at, chain);
}

/// The receive queue during one burst.
pub(crate) struct RxBurst<'q, 'm> {
    queue: &'q mut RxQueue,
    mem: &'m GuestMemoryMmap,
    view: RingView<'m>,
    /// Buffers of the reserved frames, oldest first. Emptied when none is left.
    slices: Vec<VolatileSlice<'m>>,
    /// Where frames go that no buffer of the guest can hold.
    sink: VolatileSlice<'m>,
    done: RxDone,
    fault: Option<DriverFault>,
}

impl<'q, 'm> RxBurst<'q, 'm> {
    /// Starts a burst; `slices` is an empty vector to use, `sink` any memory of the host.
    pub(crate) fn new(
        queue: &'q mut RxQueue,
        mem: &'m GuestMemoryMmap,
        slices: Vec<VolatileSlice<'m>>,
        sink: VolatileSlice<'m>,
    ) -> Self {
        let mut burst = Self {
            mem,
            view: queue.vring.view(mem),
            queue,
            slices,
            sink,
            done: RxDone::default(),
            fault: None,
        };
        if burst.queue.armed && !burst.queue.awaited {
            burst.queue.armed = false;
            if let Err(fault) = burst.queue.vring.disable_notification(mem) {
                burst.fault = Some(fault);
            }
        }
        burst
    }

    /// Ends the burst: what was finished becomes visible, the rest goes back.
    ///
    /// The vector returned is the one given to [`Self::new`].
    pub(crate) fn publish(mut self) -> (Result<RxDone, DriverFault>, Vec<VolatileSlice<'m>>) {
        self.done.unfinished = self.queue.frames.len() as u64;
        self.unreserve();
        // Also after a fault: frames that are complete are the guest's.
        let published = self.queue.vring.publish(&self.view);
        let result = match self.fault {
            Some(fault) => Err(fault),
            None => published.map(|signal| RxDone {
                signal,
                ..self.done
            }),
        };
        (result, self.slices)
    }

    /// Takes a chain off the available ring. It has room for the header at least.
    fn pop(&mut self) -> Result<Option<Chain>, DriverFault> {
        let RxQueue {
            vring,
            spare,
            reserved,
            ..
        } = &mut *self.queue;
        // A driver that makes more chains available than there are would have us overwrite used
        // elements that are not published yet.
        let held = usize::from(vring.pending()) + spare.len() + reserved.len();
        if held >= usize::from(vring.size()) {
            return Ok(None);
        }
        let position = vring.next_avail();
        let Some(head) = vring.pop(&self.view)? else {
            return Ok(None);
        };
        if std::mem::take(&mut self.queue.awaited) {
            self.queue.armed = false;
            self.queue.vring.disable_notification(self.mem)?;
        }
        self.queue.taken = self.queue.taken.wrapping_add(1);
        Ok(Some(Chain {
            position,
            head,
            room: 0,
        }))
    }

    /// Adds the buffers of `chain` to `slices`, with the first `hdr_left` bytes kept apart.
    fn map(&mut self, mut chain: Chain, hdr_left: &mut usize) -> Result<Chain, DriverFault> {
        let (table, slices) = (self.queue.vring.table(&self.view), &mut self.slices);
        chain.room = table.walk(chain.head, Access::Writable, |slice| {
            let n = slice.len().min(*hdr_left);
            *hdr_left -= n;
            // Neither can fail: `n` is at most the slice's length.
            if n > 0
                && let Ok(hdr) = slice.subslice(0, n)
            {
                slices.push(hdr);
            }
            if n < slice.len()
                && let Ok(payload) = slice.offset(n)
            {
                slices.push(payload);
            }
        })?;
        if chain.room < NET_HDR_LEN {
            return Err(DriverFault::TooShort {
                len: chain.room,
                need: NET_HDR_LEN,
            });
        }
        Ok(chain)
    }

    /// Reserves as many chains as `need` bytes take (VIRTIO 1.3, 5.1.6.4).
    fn reserve_merged(&mut self, need: usize) -> Result<bool, DriverFault> {
        let start = self.slices.len();
        let (mut room, mut chains, mut hdr_left) = (0, 0, NET_HDR_LEN);
        while room < need {
            let chain = match self.queue.spare.pop_front() {
                Some(chain) => Some(chain),
                None => self.pop()?,
            };
            let Some(chain) = chain else {
                self.slices.truncate(start);
                for _ in 0..chains {
                    self.give_back_newest();
                }
                // The guest cannot add any buffers to a ring that is already full of them.
                if chains == usize::from(self.queue.vring.size()) {
                    return Ok(self.reserve_sink(need));
                }
                self.done.starved = true;
                return Ok(false);
            };
            let chain = self.map(chain, &mut hdr_left)?;
            self.queue.reserved.push_back(chain);
            room += chain.room;
            chains += 1;
        }
        self.push_frame(start, chains);
        Ok(true)
    }

    /// Reserves the first chain that holds `need` bytes.
    ///
    /// Shorter ones stay for shorter frames. If there are no others, the frame is for the sink:
    /// waiting would block the queue for as long as the short ones are not used.
    fn reserve_single(&mut self, need: usize) -> Result<bool, DriverFault> {
        let start = self.slices.len();
        let mut tried = 0;
        loop {
            let chain = match self.queue.spare.get(tried).copied() {
                Some(chain) => Some(chain),
                None => self.pop()?.inspect(|&new| self.queue.spare.push_back(new)),
            };
            let Some(chain) = chain else { break };
            let mut hdr_left = NET_HDR_LEN;
            let chain = self.map(chain, &mut hdr_left)?;
            if chain.room >= need {
                self.queue.spare.remove(tried);
                self.queue.reserved.push_back(chain);
                self.push_frame(start, 1);
                return Ok(true);
            }
            self.slices.truncate(start);
            tried += 1;
        }
        if tried > 0 {
            return Ok(self.reserve_sink(need));
        }
        self.done.starved = true;
        Ok(false)
    }

    /// Reserves room that leads nowhere.
    fn reserve_sink(&mut self, need: usize) -> bool {
        // One longer than any frame is cut; to refuse it would make the backend wait for ever.
        let room = self.sink.subslice(0, need - NET_HDR_LEN);
        let room = room.unwrap_or(self.sink);
        self.slices.push(room);
        let end = self.slices.len();
        self.queue.frames.push_back(Frame {
            hdr: end - 1,
            payload: end - 1,
            end,
            chains: 0,
        });
        true
    }

    /// Records the frame whose slices start at `hdr`.
    fn push_frame(&mut self, hdr: usize, chains: usize) {
        let (mut payload, mut left) = (hdr, NET_HDR_LEN);
        while left > 0 {
            left -= self.slices[payload].len();
            payload += 1;
        }
        self.queue.frames.push_back(Frame {
            hdr,
            payload,
            end: self.slices.len(),
            chains,
        });
    }

    fn give_back_newest(&mut self) {
        if let Some(chain) = self.queue.reserved.pop_back() {
            put_back(&mut self.queue.spare, chain);
        }
    }

    /// Writes the frame's used elements and header.
    fn complete(&mut self, frame: Frame, hdr: &VnetHdr, len: usize) -> Result<(), DriverFault> {
        let queue = &mut *self.queue;
        let mut left = NET_HDR_LEN + len;
        let mut num_buffers = 0u16;
        for _ in 0..frame.chains {
            let Some(chain) = queue.reserved.pop_front() else {
                break;
            };
            if left == 0 {
                put_back(&mut queue.spare, chain);
                continue;
            }
            let n = chain.room.min(left);
            left -= n;
            num_buffers += 1;
            let written = u32::try_from(n).unwrap_or(u32::MAX);
            queue.vring.push_used(&self.view, chain.head, written)?;
        }
        let mut raw = [0; NET_HDR_LEN];
        raw[..VnetHdr::LEN].copy_from_slice(&hdr.encode());
        raw[VnetHdr::LEN..].copy_from_slice(&num_buffers.to_le_bytes());
        net::nic::write_at(&self.slices[frame.hdr..frame.payload], 0, &raw);
        self.done.frames += 1;
        self.done.bytes += len as u64;
        Ok(())
    }
}

impl RxRing for RxBurst<'_, '_> {
    fn reserve(&mut self, len: usize) -> bool {
        if self.fault.is_some() {
            return false;
        }
        let need = NET_HDR_LEN.saturating_add(len);
        let result = if self.queue.mergeable {
            self.reserve_merged(need)
        } else {
            self.reserve_single(need)
        };
        result.unwrap_or_else(|fault| {
            self.fault = Some(fault);
            false
        })
    }

    fn slices(&self, index: usize) -> &[VolatileSlice<'_>] {
        match self.queue.frames.get(index) {
            Some(frame) => &self.slices[frame.payload..frame.end],
            None => &[],
        }
    }

    fn finish(&mut self, hdr: &VnetHdr, len: usize) {
        let Some(frame) = self.queue.frames.pop_front() else {
            return;
        };
        if frame.chains == 0 {
            self.done.undeliverable += 1;
        } else if self.fault.is_none() {
            let room = self.slices[frame.payload..frame.end]
                .iter()
                .map(VolatileSlice::len)
                .sum();
            if let Err(fault) = self.complete(frame, hdr, len.min(room)) {
                self.fault = Some(fault);
            }
        }
        if self.queue.frames.is_empty() {
            self.slices.clear();
        }
    }

    fn unreserve(&mut self) {
        while !self.queue.reserved.is_empty() {
            self.give_back_newest();
        }
        self.queue.frames.clear();
        self.slices.clear();
    }
}
