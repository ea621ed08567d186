use super::super::tests::{BASE, Elf};
use super::*;

const MIB: u64 = 1 << 20;

fn layout(elf: &Elf) -> Result<Layout, Error> {
    Layout::of(&elf.build())
}

fn with_segments(segments: &[(u64, u64, u64, u64)]) -> Elf {
    Elf {
        bytes: vec![0x90; 0x1000],
        segments: segments.to_vec(),
        ..Elf::default()
    }
}

#[test]
fn segments_that_share_anything_are_refused() {
    let fine = [(16 * MIB, 0x100, 0x100, MIB), (17 * MIB, 0, 0x100, 0x100)];
    let segments = layout(&with_segments(&fine)).unwrap().segments;
    assert_eq!(segments[0].address, 16 * MIB);
    assert_eq!(segments[1].end(), 17 * MIB + 0x100);

    let cases = [
        (
            [
                (16 * MIB, 0, 0x100, MIB),
                (17 * MIB - 1, 0x100, 0x100, 0x100),
            ],
            "memory",
        ),
        (
            [(16 * MIB, 0, 0x100, MIB), (17 * MIB, 0xff, 0x100, 0x100)],
            "file",
        ),
        (
            [(16 * MIB, 0, 0x100, MIB), (16 * MIB, 0x100, 0, 1)],
            "memory",
        ),
    ];
    for (segments, part) in cases {
        let error = layout(&with_segments(&segments)).unwrap_err();
        assert!(matches!(error, Error::Overlap(_)), "{error}");
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[test]
fn as_many_segments_as_a_header_can_count_load_each_byte_once() {
    // Each the whole file, at the same place: 65,534 times 4 KiB were written.
    let many = vec![(16 * MIB, 0, 0x1000, 0x1000); 0xfffe];
    assert!(matches!(
        layout(&with_segments(&many)),
        Err(Error::Overlap(_))
    ));
    let empty = vec![(16 * MIB, 0, 0, 0); 0xfffe];
    assert!(layout(&with_segments(&empty)).unwrap().segments.is_empty());
}

#[test]
fn sizes_that_make_no_sense_are_refused() {
    for segment in [
        (16 * MIB, 0, 0x2000, 0x2000), // beyond the file, which has some headers after its bytes
        (16 * MIB, u64::MAX - 120, 1, 1),
        (16 * MIB, 0, u64::MAX, u64::MAX),
        (16 * MIB, 0, 2, 1),
        (u64::MAX, 0, 1, 2),
    ] {
        let error = layout(&with_segments(&[segment])).unwrap_err();
        assert!(
            matches!(error, Error::Truncated(_) | Error::Elf(_)),
            "{segment:x?}: {error}"
        );
    }
}

#[test]
fn code_that_many_sections_claim_is_searched_once() {
    let sections = [
        (BASE, 0, 0x800),
        (BASE + 0x400, 0x400, 0x800),
        (BASE, 0xc00, 0x400),
    ];
    let elf = Elf {
        bytes: vec![0x90; 0x1000],
        code: sections.iter().copied().cycle().take(3000).collect(),
        ..Elf::default()
    };
    let code = layout(&elf).unwrap().code.unwrap();
    let at = elf.bytes_at() as usize;
    let found: Vec<_> = code
        .iter()
        .map(|code| (code.address, code.file.clone()))
        .collect();
    assert_eq!(
        found,
        [(BASE, at..at + 0xc00), (BASE, at + 0xc00..at + 0x1000)]
    );
}

#[test]
fn headers_are_no_code() {
    let elf = with_segments(&[(16 * MIB, 0, 0x1000, 0x1000)]);
    // Before the bytes are the ELF header and the program headers, after them the sections'.
    for (place, size) in [
        (0_u64.wrapping_sub(1), 2),
        (0_u64.wrapping_sub(120), 1),
        (0xff0, 0x100),
    ] {
        let elf = Elf {
            code: vec![(BASE, place, size)],
            ..elf.clone()
        };
        let error = layout(&elf).unwrap_err();
        assert!(matches!(error, Error::Overlap(_)), "{place:x}: {error}");
    }
}

#[test]
fn a_count_of_32_bits_is_bounded() {
    let mut file = Elf::default().build();
    file[60..62].copy_from_slice(&0_u16.to_le_bytes()); // e_shnum: the count is in section 0
    let sections = u64::from_le_bytes(file[40..48].try_into().unwrap()) as usize;
    file[sections + 32..][..8].copy_from_slice(&0x1_0000_u64.to_le_bytes());
    assert!(matches!(
        Layout::of(&file),
        Err(Error::Headers(0x1_0000, "section"))
    ));
}

#[test]
fn a_kernel_of_32_bits_is_named_as_such() {
    let mut file = Elf::default().build();
    file[4] = 1; // EI_CLASS: ELFCLASS32
    // Its header is shorter, and is not read as one of 64 bits.
    assert!(matches!(Layout::of(&file), Err(Error::Machine)));
}
