//! Address spaces that a hostile program has made: none panics, and none costs more than its budget.
//!
//! They are mutations of real ones, the corpus of the fuzz target `unwind`, made by the test `native`.

mod space;

use std::path::Path;

use space::check;
use vpmu_unwind::{Cut, End};

fn corpus() -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/unwind");
    let files = std::fs::read_dir(folder).expect("the corpus");
    let bytes = files.map(|file| std::fs::read(file.expect("a file").path()).expect("read"));
    bytes.collect()
}

/// A generator of numbers (xorshift64*).
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % end.max(1)
    }
}

#[test]
fn real_spaces_have_their_calls() {
    let corpus = corpus();
    assert!(!corpus.is_empty());
    for bytes in corpus.iter().filter(|bytes| bytes.len() > 4096) {
        let outcome = check(bytes);
        assert!(outcome.calls > 0, "{outcome:?}");
    }
}

#[test]
fn mutated_spaces_stay_in_their_budget() {
    let corpus = corpus();
    let mut random = Random(1);
    let mut ends = std::collections::BTreeMap::<String, u32>::new();
    for round in 0..3000 {
        let mut bytes = corpus[round % corpus.len()].clone();
        for _ in 0..1 + random.below(24) {
            let at = random.below(bytes.len());
            bytes[at] = match random.below(4) {
                0 => 0,
                1 => 0xff,
                2 => bytes[at] ^ 1 << random.below(8),
                _ => random.below(256) as u8,
            };
        }
        let outcome = check(&bytes);
        *ends.entry(format!("{:?}", outcome.end)).or_default() += 1;
    }
    println!("{ends:?}");
    assert!(ends.len() > 3, "{ends:?}");
}

/// Returns a space of one page, whose ELF header says that it has code and CFI there.
fn object(eh_frame: &[u8]) -> Vec<u8> {
    const BASE: u64 = 0x40_0000;
    let mut page = vec![0_u8; 4096];
    let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"\x7fELF\x02\x01\x01");
    put(18, &[62]);
    put(32, &64_u64.to_le_bytes());
    put(54, &[56, 0, 2, 0]);
    for (n, kind, flags, address, length) in [
        (0, 1_u32, 5_u32, 0_u64, 4096_u64),
        (1, 0x6474_e550, 4, 0x200, 0x40),
    ] {
        let at = 64 + 56 * n;
        put(at, &kind.to_le_bytes());
        put(at + 4, &flags.to_le_bytes());
        put(at + 16, &address.to_le_bytes());
        put(at + 40, &length.to_le_bytes());
    }
    // One function, from 0x100 on, with its entry at 0x340.
    put(0x200, &[1, 0x1b, 3, 0x3b, 0, 0, 0, 0, 1, 0, 0, 0]);
    put(0x20c, &(-0x100_i32).to_le_bytes());
    put(0x210, &0x140_i32.to_le_bytes());
    put(0x300, eh_frame);
    let mut bytes = vec![0; 16 * 8];
    bytes[7 * 8..8 * 8].copy_from_slice(&(BASE + 0x800).to_le_bytes());
    bytes.extend((BASE + 0x110).to_le_bytes());
    bytes.extend(BASE.to_le_bytes());
    bytes.extend(4096_u64.to_le_bytes());
    bytes.extend(page);
    bytes
}

/// Returns a CIE for 0x300 of its object, and behind it an entry with these instructions.
fn entry(instructions: &[u8]) -> Vec<u8> {
    // "zR", pcrel and sdata4; the CFA is RSP + 8, and the return address below it.
    let cie = [
        0x14, 0, 0, 0, 0, 0, 0, 0, 1, b'z', b'R', 0, 1, 0x78, 16, 1, 0x1b, 0x0c, 7, 8, 0x90, 1, 0,
        0,
    ];
    let mut bytes = vec![0_u8; 0x140];
    bytes[..cie.len()].copy_from_slice(&cie);
    let fde = &mut bytes[0x40..];
    let length = 4 + 4 + 4 + 1 + instructions.len() as u32;
    fde[..4].copy_from_slice(&length.to_le_bytes());
    fde[4..8].copy_from_slice(&0x44_u32.to_le_bytes());
    fde[8..12].copy_from_slice(&(-0x248_i32).to_le_bytes());
    fde[12..16].copy_from_slice(&0x100_u32.to_le_bytes());
    fde[17..17 + instructions.len()].copy_from_slice(instructions);
    bytes
}

#[test]
fn an_entry_is_what_leads_to_the_caller() {
    let outcome = check(&object(&entry(&[0])));
    // The word there is 0: no caller.
    assert_eq!(outcome.end, End::Complete);
    assert_eq!(outcome.calls, 0);
    // DW_CFA_undefined of the return address.
    assert_eq!(check(&object(&entry(&[0x07, 16]))).end, End::Complete);
}

