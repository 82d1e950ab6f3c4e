//! A running `wonton serve`.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tests::release_wonton;

/// How long anything may take that takes no time.
pub(crate) const SOON: Duration = Duration::from_secs(10);

/// The process, in a directory of its own. Dropping it kills it.
pub(crate) struct Serve {
    child: Child,
    dir: TempDir,
}

impl Serve {
    /// Starts it with `--net NET`, and waits until it listens.
    pub(crate) fn start(net: &str) -> Result<Self> {
        Self::start_in(tempfile::tempdir()?, net)
    }

    /// As [`Self::start`], with the socket in `dir`.
    pub(crate) fn start_in(dir: TempDir, net: &str) -> Result<Self> {
        let socket = dir.path().join("socket");
        let stderr = File::create(dir.path().join("stderr"))?;
        let child = Command::new(release_wonton()?)
            .args(["serve", "--net", net, "--socket"])
            .arg(&socket)
            .arg("--stats")
            .arg(dir.path().join("stats"))
            .stdin(Stdio::null())
            .stderr(stderr)
            .spawn()
            .context("cannot start wonton")?;
        let mut serve = Self { child, dir };
        let deadline = Instant::now() + SOON;
        // A front-end that leaves at once. An old socket refuses, a new one accepts.
        while UnixStream::connect(&socket).is_err() {
            if let Some(status) = serve.child.try_wait()? {
                bail!("wonton serve ended with {status}: {}", serve.stderr());
            }
            ensure!(Instant::now() < deadline, "wonton serve does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(serve)
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    pub(crate) fn stats(&self) -> PathBuf {
        self.dir.path().join("stats")
    }

    pub(crate) fn stderr(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("stderr")).unwrap_or_default()
    }

    pub(crate) fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.child.id())?;
        kill_process(Pid::from_raw(pid).context("no process")?, signal)?;
        Ok(())
    }

    /// Waits for its end; the directory stays.
    pub(crate) fn wait(mut self) -> Result<(ExitStatus, TempDir)> {
        let status = end(&mut self.child)?;
        let dir = std::mem::replace(&mut self.dir, tempfile::tempdir()?);
        Ok((status, dir))
    }

    /// Its open descriptors and its threads.
    pub(crate) fn holds(&self) -> Result<(usize, usize)> {
        let count = |what: &str| -> Result<usize> {
            let path = format!("/proc/{}/{what}", self.child.id());
            Ok(std::fs::read_dir(path)?.count())
        };
        Ok((count("fd")?, count("task")?))
    }

    /// What those descriptors are, for an error.
    pub(crate) fn descriptors(&self) -> String {
        let Ok(entries) = std::fs::read_dir(format!("/proc/{}/fd", self.child.id())) else {
            return String::new();
        };
        let links = entries.flatten().map(|entry| {
            let link = std::fs::read_link(entry.path()).unwrap_or_default();
            link.display().to_string()
        });
        links.collect::<Vec<_>>().join(" ")
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for `child` to end by itself.
pub(crate) fn end(child: &mut Child) -> Result<ExitStatus> {
    let deadline = Instant::now() + SOON;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        ensure!(Instant::now() < deadline, "wonton does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}
