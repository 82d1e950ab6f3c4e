//! `cargo xtask smoke`: both kernels boot and use the network, unattended.
//!
//! One boot of the lab (or this machine's KVM, when the lab is not needed, is left to `run`): the
//! far side is set up on the lab's loopback, then each kernel boots and runs
//! `guest-images/init/smoke.sh`.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use guest_images::console::Record;
use guest_images::lab::{LabJob, LabResult, run_lab_with};
use guest_images::{Images, Kernel, target_dir};
use serde::Serialize;

use crate::build;
use crate::guest::{BOOT, FAR_SIDE, Vmm};

/// What must be reported for each kernel, besides `boot` and `power-off`.
const CHECKS: [&str; 6] = ["dhcp", "ping", "dns", "sha256", "iperf3-down", "iperf3-up"];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only this kernel: 6.1 or 6.12
    #[arg(long)]
    guest: Option<Kernel>,
    /// What boots the guest
    #[arg(long, value_enum, default_value = "wonton")]
    vmm: Vmm,
    /// Give up after so many seconds
    #[arg(long, default_value_t = 170)]
    timeout: u64,
}

/// One row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Check {
    kernel: String,
    check: String,
    ok: bool,
    value: String,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let started = Instant::now();
    let images = Images::of_workspace()?;
    let lab = images.lab()?;
    let kernels: Vec<Kernel> = Kernel::ALL
        .into_iter()
        .filter(|k| args.guest.is_none_or(|wanted| wanted == *k))
        .collect();
    let mut script = format!("{BOOT}{FAR_SIDE}far_side\n");
    for kernel in &kernels {
        script += &format!(
            "report event=guest kernel=linux-{kernel}\nboot {} {kernel} wonton.mode=smoke\n",
            args.vmm.name()
        );
    }
    script += "exit 0\n";
    let mut job = LabJob::new(script)
        .program(
            "xtask",
            &std::env::current_exe().context("cannot find this program")?,
        )
        .timeout(Duration::from_secs(args.timeout));
    job = match args.vmm {
        Vmm::Wonton => job.program("wonton", &build::wonton()?),
        Vmm::Qemu => job.with_peer(),
    };
    let log = target_dir().join("smoke-console.log");
    let progress = images.progress().clone();
    progress.step("booting the lab");
    let result = run_lab_with(&lab, &job, &log, &mut |record| {
        if let Some(name) = record
            .get("check")
            .or_else(|| record.get("event"))
            .and_then(|v| v.as_str())
        {
            progress.step(&format!("smoke: {name}"));
        }
    })?;
    progress.clear();
    let names: Vec<&str> = kernels.iter().map(|k| k.name()).collect();
    let checks = checks(&result.records, &names);
    report(args, &checks, &result, started.elapsed())
}

/// Sorts the records by kernel and adds what was not reported as failed.
fn checks(records: &[Record], kernels: &[&str]) -> Vec<Check> {
    let mut all = Vec::new();
    for kernel in kernels {
        let marker = format!("linux-{kernel}");
        let is_guest = |r: &&Record| r.get("event").is_some_and(|e| e == "guest");
        let mine: Vec<&Record> = records
            .iter()
            .skip_while(|r| !(is_guest(r) && r.get("kernel").is_some_and(|k| *k == marker)))
            .skip(1)
            .take_while(|r| !is_guest(r))
            .collect();
        let event = |name: &str| {
            mine.iter()
                .find(|r| r.get("event").is_some_and(|e| e == name))
        };
        let mut push = |check: &str, ok: bool, value: String| {
            all.push(Check {
                kernel: (*kernel).to_owned(),
                check: check.to_owned(),
                ok,
                value,
            });
        };
        match event("boot").and_then(|r| r.get("exec_to_init_ms")?.as_f64()) {
            Some(ms) => push("boot", true, format!("{:.2} s from exec to init", ms / 1e3)),
            None => push("boot", false, "init did not run".to_owned()),
        }
        for name in CHECKS {
            let found = mine
                .iter()
                .find(|r| r.get("check").is_some_and(|c| c == name));
            let ok = found.and_then(|r| r.get("ok")?.as_bool()).unwrap_or(false);
            let value = found
                .and_then(|r| r.get("value"))
                .map(|value| match value.as_str() {
                    Some(text) => text.to_owned(),
                    None => value.to_string(),
                });
            push(name, ok, value.unwrap_or_else(|| "not reported".to_owned()));
        }
        match event("end").and_then(|r| r.get("code")?.as_i64()) {
            Some(code) => push("power-off", code == 0, format!("exit code {code}")),
            None => push("power-off", false, "the guest did not power off".to_owned()),
        }
    }
    all
}

fn report(args: &Args, checks: &[Check], result: &LabResult, took: Duration) -> Result<ExitCode> {
    let mut table = Table::new();
    table
        .load_style(UTF8_FULL_CONDENSED)
        .set_header(["kernel", "check", "", "value"]);
    for check in checks {
        let mark = if check.ok { "ok" } else { "FAIL" };
        table.add_row([&check.kernel, &check.check, mark, &check.value]);
    }
    println!("{table}");
    if result.attempts > 1 {
        println!(
            "smoke: the emulated lab itself crashed {} times before this run",
            result.attempts - 1
        );
    }
    let failed = checks.iter().filter(|c| !c.ok).count();
    let ok = failed == 0 && result.exit == Some(0);
    let json = serde_json::json!({
        "vmm": args.vmm.name(),
        "ok": ok,
        "seconds": took.as_secs_f64(),
        "checks": checks,
    });
    let path = target_dir().join("smoke.json");
    std::fs::write(&path, format!("{json:#}\n"))
        .with_context(|| format!("cannot write {}", path.display()))?;
    if ok {
        println!(
            "smoke: {} checks passed in {:.0} s, in the lab",
            checks.len(),
            took.as_secs_f64()
        );
        return Ok(ExitCode::SUCCESS);
    }
    println!(
        "smoke: {failed} of {} checks failed after {:.0} s",
        checks.len(),
        took.as_secs_f64()
    );
    println!(
        "smoke: the whole console is in {}",
        result.console.display()
    );
    result.ensure_success()?;
    Ok(ExitCode::FAILURE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use guest_images::console::records;

    #[test]
    fn rows_are_sorted_by_kernel_and_missing_ones_fail() {
        let log = "WONTON {\"event\":\"guest\",\"kernel\":\"linux-6.1\"}\nWONTON {\"event\":\"end\",\"code\":3}\n\
            WONTON {\"event\":\"guest\",\"kernel\":\"linux-6.12\"}\nWONTON {\"event\":\"boot\",\"exec_to_init_ms\":6500}\n\
            WONTON {\"check\":\"dhcp\",\"ok\":true,\"value\":\"10.0.2.15\"}\nWONTON {\"event\":\"end\",\"code\":0}\n";
        let rows = checks(&records(log), &["6.1", "6.12"]);
        assert_eq!(rows.len(), 2 * (CHECKS.len() + 2));
        assert!(rows[..8].iter().all(|row| row.kernel == "6.1" && !row.ok));
        assert_eq!(rows[7].value, "exit code 3");
        assert_eq!(rows[8].value, "6.50 s from exec to init");
        assert!(rows[9].ok && rows[9].value == "10.0.2.15");
        assert!(!rows[10].ok && rows[10].value == "not reported");
        assert!(rows[15].ok);
    }
}
