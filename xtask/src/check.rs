//! `cargo xtask check`: everything that needs no machine to boot.

use std::process::ExitCode;

use anyhow::Result;

use crate::{audit, build};

pub(crate) fn run() -> Result<ExitCode> {
    let steps: [(&str, &[&str], Option<(&str, &str)>); 3] = [
        ("format", &["fmt", "--all", "--check"], None),
        (
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
            None,
        ),
        (
            "doc",
            &[
                "doc",
                "--quiet",
                "--workspace",
                "--no-deps",
                "--document-private-items",
            ],
            Some(("RUSTDOCFLAGS", "-D warnings")),
        ),
    ];
    let mut failed = Vec::new();
    for (name, arguments, variable) in steps {
        let mut command = build::cargo(arguments);
        command.envs(variable);
        if !build::status(&mut command)?.success() {
            failed.push(name);
        }
    }
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
