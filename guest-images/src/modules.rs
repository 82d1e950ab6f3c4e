//! Kernel modules and the order to load them in.
//!
//! `modules.dep` of the package is made by the maintainer's scripts at installation, which are not
//! run here. So the order comes from the modules themselves: each `.modinfo` section names what the
//! module depends on, and `modules.builtin` what the kernel already has.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The modules of one kernel package.
#[derive(Clone, Debug)]
pub struct Modules {
    dir: PathBuf,
    files: BTreeMap<String, PathBuf>,
    builtin: BTreeSet<String>,
}

/// One module, unpacked.
#[derive(Clone, Debug)]
pub struct Module {
    /// Name as `lsmod` shows it.
    pub name: String,
    /// The `.ko` itself.
    pub data: Vec<u8>,
}

impl Modules {
    /// Reads the tree `lib/modules/VERSION` at `dir`.
    pub fn open(dir: &Path) -> Result<Self> {
        let mut files = BTreeMap::new();
        find_modules(dir, &mut files).with_context(|| format!("cannot read {}", dir.display()))?;
        let list = dir.join("modules.builtin");
        let builtin = std::fs::read_to_string(&list)
            .with_context(|| format!("cannot read {}", list.display()))?;
        let builtin = builtin
            .lines()
            .filter_map(|line| module_name(Path::new(line)))
            .collect();
        Ok(Self {
            dir: dir.to_owned(),
            files,
            builtin,
        })
    }

    /// The named modules and all they need, each after what it needs. What is built into the
    /// kernel is left out; a name that is neither is an error.
    pub fn in_load_order(&self, names: &[&str]) -> Result<Vec<Module>> {
        let mut order = Vec::new();
        let mut seen = BTreeSet::new();
        for name in names {
            self.visit(name, &mut seen, &mut order)?;
        }
        Ok(order)
    }

    fn visit(
        &self,
        name: &str,
        seen: &mut BTreeSet<String>,
        order: &mut Vec<Module>,
    ) -> Result<()> {
        let name = name.replace('-', "_");
        if self.builtin.contains(&name) || !seen.insert(name.clone()) {
            return Ok(());
        }
        let path = self.files.get(&name).with_context(|| {
            format!("the kernel in {} has no module {name}", self.dir.display())
        })?;
        let data = read_module(path)?;
        for needed in depends(&data) {
            self.visit(&needed, seen, order)?;
        }
        order.push(Module { name, data });
        Ok(())
    }
}

fn find_modules(dir: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            find_modules(&path, files)?;
        } else if let Some(name) = module_name(&path) {
            files.insert(name, path);
        }
    }
    Ok(())
}

/// `…/virtio-rng.ko.xz` is the module `virtio_rng`.
fn module_name(path: &Path) -> Option<String> {
    let (stem, rest) = path.file_name()?.to_str()?.split_once(".ko")?;
    matches!(rest, "" | ".xz" | ".zst").then(|| stem.replace('-', "_"))
}

fn read_module(path: &Path) -> Result<Vec<u8>> {
    let context = || format!("cannot read module {}", path.display());
    let raw = std::fs::read(path).with_context(context)?;
    let mut data = Vec::new();
    match path.extension().and_then(|e| e.to_str()) {
        Some("xz") => liblzma::read::XzDecoder::new(&raw[..])
            .read_to_end(&mut data)
            .with_context(context)?,
        Some("zst") => zstd::Decoder::new(&raw[..])?
            .read_to_end(&mut data)
            .with_context(context)?,
        _ => return Ok(raw),
    };
    Ok(data)
}

/// The `depends=a,b` entry of the module's `.modinfo`: strings that end with NUL.
fn depends(data: &[u8]) -> Vec<String> {
    const TAG: &[u8] = b"\0depends=";
    let Some(at) = data.windows(TAG.len()).position(|window| window == TAG) else {
        return Vec::new();
    };
    let list = data[at + TAG.len()..]
        .split(|b| *b == 0)
        .next()
        .unwrap_or_default();
    String::from_utf8_lossy(list)
        .split(',')
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        dir
    }

    #[test]
    fn modules_come_after_what_they_need_and_builtins_are_left_out() {
        let dir = tree(&[
            ("kernel/net/failover.ko", "\0license=GPL\0depends=\0"),
            ("kernel/net/net_failover.ko", "\0depends=failover\0"),
            (
                "kernel/drivers/virtio-net.ko",
                "\0depends=net-failover,virtio\0",
            ),
            ("modules.builtin", "kernel/drivers/virtio/virtio.ko\n"),
        ]);
        let modules = Modules::open(dir.path()).unwrap();
        let order = modules.in_load_order(&["virtio_net", "failover"]).unwrap();
        let names: Vec<_> = order.iter().map(|m| m.name.as_str()).collect();
        assert_eq!(names, ["failover", "net_failover", "virtio_net"]);
        let error = modules.in_load_order(&["nosuch"]).unwrap_err();
        assert!(error.to_string().contains("no module nosuch"));
    }
}
