//! How fast the machine is right now.

use std::hint::black_box;
use std::time::Instant;

use super::stats::median;

/// Speeds of one measurement that differ by more than this make it doubtful.
pub(crate) const MAX_DRIFT: f64 = 1.25;
/// More of the CPU than this, in percent, is too much for others to have on average.
pub(crate) const MAX_TAKEN: f64 = 5.0;

const BATCHES: u32 = 15;
const CALLS: u32 = 5000;

/// The machine at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Machine {
    /// The cheapest system call in nanoseconds, the median of some batches. Virtual machines change
    /// between speeds for seconds to minutes, and this shows which one it is.
    pub(crate) syscall_ns: f64,
    /// How much of the time others had the CPU, in percent: near zero when nothing else runs, because
    /// the spinners that keep CPUs awake give way at once.
    pub(crate) taken_percent: f64,
}

impl Machine {
    /// Looks; takes about 10 ms.
    pub(crate) fn now() -> Self {
        let cpu = cpu_time();
        let started = Instant::now();
        let batches: Vec<f64> = (0..BATCHES)
            .map(|_| {
                let started = Instant::now();
                for _ in 0..CALLS {
                    black_box(rustix::process::getppid());
                }
                started.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS)
            })
            .collect();
        let share = (cpu_time() - cpu) / started.elapsed().as_secs_f64();
        Self {
            syscall_ns: median(&batches).unwrap_or_default(),
            taken_percent: 100.0 * (1.0 - share).max(0.0),
        }
    }
}

/// CPU seconds of this thread.
#[expect(clippy::cast_precision_loss, reason = "seconds of a process")]
fn cpu_time() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// The largest of `speeds` by the smallest; 1 without any.
pub(crate) fn drift(speeds: impl Iterator<Item = f64>) -> f64 {
    let (low, high) = speeds.fold((f64::INFINITY, 0.0_f64), |(low, high), speed| {
        (low.min(speed), high.max(speed))
    });
    if high > 0.0 { high / low } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_takes_some_time_for_a_call() {
        let machine = Machine::now();
        assert!(machine.syscall_ns > 1.0, "{machine:?}");
        assert!(
            (0.0..=100.0).contains(&machine.taken_percent),
            "{machine:?}"
        );
    }

    #[test]
    fn drift_is_the_widest_ratio() {
        assert_eq!(drift([100.0, 80.0, 120.0].into_iter()), 1.5);
        assert_eq!(drift(std::iter::empty()), 1.0);
    }
}
