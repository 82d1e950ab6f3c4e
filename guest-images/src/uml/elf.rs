//! Running a program with another release's C library, without installing either.
//!
//! A program names its loader in a string of fixed room (`PT_INTERP`). The kernel takes that name
//! relative to the working directory, so a short one put in its place makes the program run with
//! the loader that lies beside it; `LD_LIBRARY_PATH` does the rest. Unlike starting the loader with
//! the program as its argument, this keeps `/proc/self/exe` and the place of the heap, both of
//! which User Mode Linux depends on.

use anyhow::{Context, Result, ensure};
use goblin::elf::Elf;
use goblin::elf::program_header::PT_INTERP;

/// Makes the ELF program in `bytes` ask for the loader `name` in its working directory.
///
/// Fails when it is not ELF, is static, or has less room for the name than it needs.
pub(super) fn set_loader(bytes: &mut [u8], name: &str) -> Result<()> {
    let elf = Elf::parse(bytes).context("no ELF file")?;
    let segment = elf
        .program_headers
        .iter()
        .find(|header| header.p_type == PT_INTERP)
        .context("a static program has no loader")?
        .file_range();
    let room = bytes
        .get_mut(segment)
        .context("the loader's name is outside the file")?;
    ensure!(
        name.len() < room.len(),
        "{} bytes are too few for the loader's name {name}",
        room.len()
    );
    room.fill(0);
    room[..name.len()].copy_from_slice(name.as_bytes());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loader_of_this_test_is_replaced() {
        let mut bytes = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        set_loader(&mut bytes, "ld.so").unwrap();
        let found = Elf::parse(&bytes).unwrap().interpreter.unwrap();
        assert_eq!(found.trim_end_matches('\0'), "ld.so");
        let long = "x".repeat(100);
        assert!(set_loader(&mut bytes, &long).is_err());
        assert!(set_loader(&mut [0; 64], "ld.so").is_err());
    }
}
