//! What the lab and other guests run of this program: things busybox has no applet for.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, UdpSocket};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Subcommand;
use guest_images::console;

use crate::{bench, client};

#[derive(Debug, Subcommand)]
pub(crate) enum Agent {
    /// Run a VMM and say when the guest's init ran
    Boot {
        /// The VMM and its arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        command: Vec<String>,
    },
    /// Stay busy for ever
    Spin,
    /// Round trips of one byte over one connection
    Rr { address: String, seconds: f64 },
    /// Round trips of one byte, each over a connection of its own
    Crr { address: String, seconds: f64 },
    /// Open connections and keep them
    Hold { address: String, count: usize },
    /// Each byte comes back, on 127.0.0.1
    Echo { port: u16 },
    /// A name server on 127.0.0.1:53 that knows a few A records
    Dns {
        /// NAME=ADDRESS
        names: Vec<String>,
    },
}

pub(crate) fn run(agent: &Agent) -> Result<ExitCode> {
    match agent {
        Agent::Boot { command } => boot(command),
        Agent::Spin => bench::awake::spin(),
        Agent::Rr { address, seconds } => {
            let duration = Duration::from_secs_f64(*seconds);
            print(client::request_response(address, duration)?)
        }
        Agent::Crr { address, seconds } => {
            let duration = Duration::from_secs_f64(*seconds);
            print(client::connections(address, duration)?)
        }
        Agent::Hold { address, count } => {
            client::hold(address, *count)?;
            Ok(ExitCode::SUCCESS)
        }
        Agent::Echo { port } => bench::echo::run(*port),
        Agent::Dns { names } => dns(names),
    }
}

fn print(trips: client::RoundTrips) -> Result<ExitCode> {
    println!("{}", serde_json::to_string(&trips)?);
    Ok(ExitCode::SUCCESS)
}

/// Passes the console through and adds records after some of the guest's: after `init`, how long
/// that took (the time is taken just before exec, so it covers all of the VMM's own work); after
/// `idle` and `idle-end`, what the VMM's process cost in between; after `mark`, how often the guest
/// has left guest mode until then.
fn boot(command: &[String]) -> Result<ExitCode> {
    let started = Instant::now();
    let mut child = Command::new(&command[0])
        .args(&command[1..])
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", command[0]))?;
    let mut console = BufReader::new(child.stdout.take().context("no stdout")?);
    let mut stdout = std::io::stdout().lock();
    let mut line = Vec::new();
    let mut idle_since = None;
    while console.read_until(b'\n', &mut line)? > 0 {
        stdout.write_all(&line)?;
        let record = console::record(&String::from_utf8_lossy(&line));
        let event = record.as_ref().and_then(|record| record.get("event"));
        match event.and_then(|event| event.as_str()) {
            Some("init") => {
                let ms = started.elapsed().as_secs_f64() * 1e3;
                writeln!(
                    stdout,
                    "WONTON {{\"event\":\"boot\",\"exec_to_init_ms\":{ms:.1}}}"
                )?;
            }
            Some("mark") => {
                let exits = kvm_stats(child.id())?;
                let exits = serde_json::to_string(&exits)?;
                writeln!(
                    stdout,
                    "WONTON {{\"event\":\"exits\",\"counters\":{exits}}}"
                )?;
            }
            Some("idle") => {
                idle_since = Some((
                    Instant::now(),
                    cpu_ticks(child.id())?,
                    own_ticks(child.id())?,
                ))
            }
            Some("idle-end") => {
                let (since, before, own_before) = idle_since.context("idle-end without idle")?;
                // Ticks are hundredths of a second on Linux (USER_HZ).
                #[expect(clippy::cast_precision_loss, reason = "a few seconds of ticks")]
                let percent =
                    (cpu_ticks(child.id())? - before) as f64 / since.elapsed().as_secs_f64();
                #[expect(clippy::cast_precision_loss, reason = "a few seconds of ticks")]
                let own =
                    (own_ticks(child.id())? - own_before) as f64 / since.elapsed().as_secs_f64();
                let kib = overhead_kib(child.id())?;
                writeln!(
                    stdout,
                    "WONTON {{\"event\":\"cost\",\"idle_cpu_percent\":{percent:.2},\"idle_own_percent\":{own:.2},\"overhead_kib\":{kib}}}"
                )?;
            }
            _ => {}
        }
        stdout.flush()?;
        line.clear();
    }
    let status = child.wait()?;
    Ok(ExitCode::from(
        status
            .code()
            .and_then(|code| u8::try_from(code).ok())
            .unwrap_or(255),
    ))
}

/// Counters of KVM, of all VMs of a process; they are in debugfs, which must be mounted.
fn kvm_stats(pid: u32) -> Result<HashMap<&'static str, u64>> {
    let mut sums = HashMap::new();
    let root = "/sys/kernel/debug/kvm";
    for vm in std::fs::read_dir(root).with_context(|| format!("cannot read {root}"))? {
        let vm = vm?;
        // PID-DESCRIPTOR
        if !vm
            .file_name()
            .to_string_lossy()
            .starts_with(&format!("{pid}-"))
        {
            continue;
        }
        for name in ["exits", "mmio_exits", "io_exits"] {
            let path = vm.path().join(name);
            let text = std::fs::read_to_string(&path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            *sums.entry(name).or_default() += text.trim().parse::<u64>()?;
        }
    }
    ensure!(
        !sums.is_empty(),
        "KVM counts nothing for process {pid} in {root}"
    );
    Ok(sums)
}

