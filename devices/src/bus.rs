//! Address ranges and the devices behind them.

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
