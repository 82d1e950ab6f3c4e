//! Unpacking `.deb` files without dpkg.
//!
//! A `.deb` is an `ar` archive whose member `data.tar.xz` (or `.zst`, `.gz` never in current
//! suites) holds the files. Only regular files, links and directories matter for an image.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Unpacks the files of `deb` for which `keep` says yes below `dest`. `keep` sees paths without the
/// leading `./`; merged-usr paths are used as the package has them.
pub fn unpack(deb: &Path, dest: &Path, keep: &dyn Fn(&str) -> bool) -> Result<()> {
    unpack_inner(deb, dest, keep).with_context(|| format!("cannot unpack {}", deb.display()))
}

fn unpack_inner(deb: &Path, dest: &Path, keep: &dyn Fn(&str) -> bool) -> Result<()> {
    let mut archive = ar::Archive::new(BufReader::new(File::open(deb)?));
    while let Some(member) = archive.next_entry() {
        let member = member?;
        let name = String::from_utf8_lossy(member.header().identifier()).into_owned();
        return match name.trim_end_matches('/') {
            "data.tar.xz" => unpack_tar(liblzma::read::XzDecoder::new(member), dest, keep),
            "data.tar.zst" => unpack_tar(zstd::Decoder::new(member)?, dest, keep),
            "data.tar" => unpack_tar(member, dest, keep),
            other if other.starts_with("data.tar") => {
                bail!("compression of {other} is not supported")
            }
            _ => continue,
        };
    }
    bail!("it has no data.tar: not a Debian package?")
}

fn unpack_tar(reader: impl Read, dest: &Path, keep: &dyn Fn(&str) -> bool) -> Result<()> {
    let mut tar = tar::Archive::new(reader);
    for entry in tar.entries()? {
        let mut entry = entry?;
        let Some(path) = relative(&entry.path()?) else {
            continue;
        };
        let shown = path.to_string_lossy().into_owned();
        let kind = entry.header().entry_type();
        if kind.is_dir() || !keep(&shown) {
            continue;
        }
        if kind.is_file() || kind.is_symlink() {
            let target = dest.join(&path);
            if let Some(parent) = target.parent() {
                std::fs::create_dir_all(parent)?;
            }
            entry.set_preserve_permissions(true);
            entry.set_preserve_mtime(false);
            entry
                .unpack(&target)
                .with_context(|| format!("cannot write {}", target.display()))?;
        }
    }
    Ok(())
}

/// The path without `./`, or `None` when it would leave the destination.
fn relative(path: &Path) -> Option<PathBuf> {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(part) => clean.push(part),
            Component::CurDir => {}
            _ => return None,
        }
    }
    (!clean.as_os_str().is_empty()).then_some(clean)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn tar_bytes() -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, body) in [
            ("./usr/bin/tool", &b"#!"[..]),
            ("./usr/share/doc/x", &b"doc"[..]),
        ] {
            let mut header = tar::Header::new_gnu();
            header.set_size(body.len() as u64);
            header.set_mode(0o755);
            header.set_cksum();
            builder.append_data(&mut header, name, body).unwrap();
        }
        builder.into_inner().unwrap()
    }

    fn deb_with(member: &str, data: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut builder = ar::Builder::new(Vec::new());
        for (name, body) in [
            ("debian-binary", &b"2.0\n"[..]),
            ("control.tar.xz", b"?"),
            (member, data),
        ] {
            let header = ar::Header::new(name.as_bytes().to_vec(), body.len() as u64);
            builder.append(&header, body).unwrap();
        }
        file.write_all(&builder.into_inner().unwrap()).unwrap();
        file
    }

    #[test]
    fn xz_zstd_and_plain_packages_unpack_what_is_kept() {
        let tar = tar_bytes();
        let mut xz = liblzma::write::XzEncoder::new(Vec::new(), 1);
        xz.write_all(&tar).unwrap();
        let xz = xz.finish().unwrap();
        let zst = zstd::encode_all(&tar[..], 1).unwrap();
        for (member, data) in [
            ("data.tar.xz", xz),
            ("data.tar.zst", zst),
            ("data.tar", tar),
        ] {
            let deb = deb_with(member, &data);
            let dest = tempfile::tempdir().unwrap();
            unpack(deb.path(), dest.path(), &|p| p.starts_with("usr/bin/")).unwrap();
            assert_eq!(
                std::fs::read(dest.path().join("usr/bin/tool")).unwrap(),
                b"#!"
            );
            assert!(!dest.path().join("usr/share").exists());
        }
    }

    #[test]
    fn other_files_are_refused_by_name() {
        let deb = deb_with("nothing", b"");
        let error = unpack(deb.path(), deb.path(), &|_| true).unwrap_err();
        assert!(format!("{error:#}").contains("not a Debian package"));
    }

    #[test]
    fn paths_that_leave_the_destination_are_dropped() {
        assert_eq!(relative(Path::new("./a/b")), Some(PathBuf::from("a/b")));
        assert_eq!(relative(Path::new("../a")), None);
        assert_eq!(relative(Path::new("/a")), None);
    }
}
