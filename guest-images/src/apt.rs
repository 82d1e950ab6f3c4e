//! Debian packages through a private apt: nothing on the machine changes.
//!
//! Each suite has apt directories of its own below the cache, holding its lists, its package cache,
//! a `sources` file that names the machine's own mirror and keyring, and an empty dpkg status. So
//! apt's signature checks apply, the candidate of a package is always that of the suite, and neither
//! the machine's pins nor its installed packages have a say. It works as root and as any user.
//!
//! What was resolved and downloaded is remembered for a day in `resolved.json`, so a warm call
//! starts no apt at all. When the lists are older and cannot be fetched, what is there is used.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::progress::Progress;
use crate::sources::DebianSource;

/// How long lists are taken to be current.
const FRESH: Duration = Duration::from_secs(24 * 3600);

/// One package at one version, with its `.deb` on disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Package {
    /// Package name.
    pub name: String,
    /// Its Debian version.
    pub version: String,
    /// First alternative of each dependency, without version bounds.
    pub depends: Vec<String>,
    /// The `.deb`, verified by apt.
    pub deb: PathBuf,
    /// When it was looked up, in seconds since 1970.
    resolved_at: u64,
}

/// A private apt for one suite.
#[derive(Debug)]
pub struct Apt {
    suite: String,
    dir: PathBuf,
    options: Vec<String>,
    resolved: BTreeMap<String, Package>,
    updated: bool,
    progress: Progress,
}

impl Apt {
    /// Sets up the directories for `suite` below `cache`, using `source`'s mirror and keyring.
    pub fn new(
        cache: &Path,
        suite: &str,
        source: &DebianSource,
        progress: Progress,
    ) -> Result<Self> {
        let dir = cache.join("apt").join(suite);
        for sub in ["lists/partial", "cache/archives/partial", "parts", "debs"] {
            let sub = dir.join(sub);
            std::fs::create_dir_all(&sub)
                .with_context(|| format!("cannot create {}", sub.display()))?;
        }
        let signed_by = match &source.signed_by {
            Some(keyring) => format!("Signed-By: {keyring}\n"),
            None => String::new(),
        };
        let stanza = format!(
            "Types: deb\nURIs: {}\nSuites: {suite}\nComponents: main\nArchitectures: amd64\n{signed_by}",
            source.uri
        );
        std::fs::write(dir.join("parts/debian.sources"), stanza)?;
        std::fs::write(dir.join("status"), "")?;
        let resolved = std::fs::read(dir.join("resolved.json"))
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .unwrap_or_default();
        Ok(Self {
            suite: suite.to_owned(),
            options: apt_options(&dir),
            dir,
            resolved,
            updated: false,
            progress,
        })
    }

    /// The named packages of this suite, downloaded unless already there.
    pub fn fetch(&mut self, names: &[&str]) -> Result<Vec<Package>> {
        let stale: Vec<&str> = names
            .iter()
            .copied()
            .filter(|n| !self.is_fresh(n))
            .collect();
        if !stale.is_empty()
            && let Err(error) = self.resolve(&stale)
        {
            // offline with yesterday's packages is a good place to be
            let missing: Vec<&str> = stale
                .iter()
                .copied()
                .filter(|n| !self.is_there(n))
                .collect();
            if !missing.is_empty() {
                return Err(error.context(format!(
                    "cannot get {} from Debian {}: this needs the network once; check that `apt-get update` \
                     works on this machine and run the command again",
                    missing.join(", "),
                    self.suite
                )));
            }
            self.progress.note(&format!(
                "Debian {} cannot be reached; using the packages fetched earlier",
                self.suite
            ));
            self.postpone();
        }
        names
            .iter()
            .map(|name| {
                self.resolved
                    .get(*name)
                    .cloned()
                    .with_context(|| format!("{name} was not resolved"))
            })
            .collect()
    }

