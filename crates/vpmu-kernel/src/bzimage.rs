//! The vmlinux in a bzImage (the kernel's Documentation/arch/x86/boot.rst).

use std::io::Read;

use super::Error;

const MAGIC_AT: usize = 0x202;
const SECTORS_AT: usize = 0x1f1;
const VERSION_AT: usize = 0x206;
const PAYLOAD_OFFSET_AT: usize = 0x248;
const PAYLOAD_LENGTH_AT: usize = 0x24c;
/// The first protocol with a payload field.
const PROTOCOL_2_08: u16 = 0x208;
/// No kernel is larger.
const LARGEST: usize = 1 << 30;

pub(super) fn is_one(image: &[u8]) -> bool {
    image.get(MAGIC_AT..MAGIC_AT + 4) == Some(b"HdrS")
}

fn word(bytes: &[u8], at: usize) -> Result<u32, Error> {
    let four = bytes.get(at..at + 4).and_then(|four| four.try_into().ok());
    four.map(u32::from_le_bytes)
        .ok_or(Error::Truncated("it ends in its header"))
}

/// Decompresses the vmlinux in `image`.
pub(super) fn extract(image: &[u8]) -> Result<Vec<u8>, Error> {
    if (word(image, VERSION_AT)? as u16) < PROTOCOL_2_08 {
        return Err(Error::Header);
    }
    let sectors = match image[SECTORS_AT] {
        0 => 4,
        n => usize::from(n),
    };
    let start = (sectors + 1) * 512 + word(image, PAYLOAD_OFFSET_AT)? as usize;
    let length = word(image, PAYLOAD_LENGTH_AT)? as usize;
    let payload = image
        .get(start..)
        .and_then(|rest| rest.get(..length))
        .ok_or(Error::Truncated("it ends before its payload does"))?;
    // The build puts the size behind the compressed data; gzip has it there by itself.
    let (data, size) = payload.split_at(payload.len().checked_sub(4).ok_or(Error::Header)?);
    let size = word(size, 0)? as usize;
    if size > LARGEST {
        return Err(Error::Header);
    }

    let damaged =
        |method| move |error: &dyn std::fmt::Display| Error::Damaged(method, error.to_string());
    let mut kernel = Vec::with_capacity(size);
    let mut decompress = |method, reader: &mut dyn Read| {
        // One byte more than there should be, to notice it.
        reader
            .take(size as u64 + 1)
            .read_to_end(&mut kernel)
            .map_err(|error| damaged(method)(&error))
    };
    let method = match *data {
        [0x1f, 0x8b, ..] => {
            decompress("gzip", &mut flate2::read::GzDecoder::new(payload))?;
            "gzip"
        }
        [0xfd, b'7', b'z', b'X', ..] => {
            decompress("xz", &mut lzma_rust2::XzReader::new(data, false))?;
            "xz"
        }
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            let mut decoder = ruzstd::decoding::StreamingDecoder::new(data)
                .map_err(|error| damaged("zstd")(&error))?;
            decompress("zstd", &mut decoder)?;
            "zstd"
        }
        [0x02, 0x21, 0x4c, 0x18, ref blocks @ ..] => {
            kernel = lz4_legacy(blocks, size)?;
            "lz4"
        }
        [a, b, c, d, ..] => return Err(Error::Compression([a, b, c, d])),
        _ => return Err(Error::Truncated("its payload is empty")),
    };
    if kernel.len() != size {
        let text = format!("{size} bytes announced, {} found", kernel.len());
        return Err(Error::Damaged(method, text));
    }
    Ok(kernel)
}

