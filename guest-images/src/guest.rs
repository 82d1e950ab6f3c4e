//! The initramfs of the guest that runs inside wonton.
//!
//! A few megabytes: busybox, iperf3 and ethtool with their libraries, the virtio modules of one kernel, and
//! `/init` (`guest-images/init/guest.sh`). What `/init` does is chosen on the kernel command line:
//!
//! | `wonton.mode=` | |
//! |---|---|
//! | `shell` (default) | eth0 by DHCP, then a shell on the console; powers off when it ends |
//! | `smoke` | runs `/smoke.sh`, reports, powers off |
//! | `cmd` | runs the script `wonton.script=PATH` (default `/job.sh`), or the one in base64 in `wonton.script64=`; powers off |
//!
//! `wonton.net=none` leaves eth0 alone. Results are lines `WONTON {json}` on the console, see
//! [`crate::console`]; a script reports with `report check=NAME ok=true value=…`.

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::apt::Package;
use crate::cache::{self, Key};
use crate::initramfs::{Initramfs, files_cpio};
use crate::kernel::{Kernel, KernelFiles};
use crate::userland::Userland;
use crate::{Images, userland};

const RECIPE: u32 = 1;
const INIT: &str = include_str!("../init/guest.sh");
const SMOKE: &str = include_str!("../init/smoke.sh");
const UDHCPC: &str = include_str!("../init/udhcpc.sh");
const REPORT: &str = include_str!("../init/report.sh");

/// Loaded by `/init`, with what they need, as far as they are not built in.
const MODULES: [&str; 3] = ["virtio_mmio", "virtio_pci", "virtio_net"];

/// A kernel and the initramfs made for it.
#[derive(Clone, Debug)]
pub struct GuestImage {
    /// The kernel whose modules are inside.
    pub kernel: KernelFiles,
    /// The initramfs.
    pub initrd: PathBuf,
}

impl GuestImage {
    /// The initramfs with more files laid over it: `(path, permission bits, contents)`.
    pub fn with_files(&self, files: &[(&str, u32, &[u8])]) -> Result<Vec<u8>> {
        let mut bytes = std::fs::read(&self.initrd)
            .with_context(|| format!("cannot read {}", self.initrd.display()))?;
        bytes.extend(files_cpio(files)?);
        Ok(bytes)
    }
}

pub(crate) fn build(images: &Images, kernel: Kernel) -> Result<GuestImage> {
    let files = images.kernel(kernel)?;
    let packages = userland::packages(images)?;
    let key = key(&files, &packages);
    let dir = cache::entry(images.root(), &format!("guest-{kernel}"), &key, |dir| {
        images
            .progress()
            .step(&format!("writing the guest initramfs for Linux {kernel}"));
        let userland = Userland::unpack(&packages)?;
        let tree = tree(&files, &userland)?;
        let file = std::fs::File::create(dir.join("initrd"))?;
        let mut file = std::io::BufWriter::new(file);
        tree.write_to(&mut file)?;
        std::io::Write::flush(&mut file)?;
        Ok(())
    })?;
    Ok(GuestImage {
        kernel: files,
        initrd: dir.join("initrd"),
    })
}

fn key(kernel: &KernelFiles, packages: &[Package]) -> Key {
    let mut key = Key::new("guest", RECIPE);
    key.add(kernel.release.as_bytes());
    userland::add_to_key(packages, &mut key);
    for text in [INIT, SMOKE, UDHCPC, REPORT].into_iter().chain(MODULES) {
        key.add(text.as_bytes());
    }
    key
}

fn tree(kernel: &KernelFiles, userland: &Userland) -> Result<Initramfs> {
    let mut tree = Initramfs::new();
    userland::skeleton(&mut tree);
    userland.busybox(&mut tree)?;
    for program in ["iperf3", "ethtool"] {
        userland.program(&mut tree, program)?;
    }
    userland::add_modules(&mut tree, &kernel.modules()?, &MODULES)?;
    tree.file("init", 0o755, INIT)
        .file("smoke.sh", 0o755, SMOKE)
        .file("etc/udhcpc.sh", 0o755, UDHCPC)
        .file("bin/report", 0o755, REPORT)
        .file("etc/hostname", 0o644, "guest\n")
        .file(
            "etc/hosts",
            0o644,
            "127.0.0.1 localhost\n192.168.76.2 machine\n",
        );
    Ok(tree)
}
