//! Several stacks for one guest, each on a thread of its own.
//!
//! A card with several pairs of queues has a [`Stack`] behind each. A flow belongs to one of them for
//! its whole life, and what decides is the guest's port: it belongs to the shard that first saw it
//! send, so receive follows transmit. There are no other ties between shards, and so no locks on the
//! way of a packet: one look into the table of owners, once per frame.
//!
//! ```text
//!   TX queue 0 -> Shard 0 -> Stack 0 -> RX queue 0
//!                   ^  \ mailboxes (frames of flows that began on the other queue)
//!                   v  /
//!   TX queue 1 -> Shard 1 -> Stack 1 -> RX queue 1
//! ```
//!
//! A driver may send a flow's frames through another queue later, when the sending thread has moved or
//! the number of queues in use was changed. Those are copied into a mailbox of the owner, and opened
//! ahead of the owner's own queue, so the order is kept. That costs a copy and a wake-up; drivers keep
//! flows where they are for as long as frames wait to be taken.
//!
//! Ports that no flow uses any more are free again after [`SWEEP`] at the latest. Ports with forwards
//! from the host belong to the first shard for good, for it has the listeners.

use std::collections::{HashSet, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use mio::Waker;

use crate::config::{Config, Protocol};
use crate::drops::DropReason;
use crate::nic::{Backend, Link, Offloads, RxRing, Stop, TxBurst, TxFrame, VnetHdr, VolatileSlice};
use crate::stack::{RxPath, Stack, StackError};
use crate::wire::ETHERNET;

/// Most shards of a guest.
pub const MAX_SHARDS: u8 = 64;

/// How long a port may stay with its shard when its last flow is gone.
pub const SWEEP: Duration = Duration::from_secs(8);

/// Frames and bytes in a mailbox; more are dropped.
const MAX_FRAMES: usize = 1024;
const MAX_BYTES: usize = 8 << 20;

/// A port of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Port {
    protocol: Protocol,
    number: u16,
}

/// No shard owns the port.
const FREE: u8 = 0;

/// Who owns which port of the guest.
struct Owners {
    tcp: Box<[AtomicU8]>,
    udp: Box<[AtomicU8]>,
}

impl Owners {
    fn new() -> Self {
        let all_free = || (0..=u16::MAX).map(|_| AtomicU8::new(FREE)).collect();
        Self {
            tcp: all_free(),
            udp: all_free(),
        }
    }

    fn entry(&self, port: Port) -> &AtomicU8 {
        let table = match port.protocol {
            Protocol::Tcp => &self.tcp,
            Protocol::Udp => &self.udp,
        };
        &table[usize::from(port.number)]
    }

    /// The owner of `port`, which is `shard` if there was none; true when that is so.
    fn claim(&self, port: Port, shard: u8) -> (u8, bool) {
        let entry = self.entry(port);
        // Nothing but the number itself is shared, so no order is needed.
        let owner = entry.load(Ordering::Relaxed);
        if owner != FREE {
            return (owner - 1, false);
        }
        match entry.compare_exchange(FREE, shard + 1, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => (shard, true),
            Err(owner) => (owner - 1, false),
        }
    }

    fn owner(&self, port: Port) -> Option<u8> {
        self.entry(port).load(Ordering::Relaxed).checked_sub(1)
    }

    fn free(&self, port: Port) {
        self.entry(port).store(FREE, Ordering::Relaxed);
    }
}

/// Frames that another shard's queue brought.
struct Mailbox {
    letters: Mutex<Letters>,
    /// There is something in it.
    full: AtomicBool,
    waker: Waker,
}

#[derive(Default)]
struct Letters {
    frames: VecDeque<(VnetHdr, Vec<u8>)>,
    bytes: usize,
}

impl Mailbox {
    /// Puts a copy of `frame` in; false when there is no room.
    fn post(&self, frame: &TxFrame<'_, '_>) -> bool {
        let len = frame.len();
        let mut letters = self.letters.lock().unwrap_or_else(PoisonError::into_inner);
        if letters.frames.len() >= MAX_FRAMES || letters.bytes + len > MAX_BYTES {
            return false;
        }
        let mut bytes = vec![0; len];
        frame.copy_head(&mut bytes);
        letters.frames.push_back((frame.hdr, bytes));
        letters.bytes += len;
        drop(letters);
        if !self.full.swap(true, Ordering::AcqRel)
            && let Err(error) = self.waker.wake()
        {
            tracing::error!(%error, "cannot wake the thread that a frame is for");
        }
        true
    }

