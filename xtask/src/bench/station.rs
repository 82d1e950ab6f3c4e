//! A back-end and the guest behind it.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use guest_images::uml::Output;
use guest_images::{UmlGuest, UmlOptions};

use super::backend::{Backend, Programs};
use super::subject::Subject;

/// Both of one subject, until dropped.
pub(crate) struct Station {
    guest: UmlGuest,
    pub(crate) backend: Backend,
    dir: tempfile::TempDir,
    /// Why the guest takes no more commands.
    broken: Option<String>,
}

impl Station {
    /// Starts the back-end, then boots the guest.
    pub(crate) fn start(programs: &Programs, subject: &Subject) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let backend = programs.start(subject, dir.path())?;
        let own = std::env::current_exe().context("cannot find this program")?;
        let options = UmlOptions {
            mtu: subject.mtu,
            programs: vec![("xtask".to_owned(), own)],
            ..UmlOptions::default()
        };
        let guest = UmlGuest::boot(programs.kit(), &backend.socket, &options)
            .with_context(|| format!("{} printed: {}", subject.name, backend.log_tail()))?;
        let mut station = Self {
            guest,
            backend,
            dir,
            broken: None,
        };
        if let Some(queues) = subject.option("queues") {
            // The driver uses no more pairs than there are CPUs, unless told to.
            let command = format!("ethtool -L eth0 combined {queues}");
            let output = station.exec(&command, Duration::from_secs(10))?;
            ensure!(output.code == 0, "`{command}`: {}", output.text.trim());
        }
        Ok(station)
    }

    /// Runs a command in the guest; `timeout` is that of [`UmlGuest::exec`]. After a command that
    /// did not end in time, all fail at once.
    pub(crate) fn exec(&mut self, command: &str, timeout: Duration) -> Result<Output> {
        if let Some(error) = &self.broken {
            bail!("the guest hangs since {error}");
        }
        let output = self.guest.exec(command, timeout);
        if let Err(error) = &output {
            self.broken = Some(error.to_string());
        }
        output
    }

    /// Interrupts of the guest's card since it booted.
    pub(crate) fn interrupts(&mut self) -> Result<f64> {
        let output = self.exec("cat /proc/interrupts", Duration::from_secs(10))?;
        Ok(virtio_interrupts(&output.text))
    }

    /// The virtio features that guest and back-end agreed on.
    pub(crate) fn features(&self) -> &str {
        self.guest.features()
    }

    /// A directory for files of a measurement.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }
}

/// The sum of the lines of `/proc/interrupts` that are of virtio devices.
fn virtio_interrupts(text: &str) -> f64 {
    text.lines()
        .filter(|line| line.contains("virtio"))
        .flat_map(|line| {
            line.split_whitespace()
                .skip(1)
                .map_while(|word| word.parse::<f64>().ok())
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_of_all_cpus_and_queues_add_up() {
        let text = "           CPU0       CPU1\n  1:   10   5  SIGIO  timer\n\
            17:   100   20   SIGIO   virtio_uml\n 18:  3  0  SIGIO  virtio0-input.0\n";
        assert_eq!(virtio_interrupts(text), 123.0);
    }
}
