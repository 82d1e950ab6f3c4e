//! Tells what a kernel file is, and whether it is whole, before anything is loaded.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};

use linux_loader::loader::bootparam::setup_header;
use vm_memory::ByteValued as _;

use super::error::{BZIP2, DEB, GZIP, INITRAMFS, LZ4, Problem, XZ, ZSTD};
use crate::layout::{HIGH_RAM, HOLE_START};

/// A kernel that can be booted.
#[derive(Debug)]
pub enum Image {
    /// A bzImage.
    BzImage(BzHeader),
    /// An uncompressed vmlinux.
    Elf(ElfExtent),
}

/// The setup header of a bzImage.
#[derive(Clone, Copy, Debug)]
pub struct BzHeader {
    /// As in the file.
    pub setup: setup_header,
}

/// What an ELF kernel occupies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ElfExtent {
    /// End of the highest segment in guest memory.
    pub end: u64,
    /// Where bytes of the file go in guest memory, and how many.
    pub filled: Vec<(u64, u64)>,
}

/// Bytes of a file that are enough to tell what it is.
const HEAD: usize = 0x400;
/// `HdrS`, where a bzImage has it.
const BZIMAGE_MAGIC: (usize, &[u8]) = (0x202, b"HdrS");

impl Image {
    /// Reads the headers of `file`, which is not empty.
    ///
    /// # Errors
    /// Says what the file is instead, or what is wrong with it.
    pub fn identify(file: &mut File) -> Result<Self, Problem> {
        let len = file.metadata().map_err(Problem::Read)?.len();
        let mut head = Vec::new();
        file.rewind().map_err(Problem::Read)?;
        file.by_ref()
            .take(HEAD as u64)
            .read_to_end(&mut head)
            .map_err(Problem::Read)?;
        if is(&head, BZIMAGE_MAGIC) {
            return BzHeader::parse(&head, len).map(Self::BzImage);
        }
        if is(&head, (0, b"\x7fELF")) {
            return ElfExtent::parse(&head, file, len).map(Self::Elf);
        }
        Err(something_else(&head))
    }

    /// End of what the kernel occupies while it starts.
    pub fn end(&self) -> u64 {
        match self {
            Self::BzImage(header) => header.load_address() + u64::from(header.setup.init_size),
            Self::Elf(extent) => extent.end,
        }
    }

    /// Address below which the initrd must be.
    pub fn initrd_limit(&self) -> u64 {
        match self {
            Self::BzImage(header) => u64::from(header.setup.initrd_addr_max) + 1,
            Self::Elf(_) => HOLE_START,
        }
    }
}

impl BzHeader {
    /// Oldest boot protocol with a 64-bit entry.
    const VERSION_64: u16 = 0x20c;
    const LOADED_HIGH: u8 = 1;
    const XLF_KERNEL_64: u16 = 1;
    /// Where the header starts in the file.
    const OFFSET: usize = 0x1f1;

    fn parse(head: &[u8], len: u64) -> Result<Self, Problem> {
        let mut setup = setup_header::default();
        let raw = setup.as_mut_slice();
        let have = head.get(Self::OFFSET..Self::OFFSET + raw.len());
        let needed = (Self::OFFSET + raw.len()) as u64;
        raw.copy_from_slice(have.ok_or(Problem::Truncated { have: len, needed })?);
        if setup.version < Self::VERSION_64 || setup.xloadflags & Self::XLF_KERNEL_64 == 0 {
            return Err(Problem::Architecture(
                "32-bit x86, or too old for a 64-bit entry",
            ));
        }
        if setup.loadflags & Self::LOADED_HIGH == 0 {
            return Err(Problem::Damaged("it wants to be loaded below 1 MiB"));
        }
        let sectors = if setup.setup_sects == 0 {
            4
        } else {
            u64::from(setup.setup_sects)
        };
        let needed = (sectors + 1) * 512 + u64::from(setup.syssize) * 16;
        if len < needed {
            return Err(Problem::Truncated { have: len, needed });
        }
        let header = Self { setup };
        if !(HIGH_RAM..HOLE_START).contains(&header.load_address()) {
            return Err(Problem::Damaged("its load address is out of range"));
        }
        if header.load_address() + (len - needed.min(len)) > HOLE_START {
            return Err(Problem::Damaged(
                "it is larger than the address space below 3 GiB",
            ));
        }
        Ok(header)
    }

    /// Where to load it: where it will run, so that it need not move.
    pub fn load_address(&self) -> u64 {
        if self.setup.relocatable_kernel == 0 {
            HIGH_RAM
        } else {
            self.setup.pref_address
        }
    }
}

impl ElfExtent {
    const EM_X86_64: u16 = 62;
    const PHDR_LEN: u16 = 56;
    const PT_LOAD: u32 = 1;

