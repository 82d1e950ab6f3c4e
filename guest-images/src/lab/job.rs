//! What to run in the lab, and what comes back.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::console::Record;
use crate::initramfs::Initramfs;
use crate::userland;

use super::image::LabImage;

/// A file to lay into the lab.
#[derive(Clone, Debug)]
pub struct LabFile {
    /// Absolute path in the lab.
    pub path: String,
    /// Permission bits.
    pub mode: u32,
    /// Contents.
    pub data: Vec<u8>,
}

/// A script to run in the lab, and what it needs.
#[derive(Clone, Debug)]
pub struct LabJob {
    script: String,
    files: Vec<LabFile>,
    programs: Vec<(String, PathBuf)>,
    peer: bool,
    /// When the lab is killed; only for unattended runs.
    pub timeout: Duration,
    /// Processors of the lab.
    pub cpus: u32,
    /// Memory of the lab, in MiB.
    pub memory_mib: u32,
}

impl LabJob {
    /// A job that runs `script` with `sh` as root, in `/tmp`, and ends with its exit code.
    pub fn new(script: impl Into<String>) -> Self {
        Self {
            script: script.into(),
            files: Vec::new(),
            programs: Vec::new(),
            peer: false,
            timeout: Duration::from_secs(300),
            cpus: 1,
            memory_mib: 4096,
        }
    }

    /// Adds a file.
    pub fn file(mut self, path: &str, mode: u32, data: impl Into<Vec<u8>>) -> Self {
        self.files.push(LabFile {
            path: path.to_owned(),
            mode,
            data: data.into(),
        });
        self
    }

    /// Adds a program of this machine as `/usr/bin/NAME`, with the shared libraries it needs.
    pub fn program(mut self, name: &str, path: &Path) -> Self {
        self.programs.push((name.to_owned(), path.to_owned()));
        self
    }

    /// Puts QEMU and the kernels as ELF files (`/images/NAME/vmlinux`) into the lab as well.
    pub fn with_peer(mut self) -> Self {
        self.peer = true;
        self
    }

    /// Sets the time after which an unattended lab is killed.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Writes the initramfs of this job: the lab's, the peer's if wanted, the job's own.
    pub(super) fn write_initrd(&self, lab: &LabImage, path: &Path) -> Result<()> {
        let mut tree = Initramfs::new();
        for (name, program) in &self.programs {
            userland::add_host_program(&mut tree, &format!("usr/bin/{name}"), program)?;
        }
        for file in &self.files {
            tree.file(&file.path, file.mode, file.data.clone());
        }
        tree.file("job/run.sh", 0o755, self.script.as_bytes());
        let mut output = std::fs::File::create(path)
            .with_context(|| format!("cannot write {}", path.display()))?;
        let archives = [Some(&lab.initrd), self.peer.then_some(&lab.peer)];
        for archive in archives.into_iter().flatten() {
            let mut input = std::fs::File::open(archive)
                .with_context(|| format!("cannot read {}", archive.display()))?;
            std::io::copy(&mut input, &mut output)?;
        }
        tree.write_to(std::io::BufWriter::new(output))
            .with_context(|| format!("cannot write {}", path.display()))
    }
}

/// What an unattended job left.
#[derive(Clone, Debug)]
pub struct LabResult {
    /// The script's exit code; `None` when it did not come to its end.
    pub exit: Option<i32>,
    /// Whether it was killed for taking too long.
    pub timed_out: bool,
    /// How often the lab was started; more than 1 when its own kernel crashed.
    pub attempts: u32,
    /// All `WONTON {json}` lines of the console, in order.
    pub records: Vec<Record>,
    /// Files sent out with `lab-send`.
    pub files: BTreeMap<String, Vec<u8>>,
    /// The whole console.
    pub console: PathBuf,
    /// Wall time from the start of QEMU to its end.
    pub took: Duration,
}

impl LabResult {
    /// An error that says how the job ended unless its exit code was 0.
    pub fn ensure_success(&self) -> Result<()> {
        if self.exit == Some(0) {
            return Ok(());
        }
        let how = match self.exit {
            Some(code) => format!("ended with code {code}"),
            None if self.timed_out => format!("was killed after {:.0?}", self.took),
            None => "stopped before its script ended".to_owned(),
        };
        let log = std::fs::read(&self.console).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(12)..].join("\n  ");
        anyhow::bail!(
            "the job in the lab {how}; its console is in {}, the end of it:\n  {tail}",
            self.console.display()
        )
    }
}
