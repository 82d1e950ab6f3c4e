//! Programs the lab needs on this machine.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::progress::Progress;

/// The emulator that runs the lab.
pub const QEMU: &str = "qemu-system-x86_64";
const QEMU_INSTALL: [&str; 5] = [
    "apt-get",
    "install",
    "-y",
    "--no-install-recommends",
    "qemu-system-x86",
];

/// The full path of `program`, searched as the shell does.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|dir| dir.join(program))
        .find(|candidate| candidate.is_file())
}

/// QEMU's path. When it is not installed, root installs it from Debian; others are told how.
pub fn qemu(progress: &Progress) -> Result<PathBuf> {
    if let Some(path) = find(QEMU) {
        return Ok(path);
    }
    let command = QEMU_INSTALL.join(" ");
    if !rustix::process::geteuid().is_root() {
        bail!("the lab needs {QEMU}, which is not installed; install it with: sudo {command}");
    }
    progress.note(&format!("the lab needs {QEMU}; installing it: {command}"));
    progress.step("installing qemu-system-x86");
    if apt(&QEMU_INSTALL[1..]).is_err() {
        // a fresh machine has no package lists yet
        apt(&["update"]).with_context(|| format!("cannot install {QEMU}; try: {command}"))?;
        apt(&QEMU_INSTALL[1..])
            .with_context(|| format!("cannot install {QEMU}; try: {command}"))?;
    }
    find(QEMU).with_context(|| format!("{command} left no {QEMU} in PATH"))
}

fn apt(arguments: &[&str]) -> Result<()> {
    let output = Command::new("apt-get")
        .arg("-q")
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(std::process::Stdio::null())
        .output()
        .context("cannot start apt-get")?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "apt-get {} failed: {}",
        arguments.join(" "),
        stderr.trim()
    );
    Ok(())
}
