//! `cargo xtask bench ab` in the lab: two option sets of `wonton run` in turn, in one outer VM.
//!
//! Each boot runs all workloads; boots go A B, B A, …. Besides the figures themselves it counts how often
//! the guest left guest mode, and how often the VMM had to serve a memory access (KVM's counters).

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use guest_images::console::Record;
use guest_images::lab::{LabJob, run_lab_with};
use guest_images::{Images, Kernel, libraries, target_dir};
use serde::Serialize;

use super::compare::verdict;
use super::report::{estimate, figure, write_json};
use super::run_options;
use super::session::Plan;
use super::stats::{Estimate, median};
use super::subject::{Program, Subject};
use super::workload::{Direction, Workload};
use crate::build;
use crate::guest::FAR_SIDE;

const KERNEL: Kernel = Kernel::Trixie612;

/// Where the guest puts this program and its libraries.
const TOOLS: &str = "/tmp/tools";

/// How the guest measures: `measure NAME COMMAND…`, where the command prints its figure and how many
/// requests or megabytes that took.
const GUEST: &str = r#"
stream() {
    iperf3 -c 10.0.2.2 -t "$seconds" -f m "$@" 2>&1 | awk '
        /receiver/ { for (i = 2; i <= NF; i++) {
            if ($i == "Mbits/sec") rate = $(i - 1)
            if ($i == "MBytes") amount = $(i - 1)
            if ($i == "GBytes") amount = 1024 * $(i - 1) } }
        END { print rate, amount }'
}
trips() { # VERB FIELD
    "$tools/ld-linux-x86-64.so.2" --library-path "$tools" "$tools/xtask" agent "$1" 10.0.2.2:8081 "$seconds" |
        sed "s/.*\"count\":\([0-9.]*\).*\"$2\":\([0-9.]*\).*/\2 \1/"
}
measure() {
    name=$1
    shift
    report event=mark
    got=$("$@")
    report event=mark
    report event=run "workload=$name" "value=${got% *}" "amount=${got#* }"
}
mkdir -p $tools
for file in $files; do
    wget -q -O "$tools/$file" "http://10.0.2.2:8080/$file" && chmod 755 "$tools/$file"
done
"#;

/// One figure of one run, boot or both.
#[derive(Clone, Copy, Debug)]
struct Metric {
    name: &'static str,
    more_is_better: bool,
    of: fn(&Run) -> Option<f64>,
}

const MAIN: fn(&Run) -> Option<f64> = |run| run.value;
const EXITS: Metric = Metric {
    name: "exits",
    more_is_better: false,
    of: |run| run.exits,
};
const MMIO_EXITS: Metric = Metric {
    name: "MMIO exits",
    more_is_better: false,
    of: |run| run.mmio_exits,
};

/// One run of a workload; the boot itself is one, too.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct Run {
    workload: String,
    value: Option<f64>,
    /// For each request or megabyte, those by port accesses left out: the console makes them.
    exits: Option<f64>,
    mmio_exits: Option<f64>,
}

/// The runs of one boot.
#[derive(Clone, Debug, Default, Serialize)]
struct Boot {
    subject: usize,
    runs: Vec<Run>,
}

/// One line of the result.
#[derive(Debug, Serialize)]
struct Row {
    what: String,
    unit: String,
    a: Option<f64>,
    b: Option<f64>,
    ratio: Option<Estimate>,
    verdict: String,
}

