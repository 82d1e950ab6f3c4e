//! Address ranges and the devices behind them.
//!
//! One [`Bus`] serves memory-mapped accesses, another one port accesses. The VMM fills both before
//! the first vCPU runs; from then on they are only read, so a lookup takes no lock but the
//! device's own.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A device that is reached by loads and stores (MMIO) or `in`/`out` (PIO).
///
/// `offset` is relative to the start of the range. Accesses are 1, 2, 4 or 8 bytes; anything the
/// device does not understand reads as zeroes and is ignored on write. No access may panic.
pub trait BusDevice: Send {
    /// Fills `data` from the register at `offset`.
    fn read(&mut self, offset: u64, data: &mut [u8]);
    /// Writes `data` to the register at `offset`.
    fn write(&mut self, offset: u64, data: &[u8]);
}

/// Why a range could not be added to a [`Bus`].
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BusError {
    /// A range is empty or does not fit into the address space.
    #[error("bus range at {base:#x} has an impossible length {len:#x}")]
    Length {
        /// Start of the range.
        base: u64,
        /// Length of the range in bytes.
        len: u64,
    },
    /// Two ranges share an address.
    #[error("bus range {base:#x}+{len:#x} overlaps the one at {other:#x}")]
    Overlap {
        /// Start of the new range.
        base: u64,
        /// Length of the new range in bytes.
        len: u64,
        /// Start of the range that is already there.
        other: u64,
    },
}

struct Slot {
    len: u64,
    device: Arc<Mutex<dyn BusDevice>>,
}

/// A set of disjoint address ranges, each with its device.
#[derive(Default)]
pub struct Bus {
    slots: BTreeMap<u64, Slot>,
}

impl Bus {
    /// An empty bus.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts `device` at `base..base + len`.
    ///
    /// # Errors
    /// Fails when the range is empty, wraps around, or overlaps another one.
    pub fn insert(
        &mut self,
        base: u64,
        len: u64,
        device: Arc<Mutex<dyn BusDevice>>,
    ) -> Result<(), BusError> {
        let last = len
            .checked_sub(1)
            .and_then(|rest| base.checked_add(rest))
            .ok_or(BusError::Length { base, len })?;
        // The last range that starts at or below our end is the only one that can overlap us.
        if let Some((&other, slot)) = self.slots.range(..=last).next_back()
            && other + (slot.len - 1) >= base
        {
            return Err(BusError::Overlap { base, len, other });
        }
        self.slots.insert(base, Slot { len, device });
        Ok(())
    }

    /// Reads `data` at `addr`; false, and `data` untouched, when no device is there.
    pub fn read(&self, addr: u64, data: &mut [u8]) -> bool {
        let Some((offset, device)) = self.find(addr, data.len()) else {
            return false;
        };
        device
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .read(offset, data);
        true
    }

    /// Writes `data` at `addr`; false when no device is there.
    pub fn write(&self, addr: u64, data: &[u8]) -> bool {
        let Some((offset, device)) = self.find(addr, data.len()) else {
            return false;
        };
        device
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .write(offset, data);
        true
    }

    /// The device that holds all of `addr..addr + len`. An access across its end finds nothing.
    fn find(&self, addr: u64, len: usize) -> Option<(u64, &Mutex<dyn BusDevice>)> {
        let (&base, slot) = self.slots.range(..=addr).next_back()?;
        let offset = addr - base;
        let end = offset.checked_add(u64::try_from(len).ok()?)?;
        (end <= slot.len).then_some((offset, &*slot.device))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Last(u64);

    impl BusDevice for Last {
        fn read(&mut self, offset: u64, data: &mut [u8]) {
            data.fill(u8::try_from(offset).unwrap_or(0xff));
        }
        fn write(&mut self, offset: u64, _data: &[u8]) {
            self.0 = offset;
        }
    }

    fn device() -> Arc<Mutex<Last>> {
        Arc::default()
    }

    #[test]
    fn finds_the_right_device() {
        let (low, high) = (device(), device());
        let mut bus = Bus::new();
        bus.insert(0x1000, 0x10, low.clone()).unwrap();
        bus.insert(0x1010, 0x10, high.clone()).unwrap();
        assert!(bus.write(0x100f, &[0]));
        assert!(bus.write(0x1011, &[0]));
        assert_eq!((low.lock().unwrap().0, high.lock().unwrap().0), (15, 1));
        let mut data = [0; 2];
        assert!(bus.read(0x1012, &mut data));
        assert_eq!(data, [2, 2]);
    }

    #[test]
    fn misses_gaps_and_straddles() {
        let mut bus = Bus::new();
        bus.insert(0x1000, 0x10, device()).unwrap();
        for (addr, len) in [(0xfff, 1), (0x1010, 1), (0x100e, 4), (u64::MAX, 8)] {
            assert!(!bus.read(addr, &mut vec![0; len]), "{addr:#x}+{len}");
        }
    }

    #[test]
    fn refuses_overlap_and_nonsense() {
        let mut bus = Bus::new();
        bus.insert(0x1000, 0x10, device()).unwrap();
        for (base, len) in [
            (0x1000, 0x10),
            (0xff8, 9),
            (0x100f, 1),
            (0, u64::MAX),
            (0x1004, 4),
        ] {
            let err = bus.insert(base, len, device()).unwrap_err();
            assert!(matches!(err, BusError::Overlap { other: 0x1000, .. }));
        }
        assert!(bus.insert(5, 0, device()).is_err());
        assert!(bus.insert(u64::MAX, 2, device()).is_err());
        assert!(bus.insert(u64::MAX, 1, device()).is_ok());
    }
}
