//! Writing initramfs archives.
//!
//! The kernel takes any number of `newc` cpio archives one after the other and lays them over each
//! other. So an image is made once and cached, and what differs from run to run (a script, a
//! binary under test) is a second small archive appended to it. Archives are plain: under
//! emulation, unpacking lz4 costs more than copying the bytes.
//!
//! The output depends on the content alone: entries are sorted, owned by root, and dated 1970.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result};
use cpio::newc::{self, ModeFileType};

#[derive(Clone, Debug)]
enum Node {
    Dir,
    File { mode: u32, data: Vec<u8> },
    Symlink { target: String },
    CharDev { mode: u32, major: u32, minor: u32 },
}

/// A file tree in memory, to be written as a cpio archive.
#[derive(Clone, Debug, Default)]
pub struct Initramfs {
    nodes: BTreeMap<String, Node>,
}

impl Initramfs {
    /// An empty tree.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a directory and those above it.
    pub fn dir(&mut self, path: &str) -> &mut Self {
        let path = path.trim_matches('/');
        self.parents(path);
        if !path.is_empty() {
            self.nodes.entry(path.to_owned()).or_insert(Node::Dir);
        }
        self
    }

    /// Adds a file with permission bits `mode`, replacing what was there.
    pub fn file(&mut self, path: &str, mode: u32, data: impl Into<Vec<u8>>) -> &mut Self {
        self.insert(
            path,
            Node::File {
                mode: mode & 0o7777,
                data: data.into(),
            },
        )
    }

    /// Adds a symbolic link.
    pub fn symlink(&mut self, path: &str, target: &str) -> &mut Self {
        self.insert(
            path,
            Node::Symlink {
                target: target.to_owned(),
            },
        )
    }

    /// Adds a character device node.
    pub fn char_dev(&mut self, path: &str, mode: u32, major: u32, minor: u32) -> &mut Self {
        self.insert(
            path,
            Node::CharDev {
                mode: mode & 0o7777,
                major,
                minor,
            },
        )
    }

    /// Adds the contents of a host file.
    pub fn copy(&mut self, path: &str, mode: u32, from: &Path) -> Result<&mut Self> {
        let data =
            std::fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
        Ok(self.file(path, mode, data))
    }

    /// Whether `path` is in the tree.
    pub fn contains(&self, path: &str) -> bool {
        self.nodes.contains_key(path.trim_matches('/'))
    }

    fn insert(&mut self, path: &str, node: Node) -> &mut Self {
        let path = path.trim_matches('/');
        self.parents(path);
        self.nodes.insert(path.to_owned(), node);
        self
    }

    fn parents(&mut self, path: &str) {
        for (end, _) in path.match_indices('/') {
            self.nodes
                .entry(path[..end].to_owned())
                .or_insert(Node::Dir);
        }
    }

    /// Writes the archive, padded to 512 bytes so that another one may follow it.
    pub fn write_to(&self, output: impl Write) -> io::Result<()> {
        let mut output = Counting {
            inner: output,
            count: 0,
        };
        for (ino, (path, node)) in (1u32..).zip(&self.nodes) {
            let entry = newc::Builder::new(path).ino(ino);
            let (entry, data): (_, &[u8]) = match node {
                Node::Dir => (
                    entry
                        .nlink(2)
                        .mode(0o755)
                        .set_mode_file_type(ModeFileType::Directory),
                    &[],
                ),
                Node::File { mode, data } => (
                    entry.mode(*mode).set_mode_file_type(ModeFileType::Regular),
                    data,
                ),
                Node::Symlink { target } => (
                    entry.mode(0o777).set_mode_file_type(ModeFileType::Symlink),
                    target.as_bytes(),
                ),
                Node::CharDev { mode, major, minor } => (
                    entry
                        .mode(*mode)
                        .set_mode_file_type(ModeFileType::Char)
                        .rdev_major(*major)
                        .rdev_minor(*minor),
                    &[],
                ),
            };
            let size = u32::try_from(data.len()).map_err(|_| {
                io::Error::other(format!(
                    "{path} is larger than the 4 GiB that a newc cpio file can be"
                ))
            })?;
            let mut writer = entry.write(&mut output, size);
            writer.write_all(data)?;
            writer.finish()?;
        }
        newc::trailer(&mut output)?;
        let padding = (512 - output.count % 512) % 512;
        output.write_all(&vec![0; padding])
    }

    /// The archive as bytes.
    pub fn to_bytes(&self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.write_to(&mut bytes)?;
        Ok(bytes)
    }
}

/// An archive of `(path, permission bits, contents)`, to be appended to another one.
pub fn files_cpio(files: &[(&str, u32, &[u8])]) -> io::Result<Vec<u8>> {
    let mut tree = Initramfs::new();
    for (path, mode, data) in files {
        tree.file(path, *mode, *data);
    }
    tree.to_bytes()
}

struct Counting<W> {
    inner: W,
    count: usize,
}

impl<W: Write> Write for Counting<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(data)?;
        self.count += written;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    type Listed = Vec<(String, u32, Vec<u8>)>;

    fn list(mut bytes: &[u8]) -> Listed {
        let mut found = Vec::new();
        loop {
            let mut reader = newc::Reader::new(bytes).unwrap();
            if reader.entry().is_trailer() {
                return found;
            }
            let (name, mode) = (reader.entry().name().to_owned(), reader.entry().mode());
            let mut data = Vec::new();
            reader.read_to_end(&mut data).unwrap();
            bytes = reader.finish().unwrap();
            found.push((name, mode, data));
        }
    }

    #[test]
    fn tree_comes_out_sorted_with_parents_first() {
        let mut tree = Initramfs::new();
        tree.file("/usr/bin/tool", 0o755, *b"body")
            .symlink("bin/sh", "busybox")
            .char_dev("dev/console", 0o600, 5, 1);
        let listed = list(&tree.to_bytes().unwrap());
        let names: Vec<_> = listed.iter().map(|(n, ..)| n.as_str()).collect();
        assert_eq!(
            names,
            [
                "bin",
                "bin/sh",
                "dev",
                "dev/console",
                "usr",
                "usr/bin",
                "usr/bin/tool"
            ]
        );
        assert_eq!(listed[0].1, 0o040_755);
        assert_eq!(listed[1], ("bin/sh".into(), 0o120_777, b"busybox".to_vec()));
        assert_eq!(listed[3].1, 0o020_600);
        assert_eq!(
            listed[6],
            ("usr/bin/tool".into(), 0o100_755, b"body".to_vec())
        );
    }

    #[test]
    fn output_depends_on_content_only_and_is_padded() {
        let mut a = Initramfs::new();
        a.file("x", 0o644, *b"1").file("y", 0o644, *b"2");
        let mut b = Initramfs::new();
        b.file("y", 0o644, *b"2").file("x", 0o644, *b"1");
        assert_eq!(a.to_bytes().unwrap(), b.to_bytes().unwrap());
        assert_eq!(a.to_bytes().unwrap().len() % 512, 0);
    }

    #[test]
    fn extra_files_are_an_archive_of_their_own() {
        let listed = list(&files_cpio(&[("job/run.sh", 0o755, b"exit 0")]).unwrap());
        assert_eq!(
            listed[1],
            ("job/run.sh".into(), 0o100_755, b"exit 0".to_vec())
        );
    }
}
