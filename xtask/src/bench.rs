//! `cargo xtask bench`: wonton beside its peers.

use std::process::ExitCode;

use anyhow::Result;
use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// In the lab: wonton and QEMU microvm, interleaved
    Lab,
}

pub(crate) fn run(_: &Bench) -> Result<ExitCode> {
    Ok(ExitCode::SUCCESS)
}
