//! The guest's side of the request and response workloads of `cargo xtask bench`.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

const PATIENCE: Duration = Duration::from_secs(5);

/// Round trips, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RoundTrips {
    pub(crate) count: f64,
    pub(crate) per_second: f64,
    /// Half took no longer than so many microseconds,
    pub(crate) p50_us: f64,
    /// and 99 of 100 no longer than these.
    pub(crate) p99_us: f64,
}

/// One byte there and back over one connection, for so long.
pub(crate) fn request_response(address: &str, duration: Duration) -> Result<RoundTrips> {
    let mut stream = connect(address)?;
    // the first ones open the way
    for _ in 0..20 {
        round_trip(&mut stream)?;
    }
    repeat(duration, || round_trip(&mut stream))
}

/// A new connection for each byte there and back, for so long.
pub(crate) fn connections(address: &str, duration: Duration) -> Result<RoundTrips> {
    repeat(duration, || round_trip(&mut connect(address)?))
}

/// Opens `count` connections, passes a byte over each, says so, and keeps them open for good.
pub(crate) fn hold(address: &str, count: usize) -> Result<()> {
    let mut held = Vec::with_capacity(count);
    for number in 0..count {
        let mut stream = connect(address).with_context(|| format!("connection {number}"))?;
        round_trip(&mut stream).with_context(|| format!("connection {number}"))?;
        held.push(stream);
    }
    println!("holding {}", held.len());
    loop {
        std::thread::park();
    }
}

fn connect(address: &str) -> Result<TcpStream> {
    let stream =
        TcpStream::connect(address).with_context(|| format!("cannot connect to {address}"))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

fn round_trip(stream: &mut TcpStream) -> Result<()> {
    stream.write_all(b"x")?;
    let mut byte = [0];
    stream.read_exact(&mut byte).context("no byte came back")
}

#[expect(clippy::cast_precision_loss, reason = "counts of some seconds")]
fn repeat(duration: Duration, mut once: impl FnMut() -> Result<()>) -> Result<RoundTrips> {
    let mut times = Vec::new();
    let started = Instant::now();
    while started.elapsed() < duration {
        let before = Instant::now();
        once()?;
        times.push(before.elapsed().as_secs_f64() * 1e6);
    }
    let took = started.elapsed().as_secs_f64();
    ensure!(!times.is_empty(), "there was no time for a round trip");
    times.sort_by(f64::total_cmp);
    Ok(RoundTrips {
        count: times.len() as f64,
        per_second: times.len() as f64 / took,
        p50_us: times[times.len() / 2],
        p99_us: times[times.len() * 99 / 100],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::echo::Echo;

    #[test]
    fn bytes_come_back_from_the_echo_server() {
        let address = format!("127.0.0.1:{}", Echo::start().unwrap().port);
        let trips = request_response(&address, Duration::from_millis(50)).unwrap();
        assert!(
            trips.count > 1.0 && trips.p50_us <= trips.p99_us,
            "{trips:?}"
        );
        assert!(
            connections(&address, Duration::from_millis(50))
                .unwrap()
                .count
                >= 1.0
        );
    }
}
