//! `wonton check`: what this host can do. Everything is tried, nothing is guessed.
//!
//! The exit code is 0 whatever is found; a script reads `--json`:
//!
//! ```json
//! {"kernel": "6.12.0", "items": [{"name": "kvm", "state": "yes", "detail": "...", "hint": null}],
//!  "guest_mips": 2000.0}
//! ```

mod probe;
mod speed;

use serde::Serialize;

use crate::sys;

/// How well something works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// As it should.
    Yes,
    /// It works, but far too slowly for a kernel to boot.
    Slow,
    /// Not at all.
    No,
}

/// One thing that was tried.
#[derive(Clone, Debug, Serialize)]
pub struct Item {
    /// Stable name.
    pub name: &'static str,
    /// How well it works.
    pub state: State,
    /// What was seen.
    pub detail: String,
    /// What to do about it.
    pub hint: Option<String>,
}

/// Everything that was tried.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Release of the host's kernel.
    pub kernel: String,
    /// By name: `kvm`, `tun`, `vhost-net`, `peek-off-v4`, `peek-off-v6`, `ping-v4`, `ping-v6`.
    pub items: Vec<Item>,
    /// Millions of supervisor instructions a second in a guest, if KVM runs one.
    pub guest_mips: Option<f64>,
}

impl Report {
    /// Tries everything.
    pub fn collect() -> Self {
        let (kvm, guest_mips) = speed::kvm();
        let items = vec![
            kvm,
            probe::device(
                "tun",
                "/dev/net/tun",
                "load the module tun; needed for tap only",
            ),
            probe::device(
                "vhost-net",
                "/dev/vhost-net",
                "load the module vhost_net; needed for vhost=on only",
            ),
            probe::peek_off(false),
            probe::peek_off(true),
            probe::ping(false),
            probe::ping(true),
        ];
        Self {
            kernel: sys::kernel_release(),
            items,
            guest_mips,
        }
    }

    /// As text for people.
    fn print(&self) {
        println!("{:<12} {}", "kernel", self.kernel);
        for Item {
            name,
            state,
            detail,
            hint,
        } in &self.items
        {
            let state = match state {
                State::Yes => "yes",
                State::Slow => "slow",
                State::No => "no",
            };
            println!("{name:<12} {state:<5} {detail}");
            if let Some(hint) = hint {
                println!("{:<12} hint: {hint}", "");
            }
        }
    }
}

/// Prints what this host can do.
///
/// # Errors
/// Fails when the report cannot be encoded.
pub fn run(json: bool) -> anyhow::Result<()> {
    let report = Report::collect();
    if json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        report.print();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_no_has_a_hint() {
        let report = Report::collect();
        assert_eq!(report.items.len(), 7);
        for item in &report.items {
            assert_eq!(item.state == State::Yes, item.hint.is_none(), "{item:?}");
        }
    }
}
