//! `cargo xtask bench`: figures, each with the command that makes it.

mod lab;
mod start;

use std::process::ExitCode;

use anyhow::Result;
use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// In the lab: wonton and QEMU microvm boot the same guest in turn
    Lab(lab::Args),
    /// On this machine: time to the first KVM_RUN, and memory beyond the guest's own
    Start(start::Args),
}

pub(crate) fn run(bench: &Bench) -> Result<ExitCode> {
    match bench {
        Bench::Lab(args) => lab::run(args),
        Bench::Start(args) => start::run(args),
    }
}
