//! The floors, and how a session stands to them.

use anyhow::{Context, Result};
use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use serde::Serialize;

use super::measure::Sample;
use super::report;
use super::session::Session;
use super::stats::{Estimate, median};
use super::workload::Workload;

/// What a floor is about.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum What {
    /// The main figure of wonton by that of passt.
    Ratio,
    /// The same of CPU seconds for each GB.
    CpuRatio,
    /// The main figure of wonton by itself.
    Absolute,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

/// Workload, what of it, and the bound.
pub(crate) const FLOORS: [(&str, What, Bound); 13] = [
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

/// A floor and what was measured.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) floor: String,
    pub(crate) bound: String,
    pub(crate) wonton: Option<f64>,
    pub(crate) passt: Option<f64>,
    pub(crate) measured: Option<Estimate>,
    /// The best run of wonton by the best of passt, which stalls of either do not touch.
    pub(crate) best: Option<f64>,
    /// Runs of wonton that gave no figure.
    pub(crate) failures: usize,
    pub(crate) held: bool,
}

/// How `session` (or `idle`, of passt and wonton in that order) stands to one floor.
pub(crate) fn row(
    session: &Session,
    idle: &Session,
    (name, what, bound): (&str, What, Bound),
) -> Result<Row> {
    let workload = Workload::named(name)?.pop().context("no workload")?;
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

/// The rows for people.
pub(crate) fn table(rows: &[Row]) -> Table {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn session(workload: Workload, pairs: &[(f64, Option<f64>)]) -> Session {
        let sample = |subject, value| Sample {
            subject,
            value,
            workload: workload.name(),
            ..Sample::default()
        };
        Session {
            subjects: vec!["passt".into(), "wonton".into()],
            asleep: false,
            features: vec![],
            uml_version: String::new(),
            passt_version: String::new(),
            workloads: vec![workload],
            samples: pairs
                .iter()
                .flat_map(|(a, b)| [sample(0, Some(*a)), sample(1, *b)])
                .collect(),
        }
    }

    #[test]
    fn a_floor_is_held_by_the_median_and_missed_by_a_failed_run() {
        let down = Workload::named("down1").unwrap()[0];
        let empty = session(down, &[]);
        let floor = ("down1", What::Ratio, Bound::AtLeast(1.5));
        let of = |pairs: &[_]| row(&session(down, pairs), &empty, floor).unwrap();
        let good = of(&[(1.0, Some(1.4)), (1.0, Some(1.6)), (1.0, Some(2.0))]);
        assert!(good.held && good.best == Some(2.0), "{good:?}");
        assert!(!of(&[(1.0, Some(1.4)), (1.0, Some(1.4))]).held);
        let failed = of(&[(1.0, Some(2.0)), (1.0, None)]);
        assert!(!failed.held && failed.failures == 1, "{failed:?}");
        assert!(!of(&[]).held);
    }
}
