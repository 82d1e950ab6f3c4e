//! Walking a descriptor chain (VIRTIO 1.3, 2.7.5), strictly.
//!
//! `virtio_queue::DescriptorChain` ends its iteration at a malformed descriptor as it does at the
//! end of the chain. A network card must tell the two apart: half a frame must not go out, and the
//! driver is to be told. So this walk reports what is wrong.
//!
//! Each descriptor is read exactly once, and only the copy is checked and used.

use std::fmt;

use virtio_queue::desc::split::Descriptor;
use vm_memory::{Address, GuestMemory, GuestMemoryMmap, Permissions, VolatileSlice};

use crate::virtio::fault::DriverFault;
use crate::virtio::window::{Window, slice_in_region};

/// Most descriptors in an indirect table: what one `readv` or `writev` takes (`UIO_MAXIOV`).
///
/// The specification caps a chain at the queue size; Linux does not keep to that for indirect
/// tables on small queues, so neither do we.
pub const MAX_INDIRECT: u16 = 1024;

const DESC_LEN: usize = 16;

/// What the device does with the buffers of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The device reads: `VIRTQ_DESC_F_WRITE` must be clear.
    Readable,
    /// The device writes: `VIRTQ_DESC_F_WRITE` must be set.
    Writable,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Readable => "readable",
            Self::Writable => "writable",
        })
    }
}

/// A descriptor table of a queue, and how to read it.
#[derive(Clone, Copy, Debug)]
pub struct Table<'m> {
    /// Guest memory, for what the descriptors point to.
    pub mem: &'m GuestMemoryMmap,
    /// The table's own memory.
    pub window: Window<'m>,
    /// Number of descriptors.
    pub size: u16,
    /// INDIRECT_DESC was negotiated.
    pub indirect: bool,
}

impl<'m> Table<'m> {
    /// Hands each buffer of the chain at `head` to `each`, in order; returns their total length.
    ///
    /// A buffer that crosses from one memory region into the next comes as two slices. Empty
    /// buffers are skipped.
    ///
    /// # Errors
    /// Fails at the first descriptor that breaks the specification; `each` may have been called.
    pub fn walk(
        self,
        head: u16,
        access: Access,
        mut each: impl FnMut(VolatileSlice<'m>),
    ) -> Result<usize, DriverFault> {
        let one_way = |_| access;
        self.visit(head, one_way, |_, slice| each(slice))
    }

    /// As [`Self::walk`], for a request: readable buffers, then writable ones (VIRTIO 1.3, 2.7.4.2).
    ///
    /// # Errors
    /// As [`Self::walk`]; a readable buffer behind a writable one breaks the specification.
    pub fn walk_request(
        self,
        head: u16,
        each: impl FnMut(Access, VolatileSlice<'m>),
    ) -> Result<usize, DriverFault> {
        let mut answering = false;
        let question_first = |found| {
            answering |= found == Access::Writable;
            if answering { Access::Writable } else { found }
        };
        self.visit(head, question_first, each)
    }

    /// Walks the chain; `wanted` tells what a buffer is to be, from what it is.
    fn visit(
        self,
        head: u16,
        mut wanted: impl FnMut(Access) -> Access,
        mut each: impl FnMut(Access, VolatileSlice<'m>),
    ) -> Result<usize, DriverFault> {
        let Self {
            mem,
            mut window,
            mut size,
            indirect,
        } = self;
        let (mut index, mut seen, mut nested, mut total) = (head, 0, false, 0usize);
        loop {
            if index >= size {
                return Err(DriverFault::Index { index, size });
            }
            if seen == size {
                return Err(DriverFault::Loop { head, limit: size });
            }
            let desc = read_descriptor(&window, index)?;
            seen += 1;

            if desc.refers_to_indirect_table() {
                let entries = indirect_entries(&desc, indirect, nested)
                    .map_err(|why| DriverFault::Indirect { index, why })?;
                window = Window::new(mem, desc.addr(), usize::from(entries) * DESC_LEN);
                size = entries;
                (index, seen, nested) = (0, 0, true);
                continue;
            }
            let (access, permissions) = if desc.is_write_only() {
                (Access::Writable, Permissions::Write)
            } else {
                (Access::Readable, Permissions::Read)
            };
            let wanted = wanted(access);
            if access != wanted {
                return Err(DriverFault::Direction { index, wanted });
            }
            if desc.len() > 0 {
                let outside = || DriverFault::Buffer {
                    addr: desc.addr().raw_value(),
                    len: desc.len(),
                };
                let len = usize::try_from(desc.len()).map_err(|_| outside())?;
                match slice_in_region(mem, desc.addr(), len) {
                    Some(slice) => each(access, slice),
                    None => {
                        for slice in mem.get_slices(desc.addr(), len, permissions)? {
                            each(access, slice.map_err(|_| outside())?);
                        }
                    }
                }
                total = total.saturating_add(len);
            }
            if !desc.has_next() {
                return Ok(total);
            }
            index = desc.next();
        }
    }
}

/// Reads descriptor `index`, each half once: as words, since a copy of 16 bytes would be a call.
fn read_descriptor(window: &Window<'_>, index: u16) -> Result<Descriptor, DriverFault> {
    let at = usize::from(index) * DESC_LEN;
    let addr = u64::from_le(window.read(at)?);
    // `len`, `flags` and `next` of `struct virtq_desc`, from the low end.
    let rest = u64::from_le(window.read(at + 8)?);
    #[expect(clippy::cast_possible_truncation, reason = "cut into fields")]
    let (len, flags, next) = (rest as u32, (rest >> 32) as u16, (rest >> 48) as u16);
    Ok(Descriptor::new(addr, len, flags, next))
}

/// Number of descriptors in the table that `desc` names (VIRTIO 1.3, 2.7.5.3).
fn indirect_entries(
    desc: &Descriptor,
    negotiated: bool,
    nested: bool,
) -> Result<u16, &'static str> {
    if !negotiated {
        return Err("not negotiated");
    }
    if nested {
        return Err("inside another one");
    }
    if desc.has_next() {
        return Err("NEXT is set");
    }
    if desc.len() == 0 || !desc.len().is_multiple_of(DESC_LEN as u32) {
        return Err("length is not a multiple of 16");
    }
    match u16::try_from(desc.len() / DESC_LEN as u32) {
        Ok(entries) if entries <= MAX_INDIRECT => Ok(entries),
        _ => Err("more than 1024 entries"),
    }
}
