//! Option sets of `wonton run`: `NAME=VALUE,…`.
//!
//! `transport`, `cpus` and `memory` are options of the command; `net` is the kind of card, and all other
//! names are keys of `--net`.

use anyhow::{Context, Result, ensure};

const OF_THE_COMMAND: [&str; 3] = ["transport", "cpus", "memory"];
const KIND: &str = "net";

/// Whether `options` hold what only `wonton run` has.
pub(super) fn are_needed(options: &str) -> bool {
    options.split(',').any(|option| {
        let name = option.split('=').next().unwrap_or_default();
        name == KIND || OF_THE_COMMAND.contains(&name)
    })
}

/// The arguments that `options` stand for, safe in a shell.
pub(super) fn arguments(options: &str) -> Result<String> {
    let mut arguments = String::new();
    let (mut kind, mut keys) = ("user", String::new());
    for option in options.split(',').filter(|option| !option.is_empty()) {
        let (name, value) = option
            .split_once('=')
            .with_context(|| format!("`{option}` is no NAME=VALUE"))?;
        let plain = |text: &str| {
            text.bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-_.:%/".contains(&byte))
        };
        ensure!(
            plain(name) && plain(value),
            "`{option}` has characters that no option of wonton has"
        );
        if OF_THE_COMMAND.contains(&name) {
            arguments += &format!("--{name} {value} ");
        } else if name == KIND {
            kind = value;
        } else {
            keys += &format!(",{option}");
        }
    }
    if kind == "user" && !keys.contains(",host-loopback=") {
        // the far side of the workloads is the lab itself
        keys += ",host-loopback=allow";
    }
    Ok(format!("{arguments}--net {kind}{keys}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_become_arguments() {
        let given = |options: &str| arguments(options).unwrap();
        assert_eq!(given(""), "--net user,host-loopback=allow");
        assert_eq!(
            given("transport=mmio,rx=copy"),
            "--transport mmio --net user,rx=copy,host-loopback=allow"
        );
        assert_eq!(given("net=tap,vhost=on"), "--net tap,vhost=on");
        assert_eq!(
            given("cpus=2,host-loopback=deny"),
            "--cpus 2 --net user,host-loopback=deny"
        );
    }

    #[test]
    fn nothing_else_reaches_the_shell() {
        for options in ["transport", "a=$(b)", "a=b c", "a;b=c", "rx='x'"] {
            assert!(arguments(options).is_err(), "{options}");
        }
    }

    #[test]
    fn the_lab_is_for_what_only_run_has() {
        assert!(are_needed("rx=copy,transport=pci") && are_needed("net=tap"));
        assert!(!are_needed("rx=copy,mtu=9000") && !are_needed(""));
    }
}
