//! What a process costs, seen from outside.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use guest_images::host;
use rustix::process::{Pid, Signal, kill_process};

use crate::agent::cpu_ticks;

/// A child that does not outlive this.
pub(crate) struct Ended(pub(crate) Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // Both fail only when it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// CPU seconds that process `pid` has used, all threads together, in steps of 10 ms.
pub(crate) fn cpu_seconds(pid: u32) -> Result<f64> {
    let ticks = cpu_ticks(pid).with_context(|| format!("process {pid} is gone"))?;
    #[expect(clippy::cast_precision_loss, reason = "ticks of some hours at most")]
    Ok(ticks as f64 / 100.0)
}

/// CPU seconds that the present threads of process `pid` have run, in nanosecond steps. Those of
/// threads that ended are not in it.
pub(crate) fn run_seconds(pid: u32) -> Result<f64> {
    let mut sum = 0.0;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let path = thread?.path().join("schedstat");
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        let ran = text.split(' ').next().and_then(|ns| ns.parse::<f64>().ok());
        sum += ran.context("unexpected schedstat")? / 1e9;
    }
    Ok(sum)
}

/// Sends `signal` to process `pid`.
pub(crate) fn signal(pid: u32, signal: Signal) -> Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    kill_process(pid.context("no such process id")?, signal).context("cannot send a signal")
}

/// Waits until `condition` holds.
pub(crate) fn wait_until(
    what: &str,
    patience: Duration,
    mut condition: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let started = Instant::now();
    while !condition()? {
        ensure!(
            started.elapsed() < patience,
            "{what} did not happen within {} s",
            patience.as_secs()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Lets this process have as many open files as it may.
pub(crate) fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // with the old limit, only the workloads with many connections fail, and say why
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        },
    );
}

/// Counts the system calls of a process with `perf stat`.
///
/// Tracing slows every system call of the machine down, so nothing else is measured meanwhile.
pub(crate) struct SyscallCount {
    perf: Ended,
    path: PathBuf,
}

impl SyscallCount {
    /// Starts to count for all threads that `pid` has now. `None` where there is no perf or it may
    /// not trace.
    pub(crate) fn start(pid: u32, dir: &Path) -> Option<Self> {
        let perf = host::find("perf")?;
        let path = dir.join("perf.csv");
        let mut command = Command::new(perf);
        command
            .args(["stat", "-x,", "-e", "raw_syscalls:sys_enter", "-p"])
            .arg(pid.to_string())
            .arg("-o")
            .arg(&path);
        let child = host::bound(&command)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let mut perf = Ended(child);
        // it says nothing when it is ready
        std::thread::sleep(Duration::from_millis(200));
        if !matches!(perf.0.try_wait(), Ok(None)) {
            return None;
        }
        Some(Self { perf, path })
    }

    /// Stops and gives the count.
    pub(crate) fn stop(mut self) -> Option<f64> {
        signal(self.perf.0.id(), Signal::INT).ok()?;
        self.perf.0.wait().ok()?;
        count_of(&std::fs::read_to_string(&self.path).ok()?)
    }
}

/// The count in the CSV of `perf stat`.
fn count_of(csv: &str) -> Option<f64> {
    csv.lines()
        .find(|line| line.contains("sys_enter"))?
        .split(',')
        .next()?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn perf_writes_the_count_first() {
        let csv = "# started on Tue\n\n1234,,raw_syscalls:sys_enter,1000,100.00,,\n";
        assert_eq!(count_of(csv), Some(1234.0));
        assert_eq!(
            count_of("<not counted>,,raw_syscalls:sys_enter,0,0.00,,"),
            None
        );
    }

    #[test]
    fn this_process_has_used_some_cpu() {
        assert!(cpu_seconds(std::process::id()).unwrap() >= 0.0);
        assert!(run_seconds(std::process::id()).unwrap() > 0.0);
        assert!(cpu_seconds(0).is_err());
    }
}
