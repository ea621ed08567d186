//! Kernels that go back into their bzImages.

use super::*;
use crate::tests::{bzimage, elf_with};

/// 300 kB of code with an RDPMC, in which a compressor finds something.
fn code() -> Vec<u8> {
    let mut word = 0x9e37_79b9_7f4a_7c15_u64;
    let mut code: Vec<u8> = (0..100_000)
        .flat_map(|_| {
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            [0x90, 0x50 | (word as u8 & 7), 0xc3]
        })
        .collect();
    code.splice(1000..1003, [0x0f, 0x33, 0xc3]);
    code
}

fn images(elf: &[u8]) -> [(&'static str, Vec<u8>); 2] {
    let image = |mut packed: Vec<u8>| {
        // What replaces RDPMC may take a few bits more than RDPMC. Linux's own images leave a hundred bytes.
        packed.resize(packed.len() + 64, 0);
        bzimage(&packed, Some(elf.len()))
    };
    [
        ("zstd", image(zstd(elf).unwrap())),
        ("lz4", image(lz4(elf).unwrap())),
    ]
}

#[test]
fn a_rewritten_kernel_goes_back_into_its_bzimage() {
    for (method, image) in images(&elf_with(&code())) {
        let mut kernel = Kernel::from_bytes(image.clone()).unwrap();
        let before = kernel.elf().to_vec();
        assert_eq!(kernel.rewrite_rdpmc().unwrap().sites.len(), 1);
        let again = Kernel::from_bytes(kernel.repack(&image).unwrap()).unwrap();
        assert_ne!(again.elf(), before, "{method}");
        assert_eq!(again.elf(), kernel.elf(), "{method}");
    }
}

#[test]
fn a_shorter_kernel_leaves_the_image_as_long_as_it_was() {
    let kernel = Kernel::from_bytes(elf_with(&vec![0x90; 300_000])).unwrap();
    for (method, image) in images(&elf_with(&code())) {
        let repacked = kernel.repack(&image).unwrap();
        assert_eq!(repacked.len(), image.len(), "{method}");
        assert_eq!(repacked[..1024], image[..1024], "{method}");
        assert_eq!(
            repacked.last_chunk::<4>(),
            image.last_chunk::<4>(),
            "{method}: the size"
        );
        assert_eq!(
            Kernel::from_bytes(repacked).unwrap().elf(),
            kernel.elf(),
            "{method}"
        );
    }
}

#[test]
fn a_checksum_that_held_holds_again() {
    let kernel = Kernel::from_bytes(elf_with(&vec![0x90; 300_000])).unwrap();
    let (_, image) = images(&elf_with(&code())).into_iter().next().unwrap();
    // Of everything with the checksum behind it the remainder is 0, as boot.rst says: not inverted at the end.
    let remainder = |image: &[u8]| {
        let mut sum = flate2::Crc::new();
        sum.update(image);
        !sum.sum()
    };
    let mut valid = image.clone();
    valid.extend(remainder(&image).to_le_bytes());
    assert_eq!(remainder(&valid), 0);
    let repacked = kernel.repack(&valid).unwrap();
    assert_ne!(repacked, valid);
    assert_eq!(remainder(&repacked), 0);

    let signed = [&image[..], b"sign"].concat();
    let repacked = kernel.repack(&signed).unwrap();
    assert!(repacked.ends_with(b"sign"), "no checksum, so none is made");
}

#[test]
fn a_kernel_that_does_not_fit_is_refused() {
    let kernel = Kernel::from_bytes(elf_with(&code())).unwrap();
    let nops = elf_with(&vec![0x90; 300_000]);
    for (method, image) in images(&nops) {
        let error = kernel.repack(&image).unwrap_err();
        assert!(matches!(error, Error::Longer(1000..)), "{method}: {error}");
    }
}

#[test]
fn another_image_or_method_is_refused() {
    let elf = elf_with(&code());
    let kernel = Kernel::from_bytes(elf.clone()).unwrap();
    for (_, image) in images(&elf_with(&[0xc3])) {
        assert!(matches!(kernel.repack(&image), Err(Error::Another)));
    }
    let gzip = [&[0x1f, 0x8b][..], &[0; 8]].concat();
    let image = bzimage(&gzip, Some(elf.len()));
    assert!(matches!(kernel.repack(&image), Err(Error::Repack)));
    assert!(kernel.repack(b"short").is_err());
}
