//! Kernel files: ELF, bzImage, and the search for RDPMC.
//!
//! Any file is refused or becomes a kernel whose parts are apart; work and memory are bounded by it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vpmu_kernel::{Error, Kernel};

const METHODS: [&[u8]; 5] = [
    b"\x1f\x8b\x08\0\0\0\0\0\0\0",
    b"\xfd7zXZ\0\0\0\xff\x12\xd9\x41\x02\0\x21\x01\x0a\0\0\0",
    b"\x28\xb5\x2f\xfd\x00\x58",
    b"\x02\x21\x4c\x18",
    b"",
];

fuzz_target!(|data: &[u8]| {
    let Some((&kind, data)) = data.split_first() else {
        return;
    };
    match kind {
        // As it is, or with the beginning that every kernel has.
        0..0x20 => check(data.to_vec()),
        0x20..0xa0 => check(
            [
                &b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0"[..],
                data,
            ]
            .concat(),
        ),
        _ => {
            let begin = METHODS[usize::from(kind) % METHODS.len()];
            check(bzimage(&[begin, data].concat()));
        }
    }
});

fn bzimage(payload: &[u8]) -> Vec<u8> {
    let mut image = vec![0; 1024];
    image[0x1f1] = 1;
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x20f_u16.to_le_bytes());
    image[0x24c..0x250].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    image.extend(payload);
    image
}

fn check(image: Vec<u8>) {
    let Ok(mut kernel) = Kernel::from_bytes(image) else {
        return;
    };
    let mut last = 0;
    for segment in kernel.segments() {
        assert!(last <= segment.address && segment.address <= segment.end());
        last = segment.end();
        assert!(segment.file.len() as u64 <= segment.size);
        let _ = &kernel.elf()[segment.file.clone()];
    }
    let before = kernel.elf().to_vec();
    match kernel.rewrite_rdpmc() {
        Err(error) => {
            assert!(matches!(
                error,
                Error::NoSections | Error::Ambiguous(_) | Error::Pairs
            ));
            assert_eq!(kernel.elf(), before);
        }
        Ok(search) => {
            assert!(search.decoded <= before.len() as u64);
            assert!(search.sites.len() <= search.pairs);
            let changed = before
                .iter()
                .zip(kernel.elf())
                .filter(|(a, b)| a != b)
                .count();
            assert_eq!(changed, 2 * search.sites.len());
            let _ = kernel.symbols(&search.sites);
            // What was checked is still what the headers say.
            let again = Kernel::from_bytes(kernel.elf().to_vec()).unwrap();
            assert_eq!(again.segments(), kernel.segments());
        }
    }
}