#[test]
fn expressions_that_do_not_end_are_cut() {
    // DW_CFA_def_cfa_expression: DW_OP_skip -3, over and over.
    let outcome = check(&object(&entry(&[0x0f, 3, 0x2f, 0xfd, 0xff])));
    assert_eq!(outcome.end, End::Cut(Cut::BadCfi));
    // Words of a stack that is not there.
    let outcome = check(&object(&entry(&[0x0f, 2, 0x30, 0x06])));
    assert_eq!(outcome.end, End::Cut(Cut::StackAbsent));
    // More than the evaluation's stack has.
    let outcome = check(&object(&entry(
        &[0x0f, 40]
            .iter()
            .chain(&[0x30; 40])
            .copied()
            .collect::<Vec<_>>(),
    )));
    assert_eq!(outcome.end, End::Cut(Cut::BadCfi));
    // DW_CFA_remember_state more often than there is room for.
    let outcome = check(&object(&entry(&[0x0a; 40])));
    assert_eq!(outcome.end, End::Cut(Cut::BadCfi));
    // Rules of more registers than there are places.
    let rules: Vec<u8> = (20..80)
        .flat_map(|register| [0x80 | register & 0x3f, 2])
        .collect();
    assert!(matches!(
        check(&object(&entry(&rules))).end,
        End::Cut(_) | End::Complete
    ));
}

#[test]
fn frames_that_do_not_go_up_are_cut() {
    // DW_CFA_def_cfa: RSP + 0.
    let outcome = check(&object(&entry(&[0x0c, 7, 0])));
    assert!(
        matches!(outcome.end, End::Cut(Cut::BadCfi) | End::Complete),
        "{outcome:?}"
    );
    // longjmp's: the CFA is in RDI.
    let outcome = check(&object(&entry(&[0x0c, 5, 0])));
    assert_eq!(outcome.end, End::Cut(Cut::BadCfi));
}

/// Returns a space without an object, whose code is `code` and whose stack has `words`; RBP is the address of the first word, RSP
/// that of the one with this number.
fn jit(code: &[u8], words: &[u64], rsp: u64) -> Vec<u8> {
    const CODE: u64 = 0x7000_0000;
    const STACK: u64 = 0x8000_0000;
    let mut bytes = vec![0; 17 * 8];
    let mut put = |register: usize, value: u64| {
        bytes[8 * register..8 * register + 8].copy_from_slice(&value.to_le_bytes());
    };
    put(6, STACK);
    put(7, STACK + 8 * rsp);
    put(16, CODE);
    let stack: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let mut page = vec![0xcc; 4096];
    page[..code.len()].copy_from_slice(code);
    // A call before the return address that the tests have.
    page[0x800..0x805].copy_from_slice(&[0xe8, 0, 1, 0, 0]);
    for (address, content) in [(CODE, page), (STACK, stack)] {
        bytes.extend(address.to_le_bytes());
        bytes.extend((content.len() as u64).to_le_bytes());
        bytes.extend(content);
    }
    bytes
}

#[test]
fn code_without_cfi_is_followed_to_its_return() {
    const BACK: u64 = 0x7000_0805;
    const UP: u64 = 0x8000_0100;
    let calls = |code: &[u8], words: &[u64], rsp: u64| check(&jit(code, words, rsp)).calls;
    // POP RBP; RET in a frame, and RET where there is none: the caller is there once.
    assert_eq!(calls(&[0x5d, 0xc3], &[UP, BACK], 0), 1);
    assert_eq!(calls(&[0xc3], &[UP, BACK], 1), 1);
    // PUSH RBP; MOV RBP, RSP; SUB RSP, 32; CALL; LEAVE; RET: the function has not begun.
    let whole = [
        0x55, 0x48, 0x89, 0xe5, 0x48, 0x83, 0xec, 32, 0xe8, 0, 2, 0, 0, 0xc9, 0xc3,
    ];
    assert_eq!(calls(&whole, &[0, 0, 0, 0, 0, 0, BACK], 6), 1);
    // CALL; RET: there is no frame, so nothing says that the call returns.
    let call = [0xe8, 0, 2, 0, 0, 0xc3];
    assert_eq!(calls(&call, &[UP, BACK, 0, BACK], 3), 0);
    // PUSH RAX; RET goes to where it likes.
    assert_eq!(calls(&[0x50, 0xc3], &[UP, BACK], 1), 0);
    // RSP from somewhere else; JMP RAX; UD2.
    assert_eq!(calls(&[0x48, 0x89, 0xc4, 0xc3], &[UP, BACK], 1), 0);
    assert_eq!(calls(&[0xff, 0xe0], &[UP, BACK], 1), 0);
    assert_eq!(calls(&[0x0f, 0x0b], &[UP, BACK], 1), 0);
    // A return address that follows no call.
    assert_eq!(calls(&[0xc3], &[UP, BACK + 1], 1), 0);
    // A loop whose end jumps to its start (JZ out; JMP start; out: RET) has a way out, and JMP to itself none.
    assert_eq!(calls(&[0x74, 2, 0xeb, 0xfc, 0xc3], &[UP, BACK], 1), 1);
    assert_eq!(calls(&[0xeb, 0xfe], &[UP, BACK], 1), 0);
}
