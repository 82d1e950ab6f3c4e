//! What the guest and the lab have in common below `/`: busybox, iperf3, ethtool, modules.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::apt::Package;
use crate::cache::Key;
use crate::initramfs::Initramfs;
use crate::modules::Modules;
use crate::{Images, deb, libraries};

/// The packages: of the machine's own suite, so that their libc is the one built against here.
pub(crate) fn packages(images: &Images) -> Result<Vec<Package>> {
    images
        .apt(images.own_suite())?
        .fetch_with_libraries(&["busybox-static", "ethtool", "iperf3"])
}

pub(crate) fn add_to_key(packages: &[Package], key: &mut Key) {
    for package in packages {
        key.add(package.name.as_bytes());
        key.add(package.version.as_bytes());
    }
}

/// The packages, unpacked for as long as this lives.
pub(crate) struct Userland {
    root: tempfile::TempDir,
}

impl Userland {
    pub(crate) fn unpack(packages: &[Package]) -> Result<Self> {
        let root = tempfile::tempdir()?;
        let wanted = |path: &str| {
            path.contains("bin/")
                || (path.contains("lib") && path.contains(".so") && !path.contains("share/"))
        };
        for package in packages {
            deb::unpack(&package.deb, root.path(), &wanted)?;
        }
        Ok(Self { root })
    }

    /// The program `name` in the packages.
    fn find(&self, name: &str) -> Result<PathBuf> {
        ["usr/bin", "bin", "usr/sbin", "sbin"]
            .into_iter()
            .map(|dir| self.root.path().join(dir).join(name))
            .find(|path| path.exists())
            .with_context(|| format!("no package holds a program {name}"))
    }

    /// busybox and a link for each of its applets.
    pub(crate) fn busybox(&self, tree: &mut Initramfs) -> Result<()> {
        let busybox = self.find("busybox")?;
        tree.copy("bin/busybox", 0o755, &busybox)?;
        let listed = Command::new(&busybox)
            .arg("--list")
            .output()
            .context("cannot run busybox --list")?;
        ensure!(listed.status.success(), "busybox --list failed");
        for applet in String::from_utf8_lossy(&listed.stdout).lines() {
            // `init` would be taken for the one in `/`
            if applet != "busybox" && applet != "init" {
                tree.symlink(&format!("bin/{applet}"), "busybox");
            }
        }
        Ok(())
    }

    /// The program `name` of the packages, with its libraries.
    pub(crate) fn program(&self, tree: &mut Initramfs, name: &str) -> Result<()> {
        let program = self.find(name)?;
        tree.copy(&format!("usr/bin/{name}"), 0o755, &program)?;
        add_libraries(tree, &program, self.root.path())
    }
}

/// A program of this machine, at `path` in the tree, with its libraries.
pub(crate) fn add_host_program(tree: &mut Initramfs, path: &str, program: &Path) -> Result<()> {
    tree.copy(path, 0o755, program)?;
    add_libraries(tree, program, Path::new("/"))
}

fn add_libraries(tree: &mut Initramfs, program: &Path, root: &Path) -> Result<()> {
    for (target, source) in libraries::closure(program, root)? {
        // the tree is merged-usr, as every current Debian is
        let target = target.to_string_lossy();
        let target = target.trim_start_matches("/usr").trim_start_matches('/');
        tree.copy(&format!("usr/{target}"), 0o755, &source)?;
    }
    Ok(())
}

/// Directories, links and device nodes every image starts with.
pub(crate) fn skeleton(tree: &mut Initramfs) {
    for dir in [
        "dev",
        "proc",
        "sys",
        "tmp",
        "run",
        "root",
        "etc",
        "var",
        "mod",
        "usr/bin",
        "usr/lib",
        "usr/lib64",
    ] {
        tree.dir(dir);
    }
    tree.char_dev("dev/console", 0o600, 5, 1)
        .char_dev("dev/null", 0o666, 1, 3)
        .symlink("lib", "usr/lib")
        .symlink("lib64", "usr/lib64")
        .symlink("sbin", "bin")
        .file(
            "etc/passwd",
            0o644,
            "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
        )
        .file("etc/group", 0o644, "root:x:0:\nnogroup:x:65534:\n")
        .file("etc/nsswitch.conf", 0o644, "hosts: files dns\n")
        .file("root/.profile", 0o644, "export PS1='\\h:\\w\\$ '\n");
}

/// Modules as `/mod/NAME.ko`, with `/mod/order` listing them in load order.
pub(crate) fn add_modules(tree: &mut Initramfs, modules: &Modules, names: &[&str]) -> Result<()> {
    let mut order = String::new();
    for module in modules.in_load_order(names)? {
        order.push_str(&module.name);
        order.push('\n');
        tree.file(&format!("mod/{}.ko", module.name), 0o644, module.data);
    }
    tree.file("mod/order", 0o644, order);
    Ok(())
}