    /// `roots` and the library packages they need, found by following `Depends` through packages
    /// called `lib…` (scripts of maintainers, which want debconf and the like, are never run here).
    pub fn fetch_with_libraries(&mut self, roots: &[&str]) -> Result<Vec<Package>> {
        let mut done: BTreeMap<String, Package> = BTreeMap::new();
        let mut wanted: Vec<String> = roots.iter().map(|r| (*r).to_owned()).collect();
        while !wanted.is_empty() {
            let names: Vec<&str> = wanted.iter().map(String::as_str).collect();
            let fetched = self.fetch(&names)?;
            wanted.clear();
            for package in fetched {
                wanted.extend(
                    package
                        .depends
                        .iter()
                        .filter(|d| d.starts_with("lib"))
                        .cloned(),
                );
                done.insert(package.name.clone(), package);
            }
            wanted.retain(|name| !done.contains_key(name));
            wanted.sort();
            wanted.dedup();
        }
        Ok(done.into_values().collect())
    }

    fn is_there(&self, name: &str) -> bool {
        self.resolved.get(name).is_some_and(|p| p.deb.exists())
    }

    fn is_fresh(&self, name: &str) -> bool {
        let limit = now().saturating_sub(FRESH.as_secs());
        self.is_there(name) && self.resolved[name].resolved_at >= limit
    }

    /// Takes everything that is there as current for another hour, so that each use of a machine
    /// without network does not wait for the next failure.
    fn postpone(&mut self) {
        let hour = Duration::from_secs(3600);
        let almost_stale = now().saturating_sub((FRESH - hour).as_secs());
        for package in self.resolved.values_mut() {
            package.resolved_at = package.resolved_at.max(almost_stale);
        }
        // a cache that cannot be written costs the wait again, nothing else
        let _ = self.save();
    }

    fn save(&self) -> Result<()> {
        let path = self.dir.join("resolved.json");
        let json = serde_json::to_vec_pretty(&self.resolved)?;
        std::fs::write(&path, json).with_context(|| format!("cannot write {}", path.display()))
    }

    fn resolve(&mut self, names: &[&str]) -> Result<()> {
        self.update()?;
        let mut missing = Vec::new();
        for name in names {
            let shown = self.run("apt-cache", &["show", "--no-all-versions", name], &self.dir)?;
            let mut package = parse_show(&shown)
                .with_context(|| format!("Debian {} has no package {name}", self.suite))?;
            package.deb = self
                .dir
                .join("debs")
                .join(deb_file_name(name, &package.version));
            if !package.deb.exists() {
                missing.push(package.clone());
            }
            self.resolved.insert((*name).to_owned(), package);
        }
        self.download(&missing)?;
        self.save()
    }

    fn download(&self, packages: &[Package]) -> Result<()> {
        if packages.is_empty() {
            return Ok(());
        }
        let names: Vec<&str> = packages.iter().map(|p| p.name.as_str()).collect();
        self.progress.step(&format!(
            "downloading {} ({})",
            names.join(", "),
            self.suite
        ));
        let scratch = tempfile::tempdir_in(&self.dir)?;
        let mut arguments = vec!["download".to_owned()];
        arguments.extend(packages.iter().map(|p| format!("{}={}", p.name, p.version)));
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        self.run("apt-get", &arguments, scratch.path())?;
        for package in packages {
            let prefix = format!("{}_", package.name);
            let found = std::fs::read_dir(scratch.path())?
                .flatten()
                .find(|e| e.file_name().to_string_lossy().starts_with(&prefix))
                .with_context(|| format!("apt-get download left no file for {}", package.name))?;
            std::fs::rename(found.path(), &package.deb)?;
        }
        Ok(())
    }

    fn update(&mut self) -> Result<()> {
        let stamp = self.dir.join("updated");
        let age = stamp
            .metadata()
            .and_then(|m| m.modified())
            .ok()
            .and_then(|t| t.elapsed().ok());
        if self.updated || age.is_some_and(|age| age < FRESH) {
            return Ok(());
        }
        self.progress.step(&format!(
            "reading the package list of Debian {}",
            self.suite
        ));
        self.run("apt-get", &["update", "--error-on=any"], &self.dir)?;
        std::fs::write(&stamp, "")?;
        self.updated = true;
        Ok(())
    }

