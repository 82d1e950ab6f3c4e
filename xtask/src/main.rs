//! Thin verbs over the other crates: `cargo xtask VERB`.

mod agent;
mod audit;
mod bench;
mod build;
mod check;
mod client;
mod guest;
mod image;
mod place;
mod run;
mod smoke;
mod tap;
mod test;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Builds, boots, tests and measures wonton.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Boot a guest under wonton, on KVM or in the lab, with its console here
    Run(run::Args),
    /// Make the guest kernels and initramfs images, and print where they are
    Image(image::Args),
    /// A shell in the lab: an emulated machine with a real /dev/kvm, wonton and the guest images
    Lab(run::LabArgs),
    /// Boot both kernels unattended and check the network; writes target/smoke.json
    Smoke(smoke::Args),
    /// Run all tests
    Test(test::Args),
    /// Format, lints, documentation and the audit of unsafe code
    Check,
    /// Measure wonton beside its peers
    #[command(subcommand)]
    Bench(bench::Bench),
    /// What the lab runs of this program
    #[command(subcommand, hide = true)]
    Agent(agent::Agent),
}

fn main() -> ExitCode {
    match verb(Args::parse().verb) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn verb(verb: Verb) -> Result<ExitCode> {
    match verb {
        Verb::Run(args) => run::run(&args),
        Verb::Image(args) => image::run(&args),
        Verb::Lab(args) => run::lab(&args),
        Verb::Smoke(args) => smoke::run(&args),
        Verb::Test(args) => test::run(&args),
        Verb::Check => check::run(),
        Verb::Bench(bench) => bench::run(&bench),
        Verb::Agent(agent) => agent::run(&agent),
    }
}
