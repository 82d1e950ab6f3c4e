//! How long it takes from exec to the first `KVM_RUN`.
//!
//! `wonton run --boot-timer` prints it to stderr. The time before `main` (loading and linking the
//! program) is taken from the CPU time that the process had used by then.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::sys;

static START: OnceLock<(Instant, Duration)> = OnceLock::new();

/// To be called first in `main`.
pub fn start() {
    let _ = START.set((Instant::now(), sys::cpu_time()));
}

/// Time since exec.
pub fn since_exec() -> Duration {
    START.get().map_or(Duration::ZERO, |(instant, before)| {
        instant.elapsed() + *before
    })
}
