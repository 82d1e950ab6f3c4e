//! The options of `--net tap`.

use devices::net::MAX_QUEUE_PAIRS;

use super::{ConfigError, TapOptions, TapSource, Vhost, choose, parse_queues};

/// The tap of a `--net tap` that names none.
const DEFAULT_TAP: &str = "tap0";

impl Default for TapOptions {
    fn default() -> Self {
        Self {
            source: TapSource::Name(DEFAULT_TAP.to_owned()),
            vhost: Vhost::default(),
            queues: 1,
            mtu: None,
        }
    }
}

impl TapOptions {
    /// Takes the option `key`, one of `name`, `fd`, `vhost` and `queues`.
    pub(super) fn set(&mut self, key: &str, value: &str) -> Result<(), ConfigError> {
        match key {
            "name" => self.source = TapSource::Name(value.to_owned()),
            "fd" => {
                let expected = "a descriptor's number, or several with `:` between them";
                let fds = choose("fd", value, expected, |text| {
                    let fds = text
                        .split(':')
                        .map(|fd| fd.parse().ok().filter(|fd| *fd >= 0));
                    fds.collect::<Option<Vec<_>>>()
                })?;
                self.source = TapSource::Fds(fds);
            }
            "vhost" => {
                self.vhost = choose("vhost", value, "on, off or auto", |text| match text {
                    "on" => Some(Vhost::On),
                    "off" => Some(Vhost::Off),
                    "auto" => Some(Vhost::Auto),
                    _ => None,
                })?;
            }
            _ => self.queues = parse_queues(value)?,
        }
        Ok(())
    }

    /// Checks the options against each other; `seen` are those that were given, and `mtu` the card's.
    pub(super) fn finish(&mut self, seen: &[&str], mtu: u16) -> Result<(), ConfigError> {
        if seen.contains(&"name") && seen.contains(&"fd") {
            return Err(ConfigError::TwoTaps);
        }
        if let TapSource::Fds(fds) = &self.source {
            let count = u16::try_from(fds.len()).unwrap_or(u16::MAX);
            let wrong = seen.contains(&"queues") && self.queues != count;
            if wrong || count > MAX_QUEUE_PAIRS {
                return Err(ConfigError::TapQueues {
                    fds: fds.len(),
                    queues: self.queues,
                });
            }
            self.queues = count;
        }
        if self.vhost == Vhost::On && seen.contains(&"loss") {
            return Err(ConfigError::NotWithVhost("loss="));
        }
        self.mtu = seen.contains(&"mtu").then_some(mtu);
        Ok(())
    }
}
