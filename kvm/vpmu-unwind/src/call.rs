//! The call instruction before a return address.

use iced_x86::{Code, Decoder, DecoderOptions};

use crate::bytes::Reader;
use crate::{Call, Frame};

/// Returns the call that returns to `back`, of the function that runs in `callee`. Where a call begins cannot always be told from
/// its end: the address may be one byte off, and is in the caller all the same.
pub(crate) fn before(reader: &mut Reader<'_>, back: u64, callee: &Frame) -> Call {
    let indirect = |length: u64| Call {
        from: back.wrapping_sub(length),
        to: callee.start,
        is_direct: false,
    };
    let mut code = [0; LONGEST];
    let start = back.wrapping_sub(LONGEST as u64);
    // The page before that of the return address may be absent: the shortest call is two bytes long.
    if reader.read(start, &mut code).is_err() {
        code = [0; LONGEST];
        let short = back.wrapping_sub(2);
        if reader.read(short, &mut code[LONGEST - 2..]).is_err() {
            return indirect(1);
        }
    }
    let length = indirect_length(&code);
    if code[LONGEST - 5] == 0xe8 {
        let distance = crate::object::u32_at(&code, LONGEST - 4).cast_signed();
        let to = back.wrapping_add_signed(distance.into());
        // The byte may be of the instruction before a short indirect call. A displacement of 0 or -1 is no compiler's, but the
        // end of a distance to what is near.
        let is_short = length.is_some_and(|length| length < 5);
        let is_likely = is_short && !matches!(code[LONGEST - 1], 0 | 0xff);
        if to == callee.start || !is_likely {
            let length = match code {
                // __tls_get_addr's, padded for a linker to replace (System V ABI, AMD64, thread-local storage).
                [0x66, 0x66, 0x48, ..] => 8,
                // A linker writes ADDR32 before a call that it has made direct.
                [_, _, 0x67, ..] => 6,
                _ => 5,
            };
            return Call {
                from: back.wrapping_sub(length),
                to,
                is_direct: true,
            };
        }
    }
    // Code that was returned to without a call: the address is still inside the caller.
    indirect(length.unwrap_or(1) as u64)
}

/// Returns whether the instruction before `back` can be a call.
pub(crate) fn ends_at(reader: &mut Reader<'_>, back: u64) -> bool {
    let mut code = [0; LONGEST];
    let is_read = reader
        .read(back.wrapping_sub(LONGEST as u64), &mut code)
        .is_ok();
    is_read && (code[LONGEST - 5] == 0xe8 || indirect_length(&code).is_some())
}

/// Returns the length of the indirect call at the end of `code`. A byte before that can be its prefix is taken for it: the
/// instruction before it seldom ends so.
fn indirect_length(code: &[u8; LONGEST]) -> Option<usize> {
    (2..=LONGEST)
        .rev()
        .find(|&length| is_indirect(&code[LONGEST - length..]))
}

/// The longest call: a prefix, FF /2, SIB, four bytes.
const LONGEST: usize = 8;

/// Returns whether `code` is one indirect near call (SDM vol. 2A, CALL; 2.1.5), with one prefix at most.
fn is_indirect(code: &[u8]) -> bool {
    let opcode = match code {
        // REX, and what compilers and linkers put before: NOTRACK, segments, BND.
        [0x40..=0x4f | 0x3e | 0x64 | 0x65 | 0x67 | 0xf2, rest @ ..] => rest,
        _ => code,
    };
    // Decoded only where it may be one: each frame has several places to try.
    if opcode.first() != Some(&0xff) {
        return false;
    }
    let instruction = Decoder::new(64, code, DecoderOptions::NONE).decode();
    instruction.code() == Code::Call_rm64 && instruction.len() == code.len()
}

#[cfg(test)]
mod tests {
    use super::is_indirect;

    #[test]
    fn indirect_calls_have_their_length() {
        let calls: [&[u8]; 9] = [
            &[0xff, 0xd0],
            &[0x41, 0xff, 0xd4],
            &[0xff, 0x50, 0x18],
            &[0xff, 0x15, 1, 2, 3, 4],
            &[0xff, 0x14, 0xc3],
            &[0xff, 0x14, 0x25, 0, 0, 0, 0],
            &[0xff, 0x94, 0x24, 0x80, 0, 0, 0],
            &[0x3e, 0xff, 0xd0],
            &[0x43, 0xff, 0x14, 0xe7],
        ];
        for call in calls {
            assert!(is_indirect(call), "{call:x?}");
            assert!(!is_indirect(&call[..call.len() - 1]), "{call:x?}");
        }
        assert!(!is_indirect(&[0xff, 0xe0]), "a jump");
        assert!(!is_indirect(&[0xff]) && !is_indirect(&[]));
    }
}
