//! `cargo xtask bench queues`: what a second pair of queues is worth to the user back-end.
//!
//! A guest needs a CPU for itself, and so does each worker, the far end and the kernel: on two cores a
//! guest cannot show it. So the driver's side is a generator on threads (`devices/examples/load.rs`).

use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use guest_images::target_dir;
use serde::Serialize;

use super::report;
use super::stats::{Estimate, median};
use crate::build;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Pairs of queues to compare with one
    #[arg(long, default_value_t = 2)]
    queues: u16,
    /// How often each is run
    #[arg(long, default_value_t = 6)]
    rounds: usize,
    /// Seconds of each run
    #[arg(long, default_value_t = 2)]
    seconds: u64,
}

/// What is compared: name, bytes of a frame, and flows.
const LOADS: [(&str, u32, u32); 3] = [
    ("frames of 64400 bytes, 16 flows", 64_400, 16),
    ("frames of 64400 bytes, 1000 flows", 64_400, 1000),
    ("frames of 1400 bytes, 16 flows", 1400, 16),
];

#[derive(Debug, Serialize)]
struct Row {
    load: &'static str,
    /// Gbit/s.
    one: f64,
    /// Gbit/s.
    many: f64,
    ratio: Estimate,
    /// The least that a queue had of what all carried, in percent of an equal share.
    least_share: f64,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    ensure!(args.rounds > 0, "--rounds must be at least 1");
    let mut build = build::cargo(&["build", "--quiet", "--release", "--package", "devices"]);
    build.args(["--features", "testing", "--example", "load"]);
    ensure!(build::status(&mut build)?.success(), "cannot build load");
    let mut rows = Vec::new();
    for (load, bytes, flows) in LOADS {
        let once = |queues| once(queues, bytes, flows, args.seconds);
        let (mut ones, mut manies, mut ratios, mut shares) = (vec![], vec![], vec![], vec![]);
        for round in 0..args.rounds {
            eprintln!("{load}: round {} of {}", round + 1, args.rounds);
            // A B B A
            let (one, many);
            if round % 2 == 0 {
                one = once(1)?;
                many = once(args.queues)?;
            } else {
                many = once(args.queues)?;
                one = once(1)?;
            }
            let (one, total): (f64, f64) = (one.iter().sum(), many.iter().sum());
            let least = many.iter().copied().fold(f64::INFINITY, f64::min);
            shares.push(least * f64::from(args.queues) / total * 100.0);
            ratios.push(total / one);
            ones.push(one);
            manies.push(total);
        }
        rows.push(Row {
            load,
            one: median(&ones).context("no rounds")?,
            many: median(&manies).context("no rounds")?,
            ratio: Estimate::of(&[ratios]).context("no rounds")?,
            least_share: median(&shares).context("no rounds")?,
        });
    }
    for row in &rows {
        println!(
            "{:36} 1 queue {:5.1}, {} queues {:5.1} Gbit/s, ratio {:.2} ({:.2}..{:.2}); the \
             least busy queue had {:.0}% of an equal share",
            row.load,
            row.one,
            args.queues,
            row.many,
            row.ratio.median,
            row.ratio.low,
            row.ratio.high,
            row.least_share
        );
    }
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    println!(
        "{cores} cores; a worker, a driver's thread and their share of the kernel for each queue"
    );
    let json = report::write_json("queues.json", &rows)?;
    println!("{}", json.display());
    Ok(ExitCode::SUCCESS)
}

/// Gbit/s of each queue.
fn once(queues: u16, bytes: u32, flows: u32, seconds: u64) -> Result<Vec<f64>> {
    #[derive(serde::Deserialize)]
    struct Printed {
        queues: Vec<f64>,
    }
    let program = target_dir().join("release/examples/load");
    let mut load = std::process::Command::new(&program);
    load.args(["--queues", &queues.to_string()]);
    load.args(["--bytes", &bytes.to_string(), "--flows", &flows.to_string()]);
    load.args(["--seconds", &seconds.to_string()]);
    let output = load
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    ensure!(
        output.status.success(),
        "{} failed: {}",
        program.display(),
        String::from_utf8_lossy(&output.stderr)
    );
    let printed: Printed = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("unexpected output of {}", program.display()))?;
    Ok(printed.queues.iter().map(|rate| rate * 8.0 / 1e9).collect())
}