    fn has_mail(&self) -> bool {
        self.full.load(Ordering::Acquire)
    }

    /// Takes everything out.
    fn take(&self) -> VecDeque<(VnetHdr, Vec<u8>)> {
        if !self.has_mail() {
            return VecDeque::new();
        }
        self.full.store(false, Ordering::SeqCst);
        let mut letters = self.letters.lock().unwrap_or_else(PoisonError::into_inner);
        letters.bytes = 0;
        std::mem::take(&mut letters.frames)
    }
}

/// What the shards of a guest share.
struct Shared {
    owners: Owners,
    mailboxes: Vec<Mailbox>,
}

/// One stack of several.
pub struct Shard {
    index: u8,
    stack: Stack,
    shared: Arc<Shared>,
    /// Ports that this shard claimed.
    claimed: Vec<Port>,
    sweep: Option<Instant>,
}

/// `count` stacks for one guest (1 to [`MAX_SHARDS`]; clamped). A single one is a plain [`Stack`].
///
/// # Errors
/// As [`Stack::new`].
pub fn stacks(config: &Config, rx: RxPath, count: u8) -> Result<Vec<Box<dyn Backend>>, StackError> {
    if count <= 1 {
        return Ok(vec![Box::new(Stack::new(config.clone(), rx)?)]);
    }
    let backends = shards(config, rx, count)?.into_iter();
    Ok(backends.map(|shard| Box::new(shard) as _).collect())
}

fn shards(config: &Config, rx: RxPath, count: u8) -> Result<Vec<Shard>, StackError> {
    let count = count.clamp(1, MAX_SHARDS);
    let (mut stacks, mut mailboxes) = (Vec::new(), Vec::new());
    for index in 0..count {
        let mut config = config.clone();
        if index > 0 {
            config.forwards.clear();
        }
        let stack = Stack::one_of(config, rx, count)?;
        mailboxes.push(Mailbox {
            letters: Mutex::default(),
            full: AtomicBool::new(false),
            waker: stack.waker()?,
        });
        stacks.push(stack);
    }
    let owners = Owners::new();
    for forward in &config.forwards {
        let port = Port {
            protocol: forward.protocol,
            number: forward.guest_port,
        };
        owners.claim(port, 0);
    }
    let shared = Arc::new(Shared { owners, mailboxes });
    let shard = |(index, stack)| Shard {
        index,
        stack,
        shared: shared.clone(),
        claimed: Vec::new(),
        sweep: None,
    };
    Ok((0..).zip(stacks).map(shard).collect())
}

/// The guest's port in a frame, and whether it makes a flow of its own: questions for names and
/// addresses are answered by whichever stack gets them. `None` for what has no port.
fn port_of(frame: &TxFrame<'_, '_>) -> Option<(Port, bool)> {
    const IHL: usize = ETHERNET;
    const PROTOCOL: usize = ETHERNET + 9;
    // Ethernet, the longest IPv4 header, and ports.
    let mut head = [0; ETHERNET + 60 + 4];
    let head_len = frame.copy_head(&mut head);
    let head = &head[..head_len];
    if head.get(12..14)? != [0x08, 0x00] {
        return None;
    }
    let protocol = match head.get(PROTOCOL)? {
        6 => Protocol::Tcp,
        17 => Protocol::Udp,
        _ => return None,
    };
    let at = ETHERNET + usize::from(head.get(IHL)? & 0xf) * 4;
    let word = |at: usize| Some(u16::from_be_bytes([*head.get(at)?, *head.get(at + 1)?]));
    let (number, far) = (word(at)?, word(at + 2)?);
    let answered_here = protocol == Protocol::Udp && matches!(far, 53 | 67);
    Some((Port { protocol, number }, !answered_here))
}

impl Shard {
    fn mailbox(&self) -> &Mailbox {
        &self.shared.mailboxes[usize::from(self.index)]
    }