/// LZ4's legacy frame: blocks of at most 8 MiB, each with its compressed size before it.
fn lz4_legacy(mut blocks: &[u8], size: usize) -> Result<Vec<u8>, Error> {
    const BLOCK: usize = 8 << 20;
    let mut kernel = vec![0; size];
    let mut done = 0;
    while !blocks.is_empty() {
        let length = word(blocks, 0)? as usize;
        let block = blocks
            .get(4..4 + length)
            .ok_or(Error::Truncated("it ends within an lz4 block"))?;
        let end = size.min(done + BLOCK);
        done += lz4_flex::block::decompress_into(block, &mut kernel[done..end])
            .map_err(|error| Error::Damaged("lz4", error.to_string()))?;
        blocks = &blocks[4 + length..];
    }
    kernel.truncate(done);
    Ok(kernel)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::super::tests::elf_with;
    use super::*;
    use crate::Kernel;

    fn bzimage(data: &[u8], size: Option<usize>) -> Vec<u8> {
        let mut image = vec![0; 1024];
        image[SECTORS_AT] = 1;
        image[MAGIC_AT..MAGIC_AT + 4].copy_from_slice(b"HdrS");
        image[VERSION_AT..VERSION_AT + 2].copy_from_slice(&0x20f_u16.to_le_bytes());
        let length = data.len() + if size.is_some() { 4 } else { 0 };
        image[PAYLOAD_LENGTH_AT..PAYLOAD_LENGTH_AT + 4]
            .copy_from_slice(&(length as u32).to_le_bytes());
        image.extend(data);
        if let Some(size) = size {
            image.extend((size as u32).to_le_bytes());
        }
        image
    }

    /// One of each kind, made by the same libraries where they can, and what is in them.
    fn images() -> Vec<(&'static str, Vec<u8>, Vec<u8>)> {
        let mut code = vec![0x90; 3000];
        code.extend([0x0f, 0x33, 0xc3]);
        let elf = elf_with(&code);

        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        gzip.write_all(&elf).unwrap();
        let gzip = gzip.finish().unwrap();
        let zstd = ruzstd::encoding::compress_to_vec(
            &elf[..],
            ruzstd::encoding::CompressionLevel::Fastest,
        );
        let block = lz4_flex::block::compress(&elf);
        let mut lz4 = vec![0x02, 0x21, 0x4c, 0x18];
        lz4.extend((block.len() as u32).to_le_bytes());
        lz4.extend(block);
        let mut xz =
            lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::default()).unwrap();
        xz.write_all(&elf).unwrap();
        let xz = xz.finish().unwrap();
        let size = Some(elf.len());
        [
            ("gzip", bzimage(&gzip, None)),
            ("zstd", bzimage(&zstd, size)),
            ("lz4", bzimage(&lz4, size)),
            ("xz", bzimage(&xz, size)),
        ]
        .into_iter()
        .map(|(method, image)| (method, image, elf.clone()))
        .collect()
    }

    #[test]
    fn each_compression_gives_the_kernel_back() {
        for (method, image, elf) in images() {
            assert!(is_one(&image));
            let kernel = Kernel::from_bytes(image).unwrap_or_else(|e| panic!("{method}: {e}"));
            assert_eq!(kernel.elf(), elf, "{method}");
        }
    }

    #[test]
    fn every_truncation_is_an_error() {
        for (method, image, _) in images() {
            for length in 0..image.len() {
                assert!(
                    Kernel::from_bytes(image[..length].to_vec()).is_err(),
                    "{method}, {length} bytes"
                );
            }
        }
    }

    #[test]
    fn a_flipped_byte_is_an_error_or_another_kernel_but_no_panic() {
        for (_, image, _) in images() {
            for at in (0x1f1..0x250).chain(1024..image.len()) {
                let mut damaged = image.clone();
                damaged[at] ^= 0x55;
                let _ = Kernel::from_bytes(damaged);
            }
        }
    }

    #[test]
    fn an_unknown_method_is_named() {
        let error = Kernel::from_bytes(bzimage(b"BZh9....", Some(9))).unwrap_err();
        assert!(matches!(error, Error::Compression(_)), "{error}");
        assert!(error.to_string().contains("42, 5a, 68, 39"), "{error}");
    }
}
