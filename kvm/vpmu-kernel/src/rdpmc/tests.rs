//! The search on code that is ordinary, and on code that is made to take long.

use super::*;
use crate::Kernel;
use crate::tests::{BASE, Elf, elf_with};

/// Ordinary code, long enough to begin in the middle of.
fn filler() -> Vec<u8> {
    let one = [
        0x55, 0x48, 0x89, 0xe5, 0x41, 0x54, 0x48, 0x83, 0xec, 0x10, 0x48, 0x8b, 0x07, 0x48, 0x85,
        0xc0, 0x74, 0x05, 0xe8, 0x10, 0x20, 0x30, 0x00, 0x5d, 0xc3,
    ];
    one.repeat(40)
}

fn search(code: &[u8]) -> Result<Search, Error> {
    find(
        code,
        &[Code {
            file: 0..code.len(),
            address: BASE,
        }],
    )
}

fn offsets(code: &[u8]) -> Vec<usize> {
    let sites = search(code).unwrap().sites;
    sites.iter().map(|site| site.offset).collect()
}

#[test]
fn an_instruction_is_found_and_the_same_bytes_in_a_constant_are_not() {
    let mut code = filler();
    code.extend([0xb8, 0x0f, 0x33, 0x00, 0x00]); // mov eax, 0x330f
    code.extend([0x48, 0x8d, 0x05, 0x0f, 0x33, 0x0f, 0x33]); // lea rax, [rip+0x330f330f]
    code.extend(filler());
    assert_eq!(offsets(&code), []);
    assert_eq!(search(&code).unwrap().pairs, 3);
    let real = code.len();
    code.extend([0x0f, 0x33]);
    code.extend(filler());
    assert_eq!(offsets(&code), [real]);
}

#[test]
fn prefixes_change_nothing() {
    for prefixes in [&[0x66][..], &[0x48], &[0x67, 0x2e, 0x66, 0x41]] {
        let mut code = filler();
        code.extend(prefixes);
        let at = code.len();
        code.extend(RDPMC);
        code.extend(filler());
        assert_eq!(offsets(&code), [at], "{prefixes:x?}");
    }
}

#[test]
fn at_the_very_beginning_and_end_too() {
    let mut code = vec![0x0f, 0x33];
    code.extend(filler());
    let end = code.len();
    code.extend([0x0f, 0x33]);
    assert_eq!(offsets(&code), [0, end]);
    // Half of one is none.
    assert!(offsets(&code[..1]).is_empty());
}

#[test]
fn nothing_but_the_instructions_changes() {
    let mut code = filler();
    code.extend([0x0f, 0x33]);
    code.extend(filler());
    let file = elf_with(&code);
    let mut kernel = Kernel::from_bytes(file.clone()).unwrap();
    kernel.rewrite_rdpmc().unwrap();
    let changed: Vec<usize> = (0..file.len())
        .filter(|&n| file[n] != kernel.elf()[n])
        .collect();
    let at = 64 + filler().len();
    assert_eq!(changed, [at, at + 1]);
    assert_eq!(kernel.elf()[at..at + 2], EXIT);
    let again = kernel.rewrite_rdpmc().unwrap();
    assert_eq!(again, Search::default(), "there is none any more");
}

/// Instructions of 3 and 2 bytes that are in step wherever decoding begins: `0f 33` is RDPMC, and
/// from its second byte `33 c9` is XOR.
const DENSE: [u8; 3] = [0x0f, 0x33, 0xc9];

#[test]
fn no_byte_is_decoded_twice_however_dense_the_pairs_are() {
    let code = DENSE.repeat(MOST_PAIRS);
    let search = search(&code).unwrap();
    assert_eq!(search.sites.len(), MOST_PAIRS);
    assert!(search.decoded <= code.len() as u64, "{}", search.decoded);
    // Pairs far apart: their run-ups, and nothing between them.
    let sparse = [&[0x90; 4096][..], &DENSE].concat().repeat(100);
    let search = self::search(&sparse).unwrap();
    assert_eq!(search.decoded, 100 * (RUN_UP as u64 + 1));
}

#[test]
fn overlapping_sections_cost_no_more_than_one() {
    let bytes = DENSE.repeat(1000);
    let section = (BASE, 0, bytes.len() as u64);
    let once = Elf {
        code: vec![section],
        bytes,
        ..Elf::default()
    };
    let often = Elf {
        code: vec![section; 60_000],
        ..once.clone()
    };
    let search = |elf: Elf| {
        let mut kernel = Kernel::from_bytes(elf.build()).unwrap();
        kernel.rewrite_rdpmc().unwrap()
    };
    let (once, often) = (search(once), search(often));
    assert_eq!(once.sites.len(), 1000);
    assert_eq!(once.decoded, often.decoded);
    assert_eq!(once.sites.len(), often.sites.len());
}

#[test]
fn more_pairs_than_any_kernel_has_are_refused() {
    let code = DENSE.repeat(MOST_PAIRS + 1);
    assert!(matches!(search(&code), Err(Error::Pairs)));
    let mut kernel = Kernel::from_bytes(elf_with(&code)).unwrap();
    assert!(kernel.rewrite_rdpmc().is_err());
    assert_eq!(kernel.elf(), elf_with(&code), "unchanged");
}

/// Decodes from each beginning anew: what the search is a shorter way to.
fn from_each_beginning(code: &[u8], at: usize) -> Option<bool> {
    let first = at.saturating_sub(RUN_UP);
    let last = if first == 0 { 0 } else { at - IN_STEP };
    let answers = (first..=last).filter_map(|start| {
        let mut decoder = Decoder::with_ip(64, &code[start..], start as u64, 0);
        loop {
            let instruction = decoder.decode();
            if instruction.is_invalid() {
                return None;
            } else if instruction.ip() as usize == at {
                return Some(instruction.code() == Opcode::Rdpmc);
            } else if instruction.next_ip() as usize > at {
                let ends = instruction.next_ip() as usize == at + RDPMC.len();
                return Some(ends && instruction.code() == Opcode::Rdpmc);
            }
        }
    });
    let answers: Vec<bool> = answers.collect();
    let first = *answers.first()?;
    answers.iter().all(|&it| it == first).then_some(first)
}

proptest::proptest! {
    #[test]
    fn the_search_agrees_with_decoding_from_each_beginning(
        words in proptest::collection::vec((0_usize..5, proptest::prelude::any::<[u8; 3]>()), 0..300),
    ) {
        let code: Vec<u8> = words.iter().flat_map(|(kind, random)| match kind {
            0 => vec![0x0f, 0x33],
            1 => DENSE.to_vec(),
            2 => vec![0xb8, 0x0f, 0x33, random[0], 0],
            3 => vec![0x48, 0x8b, 0x07],
            _ => random.to_vec(),
        }).collect();
        let mut steps = Steps::of(&code);
        for at in pairs(&code) {
            proptest::prop_assert_eq!(steps.begins_at(at), from_each_beginning(&code, at), "{}", at);
        }
    }
}
