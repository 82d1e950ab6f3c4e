//! A running UML guest.

use std::io::Write as _;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process_group};

use super::UmlKit;
use super::console::{Console, Output};
use crate::cache;
use crate::host;
use crate::initramfs::Initramfs;
use crate::userland;

/// How a guest is made.
#[derive(Clone, Debug)]
pub struct UmlOptions {
    /// Memory in MiB.
    pub mem_mib: u32,
    /// MTU of eth0 in bytes.
    pub mtu: u32,
    /// More words for the kernel's command line; `NAME=VALUE` arrives in init's environment.
    pub arguments: Vec<String>,
    /// Programs of this machine, `(name, path)`, each laid into the guest as `/usr/bin/NAME` with
    /// its libraries.
    pub programs: Vec<(String, PathBuf)>,
    /// How long it may take to come up.
    pub patience: Duration,
}

impl Default for UmlOptions {
    fn default() -> Self {
        Self {
            mem_mib: 512,
            mtu: 1500,
            arguments: Vec::new(),
            programs: Vec::new(),
            patience: Duration::from_secs(30),
        }
    }
}

/// A guest with eth0 at 10.0.2.15/24 and the gateway 10.0.2.2. Dropping it ends it at once.
#[derive(Debug)]
pub struct UmlGuest {
    child: Child,
    stdin: ChildStdin,
    console: Console,
    commands: u32,
    features: String,
    release: String,
    /// The initramfs of this boot, when it has one of its own.
    _scratch: Option<tempfile::TempDir>,
}

impl UmlGuest {
    /// Boots a guest whose network card is the vhost-user back-end that listens at `socket`.
    ///
    /// Fails when it is not up after [`UmlOptions::patience`], with the end of its console.
    /// The guest dies with the thread that calls this.
    pub fn boot(kit: &UmlKit, socket: &Path, options: &UmlOptions) -> Result<Self> {
        let (initrd, scratch) = initrd(kit, options)?;
        let mut command = host::bound(&kit.kernel());
        command
            .arg(format!("mem={}M", options.mem_mib))
            .arg(format!("initrd={}", initrd.display()))
            .arg(format!("virtio_uml.device={}:1", socket.display()))
            .args([
                "con=null",
                "con0=fd:0,fd:1",
                "root=/dev/ram0",
                "quiet",
                "loglevel=3",
            ])
            .arg(format!("guest_mtu={}", options.mtu))
            .args(&options.arguments)
            // UML writes its own messages there, before there is a console
            .stderr(Stdio::null())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0);
        let mut child = command.spawn().context("cannot start User Mode Linux")?;
        let stdin = child.stdin.take().context("no stdin")?;
        let stdout = child.stdout.take().context("no stdout")?;
        let mut guest = Self {
            child,
            stdin,
            console: Console::new(stdout),
            commands: 0,
            features: String::new(),
            release: String::new(),
            _scratch: scratch,
        };
        let (ready, _) = guest
            .console
            .wait_for("@@ready ", Instant::now() + options.patience)
            .with_context(|| {
                format!(
                    "the UML guest at {} did not come up within {} s",
                    socket.display(),
                    options.patience.as_secs()
                )
            })?;
        let (features, release) = ready.split_once(' ').unwrap_or(("", &ready));
        features.clone_into(&mut guest.features);
        release.clone_into(&mut guest.release);
        guest.console.forget();
        Ok(guest)
    }

    /// Runs one line with the guest's `sh`, in `/tmp`. Its standard input is empty.
    ///
    /// Fails when it takes longer than `timeout`; the guest is of no more use then. A command that
    /// exits with another code than 0 is not an error here.
    pub fn exec(&mut self, command: &str, timeout: Duration) -> Result<Output> {
        ensure!(
            !command.contains('\n') && command.len() < 4000,
            "a guest command is one line of less than 4,000 bytes"
        );
        self.commands += 1;
        let id = self.commands;
        let deadline = Instant::now() + timeout;
        let what = || format!("`{command}` in the guest");
        writeln!(self.stdin, "{id} {command}").with_context(what)?;
        self.console
            .wait_for(&format!("@@begin {id}"), deadline)
            .with_context(what)?;
        let (code, text) = self
            .console
            .wait_for(&format!("@@end {id} "), deadline)
            .with_context(what)?;
        self.console.forget();
        Ok(Output {
            code: code.parse().with_context(what)?,
            text: text.strip_suffix('\n').unwrap_or(&text).to_owned(),
        })
    }

    /// The virtio features that guest and back-end agreed on, bit 0 first, as sysfs shows them.
    pub fn features(&self) -> &str {
        &self.features
    }

    /// The guest's `uname -r`.
    pub fn release(&self) -> &str {
        &self.release
    }

    /// The id of UML's main process, which is also that of its process group.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for UmlGuest {
    fn drop(&mut self) {
        // guest processes are processes here, in the group of the kernel
        if let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.wait();
    }
}

/// The kit's initramfs, or a copy with the options' programs laid over it.
fn initrd(kit: &UmlKit, options: &UmlOptions) -> Result<(PathBuf, Option<tempfile::TempDir>)> {
    if options.programs.is_empty() {
        return Ok((kit.initrd.clone(), None));
    }
    let scratch = tempfile::Builder::new()
        .prefix(cache::RUN_PREFIX)
        .tempdir_in(&kit.scratch)
        .with_context(|| format!("cannot make a directory in {}", kit.scratch.display()))?;
    let path = scratch.path().join("initrd");
    std::fs::copy(&kit.initrd, &path)
        .with_context(|| format!("cannot copy {}", kit.initrd.display()))?;
    let mut tree = Initramfs::new();
    for (name, program) in &options.programs {
        userland::add_host_program(&mut tree, &format!("usr/bin/{name}"), program)?;
    }
    let file = std::fs::File::options().append(true).open(&path)?;
    tree.write_to(std::io::BufWriter::new(file))
        .with_context(|| format!("cannot write {}", path.display()))?;
    Ok((path, Some(scratch)))
}
