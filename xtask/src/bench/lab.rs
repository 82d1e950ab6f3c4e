//! `cargo xtask bench lab`: wonton and QEMU's microvm boot the same guest in turn, in one lab.
//!
//! With `--net user` each has its own user-mode network; with `--net tap` all have the same tap in turn:
//! wonton by itself, wonton with vhost-net and QEMU with vhost-net.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use guest_images::console::Record;
use guest_images::lab::{LabJob, run_lab_with};
use guest_images::{Images, Kernel, target_dir};
use serde::Serialize;

use super::stats::median;
use crate::build;
use crate::guest::{BOOT, FAR_SIDE, Vmm};
use crate::tap::LAB_TAP;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Which kernel: 6.1 or 6.12
    #[arg(long, default_value = "6.12")]
    guest: Kernel,
    /// What stands behind the network card
    #[arg(long, value_enum, default_value = "user")]
    net: Network,
    /// How often each of them runs
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Seconds of each iperf3 run
    #[arg(long, default_value_t = 5)]
    seconds: u32,
}

/// What stands behind the network card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Network {
    /// The user-mode network of each
    User,
    /// A tap of the lab
    Tap,
}

impl Network {
    fn subjects(self) -> Vec<LabSubject> {
        match self {
            Self::User => vec![
                LabSubject::new("wonton", Vmm::Wonton),
                LabSubject::new("qemu", Vmm::Qemu),
            ],
            Self::Tap => vec![
                LabSubject::tap("wonton vhost=off", Vmm::Wonton, "tap,vhost=off"),
                LabSubject::tap("wonton vhost=on", Vmm::Wonton, "tap,vhost=on"),
                LabSubject::tap(
                    "qemu vhost=on",
                    Vmm::Qemu,
                    "tap,id=n0,ifname=tap0,script=no,downscript=no,vhost=on",
                ),
            ],
        }
    }
}

/// A VMM with its network, as it is booted in the lab.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LabSubject {
    name: String,
    vmm: Vmm,
    /// For [`BOOT`]; empty for the user-mode network.
    net: String,
    /// Whether the lab has to set up `tap0`.
    tap: bool,
}

impl LabSubject {
    /// With its user-mode network.
    fn new(name: &str, vmm: Vmm) -> Self {
        Self {
            name: name.to_owned(),
            vmm,
            net: String::new(),
            tap: false,
        }
    }

    /// On the lab's `tap0`; `net` is the value of `--net` or `-netdev`.
    pub(super) fn tap(name: &str, vmm: Vmm, net: &str) -> Self {
        Self {
            net: net.to_owned(),
            tap: true,
            ..Self::new(name, vmm)
        }
    }

    /// The lines that boot it once.
    fn script(&self, guest: Kernel) -> String {
        let (vmm, net) = (self.vmm.name(), &self.net);
        let mut script = format!("report event=guest 'subject={}'\n", self.name);
        script += &format!("net='{net}' netdev='{net}'\nboot {vmm} {guest} wonton.mode=cmd\n");
        script
    }
}

/// How the subjects are compared.
pub(super) struct LabPlan {
    pub(super) guest: Kernel,
    pub(super) rounds: u32,
    pub(super) seconds: u32,
}

/// What is measured: the record it is in, its name, its unit, and whether more is better.
const METRICS: [(&str, &str, bool); 5] = [
    ("exec to init", "ms", false),
    ("idle, all threads", "% of a core", false),
    ("idle, not vCPUs", "% of a core", false),
    ("iperf3 down", "Mbit/s", true),
    ("iperf3 up", "Mbit/s", true),
];

/// Runs one iperf3 each way and reports the receiver's rate.
const GUEST: &str = r#"
rate() {
    iperf3 -c 10.0.2.2 -t SECONDS -f m $1 2>&1 | sed -n 's/.* \([0-9.]*\) Mbits\/sec.*receiver.*/\1/p' | tail -n 1
}
sleep 1
report event=idle
sleep 5
report event=idle-end
rate -R >/dev/null
report metric=down "mbit_s=$(rate -R)"
report metric=up "mbit_s=$(rate)"
"#;

/// One boot of one VMM.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Sample {
    subject: String,
    /// In the order of [`METRICS`]; `None` where the run did not get that far.
    values: [Option<f64>; METRICS.len()],
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let plan = LabPlan {
        guest: args.guest,
        rounds: args.rounds,
        seconds: args.seconds,
    };
    compare(&args.net.subjects(), &plan)
}

