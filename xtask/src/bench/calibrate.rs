//! How fast the machine is right now.

use std::hint::black_box;
use std::time::Instant;

use super::stats::median;

/// Speeds of one measurement that differ by more than this make it doubtful.
pub(crate) const MAX_DRIFT: f64 = 1.25;

const BATCHES: u32 = 15;
const CALLS: u32 = 5000;

/// Nanoseconds of the cheapest system call, the median of some batches; takes about 10 ms.
///
/// Virtual machines change between speeds for seconds to minutes, and this shows which one it is.
pub(crate) fn syscall_ns() -> f64 {
    let batches: Vec<f64> = (0..BATCHES)
        .map(|_| {
            let started = Instant::now();
            for _ in 0..CALLS {
                black_box(rustix::process::getppid());
            }
            started.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS)
        })
        .collect();
    median(&batches).unwrap_or_default()
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
    fn drift_is_the_widest_ratio() {
        assert_eq!(drift([100.0, 80.0, 120.0].into_iter()), 1.5);
        assert_eq!(drift(std::iter::empty()), 1.0);
    }
}
