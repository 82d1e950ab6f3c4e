//! `cargo xtask bench floors`: wonton must be ahead of passt by so much.
//!
//! Both at MTU 1500 in one session with the CPUs kept awake. A floor is missed when the median of the
//! paired ratios misses it; the interval beside it says how sure that is.

use std::process::ExitCode;

use anyhow::Result;
use guest_images::Images;

use super::compare::Comparison;
use super::floor::{FLOORS, Row, row, table};
use super::session::{Plan, Session};
use super::subject::Subject;
use super::uml::code;
use super::workload::Workload;
use super::{html, report};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Fresh boots of all guests
    #[arg(long, default_value_t = 2)]
    boots: u32,
    /// Turns of each workload in one boot
    #[arg(long, default_value_t = 4)]
    rounds: u32,
    /// Leave out what is shown beside the floors
    #[arg(long)]
    only: bool,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let images = Images::of_workspace()?;
    let pair: Vec<Subject> = vec!["passt".parse()?, "wonton".parse()?];
    let plan = |boots, rounds, asleep| Plan {
        boots,
        rounds,
        seconds: 2,
        asleep,
    };
    let workloads = workloads(FLOORS.iter().map(|(name, ..)| *name))?;
    let (idle, moving): (Vec<Workload>, Vec<Workload>) = workloads
        .into_iter()
        .partition(|workload| matches!(workload, Workload::Idle(_)));
    let session = Session::run(
        &images,
        &pair,
        &moving,
        &plan(args.boots, args.rounds, false),
    )?;
    // a spinner beside it does not change what an idle back-end costs, but two rounds will do
    let idle = Session::run(&images, &pair, &idle, &plan(1, 2, false))?;

    println!("{}", report::samples_table(&session));
    println!("{}", report::samples_table(&idle));
    for line in report::idle_lines(&idle) {
        println!("{line}");
    }
    let rows = FLOORS
        .iter()
        .map(|floor| row(&session, &idle, *floor))
        .collect::<Result<Vec<_>>>()?;
    println!("{}", table(&rows));
    let mut beside = Vec::new();
    if !args.only {
        beside = self::beside(&images, &pair)?;
    }
    for session in &beside {
        println!("beside, no floor; {}:", report::footnote(session));
        println!("{}", report::samples_table(session));
    }
    println!("{}", report::footnote(&session));

    let comparisons: Vec<Comparison> = session
        .workloads
        .iter()
        .map(|workload| Comparison::of(&session, 0, 1, *workload))
        .collect();
    for row in &comparisons {
        for doubt in &row.doubts {
            println!("noisy: {}: {doubt}", row.workload);
        }
    }
    let json =
        serde_json::json!({ "floors": rows, "session": session, "idle": idle, "beside": beside });
    let json = report::write_json("floors.json", &json)?;
    let page = html::write("floors.html", "bench floors", &session, &comparisons)?;
    println!("{} {}", json.display(), page.display());
    // all are said, whichever counts in the end
    let failed = [&session, &idle]
        .into_iter()
        .chain(&beside)
        .filter(|session| !session.errors().is_empty())
        .inspect(|session| {
            code(session);
        })
        .count();
    let missed: Vec<&Row> = rows.iter().filter(|row| !row.held).collect();
    for row in &missed {
        let failures = match row.failures {
            0 => String::new(),
            count => format!(", and {count} runs failed"),
        };
        eprintln!(
            "missed: {} is {}, the floor is {}{failures}",
            row.floor,
            report::estimate(row.measured),
            row.bound
        );
    }
    Ok(if missed.is_empty() && failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// What stands beside the floors: passt with its largest MTU, and idle CPUs that halt.
fn beside(images: &Images, pair: &[Subject]) -> Result<Vec<Session>> {
    let large: Vec<Subject> = vec!["passt:mtu=65520".parse()?, "wonton".parse()?];
    let plan = |asleep| Plan {
        boots: 1,
        rounds: 2,
        seconds: 2,
        asleep,
    };
    Ok(vec![
        Session::run(
            images,
            &large,
            &workloads(["down1", "up1", "down8", "up8"].into_iter())?,
            &plan(false),
        )?,
        Session::run(
            images,
            pair,
            &workloads(["down1", "up1", "up8"].into_iter())?,
            &plan(true),
        )?,
    ])
}

/// The workloads of those names, each once.
fn workloads<'a>(names: impl Iterator<Item = &'a str>) -> Result<Vec<Workload>> {
    let mut found = Vec::new();
    for name in names {
        for workload in Workload::named(name)? {
            if !found.contains(&workload) {
                found.push(workload);
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_floor_is_of_one_workload() {
        for (name, ..) in FLOORS {
            assert_eq!(Workload::named(name).unwrap().len(), 1, "{name}");
        }
        assert_eq!(workloads(["rr", "rr"].into_iter()).unwrap().len(), 1);
    }
}
