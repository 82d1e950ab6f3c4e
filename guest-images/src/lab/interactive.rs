//! The lab with the user's terminal as its console.

use std::process::Stdio;

use anyhow::{Context, Result};
use rustix::termios::{self, OptionalActions, Termios};

use crate::console::Outcome;

use super::command;
use super::image::LabImage;
use super::job::LabJob;

/// How often a lab that crashed before its job began is started.
const ATTEMPTS: u32 = 3;

/// Runs `job` with this terminal as the lab's console; every key, Ctrl-C too, goes to it. Returns
/// the script's exit code.
pub fn run_interactive(lab: &LabImage, job: &LabJob) -> Result<i32> {
    let scratch = lab.run_dir()?;
    let initrd = scratch.path().join("initrd");
    job.write_initrd(lab, &initrd)?;
    let port = scratch.path().join("ttyS1");

    let size = termios::tcgetwinsize(rustix::stdio::stdin())
        .ok()
        .filter(|size| size.ws_row > 0);
    let size = size.map_or(String::new(), |s| {
        format!("lab.rows={} lab.cols={}", s.ws_row, s.ws_col)
    });
    let mut attempt = 1;
    loop {
        let mut command = command::qemu(lab, job, &initrd, "console", &size);
        let mut chardev = std::ffi::OsString::from("file,id=port,path=");
        chardev.push(command::escaped(&port));
        command
            .args([
                "-chardev",
                "stdio,id=console,signal=off",
                "-serial",
                "chardev:console",
            ])
            .arg("-chardev")
            .arg(chardev)
            .args(["-serial", "chardev:port"])
            .stdin(Stdio::inherit());
        let terminal = Terminal::save();
        let status = command
            .status()
            .with_context(|| format!("cannot start {}", lab.qemu.display()));
        drop(terminal);
        let status = status?;
        let outcome = Outcome::parse(&String::from_utf8_lossy(
            &std::fs::read(&port).unwrap_or_default(),
        ));
        // a lab whose kernel crashed while booting (see `run_lab`) is simply started again
        if !outcome.started && status.success() && attempt < ATTEMPTS {
            attempt += 1;
            eprintln!(
                "\nthe lab crashed while booting (a race in QEMU's emulation); starting it again"
            );
            continue;
        }
        return outcome
            .exit
            .with_context(|| format!("the lab stopped before its job ended (QEMU: {status})"));
    }
}

/// The terminal as it was, put back on drop: QEMU does so itself unless it is killed.
struct Terminal(Option<Termios>);

impl Terminal {
    fn save() -> Self {
        Self(termios::tcgetattr(rustix::stdio::stdin()).ok())
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if let Some(saved) = &self.0 {
            // nothing is left to be done about a terminal that went away
            let _ = termios::tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, saved);
        }
    }
}
