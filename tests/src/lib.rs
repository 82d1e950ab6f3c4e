//! Stories told from the guest's side.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use guest_images::target_dir;

/// The release build of wonton, as `cargo xtask test` leaves it.
///
/// # Errors
/// Fails when there is none.
pub fn release_wonton() -> Result<PathBuf> {
    let path = target_dir().join("release/wonton");
    ensure!(
        path.is_file(),
        "{} is missing; `cargo xtask test` builds it, and so does `cargo build --release -p vmm`",
        path.display()
    );
    Ok(path)
}

/// Builds this crate's `peer` as a static program, so that it runs in any guest.
///
/// # Errors
/// Fails when cargo does.
pub fn build_peer() -> Result<PathBuf> {
    let target = "x86_64-unknown-linux-gnu";
    let dir = target_dir().join("peer");
    let status = cargo()
        .args([
            "build",
            "--quiet",
            "--release",
            "--package",
            "tests",
            "--bin",
            "peer",
        ])
        .args(["--target", target, "--target-dir"])
        .arg(&dir)
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .status()
        .context("cannot run cargo")?;
    ensure!(status.success(), "cannot build the peer program");
    Ok(dir.join(target).join("release/peer"))
}

/// The release build of wonton: what users run.
///
/// # Errors
/// Fails when cargo does.
pub fn build_wonton() -> Result<PathBuf> {
    let status = cargo()
        .args(["build", "--quiet", "--release", "--package", "vmm"])
        .status()
        .context("cannot run cargo")?;
    ensure!(status.success(), "cannot build wonton");
    Ok(target_dir().join("release/wonton"))
}

fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
    command
}
