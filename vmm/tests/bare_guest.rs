//! Whole runs of `wonton` with guests of a few instructions, entered through a PVH note.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Trial};

const LOAD: u32 = 0x20_0000;

/// An ELF kernel with a PVH note whose entry is the first byte of `code`.
fn kernel(dir: &Path, code: &[u8]) -> PathBuf {
    let mut file = vec![0; 64];
    file[..6].copy_from_slice(b"\x7fELF\x02\x01");
    file[16..20].copy_from_slice(&[2, 0, 62, 0]);
    file[32] = 64; // e_phoff
    file[54] = 56; // e_phentsize
    file[56] = 2; // e_phnum
    let (data, note) = (176, 176 + code.len() as u64);
    for (kind, offset, len) in [(1u32, data, code.len() as u64), (4, note, 20)] {
        file.extend(kind.to_le_bytes());
        file.extend([0; 4]);
        for word in [offset, 0, u64::from(LOAD), len, len, 0] {
            file.extend(word.to_le_bytes());
        }
    }
    file.extend(code);
    for word in [4, 4, 18, u32::from_le_bytes(*b"Xen\0"), LOAD] {
        file.extend(word.to_le_bytes());
    }
    let path = dir.join("kernel");
    File::create(&path).unwrap().write_all(&file).unwrap();
    path
}

/// `mov dx, port; mov al, value; out dx, al`
fn out(port: u16, value: u8) -> Vec<u8> {
    let [low, high] = port.to_le_bytes();
    vec![0x66, 0xba, low, high, 0xb0, value, 0xee]
}

/// `1: jmp 1b`
const SPIN: [u8; 2] = [0xeb, 0xfe];

/// `mov dx, port; mov eax, value; out dx, eax`
fn out_dword(port: u16, value: u32) -> Vec<u8> {
    let [low, high] = port.to_le_bytes();
    let mut code = vec![0x66, 0xba, low, high, 0xb8];
    code.extend(value.to_le_bytes());
    code.push(0xef);
    code
}

/// `mov dx, port; in eax, dx`
fn in_dword(port: u16) -> Vec<u8> {
    let [low, high] = port.to_le_bytes();
    vec![0x66, 0xba, low, high, 0xed]
}

/// `mov dword [address], value`
fn store(address: u32, value: u32) -> Vec<u8> {
    let words = [address, value].map(u32::to_le_bytes).concat();
    [&[0xc7, 0x05][..], &words].concat()
}

/// `mov eax, [address]`
fn load(address: u32) -> Vec<u8> {
    [&[0xa1][..], &address.to_le_bytes()].concat()
}

/// `cmp eax, value; je +2; ud2`: a triple fault unless equal
fn expect(value: u32) -> Vec<u8> {
    [&[0x3d][..], &value.to_le_bytes(), &[0x74, 2, 0x0f, 0x0b]].concat()
}

fn wonton(dir: &Path, code: &[&[u8]]) -> Command {
    wonton_with("none", dir, code)
}

fn wonton_with(net: &str, dir: &Path, code: &[&[u8]]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wonton"));
    command.args(["run", "--net", net, "--memory", "64M", "--kernel"]);
    command
        .arg(kernel(dir, &code.concat()))
        .stdin(Stdio::null());
    command
}

fn main() {
    let kvm = File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_ok();
    if !kvm {
        eprintln!("bare guests need /dev/kvm, which cannot be opened here: they are ignored");
    }
    let bare: [(&str, fn()); 7] = [
        ("power_off_is_success", power_off_is_success),
        ("resets_end_in_ten", resets_end_in_ten),
        ("a_triple_fault_is_dumped", a_triple_fault_is_dumped),
        (
            "absent_devices_do_not_stop_a_guest",
            absent_devices_do_not_stop_a_guest,
        ),
        (
            "a_card_is_a_pci_function_with_msix",
            a_card_is_a_pci_function_with_msix,
        ),
        (
            "a_card_is_a_page_of_registers",
            a_card_is_a_page_of_registers,
        ),
        (
            "sigterm_stops_a_spinning_guest",
            sigterm_stops_a_spinning_guest,
        ),
    ];
    let trial = |name: &str, test: fn()| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    };
    let mut trials: Vec<Trial> = bare
        .into_iter()
        .map(|(name, test)| trial(name, test).with_ignored_flag(!kvm))
        .collect();
    trials.push(trial("usage_errors_end_in_two", usage_errors_end_in_two));
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// Runs `code` to its end.
fn run(code: &[&[u8]], more: &[&str]) -> Output {
    let dir = tempfile::tempdir().unwrap();
    wonton(dir.path(), code).args(more).output().unwrap()
}