    fn run(&self, program: &str, arguments: &[&str], cwd: &Path) -> Result<String> {
        let output = Command::new(program)
            .arg("-q")
            .args(&self.options)
            .args(arguments)
            .env("LC_ALL", "C")
            .env("DEBIAN_FRONTEND", "noninteractive")
            .current_dir(cwd)
            .output()
            .with_context(|| {
                format!("cannot start {program}: guest images are made with Debian's apt")
            })?;
        let shown = format!(
            "`{program} {}` for Debian {}",
            arguments.join(" "),
            self.suite
        );
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            bail!("{shown} failed: {}", stderr.trim());
        }
        String::from_utf8(output.stdout).with_context(|| format!("{shown} printed no UTF-8"))
    }
}

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs())
}

fn apt_options(dir: &Path) -> Vec<String> {
    let dir = dir.display();
    [
        format!("Dir::State={dir}"),
        format!("Dir::State::Lists={dir}/lists"),
        format!("Dir::State::status={dir}/status"),
        format!("Dir::Cache={dir}/cache"),
        "Dir::Cache::pkgcache=pkgcache.bin".to_owned(),
        "Dir::Cache::srcpkgcache=srcpkgcache.bin".to_owned(),
        "Dir::Etc::SourceList=/dev/null".to_owned(),
        format!("Dir::Etc::SourceParts={dir}/parts"),
        "Dir::Etc::Preferences=/dev/null".to_owned(),
        "Dir::Etc::PreferencesParts=/dev/null".to_owned(),
        "APT::Architecture=amd64".to_owned(),
        "APT::Architectures=amd64".to_owned(),
        "APT::Default-Release=".to_owned(),
        // as an ordinary user, and as root without warnings about `_apt`
        "APT::Sandbox::User=root".to_owned(),
        "APT::Update::Post-Invoke-Success::=true".to_owned(),
        "Acquire::Languages=none".to_owned(),
        "Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false".to_owned(),
        "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".to_owned(),
        "Acquire::Retries=2".to_owned(),
        "Acquire::http::Timeout=20".to_owned(),
        "Acquire::https::Timeout=20".to_owned(),
    ]
    .into_iter()
    .map(|option| format!("-o{option}"))
    .collect()
}

/// The name a `.deb` is kept under; the colon of an epoch is escaped as apt does.
fn deb_file_name(name: &str, version: &str) -> String {
    format!("{name}_{}_amd64.deb", version.replace(':', "%3a"))
}

/// Reads the first stanza of `apt-cache show`.
fn parse_show(text: &str) -> Result<Package> {
    let stanza = text.trim_start().split("\n\n").next().unwrap_or_default();
    let field = |wanted: &str| {
        stanza
            .lines()
            .find_map(|line| line.strip_prefix(wanted)?.strip_prefix(": "))
    };
    let name = field("Package").context("no Package field")?;
    let version = field("Version").context("no Version field")?;
    let depends: Vec<String> = ["Pre-Depends", "Depends"]
        .into_iter()
        .filter_map(field)
        .flat_map(|list| list.split(','))
        .filter_map(|dependency| dependency.split(['|', '(', ':']).next())
        .map(|dependency| dependency.trim().to_owned())
        .collect();
    ensure!(
        !name.is_empty() && !version.is_empty(),
        "empty Package or Version field"
    );
    Ok(Package {
        name: name.to_owned(),
        version: version.to_owned(),
        depends,
        deb: PathBuf::new(),
        resolved_at: now(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn show_gives_version_and_first_alternatives() {
        let text = "Package: iperf3\nVersion: 3.12-1+deb12u2\nPre-Depends: debconf (>= 1) | other\n\
            Depends: libc6 (>= 2.34), libiperf0 (= 3.12-1), libfoo:any\nDescription: x\n\n\
            Package: iperf3\nVersion: 1\n";
        let package = parse_show(text).unwrap();
        assert_eq!(package.version, "3.12-1+deb12u2");
        assert_eq!(package.depends, ["debconf", "libc6", "libiperf0", "libfoo"]);
        assert!(parse_show("").is_err());
    }

    #[test]
    fn epoch_is_escaped_in_file_names() {
        assert_eq!(
            deb_file_name("busybox-static", "1:1.35.0-4"),
            "busybox-static_1%3a1.35.0-4_amd64.deb"
        );
    }
}
