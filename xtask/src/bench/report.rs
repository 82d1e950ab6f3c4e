//! What came out, as tables for people and as JSON.

use std::path::PathBuf;

use anyhow::{Context, Result};
use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use guest_images::target_dir;
use serde::Serialize;

use super::compare::Comparison;
use super::measure::Sample;
use super::session::Session;
use super::stats::{Estimate, median};

/// A column that is a median: its heading and figure.
type Column = (&'static str, fn(&Sample) -> Option<f64>);

const COLUMNS: [Column; 8] = [
    ("CPU s/GB", |s| s.cpu_s_per_gb),
    ("syscalls/MB", |s| s.syscalls_per_mb),
    ("guest IRQ/MB", |s| s.interrupts_per_mb),
    ("tx kicks/MB", |s| s.tx_kicks_per_mb),
    ("rx kicks/MB", |s| s.rx_kicks_per_mb),
    ("lost %", |s| s.lost_percent),
    ("resent", |s| s.retransmits),
    ("p99 us", |s| s.p99_us),
];

/// One row for each workload and subject: medians, and the range of the main figure.
pub(crate) fn samples_table(session: &Session) -> Table {
    let columns: Vec<Column> = COLUMNS
        .into_iter()
        .filter(|(_, figure)| session.samples.iter().any(|s| figure(s).is_some()))
        .collect();
    let mut table = Table::new();
    let mut header = vec!["", "subject", "median", "range", "unit"];
    header.extend(columns.iter().map(|(name, _)| *name));
    table.load_style(UTF8_FULL_CONDENSED).set_header(header);
    for workload in &session.workloads {
        for (subject, name) in session.subjects.iter().enumerate() {
            let values = session.figures(subject, *workload, |s| s.value).concat();
            let low = values.iter().copied().reduce(f64::min);
            let high = values.iter().copied().reduce(f64::max);
            let mut row = vec![
                workload.name(),
                name.clone(),
                figure(median(&values)),
                format!("{} to {}", figure(low), figure(high)),
                workload.unit().to_owned(),
            ];
            row.extend(columns.iter().map(|(_, value)| {
                let values = session.figures(subject, *workload, *value).concat();
                figure(median(&values))
            }));
            table.add_row(row);
        }
    }
    table
}

/// One row for each workload.
pub(crate) fn comparison_table(comparisons: &[Comparison]) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header([
        "",
        "A",
        "B",
        "unit",
        "B/A",
        "CPU s/GB A",
        "B",
        "B/A",
        "verdict",
        "noisy",
    ]);
    for row in comparisons {
        table.add_row([
            row.workload.clone(),
            figure(row.a),
            figure(row.b),
            row.unit.to_owned(),
            estimate(row.ratio),
            figure(row.cpu_a),
            figure(row.cpu_b),
            estimate(row.cpu_ratio),
            row.verdict.clone(),
            row.doubts.join(", "),
        ]);
    }
    table
}

/// Round trips with idle connections open, where that was measured.
pub(crate) fn idle_lines(session: &Session) -> Vec<String> {
    let mut lines = Vec::new();
    for workload in &session.workloads {
        for (subject, name) in session.subjects.iter().enumerate() {
            let middle = |figure| median(&session.figures(subject, *workload, figure).concat());
            if let (Some(alone), Some(loaded)) =
                (middle(|s| s.p50_alone_us), middle(|s| s.p50_loaded_us))
            {
                lines.push(format!(
                    "{}: round trip of {name} {alone:.0} us without, {loaded:.0} us with the idle connections",
                    workload.name()
                ));
            }
        }
    }
    lines
}

/// A figure with three digits that count; `-` when there is none.
pub(crate) fn figure(value: Option<f64>) -> String {
    match value {
        None => "-".to_owned(),
        Some(value) => {
            let digits = match value.abs() {
                100.0.. => 0,
                10.0.. => 1,
                _ => 2,
            };
            format!("{value:.digits$}")
        }
    }
}

/// `1.09 (1.04..1.15)`.
pub(crate) fn estimate(value: Option<Estimate>) -> String {
    match value {
        None => "-".to_owned(),
        Some(e) => format!("{:.2} ({:.2}..{:.2})", e.median, e.low, e.high),
    }
}

/// What the figures stand on, in one line.
pub(crate) fn footnote(session: &Session) -> String {
    let moved = session.samples.iter().any(|s| s.cpu_s_per_gb.is_some());
    let counted = session.samples.iter().any(|s| s.syscalls_per_mb.is_some());
    let syscalls = match (moved, counted) {
        (false, _) => "",
        (true, true) => "; system calls by perf, in a warm-up run of their own",
        (true, false) => "; system calls not counted: there is no perf here, or it may not trace",
    };
    format!(
        "UML {}, passt {}, CPUs {}{syscalls}",
        session.uml_version,
        session.passt_version,
        if session.asleep {
            "left alone"
        } else {
            "kept awake"
        },
    )
}

/// Writes `value` to `target/bench/NAME` as JSON.
pub(crate) fn write_json(name: &str, value: &impl Serialize) -> Result<PathBuf> {
    write(name, &format!("{}\n", serde_json::to_string_pretty(value)?))
}

/// Writes `target/bench/NAME`.
pub(crate) fn write(name: &str, text: &str) -> Result<PathBuf> {
    let dir = target_dir().join("bench");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let path = dir.join(name);
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_three_digits() {
        let shown = [1234.5, 12.34, 1.234, 0.01].map(|v| figure(Some(v)));
        assert_eq!(shown, ["1234", "12.3", "1.23", "0.01"]);
        assert_eq!(figure(None), "-");
    }
}
