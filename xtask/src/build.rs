//! Running cargo.

use std::path::PathBuf;
use std::process::{Command, ExitStatus};

use anyhow::{Context, Result, ensure};

/// `cargo ARGUMENTS` in the workspace.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(arguments).current_dir(workspace());
    command
}

/// Runs `command` with its output shown.
pub(crate) fn status(command: &mut Command) -> Result<ExitStatus> {
    let program = command.get_program().to_owned();
    command
        .status()
        .with_context(|| format!("cannot start {}", program.display()))
}

/// The root of the workspace.
pub(crate) fn workspace() -> PathBuf {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    root.canonicalize().unwrap_or(root)
}

/// Builds wonton for release and gives its path.
pub(crate) fn wonton() -> Result<PathBuf> {
    let status = status(&mut cargo(&[
        "build",
        "--release",
        "--quiet",
        "--package",
        "vmm",
    ]))?;
    ensure!(
        status.success(),
        "cargo build --release --package vmm failed"
    );
    let path = guest_images::target_dir().join("release/wonton");
    path.canonicalize()
        .with_context(|| format!("the build left no {}", path.display()))
}
