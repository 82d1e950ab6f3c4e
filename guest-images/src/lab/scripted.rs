//! Unattended runs.

use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::console::{self, Outcome, Record};

use super::command;
use super::image::LabImage;
use super::job::{LabJob, LabResult};

/// How often a lab that crashed is started again.
const ATTEMPTS: u32 = 3;

/// Runs `job` and waits for its end. `log` receives the console.
///
/// QEMU's multi-threaded emulation now and then loses a race when the lab's kernel patches its own
/// code, which ends in a kernel panic of the lab. Such a run says nothing about the job: it is
/// started again, at most twice, and [`LabResult::attempts`] tells.
pub fn run_lab(lab: &LabImage, job: &LabJob, log: &Path) -> Result<LabResult> {
    run_lab_with(lab, job, log, &mut |_| {})
}

/// As [`run_lab`], calling `on_record` with each record soon after it was reported (those of a
/// crashed attempt too).
pub fn run_lab_with(
    lab: &LabImage,
    job: &LabJob,
    log: &Path,
    on_record: &mut dyn FnMut(&Record),
) -> Result<LabResult> {
    let scratch = lab.run_dir()?;
    let initrd = scratch.path().join("initrd");
    job.write_initrd(lab, &initrd)?;
    if let Some(parent) = log.parent() {
        std::fs::create_dir_all(parent)
            .with_context(|| format!("cannot create {}", parent.display()))?;
    }
    let mut attempt = 1;
    loop {
        let mut result = run_once(lab, job, &initrd, scratch.path(), log, on_record)?;
        result.attempts = attempt;
        let crashed = result.exit.is_none() && !result.timed_out;
        if !crashed || attempt == ATTEMPTS {
            return Ok(result);
        }
        // keep the evidence beside the next attempt's log
        let _ = std::fs::copy(log, log.with_extension(format!("crash{attempt}.log")));
        attempt += 1;
    }
}

fn run_once(
    lab: &LabImage,
    job: &LabJob,
    initrd: &Path,
    scratch: &Path,
    log: &Path,
    on_record: &mut dyn FnMut(&Record),
) -> Result<LabResult> {
    let port = scratch.join("ttyS1");
    let errors = scratch.join("stderr");
    std::fs::write(log, "").with_context(|| format!("cannot write {}", log.display()))?;

    let mut command = command::qemu(lab, job, initrd, "job", "");
    for (id, path) in [("console", log), ("port", &port)] {
        let mut chardev = std::ffi::OsString::from(format!("file,id={id},path="));
        chardev.push(command::escaped(path));
        command
            .arg("-chardev")
            .arg(chardev)
            .arg("-serial")
            .arg(format!("chardev:{id}"));
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&errors)?);
    let started = Instant::now();
    let child = command
        .spawn()
        .with_context(|| format!("cannot start {}", lab.qemu.display()))?;
    let mut child = Killed(child);
    let mut tail = Tail::new(log)?;
    let (status, timed_out) = loop {
        let ended = child.0.try_wait().context("cannot wait for QEMU")?;
        for record in tail.records()? {
            on_record(&record);
        }
        match ended {
            Some(status) => break (Some(status), false),
            None if started.elapsed() > job.timeout => break (None, true),
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    drop(child);
    if status.is_some_and(|status| !status.success()) {
        let errors = std::fs::read_to_string(&errors).unwrap_or_default();
        bail!("QEMU failed to run the lab: {}", errors.trim());
    }
    let console = String::from_utf8_lossy(&std::fs::read(log)?).into_owned();
    let outcome = Outcome::parse(&String::from_utf8_lossy(
        &std::fs::read(&port).unwrap_or_default(),
    ));
    Ok(LabResult {
        exit: outcome.exit,
        timed_out,
        attempts: 1,
        records: console::records(&console),
        files: outcome.files,
        console: log.to_owned(),
        took: started.elapsed(),
    })
}

/// A child that does not outlive this.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // both fail only when it has ended
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Reads a log while it grows, in whole lines.
struct Tail {
    file: std::fs::File,
    read: u64,
    partial: Vec<u8>,
}

impl Tail {
    fn new(path: &Path) -> Result<Self> {
        let file =
            std::fs::File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Self {
            file,
            read: 0,
            partial: Vec::new(),
        })
    }

    fn records(&mut self) -> Result<Vec<Record>> {
        self.file.seek(SeekFrom::Start(self.read))?;
        self.read += self.file.read_to_end(&mut self.partial)? as u64;
        let Some(end) = self.partial.iter().rposition(|b| *b == b'\n') else {
            return Ok(Vec::new());
        };
        let rest = self.partial.split_off(end + 1);
        let lines = std::mem::replace(&mut self.partial, rest);
        Ok(console::records(&String::from_utf8_lossy(&lines)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn tail_gives_each_record_once_and_waits_for_whole_lines() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut tail = Tail::new(file.path()).unwrap();
        assert!(tail.records().unwrap().is_empty());
        file.write_all(b"noise\nWONTON {\"a\":1}\nWONTON {\"b\"")
            .unwrap();
        assert_eq!(tail.records().unwrap().len(), 1);
        file.write_all(b":2}\n").unwrap();
        let found = tail.records().unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0]["b"], 2);
        assert!(tail.records().unwrap().is_empty());
    }
}
