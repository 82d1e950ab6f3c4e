//! The transmit queue: frames from the guest.
//!
//! A burst is popped, handed to the backend in place, and returned with one store to `used.idx`.
//! Used elements are written while popping: the driver does not look at them before the index
//! moves, which is after the backend is done with the memory.

use net::nic::{Backend, TxBurst, VnetHdr};
use std::time::{Duration, Instant};
use vm_memory::GuestMemoryMmap;

use crate::net::counters::{Counters, count};
use crate::virtio::chain::Access;
use crate::virtio::fault::DriverFault;
use crate::virtio::spec::NET_HDR_LEN;
use crate::virtio::vring::{RingView, Vring};

/// Frames in a burst. With GSO that is up to 4 MiB, so the receive side waits no longer for it.
pub const TX_BURST: u16 = 64;

/// Longest frame that any link carries: an IPv6 packet of the largest payload, in Ethernet.
pub const MAX_FRAME: usize = 14 + 40 + 65535;

/// How long an interrupt for returned chains may wait for a reason to be left out.
///
/// A driver hurries to get frames, not to get its own buffers back; Linux's looks for those whenever
/// it takes frames. So while frames go to the guest, an interrupt for the TX queue is one too many.
///
/// Longer than a tick of the host, so that waiting does not mean setting a timer each time.
pub const TX_INTERRUPT_DELAY: Duration = Duration::from_millis(10);

/// How long a driver that did not look for its buffers in time is not made to wait.
const NO_DELAY: Duration = Duration::from_secs(1);

/// An interrupt that the driver wants and has not got.
#[derive(Clone, Copy, Debug)]
struct Owed {
    /// The used index when the driver last had nothing to be told.
    since: u16,
    at: Instant,
}

/// The transmit queue and its notification state.
#[derive(Debug)]
pub(crate) struct TxQueue {
    vring: Vring,
    armed: bool,
    owed: Option<Owed>,
    /// Until then nothing waits.
    prompt_until: Option<Instant>,
}

impl TxQueue {
    pub(crate) fn new(vring: Vring) -> Self {
        // The driver notifies until told otherwise.
        Self {
            vring,
            armed: true,
            owed: None,
            prompt_until: None,
        }
    }

    pub(crate) fn into_vring(self) -> Vring {
        self.vring
    }

    /// Passes one burst from the guest to `backend`, and returns its chains; tells how many there were.
    /// The interrupt for them is left to [`Self::interrupt_due`].
    ///
    /// Frames ahead of a malformed chain are still sent.
    pub(crate) fn process<'m>(
        &mut self,
        mem: &'m GuestMemoryMmap,
        burst: &mut TxBurst<'m>,
        backend: &mut dyn Backend,
        counters: &Counters,
        now: Instant,
    ) -> Result<usize, DriverFault> {
        if self.armed {
            self.vring.disable_notification(mem)?;
            self.armed = false;
        }
        let view = self.vring.view(mem);
        let (mut chains, mut bytes, mut oversized) = (0, 0, 0);
        let mut fault = None;
        while self.vring.pending() < TX_BURST.min(self.vring.size()) {
            let head = match self.vring.pop(&view) {
                Ok(Some(head)) => head,
                Ok(None) => break,
                Err(error) => {
                    fault = Some(error);
                    break;
                }
            };
            chains += 1;
            match self.read_frame(&view, head, burst) {
                Ok((hdr, len)) if len <= MAX_FRAME => {
                    burst.end_frame(hdr);
                    bytes += len;
                }
                Ok(_) => {
                    burst.abandon_frame();
                    oversized += 1;
                }
                Err(error) => {
                    burst.abandon_frame();
                    fault = Some(error);
                    break;
                }
            }
            // The device wrote nothing into the chain.
            self.vring.push_used(&view, head, 0)?;
        }
        if !burst.is_empty() {
            backend.transmit(burst, now);
            count(&counters.tx_frames, burst.len() as u64);
            count(&counters.tx_bytes, bytes as u64);
            count(&counters.tx_bursts, 1);
        }
        count(&counters.tx_oversized, oversized);
        let since = self.vring.next_used();
        if self.vring.publish(&view)? {
            self.owed.get_or_insert(Owed { since, at: now });
        }
        match fault {
            Some(fault) => Err(fault),
            None => Ok(chains),
        }
    }

    /// Tells whether the driver must have its interrupt now. `woken` is true when it was just
    /// interrupted for frames, and so may find its chains by itself.
    pub(crate) fn interrupt_due(
        &mut self,
        mem: &GuestMemoryMmap,
        woken: bool,
        now: Instant,
    ) -> Result<bool, DriverFault> {
        let Some(Owed { since, at }) = self.owed else {
            return Ok(false);
        };
        let returned = self.vring.next_used().wrapping_sub(since);
        let late = now.saturating_duration_since(at) >= TX_INTERRUPT_DELAY;
        let prompt = self.prompt_until.is_some_and(|until| now < until);
        if woken && !late && !prompt && returned < self.vring.size() / 2 {
            return Ok(false);
        }
        let view = self.vring.view(mem);
        self.owed = None;
        let due = self.vring.wants_interrupt(&view, since)?;
        if due && late {
            self.prompt_until = Some(now + NO_DELAY);
        }
        Ok(due)
    }

    /// When [`Self::interrupt_due`] wants to be asked again.
    pub(crate) fn interrupt_deadline(&self) -> Option<Instant> {
        self.owed.map(|owed| owed.at + TX_INTERRUPT_DELAY)
    }

    /// Puts the frame at `head` into `burst`; its header may be spread over several descriptors.
    fn read_frame<'m>(
        &self,
        view: &RingView<'m>,
        head: u16,
        burst: &mut TxBurst<'m>,
    ) -> Result<(VnetHdr, usize), DriverFault> {
        let mut raw = [0; NET_HDR_LEN];
        let mut have = 0;
        let total = self
            .vring
            .table(view)
            .walk(head, Access::Readable, |slice| {
                let n = slice.len().min(NET_HDR_LEN - have);
                if n > 0 {
                    slice.copy_to(&mut raw[have..have + n]);
                    have += n;
                }
                if n < slice.len()
                    && let Ok(payload) = slice.offset(n)
                {
                    burst.push_slice(payload);
                }
            })?;
        let len = total
            .checked_sub(NET_HDR_LEN)
            .ok_or(DriverFault::TooShort {
                len: total,
                need: NET_HDR_LEN,
            })?;
        // The last two bytes are `num_buffers`, which means nothing in this direction.
        let [hdr @ .., _, _] = raw;
        Ok((VnetHdr::decode(&hdr), len))
    }

    /// Asks for notifications; true when frames are waiting already.
    pub(crate) fn arm(&mut self, mem: &GuestMemoryMmap) -> Result<bool, DriverFault> {
        self.armed = true;
        self.vring.enable_notification(mem)
    }
}
