//! `cargo xtask bench ab`: two settings or versions in turn, and whether they differ.
//!
//! Settings of the network alone are compared at native speed, under User Mode Linux; those that only
//! `wonton run` has (`transport=`, `cpus=`, `net=`) in the lab.

use std::process::ExitCode;

use anyhow::Result;
use guest_images::Images;

use super::ab_lab;
use super::compare::Comparison;
use super::run_options;
use super::session::{Plan, Session};
use super::subject::Subject;
use super::uml::code;
use super::workload::{Words, chosen};
use super::{ab_tap, html, lab, report};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The first: options of wonton (rx=copy), wonton, passt, passt:mtu=BYTES, rev:REF, rev:REF:OPTIONS
    /// or rev:worktree; in the lab options of wonton run (transport=mmio,cpus=2), those of a tap
    /// (net=tap,vhost=on) among them
    #[arg(long)]
    a: Subject,
    /// The second, as the first
    #[arg(long)]
    b: Subject,
    #[command(flatten)]
    plan: Plan,
    /// down1 down8 down16 up1 up8 up16 udp64 udp1400 udp16k rr crr idle1000, or all
    workloads: Vec<Words>,
    /// In the lab, also if the settings do not need it
    #[arg(long)]
    lab: bool,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    if let Some(pair) = ab_tap::subjects([&args.a, &args.b])? {
        return lab::compare(&pair, &ab_tap::plan(&args.plan));
    }
    let images = Images::of_workspace()?;
    let workloads = chosen(&args.workloads);
    let needs_lab = |subject: &Subject| run_options::are_needed(&subject.options);
    if args.lab || needs_lab(&args.a) || needs_lab(&args.b) {
        return ab_lab::run(&images, [&args.a, &args.b], &workloads, &args.plan);
    }
    let subjects = [args.a.clone(), args.b.clone()];
    let session = Session::run(&images, &subjects, &workloads, &args.plan)?;
    let comparisons: Vec<Comparison> = workloads
        .iter()
        .map(|workload| Comparison::of(&session, 0, 1, *workload))
        .collect();
    println!("{}", report::samples_table(&session));
    println!("A is {}, B is {}", args.a.name, args.b.name);
    println!("{}", report::comparison_table(&comparisons));
    for row in &comparisons {
        println!("{}: {}", row.workload, row.verdict);
    }
    for line in report::idle_lines(&session) {
        println!("{line}");
    }
    println!("{}", report::footnote(&session));
    let json = serde_json::json!({ "session": session, "comparisons": comparisons });
    let json = report::write_json("ab.json", &json)?;
    let page = html::write("ab.html", "bench ab", &session, &comparisons)?;
    println!("{} {}", json.display(), page.display());
    Ok(code(&session))
}
