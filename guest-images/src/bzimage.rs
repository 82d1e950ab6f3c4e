//! From a bzImage to the vmlinux inside it.
//!
//! Wonton boots the bzImage as it is. QEMU's microvm machine enters a kernel by PVH, for which it
//! wants the ELF file. The setup header says where the compressed payload lies
//! (`Documentation/arch/x86/boot.rst`: `setup_sects`, `payload_offset`, `payload_length`); Debian
//! compresses it with zstd (6.12) or lz4 in the legacy frame (6.1). The last four bytes of the
//! payload are its unpacked length.

use anyhow::{Context, Result, bail, ensure};

const SETUP_SECTS: usize = 0x1f1;
const HEADER_MAGIC: usize = 0x202;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;
const LZ4_LEGACY: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// A block of the legacy frame unpacks to at most this much.
const LZ4_BLOCK: usize = 8 << 20;

/// Unpacks the ELF kernel from the bytes of a bzImage.
pub fn vmlinux(image: &[u8]) -> Result<Vec<u8>> {
    ensure!(
        image.get(HEADER_MAGIC..HEADER_MAGIC + 4) == Some(b"HdrS"),
        "not a Linux bzImage"
    );
    let setup_sects = match image[SETUP_SECTS] {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let start = (setup_sects + 1) * 512 + read_u32(image, PAYLOAD_OFFSET)?;
    let length = read_u32(image, PAYLOAD_LENGTH)?;
    let payload = image
        .get(start..start + length)
        .context("the payload lies beyond the end of the bzImage")?;
    ensure!(payload.len() > 8, "the bzImage has no payload");
    let (data, unpacked) = payload.split_at(payload.len() - 4);
    let unpacked = read_u32(unpacked, 0)?;
    let elf = match &data[..4] {
        magic if magic == ZSTD => {
            use std::io::Read;
            let mut elf = Vec::with_capacity(unpacked);
            zstd::Decoder::new(data)?
                .single_frame()
                .read_to_end(&mut elf)
                .context("bad zstd payload")?;
            elf
        }
        magic if magic == LZ4_LEGACY => lz4_legacy(&data[4..])?,
        magic => {
            bail!("the kernel is compressed in a way that is not supported (magic {magic:02x?})")
        }
    };
    ensure!(
        elf.starts_with(b"\x7fELF"),
        "the payload of the bzImage is no ELF file"
    );
    Ok(elf)
}

fn lz4_legacy(mut data: &[u8]) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    while data.len() >= 4 {
        let size = read_u32(data, 0)?;
        let block = data
            .get(4..4 + size)
            .context("a block of the lz4 payload is cut short")?;
        out.extend(lz4_flex::block::decompress(block, LZ4_BLOCK).context("bad lz4 block")?);
        data = &data[4 + size..];
    }
    Ok(out)
}

fn read_u32(bytes: &[u8], at: usize) -> Result<usize> {
    let field = bytes.get(at..at + 4).context("the bzImage is cut short")?;
    Ok(u32::from_le_bytes([field[0], field[1], field[2], field[3]]) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bzimage(payload: &[u8], unpacked: u32) -> Vec<u8> {
        let mut image = vec![0; 0x400];
        image[SETUP_SECTS] = 1;
        image[HEADER_MAGIC..][..4].copy_from_slice(b"HdrS");
        let length = u32::try_from(payload.len()).unwrap() + 4;
        image[PAYLOAD_LENGTH..][..4].copy_from_slice(&length.to_le_bytes());
        image.extend(payload);
        image.extend(unpacked.to_le_bytes());
        image
    }

    #[test]
    fn zstd_and_lz4_payloads_unpack() {
        let elf = b"\x7fELF and the rest of it".to_vec();
        let zstd = zstd::encode_all(&elf[..], 1).unwrap();
        let block = lz4_flex::block::compress(&elf);
        let mut lz4 = LZ4_LEGACY.to_vec();
        lz4.extend(u32::try_from(block.len()).unwrap().to_le_bytes());
        lz4.extend(block);
        for payload in [zstd, lz4] {
            assert_eq!(vmlinux(&bzimage(&payload, elf.len() as u32)).unwrap(), elf);
        }
    }

    #[test]
    fn damage_is_an_error_not_a_panic() {
        assert!(vmlinux(b"").is_err());
        assert!(vmlinux(&[0; 0x400]).is_err());
        let mut cut = bzimage(&LZ4_LEGACY, 0);
        assert!(vmlinux(&cut).is_err());
        cut.truncate(0x400);
        assert!(vmlinux(&cut).is_err());
        assert!(vmlinux(&bzimage(b"what is this", 1)).is_err());
    }
}
