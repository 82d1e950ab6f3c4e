//! `cargo xtask check`: everything that needs no machine to boot.

use std::process::ExitCode;

use anyhow::Result;

use crate::{audit, build};

pub(crate) fn run() -> Result<ExitCode> {
    let mut failed = Vec::new();
    let mut step = |name: &'static str, arguments: &[&str]| -> Result<()> {
        let mut command = build::cargo(arguments);
        if !build::status(command.env("RUSTDOCFLAGS", "-D warnings"))?.success() {
            failed.push(name);
        }
        Ok(())
    };
    step("format", &["fmt", "--all", "--check"])?;
    step(
        "clippy",
        &[
            "clippy",
            "--quiet",
            "--workspace",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ],
    )?;
    step(
        "doc",
        &[
            "doc",
            "--quiet",
            "--workspace",
            "--no-deps",
            "--document-private-items",
        ],
    )?;
    if !audit::run(&build::workspace())? {
        failed.push("unsafe audit");
    }
    if failed.is_empty() {
        println!("check: format, clippy, doc and unsafe audit are clean");
        Ok(ExitCode::SUCCESS)
    } else {
        eprintln!("check: failed: {}", failed.join(", "));
        Ok(ExitCode::FAILURE)
    }
}
