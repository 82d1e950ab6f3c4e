//! A subject that runs: a process behind a vhost-user socket.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use guest_images::{UmlKit, host};
use rustix::process::Signal;

use super::process::{Ended, signal, wait_until};
use super::revision;
use super::subject::{Program, Subject};

const PATIENCE: Duration = Duration::from_secs(10);

/// The programs of some subjects, built.
pub(crate) struct Programs {
    kit: UmlKit,
    wontons: BTreeMap<Option<String>, PathBuf>,
}

impl Programs {
    /// Builds what `subjects` need.
    pub(crate) fn build(kit: UmlKit, subjects: &[Subject]) -> Result<Self> {
        let mut wontons = BTreeMap::new();
        for subject in subjects {
            if let Program::Wonton { revision } = &subject.program
                && !wontons.contains_key(revision)
            {
                let path = revision::wonton(revision.as_deref())?;
                wontons.insert(revision.clone(), path);
            }
        }
        Ok(Self { kit, wontons })
    }

    pub(crate) fn kit(&self) -> &UmlKit {
        &self.kit
    }

    /// Starts `subject`, its socket and files in `dir`, and waits for the socket.
    ///
    /// The guest's 10.0.2.2 is the loopback of this machine.
    pub(crate) fn start(&self, subject: &Subject, dir: &Path) -> Result<Backend> {
        let socket = dir.join("socket");
        let stats = dir.join("stats.json");
        let (mut command, stats) = match &subject.program {
            Program::Wonton { revision } => {
                let path = self
                    .wontons
                    .get(revision)
                    .context("this revision was not built")?;
                let mut command = Command::new(path);
                command.args(["serve", "--net", &subject.net(), "--socket"]);
                command.arg(&socket).arg("--stats").arg(&stats);
                (command, Some(stats))
            }
            Program::Passt => {
                let mut command = self.kit.passt();
                command
                    .args(["--vhost-user", "-f", "-4", "--no-dhcp-dns", "-D", "none"])
                    .args(["-a", "10.0.2.15", "-n", "24", "-g", "10.0.2.2", "-i", "lo"])
                    .args(["--map-host-loopback", "10.0.2.2", "-s"])
                    .arg(&socket);
                (command, None)
            }
        };
        command = host::bound(&command);
        let log = dir.join("log");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log)?);
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {}", subject.name))?;
        let mut process = Ended(child);
        wait_until("a listening socket", PATIENCE, || {
            if let Some(status) = process.0.try_wait()? {
                let log = std::fs::read_to_string(&log).unwrap_or_default();
                bail!("it ended with {status}: {}", log.trim());
            }
            Ok(socket.exists())
        })
        .with_context(|| format!("cannot start {}", subject.name))?;
        Ok(Backend {
            process,
            socket,
            stats,
            log,
        })
    }
}

/// A running back-end; it ends when dropped.
pub(crate) struct Backend {
    process: Ended,
    /// Where a front-end connects.
    pub(crate) socket: PathBuf,
    /// Where it writes its counters when asked to, if it does.
    stats: Option<PathBuf>,
    log: PathBuf,
}

impl Backend {
    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.process.0.id()
    }

    /// What it says about itself: counters by name, or nothing.
    pub(crate) fn counters(&self) -> Result<BTreeMap<String, f64>> {
        let Some(stats) = &self.stats else {
            return Ok(BTreeMap::new());
        };
        let _ = std::fs::remove_file(stats);
        signal(self.pid(), Signal::USR1)?;
        wait_until("writing of counters", PATIENCE, || Ok(stats.exists()))?;
        let text = std::fs::read(stats)?;
        serde_json::from_slice(&text).context("unexpected counters")
    }

    /// The end of what it printed, for an error.
    pub(crate) fn log_tail(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().rev().take(5).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("\n")
    }
}
