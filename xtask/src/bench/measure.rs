//! One measurement: a workload in a guest, and what it cost the back-end meanwhile.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;

use super::calibrate::Machine;
use super::echo::Echo;
use super::iperf::{self, Server};
use super::process::{SyscallCount, cpu_seconds, run_seconds};
use super::station::Station;
use super::workload::Workload;
use crate::client::RoundTrips;

/// How long a command in the guest may take beyond its own duration.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long idleness is watched.
const IDLE: Duration = Duration::from_secs(5);
const SETTLE: Duration = Duration::from_secs(1);

/// What one run of a workload gave. What could not be measured is `None`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Sample {
    /// Index of the subject.
    pub(crate) subject: usize,
    pub(crate) workload: String,
    pub(crate) boot: u32,
    pub(crate) round: u32,
    /// The main figure, in the workload's unit.
    pub(crate) value: Option<f64>,
    /// CPU seconds of the back-end for each GB received.
    pub(crate) cpu_s_per_gb: Option<f64>,
    /// System calls of the back-end for each MB, from a warm-up run of its own.
    pub(crate) syscalls_per_mb: Option<f64>,
    /// Interrupts of the card in the guest for each MB.
    pub(crate) interrupts_per_mb: Option<f64>,
    /// Times the guest woke the back-end up, for each MB, if that counts them.
    pub(crate) tx_kicks_per_mb: Option<f64>,
    pub(crate) rx_kicks_per_mb: Option<f64>,
    /// The slowest percent of round trips, microseconds.
    pub(crate) p99_us: Option<f64>,
    /// Median round trip with and without idle connections, microseconds.
    pub(crate) p50_loaded_us: Option<f64>,
    pub(crate) p50_alone_us: Option<f64>,
    pub(crate) lost_percent: Option<f64>,
    pub(crate) retransmits: Option<f64>,
    /// A system call of this machine just before, nanoseconds.
    pub(crate) machine_ns: f64,
    /// How much of a CPU other programs had just before, percent.
    pub(crate) taken_percent: f64,
    /// Why there is no figure.
    pub(crate) error: Option<String>,
}

/// The far side, and for how long things run.
pub(crate) struct Bench {
    pub(crate) echo: Echo,
    /// Seconds of each run.
    pub(crate) seconds: u32,
}

impl Bench {
    /// Measures `workload`.
    pub(crate) fn measure(&self, station: &mut Station, workload: Workload) -> Result<Sample> {
        let machine = Machine::now();
        let mut sample = match workload {
            Workload::Tcp(..) | Workload::Udp(..) => self.transfer(station, workload)?,
            Workload::RequestResponse => {
                let trips = self.round_trips(station, "rr", f64::from(self.seconds))?;
                Sample {
                    value: Some(trips.p50_us),
                    p99_us: Some(trips.p99_us),
                    ..Sample::default()
                }
            }
            Workload::Connections => {
                let trips = self.round_trips(station, "crr", f64::from(self.seconds))?;
                Sample {
                    value: Some(trips.per_second),
                    p99_us: Some(trips.p99_us),
                    ..Sample::default()
                }
            }
            Workload::Idle(connections) => self.idle(station, connections)?,
        };
        sample.machine_ns = machine.syscall_ns;
        sample.taken_percent = machine.taken_percent;
        Ok(sample)
    }

    /// Runs `workload` once for a second, to open the way and, where perf can, to count the
    /// back-end's system calls for each MB.
    pub(crate) fn warm_up(&self, station: &mut Station, workload: Workload) -> Result<Option<f64>> {
        if !matches!(workload, Workload::Tcp(..) | Workload::Udp(..)) {
            return Ok(None);
        }
        let count = SyscallCount::start(station.backend.pid(), station.dir());
        let received = self.iperf(station, workload, 1)?;
        let calls = count.and_then(SyscallCount::stop);
        let mb = received.bytes / 1e6;
        Ok(calls.filter(|_| mb > 0.0).map(|calls| calls / mb))
    }

