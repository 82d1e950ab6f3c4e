//! `cargo xtask bench lab`: wonton and QEMU's microvm boot the same guest in turn, in one lab.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use guest_images::console::Record;
use guest_images::lab::{LabJob, run_lab_with};
use guest_images::{Images, Kernel, target_dir};
use serde::Serialize;

use crate::build;
use crate::guest::{BOOT, FAR_SIDE, Vmm};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Which kernel: 6.1 or 6.12
    #[arg(long, default_value = "6.12")]
    guest: Kernel,
    /// How often each of the two runs
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Seconds of each iperf3 run
    #[arg(long, default_value_t = 5)]
    seconds: u32,
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
    vmm: String,
    /// In the order of [`METRICS`]; `None` where the run did not get that far.
    values: [Option<f64>; METRICS.len()],
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let wonton = build::wonton()?;
    let images = Images::of_workspace()?;
    let lab = images.lab()?;
    let guest = lab.guest(args.guest).context("the lab has no such guest")?;
    let script = GUEST.replace("SECONDS", &args.seconds.to_string());
    // the same initramfs for both, with the bench's script in it
    let initrd = guest.with_files(&[("job.sh", 0o755, script.as_bytes())])?;
    let mut script = format!("payload_mib=1\n{BOOT}{FAR_SIDE}far_side\n");
    for round in 0..args.rounds {
        // A B, B A, …: neither always comes first
        let mut pair = [Vmm::Wonton, Vmm::Qemu];
        pair.rotate_left(round as usize % 2);
        for vmm in pair {
            let name = vmm.name();
            script += &format!(
                "report event=guest vmm={name}\nboot {name} {} wonton.mode=cmd\n",
                args.guest
            );
        }
    }
    script += "exit 0\n";
    let per_boot = Duration::from_secs(60 + 4 * u64::from(args.seconds));
    let job = LabJob::new(script)
        .program(
            "xtask",
            &std::env::current_exe().context("cannot find this program")?,
        )
        .program("wonton", &wonton)
        .file(&format!("images/{}/initrd", args.guest), 0o644, initrd)
        .with_peer()
        .timeout(Duration::from_secs(60) + per_boot * 2 * args.rounds);
    let progress = images.progress().clone();
    progress.step("booting the lab");
    let log = target_dir().join("bench-lab-console.log");
    let mut boots = 0;
    let result = run_lab_with(&lab, &job, &log, &mut |record| {
        if record.get("event").is_some_and(|e| e == "guest") {
            boots += 1;
            progress.step(&format!("bench: boot {boots} of {}", 2 * args.rounds));
        }
    })?;
    progress.clear();
    result.ensure_success()?;
    let samples = samples(&result.records);
    println!("{}", table(&samples));
    println!(
        "Linux {} in the lab, {} rounds in turn, best at the left; ratios are of medians",
        args.guest, args.rounds
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
                vmm: text("vmm").unwrap_or("?").to_owned(),
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

fn table(samples: &[Sample]) -> Table {
    let mut table = Table::new();
    table
        .load_style(UTF8_FULL_CONDENSED)
        .set_header(["", "wonton", "qemu", "wonton is"]);
    for (index, (name, unit, more_is_better)) in METRICS.into_iter().enumerate() {
        let of = |vmm: Vmm| {
            let mut values: Vec<f64> = samples
                .iter()
                .filter(|s| s.vmm == vmm.name())
                .filter_map(|s| s.values[index])
                .collect();
            values.sort_by(f64::total_cmp);
            if more_is_better {
                values.reverse();
            }
            values
        };
        let (ours, theirs) = (of(Vmm::Wonton), of(Vmm::Qemu));
        let shown = |values: &[f64]| {
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
        let ratio = match (median(&ours), median(&theirs)) {
            (Some(ours), Some(theirs)) if more_is_better => {
                format!("{:.2}x as much", ours / theirs)
            }
            (Some(ours), Some(theirs)) => format!("{:.2}x as much", ours / theirs),
            _ => "not known".to_owned(),
        };
        table.add_row([name.to_owned(), shown(&ours), shown(&theirs), ratio]);
    }
    table
}

/// The median of sorted values.
fn median(sorted: &[f64]) -> Option<f64> {
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use guest_images::console::records;

    #[test]
    fn each_boot_is_a_sample_and_gaps_stay_gaps() {
        let log = "WONTON {\"event\":\"guest\",\"vmm\":\"wonton\"}\nWONTON {\"event\":\"boot\",\"exec_to_init_ms\":400.0}\n\
            WONTON {\"metric\":\"down\",\"mbit_s\":200}\nWONTON {\"metric\":\"up\",\"mbit_s\":\"\"}\n\
            WONTON {\"event\":\"guest\",\"vmm\":\"qemu\"}\nWONTON {\"metric\":\"down\",\"mbit_s\":100}\n";
        let samples = samples(&records(log));
        assert_eq!(
            samples[0].values,
            [Some(400.0), None, None, Some(200.0), None]
        );
        assert_eq!(samples[1].values, [None, None, None, Some(100.0), None]);
        let shown = table(&samples).to_string();
        assert!(
            shown.contains("2.00x as much") && shown.contains("not known"),
            "{shown}"
        );
    }

    #[test]
    fn median_of_odd_and_even() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0][..1]), Some(3.0));
        assert_eq!(median(&[1.0, 2.0, 9.0]), Some(2.0));
        assert_eq!(median(&[1.0, 3.0]), Some(2.0));
    }
}
