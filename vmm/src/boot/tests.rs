use std::io::Write as _;

use super::*;
use crate::layout::{PVH_MODULES, ZERO_PAGE};

const SIZE: u64 = 64 << 20;

fn boot_with(
    kernel: &[u8],
    initrd: Option<&[u8]>,
    cmdline: &str,
) -> (GuestMemoryMmap, Result<Entry, BootError>) {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        File::create(&path).unwrap().write_all(bytes).unwrap();
        path
    };
    let kernel = path("kernel", kernel);
    let initrd = initrd.map(|bytes| path("initrd", bytes));
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), SIZE as usize)]).unwrap();
    let source = Source {
        kernel: &kernel,
        initrd: initrd.as_deref(),
        cmdline,
    };
    let entry = load(&memory, SIZE, source);
    (memory, entry)
}

fn boot(kernel: &[u8]) -> Result<Entry, BootError> {
    boot_with(kernel, None, "").1
}

fn problem(kernel: &[u8]) -> String {
    boot(kernel).expect_err("booted").problem.to_string()
}

/// A bzImage of one setup sector and `body` bytes.
fn bzimage(body: usize) -> Vec<u8> {
    let mut file = vec![0; 1024 + body];
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x1f1, &[1]);
    put(0x1f4, &u32::try_from(body / 16).unwrap().to_le_bytes());
    put(0x1fe, &[0x55, 0xaa]);
    put(0x202, b"HdrS");
    put(0x206, &0x20fu16.to_le_bytes());
    put(0x211, &[1]);
    put(0x22c, &0x7fff_ffffu32.to_le_bytes());
    put(0x234, &[1]);
    put(0x236, &1u16.to_le_bytes());
    put(0x238, &2047u32.to_le_bytes());
    put(0x258, &0x100_0000u64.to_le_bytes());
    put(0x260, &0x10_0000u32.to_le_bytes());
    file
}

/// An ELF file with one segment at `start`, and a PVH note if asked for.
fn elf(start: u64, body: usize, note: bool) -> Vec<u8> {
    let count: u16 = if note { 2 } else { 1 };
    let mut file = vec![0; 64];
    file[..6].copy_from_slice(b"\x7fELF\x02\x01");
    file[16..20].copy_from_slice(&[2, 0, 62, 0]);
    file[24..32].copy_from_slice(&start.wrapping_add(4).to_le_bytes());
    file[32..40].copy_from_slice(&64u64.to_le_bytes());
    file[54..56].copy_from_slice(&56u16.to_le_bytes());
    file[56..58].copy_from_slice(&count.to_le_bytes());
    let data = 64 + 56 * u64::from(count);
    let mut header = |kind: u32, offset: u64, len: u64| {
        file.extend(kind.to_le_bytes());
        file.extend([0; 4]);
        for word in [offset, 0, start, len, len, 0] {
            file.extend(word.to_le_bytes());
        }
    };
    header(1, data, body as u64);
    if note {
        header(4, data + body as u64, 20);
    }
    file.resize(file.len() + body, 0x90);
    if note {
        for word in [4u32, 4, 18, u32::from_le_bytes(*b"Xen\0"), 0x123_4567] {
            file.extend(word.to_le_bytes());
        }
    }
    file
}

#[test]
fn bzimage_enters_behind_its_load_address() {
    let (memory, entry) = boot_with(&bzimage(4096), Some(&[7; 5000]), "quiet");
    assert_eq!(entry.unwrap(), Entry::Long { rip: 0x100_0200 });
    let initrd: u32 = memory.read_obj(GuestAddress(ZERO_PAGE + 0x218)).unwrap();
    assert_eq!(u64::from(initrd), (SIZE - 5000) & !0xfff);
    assert_eq!(
        memory
            .read_obj::<u8>(GuestAddress(u64::from(initrd) + 4999))
            .unwrap(),
        7
    );
    let mut text = [0; 6];
    memory.read_slice(&mut text, GuestAddress(CMDLINE)).unwrap();
    assert_eq!(&text, b"quiet\0");
}

