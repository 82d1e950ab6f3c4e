//! `cargo xtask bench ab` of two option sets of `--net tap`, which only the lab has: `net=tap,vhost=off`
//! against `net=tap,vhost=on`.

use anyhow::{Context, Result, ensure};
use guest_images::Kernel;

use super::lab::{LabPlan, LabSubject};
use super::session::Plan;
use super::subject::{Program, Subject};
use crate::guest::Vmm;

/// The two as they run in the lab; `None` when neither is about a tap.
///
/// # Errors
/// Fails when only one is, or one is not wonton of this tree.
pub(super) fn subjects(pair: [&Subject; 2]) -> Result<Option<[LabSubject; 2]>> {
    let spec = |subject: &Subject| {
        let rest = subject.options.strip_prefix("net=tap")?;
        (rest.is_empty() || rest.starts_with(',')).then(|| format!("tap{rest}"))
    };
    if pair.iter().all(|subject| spec(subject).is_none()) {
        return Ok(None);
    }
    let mut found = Vec::new();
    for subject in pair {
        let spec = spec(subject).context("a tap is only compared with a tap")?;
        ensure!(
            subject.program == (Program::Wonton { revision: None }),
            "`{}`: the lab runs wonton of this tree only",
            subject.name
        );
        found.push(LabSubject::tap(&subject.name, Vmm::Wonton, &spec));
    }
    Ok(found.try_into().ok())
}

/// As many boots and seconds as `plan` has.
pub(super) fn plan(plan: &Plan) -> LabPlan {
    LabPlan {
        guest: Kernel::Trixie612,
        rounds: plan.boots,
        seconds: plan.seconds,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn taps_are_told_from_the_rest() {
        let subject = |text: &str| text.parse::<Subject>().unwrap();
        let pair = |a, b| subjects([&subject(a), &subject(b)]);
        assert!(pair("rx=copy", "rx=ring").unwrap().is_none());
        assert!(pair("net=tap,vhost=off", "net=tap").unwrap().is_some());
        assert!(pair("net=tap", "rx=ring").is_err());
        assert!(pair("net=tap", "rev:HEAD:net=tap").is_err());
    }
}
