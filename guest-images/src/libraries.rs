//! The shared libraries a program needs, from this machine or from an unpacked package tree.
//!
//! `ldd` would run the program's loader; here the ELF headers are read instead (`DT_NEEDED`,
//! `DT_RUNPATH`, the interpreter), so the programs may come from another release or machine.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use goblin::elf::Elf;

const DIRS: [&str; 6] = [
    "usr/lib/x86_64-linux-gnu",
    "lib/x86_64-linux-gnu",
    "usr/lib64",
    "lib64",
    "usr/lib",
    "lib",
];

/// Where each library that `program` needs lies: the path it is expected at, and the file to copy.
/// `root` is `/` for this machine or the root of an unpacked tree. A static program needs none.
pub fn closure(program: &Path, root: &Path) -> Result<BTreeMap<PathBuf, PathBuf>> {
    let mut found = BTreeMap::new();
    let mut todo = vec![program.to_owned()];
    while let Some(path) = todo.pop() {
        let bytes =
            std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let elf =
            Elf::parse(&bytes).with_context(|| format!("{} is no ELF file", path.display()))?;
        if let Some(interpreter) = elf.interpreter {
            let source = locate_absolute(root, interpreter).with_context(|| {
                format!(
                    "{} wants the loader {interpreter}, which is not there",
                    path.display()
                )
            })?;
            found.insert(PathBuf::from(interpreter), source);
        }
        let runpaths: Vec<String> = elf
            .runpaths
            .iter()
            .chain(&elf.rpaths)
            .flat_map(|list| list.split(':'))
            .map(|dir| dir.trim_start_matches('/').to_owned())
            .collect();
        for name in &elf.libraries {
            let (target, source) = locate(root, &runpaths, name).with_context(|| {
                format!(
                    "{} needs the library {name}, which is not below {}",
                    path.display(),
                    root.display()
                )
            })?;
            if found.insert(target, source.clone()).is_none() {
                todo.push(source);
            }
        }
    }
    Ok(found)
}

fn locate(root: &Path, runpaths: &[String], name: &str) -> Option<(PathBuf, PathBuf)> {
    let dirs = runpaths.iter().map(String::as_str).chain(DIRS);
    dirs.map(|dir| {
        (
            Path::new("/").join(dir).join(name),
            root.join(dir).join(name),
        )
    })
    .find(|(_, source)| source.exists())
}

fn locate_absolute(root: &Path, path: &str) -> Option<PathBuf> {
    let relative = Path::new(path.trim_start_matches('/'));
    // packages of merged-usr releases hold /lib64/… as usr/lib64/…, and the loader may be a link
    // to an absolute path inside the tree
    let name = relative.file_name()?;
    [root.join(relative), root.join("usr").join(relative)]
        .into_iter()
        .chain(DIRS.iter().map(|dir| root.join(dir).join(name)))
        .find(|candidate| candidate.exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_test_needs_libc_and_its_loader() {
        let found = closure(&std::env::current_exe().unwrap(), Path::new("/")).unwrap();
        let names: Vec<_> = found
            .keys()
            .filter_map(|p| p.file_name()?.to_str())
            .collect();
        assert!(names.contains(&"libc.so.6"), "{names:?}");
        assert!(names.iter().any(|n| n.starts_with("ld-linux")), "{names:?}");
    }

    #[test]
    fn a_missing_library_is_named() {
        let empty = tempfile::tempdir().unwrap();
        let error = closure(&std::env::current_exe().unwrap(), empty.path()).unwrap_err();
        assert!(error.to_string().contains("which is not"), "{error}");
    }
}
