//! `cargo xtask image`.

use std::process::ExitCode;

use anyhow::Result;
use guest_images::{Images, Kernel};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only this kernel: 6.1 or 6.12
    #[arg(long)]
    guest: Option<Kernel>,
    /// The lab as well (needs QEMU)
    #[arg(long)]
    lab: bool,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let images = Images::of_workspace()?;
    for kernel in Kernel::ALL
        .into_iter()
        .filter(|k| args.guest.is_none_or(|wanted| wanted == *k))
    {
        let guest = images.guest(kernel)?;
        println!("{kernel} kernel  {}", guest.kernel.bzimage.display());
        println!("{kernel} vmlinux {}", guest.kernel.vmlinux.display());
        println!("{kernel} initrd  {}", guest.initrd.display());
    }
    if args.lab {
        let lab = images.lab()?;
        println!("lab kernel  {}", lab.kernel.bzimage.display());
        println!("lab initrd  {}", lab.initrd.display());
        println!("lab peer    {}", lab.peer.display());
    }
    Ok(ExitCode::SUCCESS)
}
