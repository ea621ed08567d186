//! Compressed kernels: whole, damaged and hostile.

use std::io::Write;

use super::*;
use crate::Kernel;
use crate::tests::{bzimage, elf_with};

/// One of each kind, made by the same libraries where they can, and what is in them.
fn images() -> Vec<(&'static str, Vec<u8>, Vec<u8>)> {
    let mut code = vec![0x90; 3000];
    code.extend([0x0f, 0x33, 0xc3]);
    let elf = elf_with(&code);

    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    gzip.write_all(&elf).unwrap();
    let gzip = gzip.finish().unwrap();
    let zstd =
        ruzstd::encoding::compress_to_vec(&elf[..], ruzstd::encoding::CompressionLevel::Fastest);
    let block = lz4_flex::block::compress(&elf);
    let mut lz4 = vec![0x02, 0x21, 0x4c, 0x18];
    lz4.extend((block.len() as u32).to_le_bytes());
    lz4.extend(block);
    let mut xz = lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::default()).unwrap();
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
        assert!(crate::is_bzimage(&image));
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

/// A file with much in it, and little of it in the file.
fn bomb(method: &str, size: usize) -> Vec<u8> {
    let zeros = vec![0; size];
    match method {
        "gzip" => {
            let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            gzip.write_all(&zeros).unwrap();
            gzip.finish().unwrap()
        }
        "zstd" => ruzstd::encoding::compress_to_vec(
            &zeros[..],
            ruzstd::encoding::CompressionLevel::Fastest,
        ),
        "lz4" => {
            let mut lz4 = vec![0x02, 0x21, 0x4c, 0x18];
            for block in zeros.chunks(8 << 20) {
                let block = lz4_flex::block::compress(block);
                lz4.extend((block.len() as u32).to_le_bytes());
                lz4.extend(block);
            }
            lz4
        }
        _ => {
            let mut xz =
                lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::default()).unwrap();
            xz.write_all(&zeros).unwrap();
            xz.finish().unwrap()
        }
    }
}

#[test]
fn no_more_is_unpacked_than_was_announced() {
    for method in ["gzip", "zstd", "lz4", "xz"] {
        let data = bomb(method, 200_000);
        // gzip's own last four bytes are the announcement.
        let image = match method {
            "gzip" => {
                let mut data = data;
                let end = data.len();
                data[end - 4..].copy_from_slice(&1000_u32.to_le_bytes());
                bzimage(&data, None)
            }
            _ => bzimage(&data, Some(1000)),
        };
        let error = extract(&image).unwrap_err();
        assert!(matches!(error, Error::Damaged(..)), "{method}: {error}");
    }
}

#[test]
fn more_than_the_largest_kernel_is_not_unpacked() {
    let largest = LARGEST_UNPACKED as usize;
    let error = extract(&bzimage(&bomb("xz", 4096), Some(largest + 1))).unwrap_err();
    assert!(matches!(error, Error::Unpacked(_)), "{error}");
    // As much as may be, announced of little: not found, and nothing taken for it.
    let error = extract(&bzimage(&bomb("xz", 4096), Some(largest))).unwrap_err();
    assert!(error.to_string().contains("4096 found"), "{error}");
}

#[test]
fn a_window_as_large_as_a_header_can_say_is_refused() {
    // xz: the block header's dictionary size, 40: 4 GiB. The header has a checksum of its own.
    let mut data = bomb("xz", 4096);
    let header = 12..12 + (usize::from(data[12]) + 1) * 4;
    let at = header.start + 4;
    assert_eq!(
        data[at - 2..at],
        [0x21, 1],
        "one filter, LZMA2, with one byte of properties"
    );
    data[at] = 40;
    let mut sum = flate2::Crc::new();
    sum.update(&data[header.start..header.end - 4]);
    data[header.end - 4..header.end].copy_from_slice(&sum.sum().to_le_bytes());
    let error = extract(&bzimage(&data, Some(4096))).unwrap_err();
    assert!(error.to_string().contains("mem_limit"), "{error}");

    // zstd: no single segment, no content size, a window of 2^41.
    let data = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 31 << 3, 1, 0, 0];
    let error = extract(&bzimage(&data, Some(4096))).unwrap_err();
    assert!(matches!(error, Error::Damaged("zstd", _)), "{error}");
}

#[test]
fn a_bzimage_that_is_too_large_is_refused() {
    let mut image = bzimage(&bomb("xz", 4096), Some(4096));
    image.resize(LARGEST_BZIMAGE as usize + 1, 0);
    assert!(matches!(extract(&image), Err(Error::BzImage)));
}

#[test]
fn blocks_with_nothing_in_them_are_not_read_for_long() {
    let sum = |bytes: &[u8]| {
        let mut sum = flate2::Crc::new();
        sum.update(bytes);
        sum.sum().to_le_bytes()
    };
    let header = [2, 0, 0x21, 1, 28, 0, 0, 0];
    let block = [&header[..], &sum(&header), &[0; 4]].concat();
    let xz = [b"\xfd7zXZ\0\0\0", &sum(&[0, 0])[..], &block.repeat(100_000)].concat();
    let gzip = [
        b"\x1f\x8b\x08\0\0\0\0\0\0\0",
        &b"\0\0\0\xff\xff".repeat(400_000)[..],
        &[0; 8],
    ]
    .concat();
    for (data, size) in [(xz, Some(100)), (gzip, None)] {
        let error = extract(&bzimage(&data, size)).unwrap_err();
        // Not that it was read to its end, and nothing found.
        assert!(matches!(error, Error::Damaged(..)), "{error}");
        assert!(!error.to_string().contains("0 found"), "{error}");
    }
}

#[test]
fn a_kernel_that_hardly_shrinks_is_unpacked() {
    // xorshift: 3 MB in which no method finds anything.
    let mut word = 0x9e37_79b9_7f4a_7c15_u64;
    let random = (0..400_000).flat_map(|_| {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        word.to_le_bytes()
    });
    let elf = elf_with(&random.collect::<Vec<u8>>());
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&elf).unwrap();
    let mut xz = lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::default()).unwrap();
    xz.write_all(&elf).unwrap();
    // zstd with the window of Linux's build, 128 MiB: nothing comes out before all of it is in.
    let mut zstd = b"\x28\xb5\x2f\xfd\x00\x88".to_vec();
    let blocks = elf.chunks(1 << 17);
    let last = blocks.len() - 1;
    for (n, block) in blocks.enumerate() {
        let header = (block.len() as u32) << 3 | u32::from(n == last);
        zstd.extend(&header.to_le_bytes()[..3]);
        zstd.extend(block);
    }
    for (data, size) in [
        (gzip.finish().unwrap(), None),
        (xz.finish().unwrap(), Some(elf.len())),
        (zstd, Some(elf.len())),
    ] {
        assert!(extract(&bzimage(&data, size)).unwrap() == elf);
    }
}