/// CPU time of a process, its guest's included, in ticks.
pub(crate) fn cpu_ticks(pid: u32) -> Result<u64> {
    ticks_of(&std::fs::read_to_string(format!("/proc/{pid}/stat"))?)
}

/// CPU time of all threads but those that run the guest's CPUs, by their names in wonton and QEMU.
fn own_ticks(pid: u32) -> Result<u64> {
    let mut ticks = 0;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let thread = thread?.path();
        // A thread may end while we look.
        let (Ok(name), Ok(stat)) = (
            std::fs::read_to_string(thread.join("comm")),
            std::fs::read_to_string(thread.join("stat")),
        ) else {
            continue;
        };
        if !name.starts_with("vcpu") && !name.starts_with("CPU ") {
            ticks += ticks_of(&stat)?;
        }
    }
    Ok(ticks)
}

fn ticks_of(stat: &str) -> Result<u64> {
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .collect();
    // Fields 14 and 15 of proc(5), counted from behind the name.
    let ticks = |index: usize| fields.get(index).and_then(|text| text.parse::<u64>().ok());
    ticks(11)
        .zip(ticks(12))
        .map(|(user, system)| user + system)
        .context("unexpected stat of a process")
}

/// Resident memory beyond the guest's own: that of all mappings but the huge ones that guest RAM is.
pub(crate) fn overhead_kib(pid: u32) -> Result<u64> {
    /// Smaller than the RAM of any guest that is measured, larger than anything else.
    const GUEST_RAM_KIB: u64 = 128 << 10;
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    let kib = |line: &str, name: &str| {
        let rest = line.strip_prefix(name)?.trim().strip_suffix(" kB")?;
        rest.trim().parse::<u64>().ok()
    };
    let (mut total, mut size) = (0, 0);
    for line in smaps.lines() {
        if let Some(value) = kib(line, "Size:") {
            size = value;
        } else if let Some(value) = kib(line, "Rss:")
            && size < GUEST_RAM_KIB
        {
            total += value;
        }
    }
    anyhow::ensure!(total > 0, "no mappings in /proc/PID/smaps");
    Ok(total)
}

fn dns(names: &[String]) -> Result<ExitCode> {
    let mut known = HashMap::new();
    for pair in names {
        let (name, address) = pair
            .split_once('=')
            .with_context(|| format!("{pair:?} is not NAME=ADDRESS"))?;
        known.insert(name.to_ascii_lowercase(), address.parse::<Ipv4Addr>()?);
    }
    let socket = UdpSocket::bind("127.0.0.1:53").context("cannot listen on 127.0.0.1:53")?;
    let mut query = [0; 512];
    loop {
        let (length, from) = socket.recv_from(&mut query)?;
        if let Ok(answer) = answer(&query[..length], &known) {
            let _ = socket.send_to(&answer, from);
        }
    }
}

/// The answer to a query with one question: the address for A, nothing for other types of a known
/// name, NXDOMAIN for other names.
fn answer(query: &[u8], known: &HashMap<String, Ipv4Addr>) -> Result<Vec<u8>> {
    ensure!(
        query.len() > 12 && query[2] & 0x80 == 0 && query[4..6] == [0, 1],
        "not a plain query"
    );
    let mut labels = Vec::new();
    let mut at = 12;
    loop {
        let length = usize::from(*query.get(at).context("cut short")?);
        at += 1;
        if length == 0 {
            break;
        }
        let label = query.get(at..at + length).context("cut short")?;
        labels.push(String::from_utf8_lossy(label).to_ascii_lowercase());
        at += length;
    }
    let kind = query.get(at..at + 4).context("cut short")?;
    let address = known.get(&labels.join("."));
    let found = address.filter(|_| kind == [0, 1, 0, 1]);
    let mut reply = query[..at + 4].to_vec();
    reply[2] = 0x84 | (query[2] & 1);
    reply[3] = if address.is_some() { 0x80 } else { 0x83 };
    reply[6..12].copy_from_slice(&[0, u8::from(found.is_some()), 0, 0, 0, 0]);
    if let Some(address) = found {
        reply.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
        reply.extend(address.octets());
    }
    Ok(reply)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(name: &str, kind: u8) -> Vec<u8> {
        let mut query = vec![0xab, 0xcd, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in name.split('.') {
            query.push(u8::try_from(label.len()).unwrap());
            query.extend(label.bytes());
        }
        query.extend([0, 0, kind, 0, 1]);
        query
    }

    #[test]
    fn known_names_are_answered_and_others_refused() {
        let known = HashMap::from([("smoke.test".to_owned(), Ipv4Addr::new(192, 0, 2, 77))]);
        let reply = answer(&query("Smoke.TEST", 1), &known).unwrap();
        assert_eq!(reply[..4], [0xab, 0xcd, 0x85, 0x80]);
        assert_eq!(reply[6..8], [0, 1]);
        assert_eq!(reply[reply.len() - 4..], [192, 0, 2, 77]);
        let reply = answer(&query("smoke.test", 28), &known).unwrap();
        assert_eq!((reply[3], reply[7]), (0x80, 0));
        assert_eq!(answer(&query("other.test", 1), &known).unwrap()[3], 0x83);
        assert!(answer(&[0; 12], &known).is_err());
        assert!(answer(&query("smoke.test", 1)[..20], &known).is_err());
    }
}
