//! Built things, kept under a name that says what went in.
//!
//! An entry is a directory `NAME-HASH`; the hash covers everything the result depends on and the
//! version of the recipe. It is filled under a temporary name and renamed when complete, so a
//! half-made entry is never seen. Older entries of the same name are removed.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

/// Directories of runs in progress begin with this.
pub const RUN_PREFIX: &str = ".run-";
const MAKING_PREFIX: &str = ".making-";
/// No run and no recipe takes this long.
const ABANDONED: Duration = Duration::from_secs(24 * 3600);

/// Removes what interrupted runs and recipes left in `root` more than a day ago.
pub fn sweep(root: &Path) {
    let Ok(entries) = std::fs::read_dir(root) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let age = entry
            .metadata()
            .and_then(|m| m.modified())
            .ok()
            .and_then(|t| t.elapsed().ok());
        if (name.starts_with(RUN_PREFIX) || name.starts_with(MAKING_PREFIX))
            && age.is_some_and(|age| age > ABANDONED)
        {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Collects what a cache entry depends on.
#[derive(Clone, Debug)]
pub struct Key(Sha256);

impl Key {
    /// A key for `recipe`, whose `version` changes whenever its code does.
    pub fn new(recipe: &str, version: u32) -> Self {
        let mut key = Self(Sha256::new());
        key.add(recipe.as_bytes());
        key.add(&version.to_le_bytes());
        key
    }

    /// Adds one input. Inputs are framed, so `ab`,`c` and `a`,`bc` differ.
    pub fn add(&mut self, input: &[u8]) {
        self.0.update((input.len() as u64).to_le_bytes());
        self.0.update(input);
    }

    /// The key as 16 hexadecimal digits.
    pub fn hex(&self) -> String {
        self.0
            .clone()
            .finalize()
            .iter()
            .take(8)
            .map(|b| format!("{b:02x}"))
            .collect()
    }
}

/// The entry `name` for `key` below `root`; `fill` makes it when it is not there.
pub fn entry(
    root: &Path,
    name: &str,
    key: &Key,
    fill: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let dir = root.join(format!("{name}-{}", key.hex()));
    if dir.is_dir() {
        return Ok(dir);
    }
    std::fs::create_dir_all(root).with_context(|| format!("cannot create {}", root.display()))?;
    let scratch = tempfile::Builder::new()
        .prefix(MAKING_PREFIX)
        .tempdir_in(root)?;
    fill(scratch.path()).with_context(|| format!("cannot make {name}"))?;
    for old in std::fs::read_dir(root)?.flatten() {
        if is_entry_of(&old.file_name().to_string_lossy(), name) {
            let _ = std::fs::remove_dir_all(old.path());
        }
    }
    std::fs::rename(scratch.keep(), &dir)
        .with_context(|| format!("cannot put {} in place", dir.display()))?;
    Ok(dir)
}

fn is_entry_of(file_name: &str, name: &str) -> bool {
    file_name
        .strip_prefix(name)
        .and_then(|rest| rest.strip_prefix('-'))
        .is_some_and(|hash| hash.len() == 16 && hash.bytes().all(|b| b.is_ascii_hexdigit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(inputs: &[&str]) -> Key {
        let mut key = Key::new("test", 1);
        for input in inputs {
            key.add(input.as_bytes());
        }
        key
    }

    #[test]
    fn keys_tell_inputs_and_recipes_apart() {
        assert_eq!(key(&["a", "b"]).hex(), key(&["a", "b"]).hex());
        assert_ne!(key(&["ab", "c"]).hex(), key(&["a", "bc"]).hex());
        assert_ne!(Key::new("test", 1).hex(), Key::new("test", 2).hex());
        assert_eq!(key(&[]).hex().len(), 16);
    }

    #[test]
    fn entries_are_made_once_and_replace_older_ones() {
        let root = tempfile::tempdir().unwrap();
        let make = |dir: &Path| Ok(std::fs::write(dir.join("f"), "1")?);
        let first = entry(root.path(), "thing", &key(&["1"]), make).unwrap();
        let again = entry(root.path(), "thing", &key(&["1"]), |_| panic!("made twice")).unwrap();
        assert_eq!(first, again);
        let other = entry(root.path(), "thing-6", &key(&["1"]), make).unwrap();
        let second = entry(root.path(), "thing", &key(&["2"]), make).unwrap();
        assert!(second.join("f").exists() && other.exists() && !first.exists());
    }

    #[test]
    fn a_failure_leaves_nothing_behind() {
        let root = tempfile::tempdir().unwrap();
        let error = entry(root.path(), "thing", &key(&[]), |_| anyhow::bail!("no")).unwrap_err();
        assert_eq!(format!("{error:#}"), "cannot make thing: no");
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
    }
}
