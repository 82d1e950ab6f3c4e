//! The guest's memory, as the front-end describes it.
//!
//! A region has three addresses: where the guest sees it, where the front-end has it mapped, and
//! where it lies in its file. Descriptors name the first kind, SET_VRING_ADDR the second.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

use vhost::vhost_user::message::VhostUserMemoryRegion;
use vm_memory::{
    GuestAddress, GuestAddressSpace as _, GuestMemoryMmap, GuestMemoryRegion as _, GuestRegionMmap,
};

use crate::virtio::GuestRam;

/// Regions that a front-end may add. What the kernel's vhost allows by default, too.
pub(super) const MAX_SLOTS: usize = 509;

#[derive(Clone, Copy, Debug)]
struct Slot {
    guest: u64,
    user: u64,
    size: u64,
}

/// The memory table.
#[derive(Debug)]
pub(super) struct Memory {
    ram: GuestRam,
    slots: Vec<Slot>,
}

/// Something that cannot be as the front-end says.
pub(super) fn invalid(problem: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, problem.into())
}

impl Memory {
    pub(super) fn new() -> Self {
        Self {
            ram: GuestRam::new(GuestMemoryMmap::new()),
            slots: Vec::new(),
        }
    }

    /// The memory to hand to a device; it follows later changes.
    pub(super) fn ram(&self) -> GuestRam {
        self.ram.clone()
    }

    /// Replaces the table.
    pub(super) fn set(
        &mut self,
        table: &[VhostUserMemoryRegion],
        files: Vec<File>,
    ) -> io::Result<()> {
        if table.len() != files.len() {
            return Err(invalid("the memory table does not match its descriptors"));
        }
        let mut regions = Vec::new();
        for (region, file) in table.iter().zip(files) {
            regions.push(map(region, file)?);
        }
        regions.sort_by_key(|region| region.start_addr());
        let memory = GuestMemoryMmap::from_regions(regions)
            .map_err(|error| invalid(format!("memory table: {error}")))?;
        self.slots = table.iter().map(Slot::of).collect();
        self.replace(memory);
        Ok(())
    }

    /// Adds a region.
    pub(super) fn add(&mut self, region: &VhostUserMemoryRegion, file: File) -> io::Result<()> {
        if self.slots.len() >= MAX_SLOTS {
            return Err(invalid(format!("more than {MAX_SLOTS} memory regions")));
        }
        let mapped = map(region, file)?;
        let memory = self
            .ram
            .memory()
            .insert_region(mapped.into())
            .map_err(|error| invalid(format!("memory region: {error}")))?;
        self.slots.push(Slot::of(region));
        self.replace(memory);
        Ok(())
    }

    /// Removes the region that starts at guest address `guest` and has `size` bytes.
    pub(super) fn remove(&mut self, guest: u64, size: u64) -> io::Result<()> {
        let (memory, _) = self
            .ram
            .memory()
            .remove_region(GuestAddress(guest), size)
            .map_err(|error| invalid(format!("memory region: {error}")))?;
        self.slots.retain(|slot| slot.guest != guest);
        self.replace(memory);
        Ok(())
    }

    /// Unmaps everything, once nobody uses it any more.
    pub(super) fn clear(&mut self) {
        self.slots.clear();
        self.replace(GuestMemoryMmap::new());
    }

    /// The guest address of what the front-end has mapped at `user`.
    pub(super) fn guest_address(&self, user: u64) -> io::Result<GuestAddress> {
        self.slots
            .iter()
            .find_map(|slot| {
                let offset = user.checked_sub(slot.user)?;
                (offset < slot.size).then(|| slot.guest.checked_add(offset))?
            })
            .map(GuestAddress)
            .ok_or_else(|| invalid(format!("address {user:#x} is in no memory region")))
    }

    fn replace(&self, memory: GuestMemoryMmap) {
        self.ram
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .replace(memory);
    }
}

impl Slot {
    fn of(region: &VhostUserMemoryRegion) -> Self {
        // Copies: the structure is packed.
        Self {
            guest: region.guest_phys_addr,
            user: region.user_addr,
            size: region.memory_size,
        }
    }
}

/// Maps a region. Its file must be as long as the front-end says: beyond the end, each access would
/// be SIGBUS.
fn map(region: &VhostUserMemoryRegion, file: File) -> io::Result<GuestRegionMmap> {
    let (start, size, offset) = (
        region.guest_phys_addr,
        region.memory_size,
        region.mmap_offset,
    );
    let fd = file.as_raw_fd();
    let end = offset
        .checked_add(size)
        .ok_or_else(|| invalid("a memory region's offset and size overflow"))?;
    let len = file.metadata()?.len();
    if end > len {
        return Err(invalid(format!(
            "memory region at {start:#x}: its file (descriptor {fd}) has {len} bytes, not {end}"
        )));
    }
    let mapping = region
        .mmap_region(file)
        .map_err(|error| invalid(format!("memory region at {start:#x}: {error}")))?;
    GuestRegionMmap::new(mapping, GuestAddress(start)).ok_or_else(|| {
        invalid(format!(
            "memory region at {start:#x}: the address overflows"
        ))
    })
}
