//! Where a guest can run: on this machine's KVM, or in the lab.

use std::path::Path;
use std::process::Command;

use serde::Deserialize;

#[derive(Debug, Deserialize)]
struct Check {
    items: Vec<Item>,
}

#[derive(Debug, Deserialize)]
struct Item {
    name: String,
    state: String,
}

/// What was chosen, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// `/dev/kvm` of this machine.
    Kvm,
    /// The nested lab, for the reason given.
    Lab(String),
}

impl Place {
    /// Asks `wonton check`.
    pub(crate) fn choose(wonton: &Path) -> Self {
        match Command::new(wonton).args(["check", "--json"]).output() {
            Ok(output) => Self::from_check(&output.stdout),
            Err(error) => Self::Lab(format!("`wonton check` did not run ({error})")),
        }
    }

    fn from_check(json: &[u8]) -> Self {
        let Ok(check) = serde_json::from_slice::<Check>(json) else {
            return Self::Lab("`wonton check` could not tell whether KVM is usable".to_owned());
        };
        let kvm = check.items.iter().find(|item| item.name == "kvm");
        match kvm.map(|item| item.state.as_str()) {
            Some("yes") => Self::Kvm,
            Some("slow") => Self::Lab(
                "this machine's KVM emulates the guest's kernel, too slow to boot".to_owned(),
            ),
            _ => Self::Lab("this machine has no usable KVM".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kvm_only_when_wonton_says_it_is_usable() {
        let place = |json: &str| Place::from_check(json.as_bytes());
        let kvm = |state: &str| {
            place(&format!(
                r#"{{"kernel":"6","items":[{{"name":"tun","state":"yes"}},{{"name":"kvm","state":"{state}","detail":""}}]}}"#
            ))
        };
        assert_eq!(kvm("yes"), Place::Kvm);
        for other in [
            kvm("slow"),
            kvm("no"),
            place(r#"{"items":[]}"#),
            place("{}"),
            place(""),
        ] {
            assert!(matches!(other, Place::Lab(_)), "{other:?}");
        }
    }
}
