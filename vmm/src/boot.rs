//! Puts a kernel, its initrd, command line and boot parameters into guest memory.
//!
//! | file | entry | told by |
//! | --- | --- | --- |
//! | bzImage | 64-bit, 0x200 behind the load address | zero page |
//! | ELF with a PVH note | 32-bit, as the note says | PVH start info |
//! | ELF without | 64-bit, as the header says | zero page |

mod error;
pub mod image;
mod pvh;
mod zero_page;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use linux_loader::loader::elf::{Elf, PvhBootCapability};
use linux_loader::loader::{BzImage, KernelLoader as _};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap};

pub use self::error::{BootError, Problem};
use self::image::{BzHeader, Image};
use crate::layout::{ACPI_TABLES, CMDLINE, CMDLINE_MAX, HIGH_RAM, HOLE_START, PVH_START_INFO};
use crate::memory::memory_map;
use crate::regs::Entry;
use crate::sys;

/// What to boot.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// Kernel file.
    pub kernel: &'a Path,
    /// Initial RAM disk.
    pub initrd: Option<&'a Path>,
    /// Kernel command line.
    pub cmdline: &'a str,
}

/// Where the initrd is in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Initrd {
    /// First address.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
}

/// Length limit of kernels that do not state one: Linux's own buffer, less the final NUL.
const CMDLINE_DEFAULT_MAX: usize = 2047;
/// Offset of the 64-bit entry in a loaded bzImage.
const ENTRY_64: u64 = 0x200;

/// Loads `source` into `memory`, which has `size` bytes of RAM.
///
/// # Errors
/// Says what is wrong with which file.
pub fn load(memory: &GuestMemoryMmap, size: u64, source: Source<'_>) -> Result<Entry, BootError> {
    let fail = |problem| BootError {
        path: source.kernel.to_owned(),
        problem,
    };
    let mut file = open(source.kernel)?;
    let image = Image::identify(&mut file).map_err(fail)?;
    let low_end = size.min(HOLE_START);
    if image.end() > low_end {
        return Err(fail(Problem::TooLarge {
            needed: image.end() - HIGH_RAM,
            size,
        }));
    }
    check_cmdline(source, &image)?;
    let loader = |error| fail(Problem::Load(error));
    let entry = match &image {
        Image::BzImage(header) => {
            let at = GuestAddress(header.load_address());
            populate(memory, at, header.setup.syssize as usize * 16);
            BzImage::load(memory, Some(at), &mut file, None).map_err(loader)?;
            Entry::Long {
                rip: at.0 + ENTRY_64,
            }
        }
        Image::Elf(extent) => {
            for &(start, len) in &extent.filled {
                populate(memory, GuestAddress(start), len as usize);
            }
            let loaded = Elf::load(memory, None, &mut file, None).map_err(loader)?;
            match loaded.pvh_boot_cap {
                PvhBootCapability::PvhEntryPresent(rip) => Entry::Pvh {
                    rip: rip.0,
                    start_info: PVH_START_INFO,
                },
                _ => Entry::Long {
                    rip: loaded.kernel_load.0,
                },
            }
        }
    };
    let initrd = source
        .initrd
        .map(|path| load_initrd(memory, path, image.end(), low_end.min(image.initrd_limit())))
        .transpose()?;
    let memory_error = |error| fail(Problem::Memory(error));
    let mut cmdline = source.cmdline.as_bytes().to_vec();
    cmdline.push(0);
    memory
        .write_slice(&cmdline, GuestAddress(CMDLINE))
        .map_err(memory_error)?;
    let map = memory_map(size);
    match entry {
        Entry::Long { .. } => {
            let header = match &image {
                Image::BzImage(header) => Some(header.setup),
                Image::Elf(_) => None,
            };
            zero_page::write(
                memory,
                header,
                initrd,
                source.cmdline.len(),
                &map,
                ACPI_TABLES,
            )
        }
        Entry::Pvh { .. } => pvh::write(memory, initrd, &map, ACPI_TABLES),
    }
    .map_err(memory_error)?;
    Ok(entry)
}

fn check_cmdline(source: Source<'_>, image: &Image) -> Result<(), BootError> {
    let stated = match image {
        Image::BzImage(BzHeader { setup, .. }) => setup.cmdline_size as usize,
        Image::Elf(_) => CMDLINE_DEFAULT_MAX,
    };
    let max = stated.min(CMDLINE_MAX - 1);
    let len = source.cmdline.len();
    if len > max {
        let problem = Problem::CmdlineTooLong { len, max };
        return Err(BootError {
            path: source.kernel.to_owned(),
            problem,
        });
    }
    Ok(())
}

fn open(path: &Path) -> Result<File, BootError> {
    let fail = |problem| BootError {
        path: path.to_owned(),
        problem,
    };
    let file = File::open(path).map_err(|error| fail(Problem::Open(error)))?;
    let metadata = file
        .metadata()
        .map_err(|error| fail(Problem::Open(error)))?;
    if !metadata.is_file() {
        return Err(fail(Problem::NotAFile));
    }
    if metadata.len() == 0 {
        return Err(fail(Problem::Empty));
    }
    Ok(file)
}

/// As high as it goes: Linux takes memory from the bottom while it unpacks itself.
fn load_initrd(
    memory: &GuestMemoryMmap,
    path: &Path,
    bottom: u64,
    top: u64,
) -> Result<Initrd, BootError> {
    let fail = |problem| BootError {
        path: PathBuf::from(path),
        problem,
    };
    let mut file = open(path)?;
    let len = file
        .metadata()
        .map_err(|error| fail(Problem::Open(error)))?
        .len();
    let initrd = place_initrd(len, bottom, top).ok_or_else(|| {
        fail(Problem::InitrdDoesNotFit {
            len,
            room: top.saturating_sub(bottom),
        })
    })?;
    let count = usize::try_from(len).map_err(|_| fail(Problem::NotAFile))?;
    populate(memory, GuestAddress(initrd.start), count);
    memory
        .read_exact_volatile_from(GuestAddress(initrd.start), &mut file, count)
        .map_err(|error| fail(Problem::Read(io::Error::other(error))))?;
    Ok(initrd)
}

/// Prepares guest memory that is about to be filled.
fn populate(memory: &GuestMemoryMmap, start: GuestAddress, len: usize) {
    let from = start.0 & !0xfff;
    let len = (start.0 - from) as usize + len;
    if let Ok(slice) = memory.get_slice(GuestAddress(from), len.next_multiple_of(0x1000)) {
        sys::populate(&slice);
    }
}

fn place_initrd(len: u64, bottom: u64, top: u64) -> Option<Initrd> {
    let start = top.checked_sub(len)? & !0xfff;
    (start >= bottom).then_some(Initrd { start, len })
}

#[cfg(test)]
mod tests;
