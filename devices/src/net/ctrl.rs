//! The control queue: what the driver asks of the card itself (VIRTIO 1.3, 5.1.6.5).
//!
//! A command is a readable class, command and data, then a writable byte for the answer, in any
//! layout of descriptors. Nothing is half done: a command that is unknown, ill-formed or not
//! negotiated is answered with ERR and changes nothing. Only a chain without room for an answer is
//! beyond an answer, and so a [`DriverFault`].

use net::nic::Offloads;
use vm_memory::{GuestMemoryMmap, VolatileSlice};

use crate::net::features::changed_offloads;
use crate::virtio::chain::Access;
use crate::virtio::fault::DriverFault;
use crate::virtio::spec::{
    NET_CTRL_GUEST_OFFLOADS, NET_CTRL_GUEST_OFFLOADS_SET, NET_CTRL_MAC, NET_CTRL_MAC_TABLE_SET,
    NET_CTRL_MQ, NET_CTRL_MQ_VQ_PAIRS_SET, NET_CTRL_RX, NET_CTRL_RX_ALLMULTI, NET_CTRL_RX_PROMISC,
    NET_ERR, NET_F_CTRL_GUEST_OFFLOADS, NET_F_CTRL_RX, NET_F_MQ, NET_OK,
};
use crate::virtio::vring::Vring;

/// Commands taken in one call, so that frames get their turn.
const BURST: u16 = 16;

/// What the driver wants changed about the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The offloads towards the guest.
    Offloads(Offloads),
    /// The pairs of queues in use, 1 to what the card has.
    Pairs(u16),
}

/// What one call of [`CtrlQueue::process`] did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CtrlDone {
    /// Commands taken.
    pub(crate) commands: u64,
    /// Those of them that were answered with ERR.
    pub(crate) refused: u64,
    /// The driver wants an interrupt.
    pub(crate) signal: bool,
    /// There are more commands.
    pub(crate) more: bool,
}

/// The control queue and its notification state.
#[derive(Debug)]
pub(crate) struct CtrlQueue {
    vring: Vring,
    features: u64,
    /// Pairs of queues that there are.
    pairs: u16,
    armed: bool,
}

impl CtrlQueue {
    /// The queue of a driver that accepted `features`, CTRL_VQ among them, on a card with `pairs` of
    /// queues.
    pub(crate) fn new(vring: Vring, features: u64, pairs: u16) -> Self {
        Self {
            vring,
            features,
            pairs,
            // A queue taken over from another device may have its event index elsewhere.
            armed: false,
        }
    }

    pub(crate) fn into_vring(self) -> Vring {
        self.vring
    }

    /// Carries out the commands that wait, up to a bound; `apply` is told of each change.
    ///
    /// Notifications are on afterwards. Commands ahead of a malformed chain are still answered.
    pub(crate) fn process(
        &mut self,
        mem: &GuestMemoryMmap,
        apply: &mut dyn FnMut(Change),
    ) -> Result<CtrlDone, DriverFault> {
        let view = self.vring.view(mem);
        let mut done = CtrlDone::default();
        let mut fault = None;
        while self.vring.pending() < BURST.min(self.vring.size()) {
            let result = self.vring.pop(&view).and_then(|head| {
                let Some(head) = head else { return Ok(None) };
                let command =
                    Command::read(|each| self.vring.table(&view).walk_request(head, each))?;
                Ok(Some((head, command)))
            });
            let (head, command) = match result {
                Ok(Some(next)) => next,
                Ok(None) => break,
                Err(error) => {
                    fault = Some(error);
                    break;
                }
            };
            let accepted = command.run(self.features, self.pairs, apply);
            done.commands += 1;
            done.refused += u64::from(!accepted);
            let written = command.answer(if accepted { NET_OK } else { NET_ERR });
            self.vring.push_used(&view, head, written)?;
        }
        done.signal = self.vring.publish(&view)?;
        if let Some(fault) = fault {
            return Err(fault);
        }
        if done.commands > 0 || !self.armed {
            self.armed = true;
            done.more = self.vring.enable_notification(mem)?;
        }
        Ok(done)
    }
}

