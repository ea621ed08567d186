//! Predictions of code in a memory that is mapped onto itself.

use super::*;
use crate::tests::{KERNEL, Ram, map, system};

const CODE: u64 = 0x40_0000;
const DATA: u64 = 0x80_0000;

/// Executes `code`, which has no branches, and returns how many instructions were predicted, and whether there was no room for
/// more.
fn predicted(code: &[u8], rax: u64) -> (usize, bool, [Masked; 16]) {
    let ram = Ram::new(0x100_0000);
    for page in (CODE..0x100_0000).step_by(0x1000) {
        map(&ram, page, page | KERNEL);
    }
    ram.write_bytes(CODE, code);
    let mut registers = Registers {
        rip: CODE,
        rflags: 2,
        ..Default::default()
    };
    registers.general[0] = rax;
    let mut predictor = Predictor::new();
    let mut prediction = predictor.begin(&registers, &system(), &ram);
    let (mut ip, mut count) = (CODE, 0);
    while ip < CODE + code.len() as u64 {
        let decoded = prediction.decode(ip).unwrap();
        if prediction.execute(&decoded).is_err() {
            break;
        }
        (ip, count) = (decoded.next_ip(), count + 1);
    }
    let general = prediction.general();
    (count, predictor.is_exhausted(), general)
}

/// vmovdqu [rax + offset], ymm0
fn vector_store(offset: u32) -> Vec<u8> {
    [&[0xc5, 0xfe, 0x7f, 0x80][..], &offset.to_le_bytes()].concat()
}

#[test]
fn a_long_path_of_vector_stores_has_room() {
    // Each of its 2,048 words is found at once: none is searched among the others.
    let code: Vec<u8> = (0..512).flat_map(|n| vector_store(32 * n)).collect();
    let (count, is_exhausted, _) = predicted(&code, DATA);
    assert_eq!((count, is_exhausted), (512, false));
}

#[test]
fn a_guest_that_stores_where_there_is_no_room_is_stopped() {
    // mov [rax + offset], rax: all of these words have the same places.
    let store = |n: u32| {
        let offset = n * 8 * 4096;
        [&[0x48, 0x89, 0x80][..], &offset.to_le_bytes()].concat()
    };
    let code: Vec<u8> = (0..64).flat_map(store).collect();
    let (count, is_exhausted, _) = predicted(&code, DATA);
    assert!(is_exhausted && (8..64).contains(&count), "{count}");
}

#[test]
fn what_was_stored_is_loaded_as_far_as_it_is_known() {
    let code = [
        // mov ecx, 0x12345678; mov [rax + 6], rcx, across two words; mov edx, [rax + 6]; mov ebx, [rax + 12]
        &[0xb9, 0x78, 0x56, 0x34, 0x12][..],
        &[0x48, 0x89, 0x48, 0x06, 0x8b, 0x50, 0x06, 0x8b, 0x58, 0x0c],
        // movd [rax], xmm0; mov [rax + 1], cl; mov ebp, [rax]; mov esi, [rax + 4]
        &[
            0x66, 0x0f, 0x7e, 0x00, 0x88, 0x48, 0x01, 0x8b, 0x28, 0x8b, 0x70, 0x04,
        ],
        // xor edi, edi
        &[0x31, 0xff],
    ]
    .concat();
    let (count, _, general) = predicted(&code, DATA);
    assert_eq!(count, 9);
    let [_, _, rdx, rbx, _, rbp, rsi, rdi, ..] = general;
    assert_eq!(rdx.bits(), Some(0x1234_5678));
    assert!(rdx.is_firm());
    // Two bytes of the store, and two of what was there: others may write these.
    assert_eq!((rbx.bits(), rbx.is_firm()), (Some(0), false));
    assert_eq!(rbp.bits(), None);
    assert!(rbp.may_be(0xffff_78ff) && !rbp.may_be(0xffff_79ff) && !rbp.may_be(1 << 32));
    assert_eq!((rsi.bits(), rsi.is_firm()), (Some(0x5678_0000), false));
    assert_eq!((rdi.bits(), rdi.is_firm()), (Some(0), true));
}
