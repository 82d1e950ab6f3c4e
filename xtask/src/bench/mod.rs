//! `cargo xtask bench`: figures, each with the command that makes it.
//!
//! ```text
//! uml, ab, floors    what is asked, and how it is answered (ab_lab, run_options: in the lab)
//!   session          subjects in turn: boots, rounds
//!     station        one back-end (backend, revision) and the UML guest behind it
//!     measure        one run of a workload (iperf, echo), and its cost (process, calibrate)
//!   compare, floor   pairs, ratios, verdicts (stats)
//!   report, html     tables, JSON, plots (plot)
//! ```

mod ab;
mod ab_lab;
mod ab_tap;
pub(crate) mod awake;
mod backend;
mod calibrate;
mod compare;
pub(crate) mod echo;
mod floor;
mod floors;
mod html;
mod iperf;
mod lab;
mod measure;
mod plot;
mod process;
mod queues;
mod report;
mod revision;
mod run_options;
mod session;
mod start;
mod station;
mod stats;
mod subject;
mod uml;
mod workload;

use std::process::ExitCode;

use anyhow::Result;
use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// In the lab: wonton and QEMU microvm boot the same guest in turn
    Lab(lab::Args),
    /// On this machine: time to the first KVM_RUN, and memory beyond the guest's own
    Start(start::Args),
    /// Native speed: back-ends under a User Mode Linux guest, in turn
    Uml(uml::Args),
    /// Two settings, programs or revisions in turn, and whether they differ: at native speed, or in the
    /// lab what only `wonton run` has
    Ab(ab::Args),
    /// Native speed, without a guest: several pairs of queues against one
    Queues(queues::Args),
    /// Native speed: wonton must be ahead of passt by so much
    Floors(floors::Args),
}

pub(crate) fn run(bench: &Bench) -> Result<ExitCode> {
    match bench {
        Bench::Lab(args) => lab::run(args),
        Bench::Start(args) => start::run(args),
        Bench::Uml(args) => uml::run(args),
        Bench::Ab(args) => ab::run(args),
        Bench::Queues(args) => queues::run(args),
        Bench::Floors(args) => floors::run(args),
    }
}
