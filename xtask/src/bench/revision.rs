//! Building wonton of another git revision.
//!
//! The revision is checked out below `target/bench`, built there with a target directory that all
//! revisions share, and removed again. The program stays, named by its commit.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use guest_images::target_dir;

use crate::build;

/// The release build of wonton at `reference`, or of this tree as it is.
pub(crate) fn wonton(reference: Option<&str>) -> Result<PathBuf> {
    let Some(reference) = reference else {
        return build::wonton();
    };
    let commit = git(&[
        "rev-parse",
        "--verify",
        "--short=12",
        &format!("{reference}^{{commit}}"),
    ])
    .with_context(|| format!("git knows no revision {reference}"))?;
    std::fs::create_dir_all(target_dir().join("bench"))?;
    let dir = target_dir().join("bench").canonicalize()?;
    let program = dir.join(format!("wonton-{commit}"));
    if program.exists() {
        return Ok(program);
    }
    let tree = dir.join(format!("rev-{commit}"));
    let tree_name = tree.to_string_lossy();
    git(&[
        "worktree", "add", "--force", "--detach", &tree_name, &commit,
    ])?;
    let built = build_in(&tree, &dir.join("rev-target"), &program);
    let removed = git(&["worktree", "remove", "--force", &tree_name]);
    built.with_context(|| format!("cannot build wonton of {reference} ({commit})"))?;
    removed?;
    Ok(program)
}

fn build_in(tree: &Path, target: &Path, program: &Path) -> Result<()> {
    let status = build::status(
        build::cargo(&["build", "--release", "--quiet", "--package", "vmm"])
            .current_dir(tree)
            .env("CARGO_TARGET_DIR", target),
    )?;
    ensure!(
        status.success(),
        "cargo build --release --package vmm failed"
    );
    std::fs::copy(target.join("release/wonton"), program)?;
    Ok(())
}

fn git(arguments: &[&str]) -> Result<String> {
    let output = Command::new("git")
        .args(arguments)
        .current_dir(build::workspace())
        .output()
        .context("cannot start git")?;
    ensure!(
        output.status.success(),
        "git {} failed: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