#[test]
fn elf_enters_by_its_note_or_else_by_its_header() {
    let plain = boot(&elf(0x20_0000, 64, false)).unwrap();
    assert_eq!(plain, Entry::Long { rip: 0x20_0004 });
    let (memory, pvh) = boot_with(&elf(0x20_0000, 64, true), Some(b"x"), "");
    assert_eq!(
        pvh.unwrap(),
        Entry::Pvh {
            rip: 0x123_4567,
            start_info: PVH_START_INFO
        }
    );
    let magic: u32 = memory.read_obj(GuestAddress(PVH_START_INFO)).unwrap();
    let module: u64 = memory.read_obj(GuestAddress(PVH_MODULES)).unwrap();
    assert_eq!((magic, module), (0x336e_c578, SIZE - 4096));
}

#[test]
fn other_files_are_called_by_their_name() {
    let arm64 = {
        let mut file = vec![0; 4096];
        file[0x38..0x3c].copy_from_slice(b"ARMd");
        file
    };
    let table: [(&[u8], &str); 9] = [
        (b"", "the file is empty"),
        (b"x", "not a Linux kernel"),
        (&[0; 4096], "not a Linux kernel"),
        (
            b"!<arch>\ndebian-binary   1",
            "not a kernel, but a Debian package",
        ),
        (
            b"\x1f\x8b\x08\0",
            "not a kernel, but a gzip-compressed file",
        ),
        (
            b"\x28\xb5\x2f\xfd....",
            "not a kernel, but a zstd-compressed file",
        ),
        (
            b"070701000",
            "not a kernel, but a cpio archive (an initramfs)",
        ),
        (&arm64, "a kernel for arm64, not for x86-64"),
        (b"#!/bin/sh\n", "not a kernel, but a script"),
    ];
    for (file, text) in table {
        assert_eq!(problem(file), text);
    }
}

#[test]
fn damaged_kernels_are_refused() {
    let whole = bzimage(4096);
    assert_eq!(
        problem(&whole[..2000]),
        "the file is truncated: it has 2000 of 5120 bytes"
    );
    assert_eq!(
        problem(&whole[..0x210]),
        "the file is truncated: it has 528 of 620 bytes"
    );
    let mut large = whole.clone();
    large[0x260..0x264].copy_from_slice(&(64u32 << 20).to_le_bytes());
    assert_eq!(
        problem(&large),
        "the kernel needs 79 MiB above the first one, the guest has 64 MiB in all"
    );
    let mut old = whole.clone();
    old[0x236] = 0;
    assert!(problem(&old).starts_with("a kernel for 32-bit x86"));
    let mut odd = whole;
    odd[0x258..0x260].copy_from_slice(&u64::MAX.to_le_bytes());
    assert_eq!(
        problem(&odd),
        "the kernel's headers are damaged: its load address is out of range"
    );
    assert!(problem(&elf(0x1000, 64, false)).contains("below 1 MiB"));
    assert!(problem(&elf(u64::MAX - 1, 64, false)).contains("out of range"));
    assert!(problem(&elf(0x20_0000, 64, false)[..130]).contains("truncated"));
}

#[test]
fn no_prefix_or_bit_flip_panics() {
    for file in [bzimage(64), elf(0x20_0000, 64, true)] {
        for len in 0..file.len() {
            let _ = boot(&file[..len]);
        }
        for at in 0..file.len().min(0x280) {
            let mut file = file.clone();
            file[at] ^= 0xff;
            let _ = boot(&file);
        }
    }
}

#[test]
fn initrd_and_command_line_must_fit() {
    let big = vec![0; 60 << 20];
    let (_, result) = boot_with(&bzimage(64), Some(&big), "");
    assert_eq!(
        result.unwrap_err().problem.to_string(),
        "the initrd of 60 MiB does not fit into the 47 MiB that the kernel leaves"
    );
    let (_, result) = boot_with(&bzimage(64), Some(b""), "");
    assert!(matches!(result.unwrap_err().problem, Problem::Empty));
    let (_, result) = boot_with(&bzimage(64), None, &"x".repeat(2048));
    assert!(matches!(
        result.unwrap_err().problem,
        Problem::CmdlineTooLong {
            len: 2048,
            max: 2047
        }
    ));
}

#[test]
fn missing_files_and_directories() {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
    for kernel in ["/", "/nonexistent/kernel"] {
        let source = Source {
            kernel: Path::new(kernel),
            initrd: None,
            cmdline: "",
        };
        assert!(load(&memory, 1 << 20, source).is_err());
    }
}
