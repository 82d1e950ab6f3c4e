//! What is measured, as it is named on the command line.
//!
//! | text | back-end |
//! |---|---|
//! | `wonton`, `wonton:OPTIONS`, `OPTIONS` | this tree's `wonton serve`, with options of `--net user` |
//! | `rev:REF`, `rev:REF:OPTIONS` | that of a git revision; `worktree` is this tree |
//! | `passt`, `passt:mtu=BYTES` | Debian's passt |
//!
//! OPTIONS is a list `NAME=VALUE,…`; its `mtu=` also is the MTU of the guest, otherwise 1500.

use std::str::FromStr;

use anyhow::{Context, Error, Result, ensure};

/// A kind of back-end and its options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Subject {
    /// As it was named.
    pub(crate) name: String,
    pub(crate) program: Program,
    /// `NAME=VALUE,…` as given.
    pub(crate) options: String,
    /// MTU of the guest in bytes.
    pub(crate) mtu: u32,
}

/// Which program a back-end is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Program {
    /// wonton of a git revision, or of this tree.
    Wonton {
        revision: Option<String>,
    },
    Passt,
}

impl Subject {
    /// The value of the option `name`, if it was given.
    pub(crate) fn option(&self, name: &str) -> Option<&str> {
        let mut options = self
            .options
            .split(',')
            .filter_map(|each| each.split_once('='));
        options.find_map(|(each, value)| (each == name).then_some(value))
    }
}

impl FromStr for Subject {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (program, options) = match text.split_once(':').unwrap_or((text, "")) {
            ("passt", options) => (Program::Passt, options),
            ("wonton", options) => (Program::Wonton { revision: None }, options),
            ("rev", rest) => {
                let (reference, options) = rest.split_once(':').unwrap_or((rest, ""));
                ensure!(!reference.is_empty(), "`{text}` names no revision");
                let revision = (reference != "worktree").then(|| reference.to_owned());
                (Program::Wonton { revision }, options)
            }
            _ => (Program::Wonton { revision: None }, text),
        };
        let mut mtu = 1500;
        for option in options.split(',').filter(|option| !option.is_empty()) {
            let (name, value) = option.split_once('=').with_context(|| {
                format!(
                    "`{text}`: `{option}` is no NAME=VALUE; subjects are wonton, passt, rev:REF, or options of wonton"
                )
            })?;
            ensure!(
                program != Program::Passt || name == "mtu",
                "`{text}`: the only option of passt here is mtu="
            );
            if name == "mtu" {
                mtu = value
                    .parse()
                    .with_context(|| format!("`{text}`: mtu is a number of bytes"))?;
                ensure!(
                    (576..=65535).contains(&mtu),
                    "`{text}`: mtu is 576 to 65535 bytes"
                );
            }
        }
        Ok(Self {
            name: text.to_owned(),
            program,
            options: options.to_owned(),
            mtu,
        })
    }
}

impl Subject {
    /// The value of `--net` for `wonton serve`.
    pub(crate) fn net(&self) -> String {
        let mut net = "user".to_owned();
        if !self.options.contains("host-loopback=") {
            net += ",host-loopback=allow";
        }
        if !self.options.is_empty() {
            net.push(',');
            net += &self.options;
        }
        net
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subject(text: &str) -> Subject {
        text.parse().unwrap()
    }

    #[test]
    fn wonton_is_named_by_itself_its_options_or_a_revision() {
        assert_eq!(subject("wonton").net(), "user,host-loopback=allow");
        assert_eq!(subject("rx=copy").net(), "user,host-loopback=allow,rx=copy");
        assert_eq!(subject("wonton:rx=copy,mtu=9000").mtu, 9000);
        assert_eq!(
            subject("host-loopback=deny").net(),
            "user,host-loopback=deny"
        );
        let revision = |text| subject(text).program;
        assert_eq!(
            revision("rev:HEAD~1:rx=copy"),
            Program::Wonton {
                revision: Some("HEAD~1".to_owned())
            }
        );
        assert_eq!(subject("rev:HEAD~1:rx=copy").options, "rx=copy");
        assert_eq!(revision("rev:worktree"), Program::Wonton { revision: None });
    }

    #[test]
    fn passt_has_an_mtu() {
        assert_eq!(subject("passt").mtu, 1500);
        assert_eq!(subject("passt:mtu=65520").mtu, 65520);
        assert!("passt:rx=copy".parse::<Subject>().is_err());
    }

    #[test]
    fn mistakes_are_refused() {
        for text in ["", "quick", "rev:", "mtu=x", "wonton:mtu=100"] {
            let parsed = text.parse::<Subject>();
            assert!(parsed.is_err() || text.is_empty(), "{parsed:?}");
        }
    }
}
