//! Guests at native speed: User Mode Linux, attached by vhost-user to `wonton serve`.
//!
//! ```text
//!   UML (virtio_net) --vhost-user--> wonton serve --sockets--> peer data (on 127.0.0.1)
//! ```
//!
//! And one guest of QEMU's, which is what most people would attach. The rows run one after the other: each has the machine to itself. Only `serve/..` needs no guest.

mod command;
mod far;
mod guests;
mod qemu;
mod serve;

use anyhow::Result;
use libtest_mimic::{Arguments, Failed, Trial};

fn main() {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let trials = [command::rows(), guests::rows(), qemu::rows()]
        .into_iter()
        .flatten();
    let trials = trials.map(|(name, run)| {
        Trial::test(name, move || {
            run().map_err(|error| Failed::from(format!("{error:#}")))
        })
    });
    libtest_mimic::run(&arguments, trials.collect()).exit();
}

/// A row: its name, and what it does.
type Row = (String, Box<dyn FnOnce() -> Result<()> + Send>);

fn row(name: impl Into<String>, run: impl FnOnce() -> Result<()> + Send + 'static) -> Row {
    (name.into(), Box::new(run))
}