/// Measures and prints.
pub(super) fn run(
    images: &Images,
    subjects: [&Subject; 2],
    workloads: &[Workload],
    plan: &Plan,
) -> Result<ExitCode> {
    let mut arguments = Vec::new();
    for subject in subjects {
        ensure!(
            subject.program == Program::Wonton { revision: None },
            "`{}`: the lab compares options of this tree's wonton",
            subject.name
        );
        arguments.push(run_options::arguments(&subject.options)?);
    }
    let wonton = build::wonton()?;
    let own = std::env::current_exe().context("cannot find this program")?;
    let files = tools(&own)?;
    let lab = images.lab()?;
    let guest = lab.guest(KERNEL).context("the lab has no such guest")?;
    let initrd = guest.with_files(&[("job.sh", 0o755, &job(workloads, plan, &files)?)])?;
    let boots = 2 * plan.boots;
    let runs = u64::try_from(workloads.len())? * u64::from(plan.rounds);
    let per_boot = Duration::from_secs(90 + runs * (4 + u64::from(plan.seconds)));
    let job = LabJob::new(script(&arguments, plan, &files))
        .program("xtask", &own)
        .program("wonton", &wonton)
        .file(&format!("images/{KERNEL}/initrd"), 0o644, initrd)
        .timeout(Duration::from_secs(60) + per_boot * boots);
    let progress = images.progress();
    progress.step("booting the lab");
    let mut boot = 0;
    let log = target_dir().join("bench-ab-console.log");
    let result = run_lab_with(&lab, &job, &log, &mut |record| {
        if is(record, "guest") {
            boot += 1;
            progress.step(&format!("boot {boot} of {boots}"));
        }
    })?;
    progress.clear();
    result.ensure_success()?;
    let boots = parse(&result.records);
    let rows = rows(&boots, workloads);
    println!("A is {}, B is {}", subjects[0].name, subjects[1].name);
    println!("{}", table(&rows));
    println!(
        "Linux {KERNEL} in the lab, {} boots of each in turn, {} rounds of {} s; exits are those of the \
         guest's CPUs without port accesses, MMIO exits those that reach wonton",
        plan.boots, plan.rounds, plan.seconds
    );
    let json = serde_json::json!({
        "a": subjects[0].name, "b": subjects[1].name, "rows": rows, "boots": boots,
    });
    println!("{}", write_json("ab-lab.json", &json)?.display());
    let complete = rows.iter().all(|row| row.ratio.is_some());
    Ok(if complete {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// This program and its libraries, as paths in the lab.
fn tools(own: &Path) -> Result<Vec<String>> {
    let libraries = libraries::closure(own, Path::new("/"))?;
    let paths = libraries.keys().map(|path| path.display().to_string());
    Ok(std::iter::once("/usr/bin/xtask".to_owned())
        .chain(paths)
        .collect())
}

/// What the lab does.
fn script(arguments: &[String], plan: &Plan, files: &[String]) -> String {
    let mut script = format!(
        "payload_mib=1\n{FAR_SIDE}far_side\nxtask agent echo 8081 &\n\
         mount -t debugfs debugfs /sys/kernel/debug\ncp -L {} /tmp/www/\n",
        files.join(" ")
    );
    for round in 0..plan.boots {
        let mut pair = [0, 1];
        // A B, B A, …: neither always comes first
        pair.rotate_left(round as usize % 2);
        for subject in pair {
            script += &format!(
                "report event=guest subject={subject}\n\
                 xtask agent boot -- wonton run --kernel /images/{KERNEL}/bzImage \
                 --initrd /images/{KERNEL}/initrd {} \
                 --cmdline 'quiet loglevel=3 wonton.mode=cmd' </dev/null 2>/tmp/vmm.err\n\
                 [ $? = 0 ] || {{ cat /tmp/vmm.err; exit 1; }}\n",
                arguments[subject]
            );
        }
    }
    script + "exit 0\n"
}

/// What the guest does.
fn job(workloads: &[Workload], plan: &Plan, files: &[String]) -> Result<Vec<u8>> {
    let names: Vec<&str> = files
        .iter()
        .filter_map(|path| path.rsplit('/').next())
        .collect();
    let mut job = format!("tools={TOOLS} files='{}'\n{GUEST}", names.join(" "));
    for workload in workloads {
        let command = command(*workload)?;
        job += &format!(
            "seconds=1\n{command} >/dev/null\nseconds={}\n",
            plan.seconds
        );
        for _ in 0..plan.rounds {
            job += &format!("measure {} {command}\n", workload.name());
        }
    }
    Ok((job + "exit 0\n").into_bytes())
}

fn command(workload: Workload) -> Result<String> {
    Ok(match workload {
        Workload::Tcp(Direction::Down, streams) => format!("stream -R -P {streams}"),
        Workload::Tcp(Direction::Up, streams) => format!("stream -P {streams}"),
        Workload::RequestResponse => "trips rr p50_us".to_owned(),
        Workload::Connections => "trips crr per_second".to_owned(),
        Workload::Udp(..) | Workload::Idle(_) => {
            anyhow::bail!(
                "workload {} is not one of those that run in the lab",
                workload.name()
            )
        }
    })
}

fn is(record: &Record, event: &str) -> bool {
    record.get("event").is_some_and(|found| found == event)
}

/// The boots in order. What was not reported is not there.
fn parse(records: &[Record]) -> Vec<Boot> {
    let mut boots: Vec<Boot> = Vec::new();
    // counters at the last two marks
    let mut marks = [None, None];
    for record in records {
        let number = |name: &str| record.get(name).and_then(serde_json::Value::as_f64);
        if is(record, "guest") {
            let subject = number("subject").map_or(0, |subject| usize::from(subject != 0.0));
            let runs = Vec::new();
            boots.push(Boot { subject, runs });
            marks = [None, None];
        }
        let Some(boot) = boots.last_mut() else {
            continue;
        };
        if is(record, "boot") {
            boot.runs.push(Run {
                workload: BOOT.to_owned(),
                value: number("exec_to_init_ms"),
                ..Run::default()
            });
        } else if is(record, "exits") {
            let counter = |name: &str| record.get("counters")?.get(name)?.as_f64();
            let all = counter("exits").zip(counter("io_exits"));
            let mmio = counter("mmio_exits");
            marks = [marks[1], all.map(|(all, io)| all - io).zip(mmio)];
        } else if is(record, "run") {
            let workload = record.get("workload").and_then(|name| name.as_str());
            let amount = number("amount").filter(|amount| *amount > 0.0);
            let each = |pick: fn((f64, f64)) -> f64| {
                let [before, after] = marks;
                Some((pick(after?) - pick(before?)) / amount?)
            };
            boot.runs.push(Run {
                workload: workload.unwrap_or_default().to_owned(),
                value: number("value"),
                exits: each(|(all, _)| all),
                mmio_exits: each(|(_, mmio)| mmio),
            });
        }
    }
    boots
}

/// Name of the run that is the boot itself.
const BOOT: &str = "boot";

fn rows(boots: &[Boot], workloads: &[Workload]) -> Vec<Row> {
    let time = Metric {
        name: "",
        more_is_better: false,
        of: MAIN,
    };
    let mut rows = vec![row(boots, BOOT, time, "ms to init")];
    for workload in workloads {
        let (unit, of_what) = match workload {
            Workload::Tcp(..) => ("Mbit/s", "MB"),
            Workload::RequestResponse => ("us, median", "request"),
            _ => (workload.unit(), "request"),
        };
        let main = Metric {
            name: "",
            more_is_better: workload.more_is_better(),
            of: MAIN,
        };
        let name = workload.name();
        rows.push(row(boots, &name, main, unit));
        for metric in [EXITS, MMIO_EXITS] {
            rows.push(row(boots, &name, metric, &format!("for each {of_what}")));
        }
    }
    rows
}

fn row(boots: &[Boot], workload: &str, metric: Metric, unit: &str) -> Row {
    let figures = |subject: usize| -> Vec<Vec<f64>> {
        let of_subject = boots.iter().filter(|boot| boot.subject == subject);
        let runs = of_subject.map(|boot| boot.runs.iter().filter(|run| run.workload == workload));
        runs.map(|runs| runs.filter_map(metric.of).collect())
            .collect()
    };
    let (a, b) = (figures(0), figures(1));
    let ratios: Vec<Vec<f64>> = a
        .iter()
        .zip(&b)
        .map(|(a, b)| {
            let pairs = a.iter().zip(b).filter(|(a, _)| **a > 0.0);
            pairs.map(|(a, b)| b / a).collect()
        })
        .collect();
    let ratio = Estimate::of(&ratios);
    Row {
        what: format!("{workload} {}", metric.name).trim().to_owned(),
        unit: unit.to_owned(),
        a: median(&a.concat()),
        b: median(&b.concat()),
        ratio,
        verdict: verdict(ratio, metric.more_is_better),
    }
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table
        .load_style(UTF8_FULL_CONDENSED)
        .set_header(["", "A", "B", "unit", "B/A", "verdict"]);
    for row in rows {
        table.add_row([
            row.what.clone(),
            figure(row.a),
            figure(row.b),
            row.unit.clone(),
            estimate(row.ratio),
            row.verdict.clone(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use guest_images::console::records;

    #[test]
    fn runs_are_counted_between_their_marks() {
        let exits = |all: u32, io: u32, mmio: u32| {
            format!(
                "WONTON {{\"event\":\"exits\",\"counters\":{{\"exits\":{all},\"io_exits\":{io},\"mmio_exits\":{mmio}}}}}\n"
            )
        };
        let run = "WONTON {\"event\":\"run\",\"workload\":\"rr\",\"value\":250,\"amount\":100}\n";
        let mut log = String::new();
        for (subject, cost) in [(0, 900), (1, 300)] {
            log += &format!("WONTON {{\"event\":\"guest\",\"subject\":{subject}}}\n");
            log += "WONTON {\"event\":\"boot\",\"exec_to_init_ms\":4000.0}\n";
            log += &(exits(1000, 500, 10) + &exits(1100 + cost, 600, 10 + cost) + run);
        }
        let boots = parse(&records(&log));
        let first = &boots[0].runs[1];
        assert_eq!((first.value, first.exits), (Some(250.0), Some(9.0)));
        let rows = rows(&boots, &[Workload::RequestResponse]);
        assert_eq!((rows[0].a, rows[0].b), (Some(4000.0), Some(4000.0)));
        assert_eq!(rows[3].what, "rr MMIO exits");
        assert_eq!((rows[3].a, rows[3].b), (Some(9.0), Some(3.0)));
        assert!(table(&rows).to_string().contains("rr exits"));
    }

    #[test]
    fn scripts_name_what_they_need() {
        let plan = Plan {
            boots: 2,
            rounds: 3,
            seconds: 4,
            asleep: false,
        };
        let files = ["/usr/bin/xtask".to_owned(), "/lib64/ld.so".to_owned()];
        let script = script(&["--net user".into(), "--net null".into()], &plan, &files);
        let order: Vec<_> = script
            .match_indices("subject=")
            .map(|(at, _)| &script[at + 8..=at + 8])
            .collect();
        assert_eq!(order, ["0", "1", "1", "0"]);
        let job = job(&[Workload::RequestResponse], &plan, &files).unwrap();
        let job = String::from_utf8(job).unwrap();
        assert_eq!(job.matches("measure rr trips rr p50_us").count(), 3);
        assert!(job.contains("files='xtask ld.so'"));
        assert!(command(Workload::Idle(1000)).is_err());
    }
}
