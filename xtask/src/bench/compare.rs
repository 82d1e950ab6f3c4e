//! Two subjects of a session, compared.

use serde::Serialize;

use super::calibrate::{MAX_DRIFT, MAX_TAKEN};
use super::measure::Sample;
use super::session::Session;
use super::stats::{Estimate, median};
use super::workload::Workload;

/// Runs of one subject that differ by more than this are a sign of stalls.
const ERRATIC: f64 = 4.0;

/// Fewer values than these have no interval that holds their median in 95 of 100 cases: the widest,
/// from the least to the greatest of `n`, misses it in `2 / 2^n`.
const MIN_PAIRS: usize = 6;

/// How B does beside A in one workload.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Comparison {
    pub(crate) workload: String,
    pub(crate) unit: &'static str,
    /// Median of the main figure of each.
    pub(crate) a: Option<f64>,
    pub(crate) b: Option<f64>,
    /// B by A.
    pub(crate) ratio: Option<Estimate>,
    /// The same of CPU seconds for each GB.
    pub(crate) cpu_a: Option<f64>,
    pub(crate) cpu_b: Option<f64>,
    pub(crate) cpu_ratio: Option<Estimate>,
    /// In words.
    pub(crate) verdict: String,
    /// Why it should not be relied on.
    pub(crate) doubts: Vec<String>,
}

impl Comparison {
    /// Compares subjects `a` and `b` of `session`.
    pub(crate) fn of(session: &Session, a: usize, b: usize, workload: Workload) -> Self {
        let value = |sample: &Sample| sample.value;
        let cpu = |sample: &Sample| sample.cpu_s_per_gb;
        let middle = |subject, figure: fn(&Sample) -> Option<f64>| {
            median(&session.figures(subject, workload, figure).concat())
        };
        let ratio = Estimate::of(&session.ratios(a, b, workload, value));
        Self {
            workload: workload.name(),
            unit: workload.unit(),
            a: middle(a, value),
            b: middle(b, value),
            cpu_a: middle(a, cpu),
            cpu_b: middle(b, cpu),
            cpu_ratio: Estimate::of(&session.ratios(a, b, workload, cpu)),
            verdict: verdict(ratio, workload.more_is_better()),
            doubts: doubts(session, a, b, workload, ratio),
            ratio,
        }
    }
}

/// What the ratio B by A says, with its interval in percent.
pub(super) fn verdict(ratio: Option<Estimate>, more_is_better: bool) -> String {
    let Some(ratio) = ratio else {
        return "not measured".to_owned();
    };
    if ratio.count < MIN_PAIRS {
        return format!("too few pairs to tell ({} of {MIN_PAIRS})", ratio.count);
    }
    let percent = |ratio: f64| 100.0 * (ratio - 1.0);
    let (low, high) = (percent(ratio.low), percent(ratio.high));
    let middle = percent(ratio.median).abs();
    if low <= 0.0 && high >= 0.0 {
        return format!("no difference shown ({low:+.0}..{high:+.0})");
    }
    let words = match (low > 0.0, more_is_better) {
        (true, true) => "B faster by",
        (false, true) => "B slower by",
        (true, false) => "B takes more by",
        (false, false) => "B takes less by",
    };
    let (near, far) = if low > 0.0 {
        (low, high)
    } else {
        (-high, -low)
    };
    format!("{words} {middle:.0}% ({near:.0}..{far:.0})")
}

/// Why `ratio` should not be relied on.
fn doubts(
    session: &Session,
    a: usize,
    b: usize,
    workload: Workload,
    ratio: Option<Estimate>,
) -> Vec<String> {
    let mut doubts = machine_doubts(session.drift(workload), session.taken(workload));
    for subject in [a, b] {
        let values = session.figures(subject, workload, |s| s.value).concat();
        if let Some(spread) = erratic(&values) {
            let name = &session.subjects[subject];
            doubts.push(format!("runs of {name} differ {spread}"));
        }
    }
    if ratio.is_some_and(|ratio| ratio.is_wide()) {
        doubts.push("the interval is wide".to_owned());
    }
    if session.of(a, workload).len() == 1 {
        doubts.push("there was one boot only".to_owned());
    }
    doubts
}

fn machine_doubts(drift: f64, taken: f64) -> Vec<String> {
    let mut doubts = Vec::new();
    if drift > MAX_DRIFT {
        doubts.push(format!("the machine's speed varied x{drift:.2}"));
    }
    if taken > MAX_TAKEN {
        doubts.push(format!("other programs had {taken:.0}% of a CPU"));
    }
    doubts
}

/// By how much runs of one subject differ, when that is so much that their median means little.
fn erratic(values: &[f64]) -> Option<String> {
    let low = values.iter().copied().reduce(f64::min)?;
    let high = values.iter().copied().reduce(f64::max)?;
    // what is nearly nothing, like the cost of idleness, may well be nothing the next time
    (high > 0.1 && high > ERRATIC * low).then(|| format!("from {low:.2} to {high:.2}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn estimate(median: f64, low: f64, high: f64) -> Option<Estimate> {
        Some(Estimate {
            median,
            low,
            high,
            count: 8,
        })
    }

    #[test]
    fn verdicts_are_one_line() {
        let say = |m, l, h, more| verdict(estimate(m, l, h), more);
        assert_eq!(say(1.09, 1.04, 1.15, true), "B faster by 9% (4..15)");
        assert_eq!(say(0.8, 0.75, 0.9, true), "B slower by 20% (10..25)");
        assert_eq!(say(0.8, 0.75, 0.9, false), "B takes less by 20% (10..25)");
        assert_eq!(say(1.01, 0.97, 1.05, true), "no difference shown (-3..+5)");
        assert_eq!(verdict(None, true), "not measured");
        let few = estimate(1.1, 1.1, 1.1).map(|e| Estimate { count: 2, ..e });
        assert_eq!(verdict(few, true), "too few pairs to tell (2 of 6)");
    }

    #[test]
    fn doubts_name_a_machine_that_changed_and_wide_intervals() {
        assert!(machine_doubts(1.1, 1.0).is_empty());
        assert_eq!(machine_doubts(1.4, 20.0).len(), 2);
        assert_eq!(erratic(&[5.0, 4.0, 9.0]), None);
        assert!(erratic(&[5.0, 0.02]).is_some());
    }
}
