//! `cargo xtask bench start`: what it costs to start a guest, on this machine's own KVM.
//!
//! The guest need not get far, so the emulated KVM of a development machine will do.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_images::{GuestImage, Images, Kernel};

use super::process::Ended;
use crate::agent::overhead_kib;
use crate::build;

/// Bounds that the project holds itself to.
const MAX_START_MS: f64 = 25.0;
const MAX_OVERHEAD_KIB: u64 = 12 << 10;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Which kernel: 6.1 or 6.12
    #[arg(long, default_value = "6.12")]
    guest: Kernel,
    /// How often it is started
    #[arg(long, default_value_t = 15)]
    rounds: usize,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    ensure!(args.rounds > 0, "--rounds must be at least 1");
    let wonton = build::wonton()?;
    let images = Images::of_workspace()?;
    let guest = images.guest(args.guest)?;
    images.progress().clear();
    let mut starts = Vec::new();
    let mut overheads = Vec::new();
    for _ in 0..args.rounds {
        let (start, overhead) = once(&wonton, &guest)?;
        starts.push(start);
        overheads.push(overhead);
    }
    starts.sort_by(f64::total_cmp);
    overheads.sort_unstable();
    let (middle, last) = (args.rounds / 2, args.rounds - 1);
    let (start, overhead) = (starts[middle], overheads[middle]);
    println!(
        "exec to first KVM_RUN  median {start:.1} ms, {:.1} to {:.1} (bound {MAX_START_MS} ms)",
        starts[0], starts[last]
    );
    println!(
        "memory beyond guest's  median {overhead} KiB, {} to {} (bound {MAX_OVERHEAD_KIB} KiB)",
        overheads[0], overheads[last]
    );
    println!(
        "Linux {}, 512 MiB, 1 vCPU, --net user, {} starts",
        args.guest, args.rounds
    );
    let held = start < MAX_START_MS && overhead < MAX_OVERHEAD_KIB;
    Ok(if held {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// One start: milliseconds to the first `KVM_RUN`, and KiB of memory half a second later.
fn once(wonton: &Path, guest: &GuestImage) -> Result<(f64, u64)> {
    let child = Command::new(wonton)
        .arg("run")
        .arg("--kernel")
        .arg(&guest.kernel.bzimage)
        .arg("--initrd")
        .arg(&guest.initrd)
        .args(["--memory", "512M", "--net", "user", "--boot-timer"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", wonton.display()))?;
    let mut child = Ended(child);
    let stderr = child.0.stderr.take().context("no stderr")?;
    let mut text = String::new();
    for line in BufReader::new(stderr).lines() {
        let line = line?;
        if let Some(time) = line.strip_prefix("boot timer: ") {
            let ms = time.split(' ').next().unwrap_or_default();
            let ms = ms.parse().with_context(|| format!("unexpected `{line}`"))?;
            std::thread::sleep(Duration::from_millis(500));
            return Ok((ms, overhead_kib(child.0.id())?));
        }
        text += &line;
        text.push('\n');
    }
    anyhow::bail!("wonton ended before the guest ran:\n{text}")
}
