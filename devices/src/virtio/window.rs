//! A stretch of guest memory that is accessed often.
//!
//! `vm-memory` finds the region of an address on every access. A ring is accessed several times
//! per chain, so its place in host memory is looked up once per burst instead. Accesses stay
//! volatile or atomic, and bounded.

use std::sync::atomic::Ordering;

use vm_memory::{
    Address, ByteValued, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError,
    GuestMemoryMmap, GuestMemoryRegion, VolatileSlice,
};

/// Guest memory from an address on, looked up in advance.
#[derive(Clone, Copy, Debug)]
pub struct Window<'m> {
    mem: &'m GuestMemoryMmap,
    addr: GuestAddress,
    /// `None` when the stretch does not lie in one region; then each access is looked up.
    slice: Option<VolatileSlice<'m>>,
}

impl<'m> Window<'m> {
    /// A window of `len` bytes at `addr`. That it lies in memory is checked by each access.
    pub fn new(mem: &'m GuestMemoryMmap, addr: GuestAddress, len: usize) -> Self {
        Self {
            mem,
            addr,
            slice: slice_in_region(mem, addr, len),
        }
    }

    /// Reads an object at `offset`, once.
    ///
    /// # Errors
    /// Fails when it does not lie in guest memory.
    pub fn read<T: ByteValued>(&self, offset: usize) -> Result<T, GuestMemoryError> {
        match &self.slice {
            Some(slice) => Ok(slice.read_obj(offset)?),
            None => self.mem.read_obj(self.at(offset)?),
        }
    }

    /// Writes an object at `offset`.
    ///
    /// # Errors
    /// Fails when it does not lie in guest memory.
    pub fn write<T: ByteValued>(&self, offset: usize, value: T) -> Result<(), GuestMemoryError> {
        match &self.slice {
            Some(slice) => Ok(slice.write_obj(value, offset)?),
            None => self.mem.write_obj(value, self.at(offset)?),
        }
    }

    /// Reads a little-endian word atomically.
    ///
    /// # Errors
    /// Fails when it does not lie in guest memory, or is not aligned.
    pub fn load(&self, offset: usize, order: Ordering) -> Result<u16, GuestMemoryError> {
        let value: u16 = match &self.slice {
            Some(slice) => slice.load(offset, order)?,
            None => self.mem.load(self.at(offset)?, order)?,
        };
        Ok(u16::from_le(value))
    }

    /// Writes a little-endian word atomically.
    ///
    /// # Errors
    /// Fails when it does not lie in guest memory, or is not aligned.
    pub fn store(
        &self,
        offset: usize,
        value: u16,
        order: Ordering,
    ) -> Result<(), GuestMemoryError> {
        match &self.slice {
            Some(slice) => Ok(slice.store(value.to_le(), offset, order)?),
            None => self.mem.store(value.to_le(), self.at(offset)?, order),
        }
    }

    fn at(&self, offset: usize) -> Result<GuestAddress, GuestMemoryError> {
        self.addr
            .checked_add(offset as u64)
            .ok_or(GuestMemoryError::InvalidGuestAddress(self.addr))
    }
}

/// `len` bytes at `addr`, when they lie in one region.
pub(crate) fn slice_in_region(
    mem: &GuestMemoryMmap,
    addr: GuestAddress,
    len: usize,
) -> Option<VolatileSlice<'_>> {
    let (region, at) = mem.to_region_addr(addr)?;
    region.get_slice(at, len).ok()
}
