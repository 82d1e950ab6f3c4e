//! Rows with guests.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::far::{Far, Lab};
use crate::serve::Serve;
use crate::{Row, row};

const RX_PATHS: [&str; 4] = ["ring", "direct", "direct-discard", "copy"];
const MIB: u32 = 1 << 20;

pub(crate) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for rx in RX_PATHS {
        rows.push(row(format!("transfer/{rx}/clean"), || transfer(rx, "")));
        rows.push(row(format!("transfer/{rx}/lossy"), || {
            transfer(rx, ",loss=2,seed=7")
        }));
    }
    for rx in ["ring", "direct"] {
        rows.push(row(format!("sleeper/{rx}"), move || sleeper(rx)));
        for count in [16, 64] {
            rows.push(row(format!("streams/{rx}/{count}"), move || {
                streams(rx, count)
            }));
        }
        rows.push(row(format!("front-end-killed/{rx}"), move || killed(rx)));
    }
    rows.push(row("queues/ring", queues));
    rows
}

fn net(rx: &str, more: &str) -> String {
    format!("user,host-loopback=allow,rx={rx}{more}")
}

/// Two pairs of queues, among which the guest spreads its connections, and then one pair under them.
fn queues() -> Result<()> {
    let lab = Lab::get()?;
    let far = Far::start(lab)?;
    let serve = Serve::start(&net("ring", ",queues=2"))?;
    let mut guest = lab.boot(&serve, 512)?;
    let minute = Duration::from_secs(60);
    // More than there are CPUs: the driver chooses the queue by a hash over the flow.
    let output = guest.exec("ethtool -L eth0 combined 2 && ethtool -l eth0", minute)?;
    ensure!(output.code == 0, "{}", output.text);
    far.peer(&mut guest, "parallel", "1000")?;
    far.peer(&mut guest, "get", &(64 * MIB).to_string())?;
    far.peer(&mut guest, "put", &(32 * MIB).to_string())?;
    far.peer(&mut guest, "udp", "")?;
    let counters = guest.exec("ethtool -S eth0", minute)?.text;
    for queue in ["tx0", "tx1"] {
        let name = format!("{queue}_kicks:");
        let line = counters.lines().find(|line| line.contains(&name));
        let kicks = line.and_then(|line| line.split_whitespace().last()?.parse().ok());
        let kicks: u64 = kicks.with_context(|| format!("no {name} in {counters}"))?;
        ensure!(kicks > 200, "{name} {kicks}: it was hardly used");
    }
    let both = format!(
        "(PEER_PORTS={} peer streams 10.0.2.2 8 6 >/tmp/log 2>&1; echo $? >/tmp/code) & \
         sleep 2; ethtool -L eth0 combined 1; sleep 1; ethtool -L eth0 combined 2; sleep 1; \
         ethtool -L eth0 combined 1; wait; cat /tmp/log; exit $(cat /tmp/code)",
        far.base()
    );
    let output = guest.exec(&both, minute)?;
    ensure!(
        output.code == 0,
        "streams over changing queues: {}",
        output.text
    );
    eprintln!("    over changing queues: {}", output.text.trim());
    far.peer(&mut guest, "parallel", "100")
}

/// Bytes come and go whole.
fn transfer(rx: &str, loss: &str) -> Result<()> {
    let lab = Lab::get()?;
    let far = Far::start(lab)?;
    let serve = Serve::start(&net(rx, loss))?;
    let mut guest = lab.boot(&serve, 512)?;
    far.peer(&mut guest, "get", &(64 * MIB).to_string())?;
    if loss.is_empty() {
        far.peer(&mut guest, "put", &(32 * MIB).to_string())?;
        // Without loss alone: a lost datagram is not sent again.
        far.peer(&mut guest, "udp", "")
    } else {
        // What arrives behind a hole is sent again, so an upload over such a link is slow: several
        // retransmission timeouts for each MiB.
        far.peer(&mut guest, "put", &(4 * MIB).to_string())
    }
}

/// A reader that does not read for a while: its window closes, and opens at once when it does.
fn sleeper(rx: &str) -> Result<()> {
    let lab = Lab::get()?;
    let far = Far::start(lab)?;
    let serve = Serve::start(&net(rx, ""))?;
    let mut guest = lab.boot(&serve, 512)?;
    far.peer(&mut guest, "pause", &format!("{} 5", 64 * MIB))
}

/// More streams than a small guest has memory for: all of them move.
///
/// For as many seconds as `STREAM_SECONDS` says.
fn streams(rx: &str, count: u32) -> Result<()> {
    let lab = Lab::get()?;
    let far = Far::start(lab)?;
    let serve = Serve::start(&net(rx, ""))?;
    let mut guest = lab.boot(&serve, 256)?;
    let seconds = std::env::var("STREAM_SECONDS").unwrap_or_else(|_| "20".to_owned());
    far.peer(&mut guest, "streams", &format!("{count} {seconds}"))
}

/// Guests die in mid-download; the process serves the next, and keeps nothing of the old.
fn killed(rx: &str) -> Result<()> {
    const ROUNDS: usize = 5;
    let lab = Lab::get()?;
    let far = Far::start(lab)?;
    let serve = Serve::start(&net(rx, ""))?;
    let mut guest = lab.boot(&serve, 512)?;
    let baseline = settled(&serve)?;
    for round in 0..ROUNDS {
        let download = format!(
            "(PEER_PORTS={} peer get 10.0.2.2 100000000000 >/tmp/log 2>&1 &); sleep 1; cat /tmp/log",
            far.base()
        );
        let output = guest.exec(&download, Duration::from_secs(20))?;
        let (descriptors, _) = serve.holds()?;
        ensure!(
            descriptors > baseline.0,
            "round {round}: there was no download to kill: {}, {} descriptors",
            output.text,
            descriptors
        );
        drop(guest); // SIGKILL
        guest = lab.boot(&serve, 512)?;
        far.peer(&mut guest, "get", &(16 * MIB).to_string())?;
    }
    // The flows of the dead guests end when the living one refuses their frames.
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let holds = serve.holds()?;
        if holds == baseline {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "{holds:?} descriptors and threads, {baseline:?} before: {}",
            serve.descriptors()
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// What the process holds once that has been the same for a second.
fn settled(serve: &Serve) -> Result<(usize, usize)> {
    let (mut last, mut since) = (serve.holds()?, Instant::now());
    let deadline = since + Duration::from_secs(60);
    while since.elapsed() < Duration::from_secs(1) {
        ensure!(Instant::now() < deadline, "{last:?} does not settle");
        std::thread::sleep(Duration::from_millis(50));
        let now = serve.holds()?;
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    Ok(last)
}