    /// The shard that `frame` is for.
    fn owner(&mut self, frame: &TxFrame<'_, '_>, now: Instant) -> u8 {
        let Some((port, makes_a_flow)) = port_of(frame) else {
            return self.index;
        };
        if !makes_a_flow {
            return self.shared.owners.owner(port).unwrap_or(self.index);
        }
        let (owner, claimed) = self.shared.owners.claim(port, self.index);
        if claimed {
            self.claimed.push(port);
            self.sweep.get_or_insert(now + SWEEP);
        }
        owner
    }

    /// Hands on what belongs to others; what is left, if that is not all of `burst`.
    fn sort<'m>(&mut self, burst: &TxBurst<'m>, now: Instant) -> Option<TxBurst<'m>> {
        let mut kept: Option<TxBurst<'m>> = None;
        for (at, frame) in burst.iter().enumerate() {
            let owner = self.owner(&frame, now);
            if owner == self.index {
                if let Some(kept) = &mut kept {
                    kept.push_frame(&frame);
                }
                continue;
            }
            kept.get_or_insert_with(|| {
                let mut before = TxBurst::default();
                burst
                    .iter()
                    .take(at)
                    .for_each(|frame| before.push_frame(&frame));
                before
            });
            // Owners are shards.
            let mailbox = &self.shared.mailboxes[usize::from(owner)];
            if !mailbox.post(&frame) {
                self.stack.count_drop(DropReason::Full);
            }
        }
        kept
    }

    /// Takes what other shards brought.
    fn open_mail(&mut self, now: Instant) {
        let mut letters = self.mailbox().take();
        if letters.is_empty() {
            return;
        }
        let mut burst = TxBurst::default();
        for (hdr, bytes) in &mut letters {
            burst.push_slice(VolatileSlice::from(&mut bytes[..]));
            burst.end_frame(*hdr);
        }
        // A port may have been freed meanwhile, and claimed by another.
        let kept = self.sort(&burst, now);
        self.stack.transmit(kept.as_ref().unwrap_or(&burst), now);
    }

    /// Frees ports without flows.
    fn sweep(&mut self, now: Instant) {
        if self.sweep.is_none_or(|at| now < at) {
            return;
        }
        let mut used = HashSet::new();
        self.stack.for_each_guest_port(|protocol, number| {
            used.insert(Port { protocol, number });
        });
        // What is in the mail may be the first of a flow.
        if self.mailbox().has_mail() {
            return;
        }
        self.claimed.retain(|&port| {
            let keep = used.contains(&port);
            if !keep {
                self.shared.owners.free(port);
            }
            keep
        });
        self.sweep = (!self.claimed.is_empty()).then_some(now + SWEEP);
    }
}

impl Backend for Shard {
    fn offloads(&self) -> Offloads {
        self.stack.offloads()
    }

    fn configure(&mut self, link: &Link) {
        self.stack.configure(link);
    }

    fn set_offloads(&mut self, link: &Link) {
        self.stack.set_offloads(link);
    }

    fn transmit(&mut self, burst: &TxBurst<'_>, now: Instant) {
        // Its frames are older: a driver that saw them taken from one queue may go on with the other.
        self.open_mail(now);
        let kept = self.sort(burst, now);
        self.stack.transmit(kept.as_ref().unwrap_or(burst), now);
    }

    fn receive(&mut self, ring: &mut dyn RxRing, now: Instant) -> Stop {
        self.open_mail(now);
        self.sweep(now);
        let stop = self.stack.receive(ring, now);
        // What came meanwhile has woken nobody: the stack has taken the event along with the others.
        if stop == Stop::Idle && self.mailbox().has_mail() {
            return Stop::Yield;
        }
        stop
    }

    fn after_burst(&mut self) -> bool {
        self.stack.after_burst()
    }

    fn host_is_quiet(&mut self) {
        self.stack.host_is_quiet();
    }

    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        self.stack.poll_fd()
    }

    fn deadline(&self) -> Option<Instant> {
        let deadlines = [self.stack.deadline(), self.sweep];
        deadlines.into_iter().flatten().min()
    }

    fn reset(&mut self) {
        // Frames of a driver that is gone.
        drop(self.mailbox().take());
        self.stack.reset();
    }
}

#[cfg(test)]
mod tests;
