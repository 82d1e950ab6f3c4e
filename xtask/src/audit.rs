//! The audit of unsafe code: a list of the files that may hold it, and how much they hold.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The files that may say `unsafe`, relative to the workspace. Each also opts out of the
/// workspace's `deny(unsafe_code)` with a reason.
const ALLOWED: [&str; 7] = [
    "devices/src/net/tap/sys.rs",
    "net/src/host/peek.rs",
    "net/src/host/send.rs",
    "net/src/host/sys.rs",
    "vmm/src/kvm.rs",
    "vmm/src/sys.rs",
    "vmm/src/terminal.rs",
];

/// Prints the count of each file; false if a file outside the list has any.
pub(crate) fn run(root: &Path) -> Result<bool> {
    let mut clean = true;
    let mut total = 0;
    for file in rust_files(root)? {
        let path = root.join(&file);
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        let count = count(&text);
        let name = file.to_string_lossy();
        let allowed = ALLOWED.contains(&name.as_ref());
        if count > 0 {
            total += count;
            println!(
                "unsafe: {count:3} {name}{}",
                if allowed {
                    ""
                } else {
                    "  not on the list in xtask/src/audit.rs"
                }
            );
            clean &= allowed;
        } else if allowed {
            println!("unsafe:   0 {name}  needs not be on the list in xtask/src/audit.rs any more");
            clean = false;
        }
    }
    println!("unsafe: {total} in all");
    Ok(clean)
}

fn rust_files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut dirs = vec![root.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in
            std::fs::read_dir(&dir).with_context(|| format!("cannot read {}", dir.display()))?
        {
            let path = entry?.path();
            let hidden = path
                .file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with('.'));
            if path.is_dir() && !hidden && !path.ends_with("target") {
                dirs.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                found.push(path.strip_prefix(root)?.to_owned());
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Counts `unsafe` before a block, `fn`, `impl`, `trait` or `extern`, outside comments and strings.
fn count(text: &str) -> usize {
    text.lines().map(strip).map(|line| count_line(&line)).sum()
}

/// The line without its comment and string contents.
fn strip(line: &str) -> String {
    let mut code = String::new();
    let mut in_string = false;
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\\' if in_string => {
                chars.next();
            }
            '"' => in_string = !in_string,
            '/' if !in_string && chars.peek() == Some(&'/') => break,
            _ if !in_string => code.push(c),
            _ => {}
        }
    }
    code
}

fn count_line(code: &str) -> usize {
    code.split(|c: char| !(c.is_alphanumeric() || c == '_'))
        .filter(|word| *word == "unsafe")
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_counts() {
        assert_eq!(
            count("let x = unsafe { *p };\nunsafe impl Send for X {}\nunsafe fn f() {}"),
            3
        );
        assert_eq!(count("// unsafe { }\nlet s = \"unsafe { }\"; // unsafe"), 0);
        assert_eq!(count("#![expect(unsafe_code, reason = \"x\")]"), 0);
        assert_eq!(count("let s = \"\\\"\"; unsafe { f() }"), 1);
    }

    #[test]
    fn this_file_has_none() {
        assert_eq!(count(include_str!("audit.rs")), 0);
    }
}
