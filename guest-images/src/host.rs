//! Programs the lab needs on this machine.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::progress::Progress;

/// A program of this machine, and the Debian package that has it.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    name: &'static str,
    package: &'static str,
}

/// The emulator that runs the lab.
pub const QEMU: Program = Program {
    name: "qemu-system-x86_64",
    package: "qemu-system-x86",
};

/// The far end of the bench's transfers.
pub const IPERF3: Program = Program {
    name: "iperf3",
    package: "iperf3",
};

/// What sets up network interfaces; busybox's cannot make a tap.
pub const IP: Program = Program {
    name: "ip",
    package: "iproute2",
};

/// The full path of `program`, searched as the shell does.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|dir| dir.join(program))
        .find(|candidate| candidate.is_file())
}

/// `command`, but killed when the thread that starts it ends, however that happens (`setpriv` of
/// util-linux asks the kernel for that). Its arguments, environment and working directory are kept;
/// what it does with its standard streams must be said again.
pub fn bound(command: &Command) -> Command {
    let mut bound = match find("setpriv") {
        Some(setpriv) => {
            let mut bound = Command::new(setpriv);
            bound.args(["--pdeathsig", "KILL", "--"]);
            // the environment is the command's, not that of setpriv, which has a loader of its own
            bound.arg("env");
            for (name, value) in command.get_envs() {
                let mut pair = name.to_owned();
                pair.push("=");
                pair.push(value.unwrap_or_default());
                bound.arg(pair);
            }
            bound.arg(command.get_program());
            bound
        }
        None => {
            let mut bound = Command::new(command.get_program());
            for (name, value) in command.get_envs() {
                bound.env(name, value.unwrap_or_default());
            }
            bound
        }
    };
    bound.args(command.get_args());
    if let Some(dir) = command.get_current_dir() {
        bound.current_dir(dir);
    }
    bound
}

impl Program {
    /// Its path. When it is not installed, root installs it from Debian; others are told how.
    pub fn installed(self, progress: &Progress) -> Result<PathBuf> {
        let Self { name, package } = self;
        if let Some(path) = find(name) {
            return Ok(path);
        }
        let install = ["install", "-y", "--no-install-recommends", package];
        let command = format!("apt-get {}", install.join(" "));
        if !rustix::process::geteuid().is_root() {
            bail!("this needs {name}, which is not installed; install it with: sudo {command}");
        }
        progress.note(&format!("this needs {name}; installing it: {command}"));
        progress.step(&format!("installing {package}"));
        if apt(&install).is_err() {
            // a fresh machine has no package lists yet
            apt(&["update"]).with_context(|| format!("cannot install {name}; try: {command}"))?;
            apt(&install).with_context(|| format!("cannot install {name}; try: {command}"))?;
        }
        find(name).with_context(|| format!("{command} left no {name} in PATH"))
    }
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