    fn transfer(&self, station: &mut Station, workload: Workload) -> Result<Sample> {
        let pid = station.backend.pid();
        let (kicks, interrupts) = (station.backend.counters()?, station.interrupts()?);
        let cpu = cpu_seconds(pid)?;
        let received = self.iperf(station, workload, self.seconds)?;
        let cpu = cpu_seconds(pid)? - cpu;
        let (more_kicks, more_interrupts) = (station.backend.counters()?, station.interrupts()?);
        ensure!(received.bytes > 0.0, "nothing was received");
        let mb = received.bytes / 1e6;
        let kicks_per_mb = |name: &str| Some((more_kicks.get(name)? - kicks.get(name)?) / mb);
        Ok(Sample {
            value: Some(match workload {
                Workload::Udp(..) => received.gbit_s * 1e3,
                _ => received.gbit_s,
            }),
            cpu_s_per_gb: Some(cpu / (mb / 1e3)),
            interrupts_per_mb: Some((more_interrupts - interrupts) / mb),
            tx_kicks_per_mb: kicks_per_mb("tx_kicks"),
            rx_kicks_per_mb: kicks_per_mb("rx_kicks"),
            lost_percent: received.lost_percent,
            retransmits: received.retransmits,
            ..Sample::default()
        })
    }

    fn iperf(
        &self,
        station: &mut Station,
        workload: Workload,
        seconds: u32,
    ) -> Result<iperf::Received> {
        let server = Server::start()?;
        let command = server
            .client(workload, seconds)
            .context("no workload of iperf3")?;
        let output = station.exec(&command, Duration::from_secs(seconds.into()) + PATIENCE)?;
        iperf::parse(&output.text)
    }

    fn round_trips(&self, station: &mut Station, verb: &str, seconds: f64) -> Result<RoundTrips> {
        let port = self.echo.port;
        let output = station.exec(
            &format!("xtask agent {verb} 10.0.2.2:{port} {seconds}"),
            Duration::from_secs_f64(seconds) + PATIENCE,
        )?;
        if output.code != 0 {
            bail!("{verb}: {}", output.text.trim());
        }
        serde_json::from_str(&output.text).with_context(|| format!("{verb}: {}", output.text))
    }

    fn idle(&self, station: &mut Station, connections: u32) -> Result<Sample> {
        let alone = self.round_trips(station, "rr", 1.0)?;
        let port = self.echo.port;
        let holder = station.exec(
            &format!(
                "rm -f hold.txt; xtask agent hold 10.0.2.2:{port} {connections} >hold.txt 2>&1 & echo $!; \
                 for i in $(seq 200); do grep -qsE 'holding|rror' hold.txt && break; \
                 sleep 0.1; done; cat hold.txt"
            ),
            Duration::from_secs(30),
        )?;
        ensure!(
            holder.text.contains("holding"),
            "cannot open {connections} connections, {} are: {}",
            self.echo.open(),
            holder.text.trim()
        );
        std::thread::sleep(SETTLE);
        let pid = station.backend.pid();
        let cpu = run_seconds(pid)?;
        std::thread::sleep(IDLE);
        let cpu = run_seconds(pid)? - cpu;
        let open = self.echo.open();
        ensure!(
            open >= usize::try_from(connections)?,
            "only {open} of {connections} connections stayed open"
        );
        let loaded = self.round_trips(station, "rr", 1.0)?;
        let id = holder.text.lines().next().unwrap_or_default();
        station.exec(&format!("kill {id}; sleep 1"), PATIENCE)?;
        Ok(Sample {
            value: Some(100.0 * cpu / IDLE.as_secs_f64()),
            p50_alone_us: Some(alone.p50_us),
            p50_loaded_us: Some(loaded.p50_us),
            ..Sample::default()
        })
    }
}
