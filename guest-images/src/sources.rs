//! Where this machine gets its Debian packages from.
//!
//! The guest images are made from the same mirror, checked with the same keyring, as the machine's
//! own packages. This module reads `/etc/apt/sources.list` (one line per entry) and
//! `/etc/apt/sources.list.d` (the same, or deb822 stanzas in `*.sources`) and picks out the entry
//! of the Debian main archive.

use std::path::Path;

use anyhow::{Context, Result};

/// The Debian main archive as this machine's apt knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DebianSource {
    /// Base of the archive, for example `http://deb.debian.org/debian`.
    pub uri: String,
    /// The keyring that verifies it; `None` leaves it to apt's trusted keys.
    pub signed_by: Option<String>,
}

/// One `deb` entry of any source file.
#[derive(Debug)]
struct Entry {
    uris: Vec<String>,
    suites: Vec<String>,
    components: Vec<String>,
    signed_by: Option<String>,
}

impl DebianSource {
    /// Reads this machine's sources and picks the Debian main archive that offers `codename`.
    pub fn of_this_machine(codename: &str) -> Result<Self> {
        Self::from_etc_apt(Path::new("/etc/apt"), codename)
    }

    fn from_etc_apt(etc: &Path, codename: &str) -> Result<Self> {
        let mut entries = Vec::new();
        if let Ok(text) = std::fs::read_to_string(etc.join("sources.list")) {
            entries.extend(parse_one_line(&text));
        }
        let parts = etc.join("sources.list.d");
        let mut files: Vec<_> = std::fs::read_dir(&parts)
            .map(|dir| dir.flatten().map(|e| e.path()).collect())
            .unwrap_or_default();
        files.sort();
        for file in files {
            let text = std::fs::read_to_string(&file).unwrap_or_default();
            match file.extension().and_then(|e| e.to_str()) {
                Some("list") => entries.extend(parse_one_line(&text)),
                Some("sources") => entries.extend(parse_deb822(&text)),
                _ => {}
            }
        }
        pick(&entries, codename).with_context(|| {
            format!(
                "no apt source for Debian {codename} main under {}: guest images are made from Debian \
                 packages; add a line such as `deb http://deb.debian.org/debian {codename} main`",
                etc.display()
            )
        })
    }
}

/// The value of `VERSION_CODENAME` in `/etc/os-release`.
pub fn own_codename() -> Result<String> {
    let text = std::fs::read_to_string("/etc/os-release").context("cannot read /etc/os-release")?;
    codename_of(&text).context("/etc/os-release has no VERSION_CODENAME: is this a Debian release?")
}

fn codename_of(os_release: &str) -> Option<String> {
    os_release
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
        .map(|value| value.trim_matches('"').to_owned())
        .filter(|value| !value.is_empty())
}

fn pick(entries: &[Entry], codename: &str) -> Option<DebianSource> {
    entries
        .iter()
        .filter(|e| e.components.iter().any(|c| c == "main"))
        .filter(|e| e.suites.iter().any(|s| s == codename))
        .find_map(|e| {
            // `…/debian` is the main archive's usual tail; third parties reuse codenames too
            let uri = e
                .uris
                .iter()
                .find(|u| u.trim_end_matches('/').ends_with("/debian"))?;
            Some(DebianSource {
                uri: uri.trim_end_matches('/').to_owned(),
                signed_by: e.signed_by.clone(),
            })
        })
}

fn words(value: &str) -> Vec<String> {
    value.split_whitespace().map(str::to_owned).collect()
}

/// `deb [option=value …] URI SUITE COMPONENT…`
fn parse_one_line(text: &str) -> Vec<Entry> {
    text.lines().filter_map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<Entry> {
    let rest = line
        .split('#')
        .next()?
        .trim()
        .strip_prefix("deb ")?
        .trim_start();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => ("", rest),
    };
    let signed_by = options
        .split_whitespace()
        .find_map(|option| option.strip_prefix("signed-by="))
        .map(str::to_owned);
    let mut fields = rest.split_whitespace();
    Some(Entry {
        uris: vec![fields.next()?.to_owned()],
        suites: vec![fields.next()?.to_owned()],
        components: fields.map(str::to_owned).collect(),
        signed_by,
    })
}

/// Stanzas of `Field: value`, separated by blank lines; `#` lines are comments.
fn parse_deb822(text: &str) -> Vec<Entry> {
    let mut entries = Vec::new();
    for stanza in text.split("\n\n") {
        let mut entry = Entry {
            uris: vec![],
            suites: vec![],
            components: vec![],
            signed_by: None,
        };
        let mut types = Vec::new();
        let mut enabled = true;
        for line in stanza
            .lines()
            .filter(|l| !l.starts_with('#') && !l.starts_with(' '))
        {
            let Some((field, value)) = line.split_once(':') else {
                continue;
            };
            match field.to_ascii_lowercase().as_str() {
                "types" => types = words(value),
                "uris" => entry.uris = words(value),
                "suites" => entry.suites = words(value),
                "components" => entry.components = words(value),
                // an embedded key has its text on continuation lines: leave it to apt's trusted keys
                "signed-by" => entry.signed_by = words(value).into_iter().next(),
                "enabled" => enabled = value.trim() != "no",
                _ => {}
            }
        }
        if enabled && types.iter().any(|t| t == "deb") {
            entries.push(entry);
        }
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEB822: &str = "Types: deb\n# a comment\nURIs: http://mirror.example/debian/\n\
        Suites: bookworm bookworm-updates\nComponents: main\n\
        Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n\n\
        Types: deb\nURIs: http://mirror.example/debian-security\nSuites: bookworm-security\nComponents: main\n";

    #[test]
    fn deb822_main_archive_is_found_among_stanzas() {
        let found = pick(&parse_deb822(DEB822), "bookworm").unwrap();
        assert_eq!(found.uri, "http://mirror.example/debian");
        assert_eq!(
            found.signed_by.as_deref(),
            Some("/usr/share/keyrings/debian-archive-keyring.gpg")
        );
        assert_eq!(pick(&parse_deb822(DEB822), "trixie"), None);
    }

    #[test]
    fn disabled_and_source_only_stanzas_are_skipped() {
        let text = DEB822.replacen("Types: deb\n", "Types: deb-src\n", 1);
        assert_eq!(pick(&parse_deb822(&text), "bookworm"), None);
        let text = DEB822.replacen("Types: deb\n", "Enabled: no\nTypes: deb\n", 1);
        assert_eq!(pick(&parse_deb822(&text), "bookworm"), None);
    }

    #[test]
    fn one_line_format_with_options_and_comments() {
        let text = "# deb http://no.example/debian bookworm main\n\
            deb https://other.example/apt bookworm main\n\
            deb [arch=amd64 signed-by=/k.gpg] http://m.example/debian bookworm main contrib # here\n";
        let found = pick(&parse_one_line(text), "bookworm").unwrap();
        assert_eq!(found.uri, "http://m.example/debian");
        assert_eq!(found.signed_by.as_deref(), Some("/k.gpg"));
    }

    #[test]
    fn codename_from_os_release() {
        assert_eq!(
            codename_of("ID=debian\nVERSION_CODENAME=bookworm\n").as_deref(),
            Some("bookworm")
        );
        assert_eq!(
            codename_of("VERSION_CODENAME=\"trixie\"").as_deref(),
            Some("trixie")
        );
        assert_eq!(codename_of("ID=debian\n"), None);
    }
}