    fn parse(head: &[u8], file: &mut File, len: u64) -> Result<Self, Problem> {
        const EHDR_LEN: usize = 64;
        if head.len() < EHDR_LEN {
            return Err(Problem::Truncated {
                have: len,
                needed: EHDR_LEN as u64,
            });
        }
        if head[4] != 2 {
            return Err(Problem::Architecture("a 32-bit machine"));
        }
        if head[5] != 1 {
            return Err(Problem::Architecture("a big-endian machine"));
        }
        match u16_at(head, 18) {
            Self::EM_X86_64 => {}
            183 => return Err(Problem::Architecture("arm64")),
            243 => return Err(Problem::Architecture("RISC-V")),
            _ => return Err(Problem::Architecture("another machine")),
        }
        // ET_EXEC, or ET_DYN, which a relocatable kernel may be but a shared library always is.
        if !matches!(u16_at(head, 16), 2 | 3) {
            return Err(Problem::Elf("an object file, not an executable"));
        }
        let (table, size, count) = (u64_at(head, 32), u16_at(head, 54), u16_at(head, 56));
        if count == 0 {
            return Err(Problem::Elf("nothing in it is to be loaded"));
        }
        if size != Self::PHDR_LEN {
            return Err(Problem::Damaged("program headers of an odd size"));
        }
        let bytes = u64::from(size) * u64::from(count);
        let needed = table
            .checked_add(bytes)
            .ok_or(Problem::Damaged("program headers out of range"))?;
        if needed > len {
            return Err(Problem::Truncated { have: len, needed });
        }
        let mut headers = vec![0; usize::from(size) * usize::from(count)];
        file.seek(SeekFrom::Start(table)).map_err(Problem::Read)?;
        file.read_exact(&mut headers).map_err(Problem::Read)?;
        let (mut end, mut filled) = (0, Vec::new());
        for header in headers.chunks_exact(usize::from(size)) {
            if u32_at(header, 0) != Self::PT_LOAD {
                continue;
            }
            let (offset, start) = (u64_at(header, 8), u64_at(header, 24));
            let (in_file, in_memory) = (u64_at(header, 32), u64_at(header, 40));
            let out_of_range = || Problem::Damaged("a segment is out of range");
            let needed = offset.checked_add(in_file).ok_or_else(out_of_range)?;
            if needed > len {
                return Err(Problem::Truncated { have: len, needed });
            }
            if start < HIGH_RAM {
                return Err(Problem::Elf(
                    "a segment lies below 1 MiB, as in no Linux kernel",
                ));
            }
            let segment_end = start
                .checked_add(in_memory.max(in_file))
                .ok_or_else(out_of_range)?;
            end = end.max(segment_end);
            filled.push((start, in_file));
        }
        if end == 0 {
            return Err(Problem::Elf("nothing in it is to be loaded"));
        }
        Ok(Self { end, filled })
    }
}

fn something_else(head: &[u8]) -> Problem {
    let others: [((usize, &[u8]), &'static str); 13] = [
        ((0, b"!<arch>\ndebian-binary"), DEB),
        ((0, b"070701"), INITRAMFS),
        ((0, b"070702"), INITRAMFS),
        ((0, b"\x1f\x8b"), GZIP),
        ((0, b"\xfd7zXZ\0"), XZ),
        ((0, b"\x28\xb5\x2f\xfd"), ZSTD),
        ((0, b"\x02\x21\x4c\x18"), LZ4),
        ((0, b"\x04\x22\x4d\x18"), LZ4),
        ((0, b"BZh"), BZIP2),
        ((0, b"QFI\xfb"), "a qcow2 disk image"),
        ((0, b"\x27\x05\x19\x56"), "a U-Boot image"),
        ((0x1fe, b"\x55\xaa"), "a disk or boot-sector image"),
        ((0, b"#!"), "a script"),
    ];
    if is(head, (0x38, b"ARMd")) {
        return Problem::Architecture("arm64");
    }
    if is(head, (0x38, b"RSC\x05")) {
        return Problem::Architecture("RISC-V");
    }
    match others.into_iter().find(|(magic, _)| is(head, *magic)) {
        Some((_, what)) => Problem::Other(what),
        None if is(head, (0, b"MZ")) => Problem::Other("an EFI program"),
        None => Problem::Unknown,
    }
}

fn is(head: &[u8], (at, magic): (usize, &[u8])) -> bool {
    head.get(at..).is_some_and(|rest| rest.starts_with(magic))
}

/// Callers have checked that the bytes are there.
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | (u32::from(u16_at(bytes, at + 2)) << 16)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | (u64::from(u32_at(bytes, at + 4)) << 32)
}

impl From<io::Error> for Problem {
    fn from(error: io::Error) -> Self {
        Self::Read(error)
    }
}
