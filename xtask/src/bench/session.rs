//! Subjects measured in turn: all of them run at once, and one of them works at a time.
//!
//! Within one boot the subjects take turns as A B, B A, …, so that what changes slowly on the machine
//! meets all alike. Fresh boots repeat that.

use anyhow::Result;
use guest_images::{Images, host};
use serde::Serialize;

use super::awake::Awake;
use super::backend::Programs;
use super::calibrate;
use super::echo::Echo;
use super::measure::{Bench, Sample};
use super::process::raise_descriptor_limit;
use super::station::Station;
use super::subject::Subject;
use super::workload::Workload;

/// How often and how long.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Plan {
    /// Fresh boots of all guests
    #[arg(long, default_value_t = 2)]
    pub(crate) boots: u32,
    /// Turns of each workload and subject in one boot
    #[arg(long, default_value_t = 4)]
    pub(crate) rounds: u32,
    /// Seconds of each run
    #[arg(long, default_value_t = 2)]
    pub(crate) seconds: u32,
    /// Let idle CPUs halt; otherwise a process of the lowest class on each keeps them awake
    #[arg(long)]
    pub(crate) asleep: bool,
}

/// All that was measured.
#[derive(Debug, Serialize)]
pub(crate) struct Session {
    /// Names, in the order of [`Sample::subject`].
    pub(crate) subjects: Vec<String>,
    pub(crate) asleep: bool,
    /// Feature bits of each subject's card, bit 0 first.
    pub(crate) features: Vec<String>,
    pub(crate) uml_version: String,
    pub(crate) passt_version: String,
    pub(crate) samples: Vec<Sample>,
    #[serde(skip)]
    pub(crate) workloads: Vec<Workload>,
}

impl Session {
    /// Measures `workloads` of `subjects`.
    pub(crate) fn run(
        images: &Images,
        subjects: &[Subject],
        workloads: &[Workload],
        plan: &Plan,
    ) -> Result<Self> {
        raise_descriptor_limit();
        host::IPERF3.installed(images.progress())?;
        images.progress().step("building what is measured");
        let programs = Programs::build(images.uml()?, subjects)?;
        let bench = Bench {
            echo: Echo::start()?,
            seconds: plan.seconds,
        };
        let _awake = if plan.asleep {
            None
        } else {
            Some(Awake::start()?)
        };
        let mut session = Self {
            subjects: subjects.iter().map(|s| s.name.clone()).collect(),
            asleep: plan.asleep,
            features: vec![String::new(); subjects.len()],
            uml_version: programs.kit().uml_version.clone(),
            passt_version: programs.kit().passt_version.clone(),
            samples: Vec::new(),
            workloads: workloads.to_vec(),
        };
        for boot in 0..plan.boots {
            let shown = format!("boot {} of {}", boot + 1, plan.boots);
            images.progress().step(&format!("{shown}: starting guests"));
            let mut stations: Vec<_> = subjects
                .iter()
                .map(|subject| Station::start(&programs, subject))
                .collect::<Result<_>>()?;
            for (features, station) in session.features.iter_mut().zip(&stations) {
                station.features().clone_into(features);
            }
            for workload in workloads {
                let mut syscalls = Vec::new();
                for (subject, station) in subjects.iter().zip(&mut stations) {
                    images.progress().step(&format!(
                        "{shown}: {}, warming {} up",
                        workload.name(),
                        subject.name
                    ));
                    // what fails here fails again below, where it is kept
                    syscalls.push(bench.warm_up(station, *workload).ok().flatten());
                }
                for round in 0..plan.rounds {
                    for subject in turns(subjects.len(), round) {
                        images.progress().step(&format!(
                            "{shown}: {}, round {} of {}, {}",
                            workload.name(),
                            round + 1,
                            plan.rounds,
                            subjects[subject].name
                        ));
                        let measured = bench.measure(&mut stations[subject], *workload);
                        let sample = measured.unwrap_or_else(|error| Sample {
                            error: Some(format!("{error:#}")),
                            ..Sample::default()
                        });
                        session.samples.push(Sample {
                            subject,
                            workload: workload.name(),
                            boot,
                            round,
                            syscalls_per_mb: syscalls[subject],
                            ..sample
                        });
                    }
                }
            }
        }
        images.progress().clear();
        Ok(session)
    }

