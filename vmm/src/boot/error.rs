//! What is wrong with the files to boot from.

use std::io;
use std::path::PathBuf;

/// Why a guest cannot be booted: which file, and what is wrong with it.
#[derive(Debug, thiserror::Error)]
#[error("cannot boot from `{}`", path.display())]
pub struct BootError {
    /// The kernel, or the initrd.
    pub path: PathBuf,
    /// What is wrong.
    #[source]
    pub problem: Problem,
}

/// What is wrong with a file.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// Cannot be opened.
    #[error(transparent)]
    Open(io::Error),
    /// Cannot be read.
    #[error("cannot read it")]
    Read(#[source] io::Error),
    /// A directory, a pipe or the like.
    #[error("not a regular file")]
    NotAFile,
    /// No bytes.
    #[error("the file is empty")]
    Empty,
    /// Something else.
    #[error("not a kernel, but {0}")]
    Other(&'static str),
    /// Nothing that we know.
    #[error("not a Linux kernel")]
    Unknown,
    /// A kernel, but not for us.
    #[error("a kernel for {0}, not for x86-64")]
    Architecture(&'static str),
    /// An ELF file that is not a kernel.
    #[error("an ELF file, but {0}")]
    Elf(&'static str),
    /// A kernel whose headers contradict themselves.
    #[error("the kernel's headers are damaged: {0}")]
    Damaged(&'static str),
    /// Cut short.
    #[error("the file is truncated: it has {have} of {needed} bytes")]
    Truncated {
        /// Its length.
        have: u64,
        /// What its headers promise.
        needed: u64,
    },
    /// Needs more RAM than there is.
    #[error(
        "the kernel needs {} MiB above the first one, the guest has {} MiB in all",
        needed.div_ceil(1 << 20), size >> 20
    )]
    TooLarge {
        /// Bytes above 1 MiB.
        needed: u64,
        /// Bytes of RAM.
        size: u64,
    },
    /// No room above the kernel.
    #[error(
        "the initrd of {} MiB does not fit into the {} MiB that the kernel leaves",
        len.div_ceil(1 << 20), room >> 20
    )]
    InitrdDoesNotFit {
        /// Its length.
        len: u64,
        /// Bytes above the kernel.
        room: u64,
    },
    /// More text than the kernel takes.
    #[error("the command line has {len} bytes, this kernel takes {max}")]
    CmdlineTooLong {
        /// Its length.
        len: usize,
        /// The limit.
        max: usize,
    },
    /// The loader failed on a file that looked right.
    #[error("cannot load it")]
    Load(#[source] linux_loader::loader::Error),
    /// Guest memory ends too early.
    #[error("cannot write boot parameters")]
    Memory(#[source] vm_memory::GuestMemoryError),
}

impl BootError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        let hint = match self.problem {
            Problem::Other(DEB) => "unpack it with `dpkg -x FILE DIR` and take DIR/boot/vmlinuz-*",
            Problem::Other(INITRAMFS) => "this is for --initrd; --kernel wants /boot/vmlinuz-*",
            Problem::Other(GZIP | XZ | ZSTD | LZ4 | BZIP2) => {
                "unpack it first; a vmlinuz (bzImage) needs no unpacking"
            }
            Problem::Other(_) | Problem::Unknown | Problem::Elf(_) | Problem::Empty => {
                "take a bzImage such as /boot/vmlinuz-*, or an uncompressed vmlinux"
            }
            Problem::Truncated { .. } => "copy or download it again",
            Problem::TooLarge { .. } | Problem::InitrdDoesNotFit { .. } => "raise --memory",
            _ => return None,
        };
        Some(hint.to_owned())
    }
}

pub(super) const DEB: &str = "a Debian package";
pub(super) const INITRAMFS: &str = "a cpio archive (an initramfs)";
pub(super) const GZIP: &str = "a gzip-compressed file";
pub(super) const XZ: &str = "an xz-compressed file";
pub(super) const ZSTD: &str = "a zstd-compressed file";
pub(super) const LZ4: &str = "an LZ4-compressed file";
pub(super) const BZIP2: &str = "a bzip2-compressed file";
