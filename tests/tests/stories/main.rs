//! Stories told from the guest's side: stock kernels boot under wonton and use the network.
//!
//! All guests run in one boot of the lab (`guest_images::lab`), because that has a usable /dev/kvm
//! everywhere. The lab's script (`lab.sh`) boots each guest; each guest runs `guest.sh`; both report
//! one line per check, and each expected line is one test here. A line that never came is a failed
//! test, so nothing passes by not running.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, Result};
use guest_images::console::Record;
use guest_images::initramfs::files_cpio;
use guest_images::lab::{LabJob, run_lab_with};
use guest_images::{Images, host, target_dir};
use libtest_mimic::{Arguments, Failed, Trial};
use tests::{build_peer, build_wonton};

/// Kernel and processors of each guest.
const GUESTS: [(&str, u32); 4] = [("6.1", 1), ("6.1", 2), ("6.12", 1), ("6.12", 2)];

/// What every guest must report, in order of the scripts.
const CHECKS: [&str; 21] = [
    "boot",
    "cpus",
    "queues",
    "wires",
    "dhcp",
    "ping-gateway",
    "ping-host",
    "dns-udp",
    "dns-tcp",
    "download-64m",
    "upload-64m",
    "connections-200-in-a-row",
    "connections-50-at-once",
    "refused-at-once",
    "udp-echo",
    "forward",
    "link-down-up",
    "driver-rebind",
    "transport-rebind",
    "download-after-rebind",
    "power-off",
];

/// What a guest on a tap must report.
const TAP_CHECKS: [&str; 16] = [
    "boot",
    "ping",
    "iperf3-down",
    "iperf3-up",
    "download",
    "upload",
    "driver-rebind",
    "download-after-rebind",
    "baseline",
    "down-up",
    "down-up-in-log",
    "reboot",
    "ping-after-reboot",
    "removed",
    "power-off",
    "removed-in-log",
];

/// What a guest on a tap with two queues must report.
const QUEUES_CHECKS: [&str; 7] = [
    "boot",
    "ping",
    "guest-queues",
    "tap-queues",
    "iperf3-4-streams",
    "driver-rebind",
    "power-off",
];

/// What the guests that run once for all report.
const EXTRA: [&str; 4] = [
    "rx-copy/download-64m",
    "loopback-denied/refused",
    "reboot-pci/exit-code",
    "reboot-mmio/exit-code",
];

fn main() {
    let arguments = Arguments::from_args();
    let groups = [("user", user_trials()), ("tap", tap_trials())];
    // A group is run as a whole, or not at all when nothing of it is asked for.
    let filter = arguments.filter.clone().unwrap_or_default();
    let is_wanted = |names: &[String]| names.iter().any(|name| name.contains(&filter));
    let wanted: Vec<&str> = groups
        .iter()
        .filter(|(_, names)| is_wanted(names))
        .map(|(group, _)| *group)
        .collect();
    let script = Arc::new(wanted.join("\n"));
    let trials = groups
        .into_iter()
        .flat_map(|(_, names)| names)
        .map(|name| trial(name, script.clone()))
        .collect();
    libtest_mimic::run(&arguments, trials).exit();
}

fn user_trials() -> Vec<String> {
    let mut names = Vec::new();
    for (kernel, cpus) in GUESTS {
        for check in CHECKS {
            names.push(format!("linux-{kernel}/{cpus}cpu/{check}"));
        }
    }
    names.extend(EXTRA.map(str::to_owned));
    names
}

fn tap_trials() -> Vec<String> {
    let mut names = Vec::new();
    for transport in ["pci", "mmio"] {
        for vhost in ["on", "off"] {
            for kernel in ["6.1", "6.12"] {
                let guest = format!("linux-{kernel}/vhost-{vhost}/{transport}");
                names.extend(TAP_CHECKS.map(|check| format!("tap/{guest}/{check}")));
                names.extend(QUEUES_CHECKS.map(|check| format!("tap-two-queues/{guest}/{check}")));
            }
        }
    }
    names
}

fn trial(name: String, groups: Arc<String>) -> Trial {
    let wanted = name.clone();
    Trial::test(name, move || match lab(&groups) {
        Ok(records) => verdict(records, &wanted),
        Err(error) => Err(Failed::from(format!("the lab did not run: {error}"))),
    })
}

fn verdict(records: &[Record], wanted: &str) -> Result<(), Failed> {
    let mut guest = String::new();
    for record in records {
        let text = |name: &str| record.get(name).and_then(|value| value.as_str());
        if text("event") == Some("guest") {
            text("name").unwrap_or_default().clone_into(&mut guest);
        }
        // The guest's init says so itself.
        if text("event") == Some("init") && format!("{guest}/boot") == wanted {
            return Ok(());
        }
        if let Some(check) = text("check")
            && format!("{guest}/{check}") == wanted
        {
            let value = record
                .get("value")
                .map(ToString::to_string)
                .unwrap_or_default();
            return if record.get("ok").and_then(|ok| ok.as_bool()) == Some(true) {
                Ok(())
            } else {
                Err(Failed::from(value))
            };
        }
    }
    Err(Failed::from("it was not reported"))
}

/// The one boot that all tests look at.
fn lab(groups: &str) -> &'static Result<Vec<Record>, String> {
    static LAB: OnceLock<Result<Vec<Record>, String>> = OnceLock::new();
    LAB.get_or_init(|| run(groups).map_err(|error| format!("{error:#}")))
}

fn run(groups: &str) -> Result<Vec<Record>> {
    let peer = build_peer()?;
    let wonton = build_wonton()?;
    let images = Images::of_workspace()?;
    let lab = images.lab()?;
    let peer_bytes =
        std::fs::read(&peer).with_context(|| format!("cannot read {}", peer.display()))?;
    let overlay = files_cpio(&[
        ("bin/peer", 0o755, &peer_bytes),
        ("job.sh", 0o755, include_bytes!("guest.sh")),
        ("tap.sh", 0o644, include_bytes!("guest-tap.sh")),
    ])?;
    let ip = host::IP.installed(images.progress())?;
    let mut job = LabJob::new(include_str!("lab.sh"))
        .program("wonton", &wonton)
        .file("/usr/bin/peer", 0o755, peer_bytes.clone())
        .program("iproute2", &ip)
        .file("/job/overlay.cpio", 0o644, overlay)
        .file("/job/groups", 0o644, groups)
        .file("/job/tap.sh", 0o644, include_bytes!("lab-tap.sh"))
        .file("/job/do.sh", 0o755, include_bytes!("do.sh"))
        .timeout(Duration::from_secs(1800));
    job.cpus = 1;
    let log = target_dir().join("stories-console.log");
    eprintln!("stories: running in the lab, console in {}", log.display());
    let result = run_lab_with(&lab, &job, &log, &mut |record| {
        eprintln!("stories: {}", serde_line(record));
    })?;
    eprintln!("stories: the lab ran for {:.0?}", result.took);
    if let Err(error) = result.ensure_success() {
        // What was reported until then still counts.
        eprintln!("stories: {error:#}");
    }
    Ok(result.records)
}

fn serde_line(record: &Record) -> String {
    record
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect::<Vec<_>>()
        .join(" ")
}
