//! Keeping the CPUs awake while something is measured.
//!
//! On virtual machines, waking a halted CPU takes long enough to be what one measures. A process of
//! the lowest scheduling class on each CPU keeps it from halting, and gives way to everything else.

use std::process::{Child, Command};

use anyhow::{Context, Result};
use guest_images::host;

/// One spinner per CPU, until dropped.
pub(crate) struct Awake(Vec<Child>);

impl Awake {
    /// Starts them, with `taskset` and `chrt` of util-linux.
    pub(crate) fn start() -> Result<Self> {
        let own = std::env::current_exe().context("cannot find this program")?;
        let mut awake = Self(Vec::new());
        for cpu in cpus()? {
            let mut command = Command::new("taskset");
            command
                .args(["-c", &cpu.to_string(), "chrt", "-i", "0"])
                .arg(&own)
                .args(["agent", "spin"]);
            let child = host::bound(&command)
                .spawn()
                .context("cannot start taskset of util-linux")?;
            awake.0.push(child);
        }
        Ok(awake)
    }
}

impl Drop for Awake {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // fails only when it has ended
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What a spinner does.
pub(crate) fn spin() -> ! {
    loop {
        std::hint::spin_loop();
    }
}

/// The CPUs this process may run on.
fn cpus() -> Result<Vec<u32>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
        .and_then(parse_list)
        .context("/proc/self/status has no list of CPUs")
}

/// `0-2,5`.
fn parse_list(text: &str) -> Option<Vec<u32>> {
    let mut list = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        list.extend(first..=last);
    }
    Some(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus_have_ranges() {
        assert_eq!(parse_list("\t0-2,5\n"), Some(vec![0, 1, 2, 5]));
        assert_eq!(parse_list("3"), Some(vec![3]));
        assert_eq!(parse_list("x"), None);
    }
}
