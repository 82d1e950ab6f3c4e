//! Guest kernels and initramfs images made from Debian packages.
//!
//! [`Images`] is the way in: it makes, and keeps below `target/guest-images`,
//!
//! * stock Debian kernels of two generations ([`Images::kernel`]),
//! * an initramfs for a guest of wonton ([`Images::guest`]),
//! * the *lab* ([`Images::lab`]): a whole machine with a real `/dev/kvm` that QEMU emulates, for
//!   hosts whose own KVM is missing or unusable. [`lab`] runs things in it.
//! * User Mode Linux and passt ([`Images::uml`]), to measure the network at native speed. [`uml`]
//!   boots such guests.
//!
//! Packages come through a private [`apt`] that verifies signatures and changes nothing on the
//! machine; everything after that (unpacking, modules, cpio) is done here.

pub mod apt;
pub mod bzimage;
pub mod cache;
pub mod console;
pub mod deb;
pub mod guest;
pub mod host;
pub mod initramfs;
pub mod kernel;
pub mod lab;
pub mod libraries;
pub mod modules;
pub mod progress;
pub mod sources;
pub mod uml;
mod userland;

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

pub use guest::GuestImage;
pub use kernel::{Kernel, KernelFiles};
pub use uml::{UmlGuest, UmlKit, UmlOptions};

use progress::Progress;
use sources::DebianSource;

/// Makes images and remembers them.
#[derive(Debug)]
pub struct Images {
    root: PathBuf,
    own_suite: String,
    source: DebianSource,
    progress: Progress,
}

impl Images {
    /// Images of this workspace: below `$CARGO_TARGET_DIR/guest-images`, by default `target/`.
    pub fn of_workspace() -> Result<Self> {
        Self::new(&target_dir().join("guest-images"))
    }

    /// Images kept below `root`.
    pub fn new(root: &Path) -> Result<Self> {
        std::fs::create_dir_all(root)
            .with_context(|| format!("cannot create {}", root.display()))?;
        let root = root.canonicalize()?;
        cache::sweep(&root);
        let own_suite = sources::own_codename()?;
        let source = DebianSource::of_this_machine(&own_suite)?;
        Ok(Self {
            root,
            own_suite,
            source,
            progress: Progress::new(),
        })
    }

    /// A stock kernel.
    pub fn kernel(&self, kernel: Kernel) -> Result<KernelFiles> {
        let _lock = self.lock("kernel")?;
        kernel::build(self, kernel)
    }

    /// The guest image for `kernel`.
    pub fn guest(&self, kernel: Kernel) -> Result<GuestImage> {
        let _lock = self.lock("guest")?;
        guest::build(self, kernel)
    }

    /// The lab, with the guest images inside.
    pub fn lab(&self) -> Result<lab::LabImage> {
        let _lock = self.lock("lab")?;
        lab::image::build(self)
    }

    /// User Mode Linux and passt, for measuring at native speed.
    pub fn uml(&self) -> Result<UmlKit> {
        let _lock = self.lock("uml")?;
        uml::build(self)
    }

    /// The directory everything is kept in.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The progress display, so that callers can share it.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    pub(crate) fn own_suite(&self) -> &str {
        &self.own_suite
    }

    pub(crate) fn apt(&self, suite: &str) -> Result<apt::Apt> {
        apt::Apt::new(&self.root, suite, &self.source, self.progress.clone())
    }

    /// Tests of several processes may ask at once; each kind of image is made by one of them. The
    /// kinds nest (a lab needs guests, which need kernels), hence a lock for each.
    fn lock(&self, kind: &str) -> Result<File> {
        let path = self.root.join(format!("{kind}.lock"));
        let file =
            File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        file.lock()
            .with_context(|| format!("cannot lock {}", path.display()))?;
        Ok(file)
    }
}

/// Cargo's target directory of this workspace.
pub fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => PathBuf::from(dir),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"),
    }
}