/// Boots the subjects in turn and prints how they differ.
pub(super) fn compare(subjects: &[LabSubject], plan: &LabPlan) -> Result<ExitCode> {
    let wonton = build::wonton()?;
    let images = Images::of_workspace()?;
    let lab = images.lab()?;
    let guest = lab.guest(plan.guest).context("the lab has no such guest")?;
    let script = GUEST.replace("SECONDS", &plan.seconds.to_string());
    // the same initramfs for all, with the bench's script in it
    let initrd = guest.with_files(&[("job.sh", 0o755, script.as_bytes())])?;
    let mut script = format!("payload_mib=1\n{BOOT}{FAR_SIDE}{LAB_TAP}far_side\n");
    if subjects.iter().any(|subject| subject.tap) {
        // made once, so that all find the same one
        script += "tunctl -t tap0 && lab_tap tap0 10.0.2 15\n";
    }
    for round in 0..plan.rounds {
        // A B, B A, …: none always comes first
        let mut turn = subjects.to_vec();
        turn.rotate_left(round as usize % subjects.len());
        for subject in turn {
            script += &subject.script(plan.guest);
        }
    }
    script += "exit 0\n";
    let per_boot = Duration::from_secs(60 + 4 * u64::from(plan.seconds));
    let total = plan.rounds * u32::try_from(subjects.len()).unwrap_or(u32::MAX);
    let job = LabJob::new(script)
        .program(
            "xtask",
            &std::env::current_exe().context("cannot find this program")?,
        )
        .program("wonton", &wonton)
        .file(&format!("images/{}/initrd", plan.guest), 0o644, initrd)
        .with_peer()
        .timeout(Duration::from_secs(60) + per_boot * total);
    let progress = images.progress().clone();
    progress.step("booting the lab");
    let log = target_dir().join("bench-lab-console.log");
    let mut boots = 0;
    let result = run_lab_with(&lab, &job, &log, &mut |record| {
        if record.get("event").is_some_and(|e| e == "guest") {
            boots += 1;
            progress.step(&format!("bench: boot {boots} of {total}"));
        }
    })?;
    progress.clear();
    result.ensure_success()?;
    let samples = samples(&result.records);
    let names: Vec<&str> = subjects.iter().map(|s| s.name.as_str()).collect();
    println!("{}", table(&samples, &names));
    println!(
        "Linux {} in the lab, {} rounds in turn, best at the left; ratios are of medians, to the first",
        plan.guest, plan.rounds
    );
    let path = target_dir().join("bench-lab.json");
    let json = serde_json::json!({ "metrics": METRICS, "samples": samples });
    std::fs::write(&path, format!("{json:#}\n"))
        .with_context(|| format!("cannot write {}", path.display()))?;
    let complete = samples
        .iter()
        .all(|sample| sample.values.iter().all(Option::is_some));
    Ok(if complete {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// One sample for each boot.
fn samples(records: &[Record]) -> Vec<Sample> {
    let mut samples: Vec<Sample> = Vec::new();
    for record in records {
        let text = |key: &str| record.get(key).and_then(|v| v.as_str());
        let number = |key: &str| record.get(key).and_then(serde_json::Value::as_f64);
        if text("event") == Some("guest") {
            samples.push(Sample {
                subject: text("subject").unwrap_or("?").to_owned(),
                values: [None; METRICS.len()],
            });
        }
        let Some(sample) = samples.last_mut() else {
            continue;
        };
        match (text("event"), text("metric")) {
            (Some("boot"), _) => sample.values[0] = number("exec_to_init_ms"),
            (Some("cost"), _) => {
                sample.values[1] = number("idle_cpu_percent");
                sample.values[2] = number("idle_own_percent");
            }
            (_, Some("down")) => sample.values[3] = number("mbit_s"),
            (_, Some("up")) => sample.values[4] = number("mbit_s"),
            _ => {}
        }
    }
    samples
}

fn table(samples: &[Sample], names: &[&str]) -> Table {
    let mut table = Table::new();
    let mut header = vec![String::new()];
    header.extend(names.iter().map(|name| (*name).to_owned()));
    header.extend(
        names[1..]
            .iter()
            .map(|name| format!("{} / {name}", names[0])),
    );
    table.load_style(UTF8_FULL_CONDENSED).set_header(header);
    for (index, (name, unit, more_is_better)) in METRICS.into_iter().enumerate() {
        let of = |subject: &&str| {
            let mut values: Vec<f64> = samples
                .iter()
                .filter(|s| s.subject == **subject)
                .filter_map(|s| s.values[index])
                .collect();
            values.sort_by(f64::total_cmp);
            if more_is_better {
                values.reverse();
            }
            values
        };
        let all: Vec<Vec<f64>> = names.iter().map(of).collect();
        let shown = |values: &Vec<f64>| {
            let list: Vec<String> = values
                .iter()
                .map(|v| format!("{v:.*}", usize::from(*v < 10.0)))
                .collect();
            if list.is_empty() {
                "none".to_owned()
            } else {
                format!("{} {unit}", list.join(" "))
            }
        };
        let first = median(&all[0]);
        let ratio = |other: &Vec<f64>| match (first, median(other)) {
            (Some(first), Some(other)) if other > 0.0 => format!("{:.2}x", first / other),
            _ => "not known".to_owned(),
        };
        let mut row = vec![name.to_owned()];
        row.extend(all.iter().map(shown));
        row.extend(all[1..].iter().map(ratio));
        table.add_row(row);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use guest_images::console::records;

    #[test]
    fn each_boot_is_a_sample_and_gaps_stay_gaps() {
        let log = "WONTON {\"event\":\"guest\",\"subject\":\"wonton\"}\nWONTON {\"event\":\"boot\",\"exec_to_init_ms\":400.0}\n\
            WONTON {\"metric\":\"down\",\"mbit_s\":200}\nWONTON {\"metric\":\"up\",\"mbit_s\":\"\"}\n\
            WONTON {\"event\":\"guest\",\"subject\":\"qemu\"}\nWONTON {\"metric\":\"down\",\"mbit_s\":100}\n";
        let samples = samples(&records(log));
        assert_eq!(
            samples[0].values,
            [Some(400.0), None, None, Some(200.0), None]
        );
        assert_eq!(samples[1].values, [None, None, None, Some(100.0), None]);
        let shown = table(&samples, &["wonton", "qemu"]).to_string();
        assert!(
            shown.contains("2.00x") && shown.contains("not known"),
            "{shown}"
        );
    }
}