fn power_off_is_success() {
    let code = [
        &out(0x3f8, b'o')[..],
        &out(0x3f8, b'k'),
        &out(0x600, 0x34),
        &SPIN,
    ];
    for cpus in ["1", "2"] {
        let output = run(&code, &["--cpus", cpus]);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        assert_eq!(output.stdout, b"ok");
        assert_eq!(output.stderr, b"");
    }
}

fn resets_end_in_ten() {
    for reset in [out(0x600, 1), out(0x64, 0xfe)] {
        let output = run(&[&reset, &SPIN], &[]);
        assert_eq!(output.status.code(), Some(10), "{output:?}");
    }
}

fn a_triple_fault_is_dumped() {
    // Nothing is at the IDT's entry for #UD: ud2
    let output = run(&[&[0x0f, 0x0b]], &[]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(20), "{text}");
    assert!(
        text.starts_with("error: cpu 0: triple fault") && text.contains("rip"),
        "{text}"
    );
}

fn absent_devices_do_not_stop_a_guest() {
    let read_port = [0x66, 0xba, 0x34, 0x12, 0xed]; // in eax, dx
    let read_memory = [0xa1, 0, 0, 0, 0xd0]; // mov eax, [0xd0000000]
    let write_memory = [0xa3, 0, 0, 0, 0xd0];
    let off = out(0x600, 0x34);
    let output = run(&[&read_port, &read_memory, &write_memory, &off, &SPIN], &[]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}

fn a_card_is_a_pci_function_with_msix() {
    const BAR: u32 = 0xe000_0000;
    const TABLE: u32 = BAR + 0x4000;
    let select = |register: u32| out_dword(0xcf8, 0x8000_0800 | register);
    let code = [
        [select(0), in_dword(0xcfc), expect(0x1041_1af4)].concat(),
        // Memory accesses on: the doorbells are attached.
        [select(0x04), out_dword(0xcfc, 6)].concat(),
        // Feature select and features, as any register.
        [store(BAR, 1), load(BAR), expect(1)].concat(),
        // MSI-X on, vector 0 unmasked with a message: KVM takes its route.
        [select(0x40), out_dword(0xcfc, 1 << 31)].concat(),
        [store(TABLE, 0xfee0_0000), store(TABLE + 8, 0x30)].concat(),
        [store(TABLE + 12, 0), load(TABLE + 8), expect(0x30)].concat(),
        // Masked again; then another message; then the BAR moves away with its doorbells.
        [store(TABLE + 12, 1), store(TABLE + 8, 0x31)].concat(),
        store(TABLE + 12, 0),
        [select(0x10), out_dword(0xcfc, BAR + 0x10_0000)].concat(),
        [load(BAR), expect(u32::MAX)].concat(),
        [load(TABLE + 0x10_0008), expect(0x31)].concat(),
        out(0x600, 0x34),
    ]
    .concat();
    let dir = tempfile::tempdir().unwrap();
    let output = wonton_with("null", dir.path(), &[&code, &SPIN])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(output.stderr, b"", "nothing was refused");
}

fn a_card_is_a_page_of_registers() {
    let code = [
        [load(0xd000_0000), expect(u32::from_le_bytes(*b"virt"))].concat(),
        // There is no PCI then.
        [
            out_dword(0xcf8, 0x8000_0000),
            in_dword(0xcf8),
            expect(u32::MAX),
        ]
        .concat(),
        out(0x600, 0x34),
    ]
    .concat();
    let dir = tempfile::tempdir().unwrap();
    let output = wonton_with("null", dir.path(), &[&code, &SPIN])
        .args(["--transport", "mmio"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}

fn sigterm_stops_a_spinning_guest() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = wonton(dir.path(), &[&out(0x3f8, b'.'), &SPIN])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // The dot says that the guest runs.
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0]).unwrap();
    let start = Instant::now();
    let kill = Command::new("kill")
        .arg(child.id().to_string())
        .status()
        .unwrap();
    assert!(kill.success());
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert!(start.elapsed() < Duration::from_secs(2));
}

fn usage_errors_end_in_two() {
    let table: [&[&str]; 4] = [
        &["run"],
        &["run", "--kernel", "k", "--cpus", "0"],
        &["run", "--kernel", "k", "--transport", "isa"],
        &["fly"],
    ];
    for args in table {
        let output = Command::new(env!("CARGO_BIN_EXE_wonton"))
            .args(args)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(!output.stderr.is_empty());
    }
}
