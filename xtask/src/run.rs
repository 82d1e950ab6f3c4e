//! `cargo xtask run` and `cargo xtask lab`: a console of one's own.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use guest_images::lab::{LabJob, run_interactive};
use guest_images::{Images, Kernel};

use crate::place::Place;
use crate::{build, tap};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Which of the stock kernels to boot: 6.1 or 6.12
    #[arg(long, default_value = "6.12")]
    guest: Kernel,
    /// A kernel of your own instead: bzImage or ELF (without --initrd it gets the guest's initramfs,
    /// whose virtio modules fit the guest's kernel only)
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// An initramfs of your own instead
    #[arg(long, value_name = "FILE")]
    initrd: Option<PathBuf>,
    /// Added to the kernel command line
    #[arg(long, default_value = "")]
    cmdline: String,
    /// Run in the lab even where KVM is usable
    #[arg(long)]
    lab: bool,
    /// More arguments for `wonton run`, replacing the defaults `--net user`, `--cpus 1`, `--memory 512M`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    wonton: Vec<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct LabArgs {
    /// Leave QEMU and the ELF kernels out of the lab
    #[arg(long)]
    no_peer: bool,
    /// Run this with `sh -c` instead of a shell
    command: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let wonton = build::wonton()?;
    let images = Images::of_workspace()?;
    let guest = match (&args.kernel, &args.initrd) {
        (Some(_), Some(_)) => None,
        _ => Some(images.guest(args.guest)?),
    };
    let kernel = args
        .kernel
        .clone()
        .or_else(|| guest.as_ref().map(|g| g.kernel.bzimage.clone()));
    // an initramfs of ours has modules for our kernels only
    let initrd = args
        .initrd
        .clone()
        .or_else(|| guest.as_ref().map(|g| g.initrd.clone()));
    let (kernel, initrd) = (kernel.context("no kernel")?, initrd.context("no initrd")?);

    let place = if args.lab {
        Place::Lab("as asked".to_owned())
    } else {
        Place::choose(&wonton)
    };
    match place {
        Place::Kvm => on_kvm(args, &wonton, &kernel, &initrd),
        Place::Lab(reason) => {
            eprintln!("{reason}: running in the nested lab (about 15 s to the guest's prompt)");
            in_lab(args, &images, &wonton, &kernel, &initrd)
        }
    }
}

fn on_kvm(args: &Args, wonton: &Path, kernel: &Path, initrd: &Path) -> Result<ExitCode> {
    let status = Command::new(wonton)
        .args(wonton_arguments(
            args,
            &kernel.to_string_lossy(),
            &initrd.to_string_lossy(),
        ))
        .status()
        .with_context(|| format!("cannot start {}", wonton.display()))?;
    Ok(exit_code(status.code().unwrap_or(255)))
}

fn in_lab(
    args: &Args,
    images: &Images,
    wonton: &Path,
    kernel: &Path,
    initrd: &Path,
) -> Result<ExitCode> {
    let lab = images.lab()?;
    images.progress().clear();
    let read = |path: &Path| {
        std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
    };
    let words = wonton_arguments(args, "/job/kernel", "/job/initrd");
    let setup = tap::setup(net_of(&words))?.unwrap_or_default();
    let words: Vec<String> = words.iter().map(|word| quoted(word)).collect();
    let job = LabJob::new(format!("{setup}exec wonton {}\n", words.join(" ")))
        .program("wonton", wonton)
        .file("job/kernel", 0o644, read(kernel)?)
        .file("job/initrd", 0o644, read(initrd)?);
    Ok(exit_code(run_interactive(&lab, &job)?))
}

fn wonton_arguments(args: &Args, kernel: &str, initrd: &str) -> Vec<String> {
    let cmdline = format!("quiet {}", args.cmdline);
    let mut words: Vec<String> = [
        "run",
        "--kernel",
        kernel,
        "--initrd",
        initrd,
        "--cmdline",
        cmdline.trim_end(),
    ]
    .map(str::to_owned)
    .into();
    for (option, value) in [("--net", "user"), ("--cpus", "1"), ("--memory", "512M")] {
        if !args
            .wonton
            .iter()
            .any(|word| word == option || word.starts_with(&format!("{option}=")))
        {
            words.extend([option.to_owned(), value.to_owned()]);
        }
    }
    words.extend(args.wonton.iter().cloned());
    words
}

/// What `words` have for `--net`, the last if there are several.
fn net_of(words: &[String]) -> &str {
    let mut net = "";
    for (at, word) in words.iter().enumerate() {
        if let Some(value) = word.strip_prefix("--net=") {
            net = value;
        } else if word == "--net"
            && let Some(value) = words.get(at + 1)
        {
            net = value;
        }
    }
    net
}

pub(crate) fn lab(args: &LabArgs) -> Result<ExitCode> {
    let wonton = build::wonton()?;
    let images = Images::of_workspace()?;
    let lab = images.lab()?;
    images.progress().clear();
    let script = match &args.command {
        Some(command) => format!("{command}\n"),
        None => "echo 'lab: wonton in /usr/bin, kernels in /images; leave with exit or Ctrl-D'\nexec sh -l\n".to_owned(),
    };
    let mut job = LabJob::new(script).program("wonton", &wonton).program(
        "xtask",
        &std::env::current_exe().context("cannot find this program")?,
    );
    if !args.no_peer {
        job = job.with_peer();
    }
    Ok(exit_code(run_interactive(&lab, &job)?))
}

fn exit_code(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code).unwrap_or(255))
}

/// `word` for a POSIX shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn defaults_give_way_to_what_is_asked_for() {
        let cli = Cli::parse_from(["run", "--guest", "6.1", "--", "--cpus=2", "--net", "none"]);
        let words = wonton_arguments(&cli.args, "k", "i").join(" ");
        assert_eq!(
            words,
            "run --kernel k --initrd i --cmdline quiet --memory 512M --cpus=2 --net none"
        );
    }

    #[test]
    fn network_is_found() {
        let words = |text: &str| -> Vec<String> { text.split(' ').map(str::to_owned).collect() };
        assert_eq!(
            net_of(&words("run --net tap,vhost=on --cpus 2")),
            "tap,vhost=on"
        );
        assert_eq!(net_of(&words("run --net=null")), "null");
        assert_eq!(net_of(&words("run")), "");
    }

    #[test]
    fn quoting_survives_a_shell() {
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
    }
}
