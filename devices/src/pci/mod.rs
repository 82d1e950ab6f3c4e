//! A PCI bus: configuration spaces, the ports that reach them, and MSI-X.
//!
//! ```text
//!   ports 0xcf8, 0xcfc --ConfigPorts--+
//!                                     +--> RootBus --> PciFunction (device 0: host bridge)
//!   memory window ------BarWindow-----+
//! ```
//!
//! There is one bus, without bridges behind it and without interrupt pins (INTx): a device interrupts
//! by MSI-X or not at all. What needs the hypervisor, message interrupts and doorbells without an
//! exit, goes through [`PciHost`].

pub mod config;
pub mod host_bridge;
pub mod msix;
pub mod root;

use std::io;

use vmm_sys_util::eventfd::EventFd;

/// One function of a PCI device. All calls come from under its lock; none may panic.
pub trait PciFunction: Send {
    /// Fills `data`, of 1, 2 or 4 bytes that do not cross a dword, from the configuration space.
    fn read_config(&mut self, offset: u8, data: &mut [u8]);
    /// Writes `data`, as above, to the configuration space.
    fn write_config(&mut self, offset: u8, data: &[u8]);
    /// Where the function's memory BAR is; `None` while it does not answer memory accesses.
    fn bar(&self) -> Option<BarRange> {
        None
    }
    /// Fills `data` from the BAR; the access lies within it.
    fn read_bar(&mut self, offset: u64, data: &mut [u8]) {
        let _ = offset;
        data.fill(0xff);
    }
    /// Writes `data` to the BAR; the access lies within it.
    fn write_bar(&mut self, offset: u64, data: &[u8]) {
        let _ = (offset, data);
    }
}

/// Guest addresses that a memory BAR answers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarRange {
    /// First address.
    pub base: u64,
    /// Size in bytes.
    pub len: u64,
}

impl BarRange {
    /// The offset of an access of `len` bytes at `address` that lies within the range.
    pub fn offset_of(&self, address: u64, len: u64) -> Option<u64> {
        let offset = address.checked_sub(self.base)?;
        (offset.checked_add(len)? <= self.len).then_some(offset)
    }
}

/// What an MSI-X vector writes to raise its interrupt (PCI Local Bus 3.0, 6.8.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsiMessage {
    /// Guest address of the write.
    pub address: u64,
    /// The 32 bits written.
    pub data: u32,
}

/// What a function needs of the hypervisor. Made for one function, whose vectors count from 0.
pub trait PciHost: Send {
    /// Makes each write to `event` send `message`, at once if one is outstanding.
    ///
    /// # Errors
    /// Fails when the hypervisor refuses the message; then `event` is not attached.
    fn attach_msi(&mut self, vector: u16, event: &EventFd, message: MsiMessage) -> io::Result<()>;
    /// Ends what [`Self::attach_msi`] began: writes to `event` stay in it.
    ///
    /// # Errors
    /// Fails when it was not attached.
    fn detach_msi(&mut self, vector: u16, event: &EventFd) -> io::Result<()>;
    /// Makes the guest's writes to `address`, of any size, write to `event` without an exit.
    ///
    /// # Errors
    /// Fails when the hypervisor refuses; the writes then arrive by [`PciFunction::write_bar`].
    fn attach_doorbell(&mut self, address: u64, event: &EventFd) -> io::Result<()>;
    /// Ends what [`Self::attach_doorbell`] began.
    ///
    /// # Errors
    /// Fails when it was not attached.
    fn detach_doorbell(&mut self, address: u64, event: &EventFd) -> io::Result<()>;
}
