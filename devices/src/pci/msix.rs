//! MSI-X (PCI Local Bus 3.0, 6.8.2): a table of messages, each with a mask.
//!
//! Each vector has one event for its lifetime; whoever writes to it need not know of masks. While the
//! vector may interrupt, the event is attached to the hypervisor, which sends the message. While it
//! is masked, by itself, by the function or because MSI-X is off, the event is detached and keeps what
//! is written: that is the pending bit. On unmasking, a kept write is repeated.
//!
//! ```text
//!   signal --> event --attached--> hypervisor --> message to a CPU
//!                    --detached--> pending bit ---unmask---> as above
//! ```

use std::io;
use std::sync::Arc;

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::pci::config::{CAP_MSIX, ConfigSpace};
use crate::pci::{MsiMessage, PciHost};

/// Size of a table entry.
pub const ENTRY_LEN: u64 = 16;
/// Most vectors that a table can have.
pub const MAX_VECTORS: u16 = 2048;

/// Message Control: MSI-X is in use.
const ENABLE: u16 = 1 << 15;
/// Message Control: all vectors are masked.
const FUNCTION_MASK: u16 = 1 << 14;
/// Offset of Message Control in the capability.
const CONTROL: u8 = 2;
/// Vector Control: this vector is masked.
const MASKED: u32 = 1;

/// One vector.
struct Vector {
    message: MsiMessage,
    masked: bool,
    /// The message that the hypervisor sends for writes to the event.
    attached: Option<MsiMessage>,
    /// Something was written while detached.
    pending: bool,
}

impl Vector {
    fn dwords(&self) -> [u32; 4] {
        let MsiMessage { address, data } = self.message;
        let high = (address >> 32) as u32;
        [address as u32, high, data, u32::from(self.masked)]
    }

    fn set_dword(&mut self, index: u64, value: u32) {
        let MsiMessage { address, data } = &mut self.message;
        match index {
            // The message is a dword write, so the address is one of a dword.
            0 => *address = (*address >> 32 << 32) | u64::from(value & !3),
            1 => *address = (*address & u64::from(u32::MAX)) | u64::from(value) << 32,
            2 => *data = value,
            _ => self.masked = value & MASKED != 0,
        }
    }

    /// Moves what was written while detached from the event to the pending bit.
    fn collect(&mut self, event: &EventFd) {
        if self.attached.is_none() && event.read().is_ok() {
            self.pending = true;
        }
    }
}

/// The table, the pending bits and the capability of one function.
pub struct Msix {
    vectors: Vec<Vector>,
    events: Arc<[EventFd]>,
    /// The capability in the configuration space.
    capability: u8,
    allowed: bool,
}

impl Msix {
    /// A table of `count` masked vectors, 1 to [`MAX_VECTORS`], and its capability in `config`, which says that the table
    /// is at `table` and the pending bits at `pending` in BAR 0.
    ///
    /// # Errors
    /// Fails when descriptors or room in `config` run out.
    pub fn new(config: &mut ConfigSpace, count: u16, table: u32, pending: u32) -> io::Result<Self> {
        let events = (0..count)
            .map(|_| EventFd::new(EFD_NONBLOCK))
            .collect::<io::Result<_>>()?;
        let last = count.saturating_sub(1).min(MAX_VECTORS - 1);
        let mut body = last.to_le_bytes().to_vec();
        body.extend(table.to_le_bytes());
        body.extend(pending.to_le_bytes());
        let capability = config
            .add_capability(CAP_MSIX, &body, &(ENABLE | FUNCTION_MASK).to_le_bytes())
            .ok_or_else(|| io::Error::other("no room for the MSI-X capability"))?;
        let vectors = (0..count)
            .map(|_| Vector {
                message: MsiMessage::default(),
                masked: true,
                attached: None,
                pending: false,
            })
            .collect();
        Ok(Self {
            vectors,
            events,
            capability,
            allowed: false,
        })
    }

    /// The events by vector; a write to one is an interrupt.
    pub fn events(&self) -> &Arc<[EventFd]> {
        &self.events
    }

