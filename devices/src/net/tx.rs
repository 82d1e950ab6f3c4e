//! The transmit queue: frames from the guest.
//!
//! A burst is popped, handed to the backend in place, and returned with one store to `used.idx`.
//! Used elements are written while popping: the driver does not look at them before the index
//! moves, which is after the backend is done with the memory.

use net::nic::{Backend, TxBurst, VnetHdr};
use std::time::Instant;
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

/// What one call of [`TxQueue::process`] did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TxDone {
    /// Chains taken.
    pub(crate) chains: usize,
    /// The driver wants an interrupt.
    pub(crate) signal: bool,
}

/// The transmit queue and its notification state.
#[derive(Debug)]
pub(crate) struct TxQueue {
    vring: Vring,
    armed: bool,
}

impl TxQueue {
    pub(crate) fn new(vring: Vring) -> Self {
        // The driver notifies until told otherwise.
        Self { vring, armed: true }
    }

    pub(crate) fn into_vring(self) -> Vring {
        self.vring
    }

    /// Passes one burst from the guest to `backend`, and returns its chains.
    ///
    /// Frames ahead of a malformed chain are still sent.
    pub(crate) fn process<'m>(
        &mut self,
        mem: &'m GuestMemoryMmap,
        burst: &mut TxBurst<'m>,
        backend: &mut dyn Backend,
        counters: &Counters,
        now: Instant,
    ) -> Result<TxDone, DriverFault> {
        if self.armed {
            self.vring.disable_notification(mem)?;
            self.armed = false;
        }
        let view = self.vring.view(mem);
        let (mut done, mut bytes, mut oversized) = (TxDone::default(), 0, 0);
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
            done.chains += 1;
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
        done.signal = self.vring.publish(&view)?;
        match fault {
            Some(fault) => Err(fault),
            None => Ok(done),
        }
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