/// One command, still in guest memory but for its first two bytes.
struct Command<'m> {
    class: u8,
    command: u8,
    /// All readable buffers, class and command included.
    request: Vec<VolatileSlice<'m>>,
    /// Bytes in them.
    len: usize,
    /// Where the answer goes. Not empty.
    ack: VolatileSlice<'m>,
}

impl<'m> Command<'m> {
    /// Reads the command from a chain that `walk` walks.
    fn read(
        walk: impl FnOnce(&mut dyn FnMut(Access, VolatileSlice<'m>)) -> Result<usize, DriverFault>,
    ) -> Result<Self, DriverFault> {
        let (mut request, mut len, mut ack) = (Vec::new(), 0usize, None);
        walk(&mut |access, slice| match access {
            Access::Readable => {
                len = len.saturating_add(slice.len());
                request.push(slice);
            }
            Access::Writable => {
                ack.get_or_insert(slice);
            }
        })?;
        let ack = ack.ok_or(DriverFault::TooShort { len: 0, need: 1 })?;
        let mut command = Self {
            class: u8::MAX,
            command: u8::MAX,
            request,
            len,
            ack,
        };
        if let Some([class, number]) = command.bytes(0) {
            (command.class, command.command) = (class, number);
        }
        Ok(command)
    }

    /// Does what is asked; false when it is to be answered with ERR.
    fn run(&self, features: u64, pairs: u16, apply: &mut dyn FnMut(Change)) -> bool {
        let rx = features & NET_F_CTRL_RX != 0;
        match (self.class, self.command) {
            // The link has one guest, and everything on it is for that guest: each filter that a
            // driver may ask for lets all of it through (5.1.6.5.1).
            (NET_CTRL_RX, NET_CTRL_RX_PROMISC | NET_CTRL_RX_ALLMULTI) if rx => {
                matches!(self.data(), Some([0 | 1]))
            }
            (NET_CTRL_MAC, NET_CTRL_MAC_TABLE_SET) if rx => self.is_mac_table(),
            (NET_CTRL_GUEST_OFFLOADS, NET_CTRL_GUEST_OFFLOADS_SET)
                if features & NET_F_CTRL_GUEST_OFFLOADS != 0 =>
            {
                let bits = self.data().map(u64::from_le_bytes);
                let offloads = bits.and_then(|bits| changed_offloads(features, bits));
                offloads.map(Change::Offloads).map(apply).is_some()
            }
            (NET_CTRL_MQ, NET_CTRL_MQ_VQ_PAIRS_SET) if features & NET_F_MQ != 0 => {
                let wanted = self.data().map(u16::from_le_bytes);
                let wanted = wanted.filter(|wanted| (1..=pairs).contains(wanted));
                wanted.map(Change::Pairs).map(apply).is_some()
            }
            _ => false,
        }
    }

    /// Writes the answer; returns the number of bytes written.
    fn answer(&self, ack: u8) -> u32 {
        self.ack.copy_from(&[ack]);
        1
    }

    /// The data behind class and command, if there are exactly `N` bytes of it.
    fn data<const N: usize>(&self) -> Option<[u8; N]> {
        let exact = self.len == HEADER + N;
        exact.then(|| self.bytes(HEADER)).flatten()
    }

    /// True when the data are two tables, each a count and that many addresses (5.1.6.5.2).
    fn is_mac_table(&self) -> bool {
        let mut at = HEADER;
        for _table in ["unicast", "multicast"] {
            let Some(count) = self.bytes(at).map(u32::from_le_bytes) else {
                return false;
            };
            let addresses = usize::try_from(count).map_or(usize::MAX, |n| n.saturating_mul(6));
            at = at.saturating_add(4).saturating_add(addresses);
        }
        at == self.len
    }

    /// The `N` bytes at `at` of the request, read once; `None` when it ends before.
    fn bytes<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        let (mut bytes, mut have, mut skip) = ([0; N], 0, at);
        for slice in &self.request {
            let Ok(rest) = slice.offset(skip.min(slice.len())) else {
                return None;
            };
            skip -= slice.len() - rest.len();
            have += rest.copy_to(&mut bytes[have..]);
            if have == N {
                return Some(bytes);
            }
        }
        None
    }
}

/// Bytes of class and command.
const HEADER: usize = 2;
