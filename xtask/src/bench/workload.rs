//! What the guest does while a back-end is measured.

use std::str::FromStr;

use anyhow::{Result, bail};

/// Which way the bytes go, as the guest sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Down,
    Up,
}

/// One thing to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Workload {
    /// iperf3 over TCP with so many streams.
    Tcp(Direction, u32),
    /// iperf3 over UDP as fast as it sends, with datagrams of so many bytes.
    Udp(Direction, u32),
    /// One byte there and back over TCP, again and again.
    RequestResponse,
    /// A new TCP connection for each byte there and back.
    Connections,
    /// Doing nothing with so many open connections.
    Idle(u32),
}

impl Workload {
    /// All that have a name.
    pub(crate) const ALL: [Self; 15] = [
        Self::Tcp(Direction::Down, 1),
        Self::Tcp(Direction::Down, 8),
        Self::Tcp(Direction::Down, 16),
        Self::Tcp(Direction::Up, 1),
        Self::Tcp(Direction::Up, 8),
        Self::Tcp(Direction::Up, 16),
        Self::Udp(Direction::Down, 64),
        Self::Udp(Direction::Up, 64),
        Self::Udp(Direction::Down, 1400),
        Self::Udp(Direction::Up, 1400),
        Self::Udp(Direction::Down, 16384),
        Self::Udp(Direction::Up, 16384),
        Self::RequestResponse,
        Self::Connections,
        Self::Idle(1000),
    ];

    /// Those measured when none is named.
    pub(crate) const USUAL: [Self; 7] = [
        Self::Tcp(Direction::Down, 1),
        Self::Tcp(Direction::Down, 8),
        Self::Tcp(Direction::Down, 16),
        Self::Tcp(Direction::Up, 1),
        Self::Tcp(Direction::Up, 8),
        Self::RequestResponse,
        Self::Connections,
    ];

    /// Its name on the command line and in reports.
    pub(crate) fn name(self) -> String {
        let way = |direction| match direction {
            Direction::Down => "down",
            Direction::Up => "up",
        };
        match self {
            Self::Tcp(direction, streams) => format!("{}{streams}", way(direction)),
            Self::Udp(direction, 16384) => format!("udp16k-{}", way(direction)),
            Self::Udp(direction, bytes) => format!("udp{bytes}-{}", way(direction)),
            Self::RequestResponse => "rr".to_owned(),
            Self::Connections => "crr".to_owned(),
            Self::Idle(connections) => format!("idle{connections}"),
        }
    }

    /// The unit of its main figure.
    pub(crate) fn unit(self) -> &'static str {
        match self {
            Self::Tcp(..) => "Gbit/s",
            Self::Udp(..) => "Mbit/s",
            Self::RequestResponse => "us",
            Self::Connections => "connections/s",
            Self::Idle(_) => "% of a core",
        }
    }

    /// Whether a larger main figure is the better one.
    pub(crate) fn more_is_better(self) -> bool {
        !matches!(self, Self::RequestResponse | Self::Idle(_))
    }

    /// Those that a word on the command line stands for: `udp64` is both directions, `all` is all.
    pub(crate) fn named(word: &str) -> Result<Vec<Self>> {
        let found: Vec<Self> = Self::ALL
            .into_iter()
            .filter(|workload| {
                let name = workload.name();
                word == "all" || name == word || name.split('-').next() == Some(word)
            })
            .collect();
        if found.is_empty() {
            let names: Vec<String> = Self::ALL.into_iter().map(Self::name).collect();
            bail!("no workload `{word}`: there are {}", names.join(", "));
        }
        Ok(found)
    }
}

/// The workloads of one word, as an argument.
#[derive(Clone, Debug)]
pub(crate) struct Words(Vec<Workload>);

impl FromStr for Words {
    type Err = anyhow::Error;

    fn from_str(word: &str) -> Result<Self> {
        Workload::named(word).map(Self)
    }
}

/// The workloads asked for, or the usual ones.
pub(crate) fn chosen(words: &[Words]) -> Vec<Workload> {
    if words.is_empty() {
        return Workload::USUAL.to_vec();
    }
    words
        .iter()
        .flat_map(|word| word.0.iter().copied())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_stands_for_its_workload() {
        for workload in Workload::ALL {
            assert_eq!(Workload::named(&workload.name()).unwrap(), [workload]);
        }
    }

    #[test]
    fn a_size_of_datagrams_is_both_directions() {
        let names: Vec<String> = Workload::named("udp16k")
            .unwrap()
            .into_iter()
            .map(Workload::name)
            .collect();
        assert_eq!(names, ["udp16k-down", "udp16k-up"]);
        assert!(Workload::named("down2").is_err());
        assert_eq!(chosen(&[]), Workload::USUAL);
    }
}
