//! User Mode Linux: a real kernel with the real `virtio_net` driver, as a process of this machine.
//!
//! It runs at native speed everywhere, needs no KVM, and attaches to a vhost-user back-end. So it
//! is what the data path is measured with, beside passt under the same guest.
//!
//! Both come from Debian `sid`: older UML kernels cannot share the interrupt with passt. They run
//! here with sid's C library beside them, see `elf.rs`.

mod console;
mod elf;
mod guest;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::apt::Package;
use crate::cache::{self, Key};
use crate::initramfs::Initramfs;
use crate::modules::Modules;
use crate::userland::{self, Userland};
use crate::{Images, deb, libraries};

pub use console::Output;
pub use guest::{UmlGuest, UmlOptions};

const RECIPE: u32 = 1;
const SUITE: &str = "sid";
const INIT: &str = include_str!("../../init/uml.sh");
const MODULES: [&str; 3] = ["failover", "net_failover", "virtio_net"];
const KERNEL: &str = "linux.uml";
const LOADER: &str = "ld.so";
/// passt starts its faster self when the processor can run it; the wrong loader would not let it.
const PASST: [&str; 2] = ["passt", "passt.avx2"];

/// A UML kernel with its initramfs, and passt.
#[derive(Clone, Debug)]
pub struct UmlKit {
    dir: PathBuf,
    scratch: PathBuf,
    /// The initramfs: busybox, iperf3, ethtool, the modules of virtio-net.
    pub initrd: PathBuf,
    /// Debian's version of the kernel package.
    pub uml_version: String,
    /// Debian's version of passt.
    pub passt_version: String,
}

impl UmlKit {
    /// The kernel, without arguments. Its working directory must stay as it is.
    pub fn kernel(&self) -> Command {
        self.program(KERNEL)
    }

    /// passt, without arguments. Its working directory must stay as it is.
    pub fn passt(&self) -> Command {
        let fast = std::arch::is_x86_feature_detected!("avx2");
        self.program(PASST[usize::from(fast)])
    }

    fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.dir.join(name));
        command
            .current_dir(&self.dir)
            .env("LD_LIBRARY_PATH", &self.dir);
        command
    }
}

pub(crate) fn build(images: &Images) -> Result<UmlKit> {
    let userland = userland::packages(images)?;
    let packages =
        images
            .apt(SUITE)?
            .fetch_with_libraries(&["user-mode-linux", "passt", "libc6"])?;
    let mut key = Key::new("uml", RECIPE);
    userland::add_to_key(&userland, &mut key);
    userland::add_to_key(&packages, &mut key);
    for text in [INIT].into_iter().chain(MODULES) {
        key.add(text.as_bytes());
    }
    let dir = cache::entry(images.root(), "uml", &key, |dir| {
        images
            .progress()
            .step("unpacking User Mode Linux and passt");
        fill(&userland, &packages, dir)
    })?;
    let version = |name: &str| {
        packages
            .iter()
            .find(|package| package.name == name)
            .map(|package| package.version.clone())
            .with_context(|| format!("{name} was not fetched"))
    };
    Ok(UmlKit {
        scratch: images.root().to_owned(),
        initrd: dir.join("initrd"),
        uml_version: version("user-mode-linux")?,
        passt_version: version("passt")?,
        dir,
    })
}

fn fill(userland: &[Package], packages: &[Package], dir: &Path) -> Result<()> {
    let root = tempfile::tempdir_in(dir)?;
    let wanted =
        |path: &str| path.contains("bin/") || path.contains("/modules/") || path.contains(".so");
    for package in packages {
        deb::unpack(&package.deb, root.path(), &wanted)?;
    }
    for name in [KERNEL].into_iter().chain(PASST) {
        let path = root.path().join("usr/bin").join(name);
        for (target, source) in libraries::closure(&path, root.path())? {
            let name = target.file_name().context("a library without a name")?;
            let name = if name.to_string_lossy().starts_with("ld-linux") {
                LOADER.as_ref()
            } else {
                name
            };
            std::fs::copy(&source, dir.join(name))
                .with_context(|| format!("cannot copy {}", source.display()))?;
        }
        let mut bytes =
            std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        elf::set_loader(&mut bytes, LOADER).with_context(|| format!("cannot adapt {name}"))?;
        std::fs::write(&path, bytes)?;
        std::fs::rename(&path, dir.join(name))?;
    }
    let tree = tree(userland, &modules(root.path())?)?;
    let file = std::fs::File::create(dir.join("initrd"))?;
    let mut file = std::io::BufWriter::new(file);
    tree.write_to(&mut file)?;
    std::io::Write::flush(&mut file)?;
    Ok(())
}

/// The modules of the one kernel in the package.
fn modules(root: &Path) -> Result<Modules> {
    let base = root.join("usr/lib/uml/modules");
    let dir = std::fs::read_dir(&base)
        .with_context(|| format!("cannot read {}", base.display()))?
        .flatten()
        .next()
        .context("the package user-mode-linux holds no modules")?;
    Modules::open(&dir.path())
}

fn tree(packages: &[Package], modules: &Modules) -> Result<Initramfs> {
    let userland = Userland::unpack(packages)?;
    let mut tree = Initramfs::new();
    userland::skeleton(&mut tree);
    userland.busybox(&mut tree)?;
    for program in ["iperf3", "ethtool"] {
        userland.program(&mut tree, program)?;
    }
    userland::add_modules(&mut tree, modules, &MODULES)?;
    tree.file("init", 0o755, INIT)
        .file("etc/hostname", 0o644, "guest\n")
        .file(
            "etc/hosts",
            0o644,
            "127.0.0.1 localhost\n10.0.2.2 machine\n",
        );
    Ok(tree)
}