    /// The samples of a subject's workload, boot by boot.
    pub(crate) fn of(&self, subject: usize, workload: Workload) -> Vec<Vec<&Sample>> {
        let name = workload.name();
        let mut boots: Vec<Vec<&Sample>> = Vec::new();
        for sample in &self.samples {
            if sample.subject != subject || sample.workload != name {
                continue;
            }
            match boots.last_mut() {
                Some(boot) if boot[0].boot == sample.boot => boot.push(sample),
                _ => boots.push(vec![sample]),
            }
        }
        boots
    }

    /// One figure of a subject's workload, boot by boot.
    pub(crate) fn figures(
        &self,
        subject: usize,
        workload: Workload,
        figure: fn(&Sample) -> Option<f64>,
    ) -> Vec<Vec<f64>> {
        let boots = self.of(subject, workload);
        let values = |boot: Vec<&Sample>| boot.into_iter().filter_map(figure).collect();
        boots.into_iter().map(values).collect()
    }

    /// The figure of `b` by that of `a` in the same round, boot by boot.
    pub(crate) fn ratios(
        &self,
        a: usize,
        b: usize,
        workload: Workload,
        figure: fn(&Sample) -> Option<f64>,
    ) -> Vec<Vec<f64>> {
        let boots = self.of(a, workload).into_iter().zip(self.of(b, workload));
        boots
            .map(|(a, b)| {
                a.into_iter()
                    .zip(b)
                    .filter_map(|(a, b)| {
                        let (a, b) = (figure(a)?, figure(b)?);
                        (a > 0.0).then(|| b / a)
                    })
                    .collect()
            })
            .collect()
    }

    /// By how much the machine's speed varied while `workload` was measured.
    pub(crate) fn drift(&self, workload: Workload) -> f64 {
        let name = workload.name();
        let samples = self.samples.iter().filter(|s| s.workload == name);
        calibrate::drift(samples.map(|s| s.machine_ns).filter(|ns| *ns > 0.0))
    }

    /// How much of a CPU other programs had while `workload` was measured, percent.
    pub(crate) fn taken(&self, workload: Workload) -> f64 {
        let name = workload.name();
        let samples = self.samples.iter().filter(|s| s.workload == name);
        let taken: Vec<f64> = samples.map(|s| s.taken_percent).collect();
        #[expect(clippy::cast_precision_loss, reason = "a count of samples")]
        let count = taken.len().max(1) as f64;
        taken.iter().sum::<f64>() / count
    }

    /// What went wrong, each once.
    pub(crate) fn errors(&self) -> Vec<String> {
        let mut errors: Vec<String> = self
            .samples
            .iter()
            .filter_map(|sample| {
                let error = sample.error.as_ref()?;
                Some(format!(
                    "{}, {}: {error}",
                    self.subjects[sample.subject], sample.workload
                ))
            })
            .collect();
        errors.dedup();
        errors
    }
}

/// The subjects in the order of one round: first to last, then last to first, and so on.
fn turns(subjects: usize, round: u32) -> Vec<usize> {
    let mut order: Vec<usize> = (0..subjects).collect();
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOWN: Workload = Workload::USUAL[0];

    fn sample(subject: usize, boot: u32, value: Option<f64>) -> Sample {
        Sample {
            subject,
            boot,
            workload: DOWN.name(),
            value,
            ..Sample::default()
        }
    }

    #[test]
    fn pairs_are_of_the_same_round_and_gaps_drop_out() {
        let session = Session {
            subjects: vec!["a".into(), "b".into()],
            asleep: false,
            features: vec![],
            uml_version: String::new(),
            passt_version: String::new(),
            workloads: vec![DOWN],
            // A B, B A; the second boot has no first B
            samples: vec![
                sample(0, 0, Some(1.0)),
                sample(1, 0, Some(2.0)),
                sample(1, 0, Some(9.0)),
                sample(0, 0, Some(3.0)),
                sample(0, 1, Some(4.0)),
                sample(1, 1, None),
                sample(1, 1, Some(4.0)),
                sample(0, 1, Some(8.0)),
            ],
        };
        let ratios = session.ratios(0, 1, DOWN, |sample| sample.value);
        assert_eq!(ratios, [vec![2.0, 3.0], vec![0.5]]);
    }

    #[test]
    fn turns_go_there_and_back() {
        assert_eq!(turns(2, 0), [0, 1]);
        assert_eq!(turns(3, 1), [2, 1, 0]);
    }
}
