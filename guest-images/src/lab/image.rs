//! The lab's initramfs.
//!
//! Two archives: the base, and the peer (QEMU of this machine with its libraries and firmware, and
//! the kernels as ELF files) which only comparisons need.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::cache::{self, Key};
use crate::guest::GuestImage;
use crate::initramfs::Initramfs;
use crate::kernel::{Kernel, KernelFiles};
use crate::userland::{self, Userland};
use crate::{Images, host};

const RECIPE: u32 = 1;
const INIT: &str = include_str!("../../init/lab.sh");
const REPORT: &str = include_str!("../../init/report.sh");
const SEND: &str = "#!/bin/sh\n# lab-send NAME: sends stdin out of the lab under that name.\n\
    { echo \"file $1\"; base64; echo end; } >/dev/ttyS1\n";

/// The kernel the lab itself runs.
const KERNEL: Kernel = Kernel::Trixie612;
const MODULES: [&str; 6] = ["virtio_net", "kvm_amd", "tun", "tap", "vhost_net", "veth"];
/// Firmware that the microvm machine may ask for.
const FIRMWARE: [&str; 6] = [
    "bios-microvm.bin",
    "qboot.rom",
    "pvh.bin",
    "linuxboot.bin",
    "linuxboot_dma.bin",
    "kvmvapic.bin",
];
const FIRMWARE_DIRS: [&str; 3] = [
    "/usr/share/qemu",
    "/usr/share/seabios",
    "/usr/lib/ipxe/qemu",
];

/// What the lab boots from.
#[derive(Clone, Debug)]
pub struct LabImage {
    /// The emulator.
    pub qemu: PathBuf,
    /// The lab's own kernel.
    pub kernel: KernelFiles,
    /// The base initramfs.
    pub initrd: PathBuf,
    /// The archive with QEMU inside, to be laid over the base.
    pub peer: PathBuf,
    /// The guests inside, as they are on this machine.
    pub guests: Vec<GuestImage>,
    /// Where runs keep their temporary files, which are large.
    pub(super) scratch: PathBuf,
}

impl LabImage {
    /// A directory for one run. `/tmp` may be in memory, and a run that is interrupted leaves its
    /// directory behind; [`cache::sweep`] finds it here.
    pub(super) fn run_dir(&self) -> Result<tempfile::TempDir> {
        tempfile::Builder::new()
            .prefix(cache::RUN_PREFIX)
            .tempdir_in(&self.scratch)
            .with_context(|| format!("cannot make a directory in {}", self.scratch.display()))
    }

    /// The guest image for `kernel`; inside the lab it is `/images/NAME/{bzImage,initrd}`.
    pub fn guest(&self, kernel: Kernel) -> Option<&GuestImage> {
        self.guests
            .iter()
            .find(|guest| guest.kernel.kernel == kernel)
    }
}

pub(crate) fn build(images: &Images) -> Result<LabImage> {
    let qemu = host::QEMU.installed(images.progress())?;
    let kernel = images.kernel(KERNEL)?;
    let guests = Kernel::ALL
        .into_iter()
        .map(|kernel| images.guest(kernel))
        .collect::<Result<Vec<_>>>()?;
    Ok(LabImage {
        initrd: base(images, &kernel, &guests)?,
        peer: peer(images, &qemu, &guests)?,
        scratch: images.root().to_owned(),
        qemu,
        kernel,
        guests,
    })
}

fn base(images: &Images, kernel: &KernelFiles, guests: &[GuestImage]) -> Result<PathBuf> {
    let packages = userland::packages(images)?;
    let mut key = Key::new("lab", RECIPE);
    key.add(kernel.release.as_bytes());
    userland::add_to_key(&packages, &mut key);
    for guest in guests {
        key.add(guest.initrd.as_os_str().as_encoded_bytes());
    }
    for text in [INIT, REPORT, SEND].into_iter().chain(MODULES) {
        key.add(text.as_bytes());
    }
    let dir = cache::entry(images.root(), "lab", &key, |dir| {
        images.progress().step("writing the initramfs of the lab");
        let userland = Userland::unpack(&packages)?;
        let mut tree = Initramfs::new();
        userland::skeleton(&mut tree);
        userland.busybox(&mut tree)?;
        userland.program(&mut tree, "iperf3")?;
        userland::add_modules(&mut tree, &kernel.modules()?, &MODULES)?;
        tree.file("init", 0o755, INIT)
            .file("bin/report", 0o755, REPORT)
            .file("bin/lab-send", 0o755, SEND)
            .file("etc/hostname", 0o644, "lab\n")
            .file(
                "etc/hosts",
                0o644,
                "127.0.0.1 localhost lab\n192.168.76.2 machine\n",
            )
            .file("etc/resolv.conf", 0o644, "nameserver 192.168.76.3\n");
        for guest in guests {
            let at = format!("images/{}", guest.kernel.kernel);
            tree.copy(&format!("{at}/bzImage"), 0o644, &guest.kernel.bzimage)?
                .copy(&format!("{at}/initrd"), 0o644, &guest.initrd)?;
        }
        write(&tree, &dir.join("initrd"))
    })?;
    Ok(dir.join("initrd"))
}

fn peer(images: &Images, qemu: &Path, guests: &[GuestImage]) -> Result<PathBuf> {
    let mut key = Key::new("peer", RECIPE);
    let metadata = qemu
        .metadata()
        .with_context(|| format!("cannot read {}", qemu.display()))?;
    key.add(format!("{} {:?}", metadata.len(), metadata.modified()?).as_bytes());
    for guest in guests {
        key.add(guest.kernel.vmlinux.as_os_str().as_encoded_bytes());
    }
    let dir = cache::entry(images.root(), "peer", &key, |dir| {
        images
            .progress()
            .step("packing QEMU for comparisons in the lab");
        let mut tree = Initramfs::new();
        userland::add_host_program(&mut tree, "usr/bin/qemu-system-x86_64", qemu)?;
        for name in FIRMWARE {
            let found = FIRMWARE_DIRS
                .iter()
                .map(|dir| Path::new(dir).join(name))
                .find(|path| path.is_file());
            if let Some(path) = found {
                tree.copy(&format!("usr/share/qemu/{name}"), 0o644, &path)?;
            }
        }
        for guest in guests {
            tree.copy(
                &format!("images/{}/vmlinux", guest.kernel.kernel),
                0o644,
                &guest.kernel.vmlinux,
            )?;
        }
        write(&tree, &dir.join("initrd"))
    })?;
    Ok(dir.join("initrd"))
}

fn write(tree: &Initramfs, path: &Path) -> Result<()> {
    let file =
        std::fs::File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
    let mut file = std::io::BufWriter::new(file);
    tree.write_to(&mut file)?;
    std::io::Write::flush(&mut file).with_context(|| format!("cannot write {}", path.display()))
}
