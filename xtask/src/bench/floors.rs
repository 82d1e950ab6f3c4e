//! `cargo xtask bench floors`: wonton must be ahead of passt by so much.
//!
//! Both at MTU 1500 in one session with the CPUs kept awake. A floor is missed when the median of the
//! paired ratios misses it; the interval beside it says how sure that is.

use std::process::ExitCode;

use anyhow::Result;
use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use guest_images::Images;
use serde::Serialize;

use super::compare::Comparison;
use super::measure::Sample;
use super::session::{Plan, Session};
use super::stats::{Estimate, median};
use super::subject::Subject;
use super::uml::code;
use super::workload::Workload;
use super::{html, report};

/// What a floor is about.
#[derive(Clone, Copy, Debug, PartialEq)]
enum What {
    /// The main figure of wonton by that of passt.
    Ratio,
    /// The same of CPU seconds for each GB.
    CpuRatio,
    /// The main figure of wonton by itself.
    Absolute,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

/// Workload, what of it, and the bound.
const FLOORS: [(&str, What, Bound); 13] = [
    ("down1", What::Ratio, Bound::AtLeast(1.5)),
    ("up1", What::Ratio, Bound::AtLeast(2.0)),
    ("down8", What::Ratio, Bound::AtLeast(2.0)),
    ("up8", What::Ratio, Bound::AtLeast(2.0)),
    ("down16", What::Ratio, Bound::AtLeast(2.5)),
    ("down1", What::CpuRatio, Bound::AtMost(0.6)),
    ("down8", What::CpuRatio, Bound::AtMost(0.6)),
    ("down16", What::CpuRatio, Bound::AtMost(0.6)),
    ("up1", What::CpuRatio, Bound::AtMost(0.5)),
    ("up8", What::CpuRatio, Bound::AtMost(0.5)),
    ("rr", What::Ratio, Bound::AtMost(1.0)),
    ("crr", What::Ratio, Bound::AtLeast(1.0)),
    ("idle1000", What::Absolute, Bound::AtMost(1.0)),
];

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

/// A floor and what was measured.
#[derive(Debug, Serialize)]
struct Row {
    floor: String,
    bound: String,
    wonton: Option<f64>,
    passt: Option<f64>,
    measured: Option<Estimate>,
    /// The best run of wonton by the best of passt, which stalls of either do not touch.
    best: Option<f64>,
    /// Runs of wonton that gave no figure.
    failures: usize,
    held: bool,
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

fn row(session: &Session, idle: &Session, (name, what, bound): (&str, What, Bound)) -> Result<Row> {
    let workload = workloads([name].into_iter())?[0];
    let session = if matches!(workload, Workload::Idle(_)) {
        idle
    } else {
        session
    };
    let value = match what {
        What::CpuRatio => |sample: &Sample| sample.cpu_s_per_gb,
        What::Ratio | What::Absolute => |sample: &Sample| sample.value,
    };
    let measured = Estimate::of(&match what {
        What::Absolute => session.figures(1, workload, value),
        What::Ratio | What::CpuRatio => session.ratios(0, 1, workload, value),
    });
    let runs = session.of(1, workload).concat();
    let failures = runs.iter().filter(|run| run.value.is_none()).count();
    let label = match what {
        What::Ratio => format!("{name}, {} by passt's", workload.unit()),
        What::CpuRatio => format!("{name}, CPU s/GB by passt's"),
        What::Absolute => format!("{name}, {}", workload.unit()),
    };
    Ok(Row {
        floor: label,
        bound: match bound {
            Bound::AtLeast(bound) => format!("at least {bound}"),
            Bound::AtMost(bound) => format!("at most {bound}"),
        },
        passt: median(&session.figures(0, workload, value).concat()),
        wonton: median(&session.figures(1, workload, value).concat()),
        best: (what != What::Absolute)
            .then(|| best(session, workload, bound, value))
            .flatten(),
        // a run that failed is worse than a slow one
        held: failures == 0
            && measured.is_some_and(|measured| match bound {
                Bound::AtLeast(bound) => measured.median >= bound,
                Bound::AtMost(bound) => measured.median <= bound,
            }),
        failures,
        measured,
    })
}

/// The best run of wonton by the best of passt.
fn best(
    session: &Session,
    workload: Workload,
    bound: Bound,
    value: fn(&Sample) -> Option<f64>,
) -> Option<f64> {
    let of = |subject| {
        let values = session
            .figures(subject, workload, value)
            .concat()
            .into_iter();
        match bound {
            Bound::AtLeast(_) => values.reduce(f64::max),
            Bound::AtMost(_) => values.reduce(f64::min),
        }
    };
    Some(of(1)? / of(0)?)
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header([
        "floor",
        "bound",
        "passt",
        "wonton",
        "measured",
        "best by best",
        "",
    ]);
    for row in rows {
        table.add_row([
            row.floor.clone(),
            row.bound.clone(),
            report::figure(row.passt),
            report::figure(row.wonton),
            report::estimate(row.measured),
            report::figure(row.best),
            if row.held { "held" } else { "MISSED" }.to_owned(),
        ]);
    }
    table
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
