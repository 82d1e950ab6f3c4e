//! Stock Debian kernels of two generations.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail};

use crate::cache::{self, Key};
use crate::modules::Modules;
use crate::{Images, bzimage, deb};

const RECIPE: u32 = 1;

/// A stock kernel the project is always tested with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kernel {
    /// Linux 6.1 of Debian 12: lz4 payload, virtio core as modules.
    Bookworm61,
    /// Linux 6.12 of Debian 13: zstd payload, virtio core and PCI transport built in.
    Trixie612,
}

impl Kernel {
    /// All of them, oldest first.
    pub const ALL: [Self; 2] = [Self::Bookworm61, Self::Trixie612];

    /// The short name used on command lines: `6.1` or `6.12`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bookworm61 => "6.1",
            Self::Trixie612 => "6.12",
        }
    }

    /// The Debian suite it comes from.
    pub fn suite(self) -> &'static str {
        match self {
            Self::Bookworm61 => "bookworm",
            Self::Trixie612 => "trixie",
        }
    }
}

impl std::fmt::Display for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Kernel {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> Result<Self> {
        let Some(kernel) = Self::ALL
            .into_iter()
            .find(|k| k.name() == name || k.suite() == name)
        else {
            bail!("no kernel {name:?}: the choices are 6.1 and 6.12");
        };
        Ok(kernel)
    }
}

/// A kernel package, unpacked.
#[derive(Clone, Debug)]
pub struct KernelFiles {
    /// Which one.
    pub kernel: Kernel,
    /// Its release, as `uname -r` will say.
    pub release: String,
    /// The bzImage as Debian ships it.
    pub bzimage: PathBuf,
    /// The ELF file inside it, with symbols stripped: what QEMU microvm boots.
    pub vmlinux: PathBuf,
    /// `lib/modules/RELEASE` of the package.
    pub modules: PathBuf,
}

impl KernelFiles {
    /// The modules of this kernel.
    pub fn modules(&self) -> Result<Modules> {
        Modules::open(&self.modules)
    }
}

pub(crate) fn build(images: &Images, kernel: Kernel) -> Result<KernelFiles> {
    let mut apt = images.apt(kernel.suite())?;
    let meta = apt.fetch(&["linux-image-cloud-amd64"])?.remove(0);
    let concrete = meta
        .depends
        .iter()
        .find(|name| name.starts_with("linux-image-"))
        .context("linux-image-cloud-amd64 depends on no kernel package")?;
    let package = apt.fetch(&[concrete])?.remove(0);
    let release = concrete.trim_start_matches("linux-image-").to_owned();
    let mut key = Key::new("kernel", RECIPE);
    key.add(package.name.as_bytes());
    key.add(package.version.as_bytes());
    let dir = cache::entry(images.root(), &format!("kernel-{kernel}"), &key, |dir| {
        images
            .progress()
            .step(&format!("unpacking Linux {release}"));
        unpack(&package.deb, &release, dir)
    })?;
    Ok(KernelFiles {
        kernel,
        bzimage: dir.join("bzImage"),
        vmlinux: dir.join("vmlinux"),
        modules: dir.join("modules"),
        release,
    })
}

fn unpack(deb: &Path, release: &str, dir: &Path) -> Result<()> {
    let tree = dir.join("tree");
    deb::unpack(deb, &tree, &|path| {
        path.starts_with("boot/vmlinuz-") || path.contains("lib/modules/")
    })?;
    let bzimage = dir.join("bzImage");
    std::fs::rename(tree.join(format!("boot/vmlinuz-{release}")), &bzimage)
        .with_context(|| format!("{} holds no boot/vmlinuz-{release}", deb.display()))?;
    let modules = ["usr/lib/modules", "lib/modules"]
        .into_iter()
        .map(|base| tree.join(base).join(release))
        .find(|path| path.is_dir())
        .with_context(|| format!("{} holds no modules for {release}", deb.display()))?;
    std::fs::rename(modules, dir.join("modules"))?;
    std::fs::remove_dir_all(&tree)?;
    let vmlinux = bzimage::vmlinux(&std::fs::read(&bzimage)?)?;
    std::fs::write(dir.join("vmlinux"), vmlinux)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_named_by_version_or_suite() {
        assert_eq!("6.1".parse::<Kernel>().unwrap(), Kernel::Bookworm61);
        assert_eq!("trixie".parse::<Kernel>().unwrap(), Kernel::Trixie612);
        assert!("6.6".parse::<Kernel>().is_err());
    }
}
