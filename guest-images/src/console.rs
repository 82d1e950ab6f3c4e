//! What comes out of a guest or the lab, as data.
//!
//! Scripts report on the console with lines `WONTON {json}`, wherever they may stand among kernel
//! messages. The lab also has a second serial port, where it says `start`, its exit code (`exit N`) and the files it
//! sends back (`file NAME`, base64, `end`).

use std::collections::BTreeMap;

use serde_json::{Map, Value};

/// One `WONTON {json}` line.
pub type Record = Map<String, Value>;

/// The record in a console line, if it holds one.
pub fn record(line: &str) -> Option<Record> {
    let json = &line[line.find("WONTON {")? + "WONTON ".len()..];
    // a kernel message may follow on the same line
    serde_json::Deserializer::from_str(json)
        .into_iter::<Record>()
        .next()?
        .ok()
}

/// All records of a console log.
pub fn records(log: &str) -> Vec<Record> {
    log.lines().filter_map(record).collect()
}

/// What the lab wrote to its second serial port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Whether the job was started.
    pub started: bool,
    /// The job's exit code; `None` when it never ended.
    pub exit: Option<i32>,
    /// Files sent with `lab-send NAME <FILE`.
    pub files: BTreeMap<String, Vec<u8>>,
}

impl Outcome {
    /// Reads the port's log.
    pub fn parse(log: &str) -> Self {
        let mut outcome = Self::default();
        let mut receiving: Option<(String, Vec<u8>)> = None;
        for line in log.lines().map(str::trim_end) {
            match (&mut receiving, line.split_once(' ')) {
                (None, None) if line == "start" => outcome.started = true,
                (None, Some(("exit", code))) => outcome.exit = code.parse().ok(),
                (None, Some(("file", name))) => receiving = Some((name.to_owned(), Vec::new())),
                (Some(_), _) if line == "end" => {
                    if let Some((name, text)) = receiving.take()
                        && let Some(data) = base64(&text)
                    {
                        outcome.files.insert(name, data);
                    }
                }
                (Some((_, text)), _) => text.extend_from_slice(line.as_bytes()),
                _ => {}
            }
        }
        outcome
    }
}

fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let mut data = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0u32, 0);
    for byte in text.iter().take_while(|b| **b != b'=') {
        let value = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            data.push((bits >> count & 0xff) as u8);
        }
    }
    Some(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_found_among_other_text() {
        let log = "[ 1.0] random\r\n[ 2.0] WONTON {\"event\":\"init\",\"uptime_s\":1.5}\r\n\
            WONTON {\"check\":\"dhcp\",\"ok\":true}[ 3.0] eth0 up\nWONTON {broken\nsaying WONTON\n";
        let found = records(log);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0]["uptime_s"], 1.5);
        assert_eq!(found[1]["check"], "dhcp");
    }

    #[test]
    fn outcome_has_exit_code_and_files() {
        let log =
            "start\r\nfile a.bin\r\nAAECAw==\r\nend\r\nfile t\r\naGVs\r\nbG8K\r\nend\r\nexit 3\r\n";
        let outcome = Outcome::parse(log);
        assert_eq!((outcome.started, outcome.exit), (true, Some(3)));
        assert_eq!(outcome.files["a.bin"], [0, 1, 2, 3]);
        assert_eq!(outcome.files["t"], b"hello\n");
        assert_eq!(Outcome::parse("").exit, None);
    }
}
