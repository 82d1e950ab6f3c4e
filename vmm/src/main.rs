//! `wonton`: boots a Linux guest behind a NAT stack that lives in the same process.

use std::process::ExitCode;

use clap::Parser as _;
use vmm::cli::{Cli, Command};
use vmm::exit::Exit;
use vmm::{check, config, report, run, serve, timing};

fn main() -> ExitCode {
    timing::start();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version also come this way, and are no errors.
            let code = if error.use_stderr() {
                Exit::Usage
            } else {
                Exit::PowerOff
            };
            let _ = error.print();
            return code.into();
        }
    };
    report::init_logging();
    let done = match cli.command {
        Command::Run(args) => match config::RunConfig::try_from(args) {
            Ok(config) => run::run(config),
            Err(error) => {
                report::error(&error.into());
                return Exit::Usage.into();
            }
        },
        Command::Serve(args) => match config::ServeConfig::try_from(args) {
            Ok(config) => serve::run(&config),
            Err(error) => {
                report::error(&error.into());
                return Exit::Usage.into();
            }
        },
        Command::Check(args) => check::run(args.json).map(|()| Exit::PowerOff),
    };
    match done {
        Ok(exit) => exit.into(),
        Err(error) => {
            report::error(&error);
            Exit::HostError.into()
        }
    }
}
