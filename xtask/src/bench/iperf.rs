//! iperf3: its server on this machine, its client's command, and its report.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use guest_images::host;
use serde_json::Value;

use super::process::Ended;
use super::workload::{Direction, Workload};

/// A server on the loopback for one test; it ends when dropped.
pub(crate) struct Server {
    _process: Ended,
    port: u16,
}

impl Server {
    /// Starts it on a free port and waits until it listens.
    pub(crate) fn start() -> Result<Self> {
        let port = free_port()?;
        let mut command = Command::new("iperf3");
        command
            .args(["-s", "-1", "--forceflush", "-B", "127.0.0.1", "-p"])
            .arg(port.to_string());
        let child = host::bound(&command)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start iperf3")?;
        let mut process = Ended(child);
        let mut output = BufReader::new(process.0.stdout.take().context("no stdout")?);
        let mut line = String::new();
        while !line.contains("listening") {
            line.clear();
            ensure!(
                output.read_line(&mut line)? > 0,
                "iperf3 -s ended at once: is it installed?"
            );
        }
        // it must be able to write its report somewhere
        std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
        Ok(Self {
            _process: process,
            port,
        })
    }

    /// The client's command for `workload`, which runs `seconds` against the guest's gateway.
    pub(crate) fn client(&self, workload: Workload, seconds: u32) -> Option<String> {
        let (direction, kind) = match workload {
            Workload::Tcp(direction, streams) => (direction, format!("-P {streams}")),
            Workload::Udp(direction, bytes) => (direction, format!("-u -b 0 -l {bytes}")),
            _ => return None,
        };
        let reverse = match direction {
            Direction::Down => " -R",
            Direction::Up => "",
        };
        Some(format!(
            "iperf3 -c 10.0.2.2 -p {} -J -i 0 -t {seconds} {kind}{reverse}",
            self.port
        ))
    }
}

/// A TCP port of the loopback that nobody listens on now.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("no free port")?;
    Ok(listener.local_addr()?.port())
}

/// What arrived.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Received {
    pub(crate) bytes: f64,
    pub(crate) gbit_s: f64,
    /// Of UDP: datagrams that did not arrive, in percent.
    pub(crate) lost_percent: Option<f64>,
    /// Of TCP: segments that the sender sent again.
    pub(crate) retransmits: Option<f64>,
}

/// Reads the client's JSON.
pub(crate) fn parse(printed: &str) -> Result<Received> {
    // warnings may come first
    let json = printed.find('{').map_or(printed, |at| &printed[at..]);
    let report: Value = serde_json::from_str(json)
        .with_context(|| format!("iperf3 printed no JSON: {}", head(json)))?;
    if let Some(error) = report["error"].as_str() {
        anyhow::bail!("iperf3: {error}");
    }
    let end = &report["end"];
    let received = &end["sum_received"];
    let number = |value: &Value| value.as_f64();
    let (bytes, rate) = number(&received["bytes"])
        .zip(number(&received["bits_per_second"]))
        .context("iperf3's report has no sum of what was received")?;
    Ok(Received {
        bytes,
        gbit_s: rate / 1e9,
        lost_percent: number(&received["lost_percent"]),
        retransmits: number(&end["sum_sent"]["retransmits"]),
    })
}

fn head(text: &str) -> &str {
    let end = (0..=text.len().min(200))
        .rev()
        .find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or_default()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_counts_what_the_receiver_got() {
        let json = r#"{"end":{"streams":[],
            "sum_sent":{"bytes":3008102400,"bits_per_second":24052552398.2,"retransmits":1},
            "sum_received":{"bytes":3000000000,"bits_per_second":24000000000.0}}}"#;
        let received = parse(json).unwrap();
        assert_eq!((received.bytes, received.gbit_s), (3e9, 24.0));
        assert_eq!(
            (received.lost_percent, received.retransmits),
            (None, Some(1.0))
        );
    }

    #[test]
    fn udp_leaves_out_what_was_lost() {
        let json = r#"{"end":{"sum":{"bytes":423192000,"lost_percent":58.06},
            "sum_received":{"bytes":177454200,"bits_per_second":1.5e9,"lost_percent":58.06}}}"#;
        let received = parse(json).unwrap();
        assert_eq!((received.gbit_s, received.lost_percent), (1.5, Some(58.06)));
    }

    #[test]
    fn failures_are_told_in_its_words() {
        let error =
            parse(r#"warning: large {"start":{},"error":"unable to connect"}"#).unwrap_err();
        assert_eq!(error.to_string(), "iperf3: unable to connect");
        assert!(format!("{:#}", parse("iperf3: what").unwrap_err()).contains("no JSON: iperf3"));
        assert!(parse("{}").is_err());
    }
}
