//! `cargo xtask test`.

use std::process::ExitCode;

use anyhow::Result;

use crate::build;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Passed to `cargo test`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    cargo: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    // the guest stories need the release binary
    build::wonton()?;
    let mut command = build::cargo(&["test", "--workspace"]);
    command.args(&args.cargo);
    let passed = build::status(&mut command)?.success();
    if passed {
        println!(
            "test: unit, scripted, seeded and bare-guest tests ran on this machine; the guest \
             stories ran in the lab, and guests at native speed and QEMU behind `wonton serve`, each \
             row above"
        );
    }
    Ok(if passed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
