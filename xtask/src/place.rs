//! Where a guest can run: on this machine's KVM, or in the lab.

use std::path::Path;
use std::process::Command;

use serde::Deserialize;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Check {
    kvm: Kvm,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Kvm {
    usable: bool,
    emulated: bool,
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
        match serde_json::from_slice::<Check>(json) {
            Ok(Check { kvm }) if kvm.usable && !kvm.emulated => Self::Kvm,
            Ok(Check { kvm }) if kvm.emulated => Self::Lab(
                "this machine's KVM emulates the guest's kernel, too slow to boot".to_owned(),
            ),
            Ok(_) => Self::Lab("this machine has no usable KVM".to_owned()),
            Err(_) => Self::Lab("`wonton check` could not tell whether KVM is usable".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kvm_only_when_wonton_says_it_is_usable() {
        let place = |json: &str| Place::from_check(json.as_bytes());
        assert_eq!(
            place(r#"{"kvm":{"usable":true,"emulated":false,"more":1},"tun":{}}"#),
            Place::Kvm
        );
        assert_eq!(place(r#"{"kvm":{"usable":true}}"#), Place::Kvm);
        for json in [
            r#"{"kvm":{"usable":false,"emulated":true}}"#,
            r#"{"kvm":{"usable":true,"emulated":true}}"#,
            "{}",
            "",
        ] {
            assert!(matches!(place(json), Place::Lab(_)), "{json}");
        }
    }
}