    /// The configuration space was written: MSI-X may be on or off now. Returns whether it is on.
    pub fn config_written(&mut self, config: &ConfigSpace, host: &mut dyn PciHost) -> bool {
        let control = config.u16(self.capability + CONTROL);
        let allowed = control & (ENABLE | FUNCTION_MASK) == ENABLE;
        if allowed != self.allowed {
            self.allowed = allowed;
            for index in 0..self.vectors.len() {
                self.update(index, host);
            }
        }
        control & ENABLE != 0
    }

    /// Reads the table; what is beyond it reads as zero.
    pub fn read_table(&self, offset: u64, data: &mut [u8]) {
        for (step, byte) in (0..).zip(data) {
            let at = offset.saturating_add(step);
            *byte = self.vector(at / ENTRY_LEN).map_or(0, |vector| {
                let dword = vector.dwords()[(at % ENTRY_LEN / 4) as usize];
                dword.to_le_bytes()[(at % 4) as usize]
            });
        }
    }

    /// Writes aligned dwords and qwords to the table; others are ignored, as the specification leaves
    /// them undefined.
    pub fn write_table(&mut self, offset: u64, data: &[u8], host: &mut dyn PciHost) {
        let (words, rest) = data.as_chunks::<4>();
        if !rest.is_empty() || !offset.is_multiple_of(4) {
            return;
        }
        let mut touched = None;
        for (step, word) in (0..).step_by(4).zip(words) {
            let at = offset.saturating_add(step);
            let index = usize::try_from(at / ENTRY_LEN).unwrap_or(usize::MAX);
            let Some(vector) = self.vectors.get_mut(index) else {
                break;
            };
            vector.set_dword(at % ENTRY_LEN / 4, u32::from_le_bytes(*word));
            if touched.replace(index).is_some_and(|last| last != index) {
                self.update(index - 1, host);
            }
        }
        if let Some(index) = touched {
            self.update(index, host);
        }
    }

    /// Reads the pending bits; what is beyond them reads as zero.
    pub fn read_pending(&mut self, offset: u64, data: &mut [u8]) {
        for (vector, event) in self.vectors.iter_mut().zip(&*self.events) {
            vector.collect(event);
        }
        for (step, byte) in (0..).zip(data) {
            let first = offset.saturating_add(step).saturating_mul(8);
            *byte = (0..8).fold(0, |bits, bit| {
                let vector = self.vector(first.saturating_add(bit));
                bits | u8::from(vector.is_some_and(|vector| vector.pending)) << bit
            });
        }
    }

    /// Forgets interrupts that were not delivered: the device was reset.
    pub fn drop_pending(&mut self) {
        for (vector, event) in self.vectors.iter_mut().zip(&*self.events) {
            vector.collect(event);
            vector.pending = false;
        }
    }

    fn vector(&self, index: u64) -> Option<&Vector> {
        self.vectors.get(usize::try_from(index).ok()?)
    }

    /// Attaches or detaches a vector as its masks say.
    fn update(&mut self, index: usize, host: &mut dyn PciHost) {
        let (Some(vector), Some(event)) = (self.vectors.get_mut(index), self.events.get(index))
        else {
            return;
        };
        let wanted = (self.allowed && !vector.masked).then_some(vector.message);
        if wanted == vector.attached {
            return;
        }
        // Below `MAX_VECTORS`.
        let number = index as u16;
        if vector.attached.take().is_some()
            && let Err(error) = host.detach_msi(number, event)
        {
            tracing::warn!(vector = number, %error, "cannot mask an interrupt");
        }
        let Some(message) = wanted else { return };
        // Without this, an old write would show as pending again the next time.
        vector.collect(event);
        match host.attach_msi(number, event, message) {
            Ok(()) => {
                vector.attached = Some(message);
                if std::mem::take(&mut vector.pending) {
                    // Fails only when 2^64 interrupts are outstanding; then one more is not needed.
                    let _ = event.write(1);
                }
            }
            Err(error) => {
                tracing::warn!(vector = number, ?message, %error, "cannot unmask an interrupt");
            }
        }
    }
}

#[cfg(test)]
mod tests;
