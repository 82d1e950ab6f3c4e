//! What was typed. [`crate::config`] turns it into values.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Boots a Linux guest; its network is a NAT stack inside this process.
#[derive(Debug, Parser)]
#[command(name = "wonton", version)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Boot a kernel.
    Run(RunArgs),
    /// Be the network card of another VMM, by vhost-user.
    Serve(ServeArgs),
    /// Tell what this host can do.
    Check(CheckArgs),
}

/// Arguments of `wonton run`.
#[derive(Args, Debug)]
#[command(after_help = EXIT_HELP)]
pub struct RunArgs {
    /// Kernel: a bzImage (as in /boot/vmlinuz-*) or an uncompressed vmlinux
    #[arg(long, value_name = "FILE")]
    pub kernel: PathBuf,
    /// Initial RAM disk
    #[arg(long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,
    /// Appended to the default command line `console=ttyS0 reboot=a panic=-1`
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        allow_hyphen_values = true
    )]
    pub cmdline: String,
    /// Number of CPUs
    #[arg(long, value_name = "N", default_value = "1")]
    pub cpus: String,
    /// Size of guest memory, with a suffix K, M or G; `SIZE,shared` lets other processes map it
    #[arg(long, value_name = "SIZE", default_value = "512M")]
    pub memory: String,
    /// Network card: user[,KEY=VALUE].., tap[,KEY=VALUE].., loopback, null or none
    ///
    /// Keys: mac=XX:XX:XX:XX:XX:XX, mtu=N (576 to 65535), loss=PERCENT[,seed=N] (frames to lose, for
    /// testing); for user also rx=ring|direct|direct-discard|copy and
    /// host-loopback=allow|deny (may the guest reach the host's 127.0.0.1); for tap also name=NAME
    /// (default tap0; made if there is none) or fd=N[:N..] (inherited) and vhost=on|off|auto (let the
    /// kernel carry the frames); for both queues=N (1 to 8 pairs, for several CPUs).
    #[arg(long, value_name = "SPEC", default_value = "user")]
    pub net: String,
    /// How the guest reaches its devices: pci or mmio
    #[arg(long, value_name = "BUS", default_value = "pci")]
    pub transport: String,
    /// Forward a host port to the guest: `[tcp:|udp:][ADDR:]HOSTPORT:GUESTPORT`
    ///
    /// ADDR defaults to 127.0.0.1; an IPv6 address goes in brackets.
    #[arg(short = 'p', long = "publish", value_name = "SPEC")]
    pub publish: Vec<String>,
    /// Send Ctrl-A to the guest instead of treating it as the escape key
    #[arg(long)]
    pub no_escape: bool,
    /// Print the time from exec to the first instruction of the guest
    #[arg(long)]
    pub boot_timer: bool,
}

/// Arguments of `wonton serve`.
#[derive(Args, Debug)]
#[command(after_help = SERVE_HELP)]
pub struct ServeArgs {
    /// Unix socket to listen on, for one front-end after the other
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,
    /// Network card, as for `wonton run`
    #[arg(long, value_name = "SPEC", default_value = "user")]
    pub net: String,
    /// Forward a host port to the guest, as for `wonton run`
    #[arg(short = 'p', long = "publish", value_name = "SPEC")]
    pub publish: Vec<String>,
    /// Write the card's counters to FILE, as JSON, on SIGUSR1 and at the end
    #[arg(long, value_name = "FILE")]
    pub stats: Option<PathBuf>,
    /// End when the first front-end has left
    #[arg(long)]
    pub once: bool,
}

/// Arguments of `wonton check`.
#[derive(Args, Debug)]
pub struct CheckArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

const SERVE_HELP: &str = "\
With QEMU (guest memory must be shared):
  qemu-system-x86_64 -object memory-backend-memfd,id=m,size=1G,share=on -machine q35,memory-backend=m
    -chardev socket,id=c,path=PATH -netdev vhost-user,id=n,chardev=c -device virtio-net-pci,netdev=n ...
Exit codes: 0 the front-end left (--once), 1 host error, 2 usage, 128+N stopped by signal N.";

const EXIT_HELP: &str = "\
Keys on a terminal: Ctrl-A X quits, Ctrl-A Ctrl-A sends Ctrl-A.
Exit codes: 0 power-off or quit, 1 host error, 2 usage, 10 guest reset, 20 guest fault,
128+N stopped by signal N.";

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn kernel_text_may_start_with_a_hyphen() {
        let cli =
            Cli::try_parse_from(["wonton", "run", "--kernel", "k", "--cmdline", "-x"]).unwrap();
        let Command::Run(args) = cli.command else {
            panic!("not run")
        };
        assert_eq!(args.cmdline, "-x");
    }
}
