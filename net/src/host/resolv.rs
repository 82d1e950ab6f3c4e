//! The host's resolvers, from `/etc/resolv.conf` (resolv.conf(5)).

use std::fs;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

/// Least time between two looks at the file.
const INTERVAL: Duration = Duration::from_secs(1);
/// Name servers that are used: what the C library uses (MAXNS).
pub const MAX_SERVERS: usize = 3;
/// Search domains that are used; more hardly fit the DHCP option.
const MAX_SEARCH: usize = 32;
/// Longest file that is read, in bytes.
const MAX_FILE: u64 = 64 * 1024;

/// What the file says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resolvers {
    /// Name servers in order, at most [`MAX_SERVERS`].
    pub servers: Vec<SocketAddr>,
    /// Search domains in order, without a trailing dot.
    pub search: Vec<String>,
}

impl Resolvers {
    /// Reads the file's text. Lines that make no sense are passed over.
    pub fn parse(text: &str) -> Self {
        let mut found = Self::default();
        for line in text.lines() {
            let line = line.split(['#', ';']).next().unwrap_or_default();
            let mut words = line.split_whitespace();
            match words.next() {
                Some("nameserver") if found.servers.len() < MAX_SERVERS => {
                    found.servers.extend(words.next().and_then(server));
                }
                // Of several lines, the last counts.
                Some("search" | "domain") => {
                    found.search = words
                        .map(|domain| domain.trim_end_matches('.').to_owned())
                        .filter(|domain| !domain.is_empty())
                        .take(MAX_SEARCH)
                        .collect();
                }
                _ => {}
            }
        }
        found
    }
}

/// An address, with its scope as a number if it has one.
fn server(word: &str) -> Option<SocketAddr> {
    const PORT: u16 = 53;
    if let Ok(address) = word.parse::<IpAddr>() {
        return Some(SocketAddr::new(address, PORT));
    }
    let (address, scope) = word.split_once('%')?;
    let scope = scope.parse().ok().or_else(|| {
        let path = format!("/sys/class/net/{scope}/ifindex");
        let plain = !scope.contains(['/', '.']);
        fs::read_to_string(path)
            .ok()
            .filter(|_| plain)?
            .trim()
            .parse()
            .ok()
    })?;
    Some(SocketAddrV6::new(address.parse().ok()?, PORT, 0, scope).into())
}

/// The file, read again when it changes.
#[derive(Debug)]
pub struct ResolvConf {
    path: PathBuf,
    looked: Option<Instant>,
    stamp: Option<(SystemTime, u64)>,
    current: Resolvers,
}

impl Default for ResolvConf {
    fn default() -> Self {
        Self::new("/etc/resolv.conf")
    }
}

impl ResolvConf {
    /// The file at `path`, not yet read.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            looked: None,
            stamp: None,
            current: Resolvers::default(),
        }
    }

    /// Looks at the file unless that was less than a second ago. True when what it says has changed.
    ///
    /// A file that cannot be read says nothing: there are no resolvers then.
    pub fn refresh(&mut self, now: Instant) -> bool {
        if self.looked.is_some_and(|at| now < at + INTERVAL) {
            return false;
        }
        self.looked = Some(now);
        let metadata = fs::metadata(&self.path).ok();
        let stamp = metadata.and_then(|file| Some((file.modified().ok()?, file.len())));
        if stamp.is_some() && stamp == self.stamp {
            return false;
        }
        self.stamp = stamp;
        let text = match stamp {
            Some((_, len)) if len <= MAX_FILE => fs::read_to_string(&self.path),
            _ => Ok(String::new()),
        };
        let found = Resolvers::parse(&text.unwrap_or_default());
        let changed = found != self.current;
        self.current = found;
        changed
    }

    /// What the file said when it was last read.
    pub fn resolvers(&self) -> &Resolvers {
        &self.current
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_of_both_families_and_search_domains_are_found() {
        let text = "# made by hand\nnameserver 127.0.0.53 # stub\n nameserver ::1\nsearch a.test\n\
                    nameserver fe80::1%7\nnameserver 192.0.2.1\nnameserver what\n\
                    search corp.test. b.test\noptions edns0\n";
        let found = Resolvers::parse(text);
        let servers = ["127.0.0.53:53", "[::1]:53", "[fe80::1%7]:53"];
        assert_eq!(found.servers, servers.map(|server| server.parse().unwrap()));
        assert_eq!(found.search, ["corp.test", "b.test"]);
        assert_eq!(
            Resolvers::parse("nameserver\n;nameserver 1.1.1.1"),
            Resolvers::default()
        );
    }

    #[test]
    fn a_change_is_seen_after_a_second() {
        let path = std::env::temp_dir().join(format!("resolv-{}", std::process::id()));
        fs::write(&path, "nameserver 192.0.2.1").unwrap();
        let mut file = ResolvConf::new(&path);
        let start = Instant::now();
        assert!(file.refresh(start));
        fs::write(&path, "nameserver 192.0.2.1\nnameserver 192.0.2.22\n").unwrap();
        assert!(!file.refresh(start + INTERVAL / 2));
        assert!(file.refresh(start + INTERVAL));
        assert_eq!(file.resolvers().servers.len(), 2);
        fs::remove_file(&path).unwrap();
        assert!(file.refresh(start + INTERVAL * 2));
        assert!(file.resolvers().servers.is_empty());
    }
}
