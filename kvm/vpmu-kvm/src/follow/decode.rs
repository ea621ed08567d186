//! Instructions that were decoded before: a loop is decoded for each of its rounds.

use iced_x86::{Decoder, DecoderOptions, Instruction};

use super::space::LONGEST;

/// Instructions that are remembered.
const MOST: usize = 256;

/// Instructions by their addresses. Each is compared with the bytes that are there now.
pub(super) struct Decodings(Vec<Decoded>);

#[derive(Clone, Copy, Default)]
struct Decoded {
    instruction: Instruction,
    bytes: [u8; LONGEST],
}

impl Decodings {
    pub(super) fn new() -> Self {
        Self(vec![Decoded::default(); MOST])
    }

    /// Returns the instruction at `ip`, where the first `length` of `bytes` are; `None`: there is none.
    pub(super) fn at(
        &mut self,
        ip: u64,
        bytes: &[u8; LONGEST],
        length: usize,
    ) -> Option<Instruction> {
        let decoded = &mut self.0[ip as usize % MOST];
        let known = decoded.instruction.len();
        let is_known = decoded.instruction.ip() == ip
            && (1..=length).contains(&known)
            && decoded.bytes[..known] == bytes[..known];
        if !is_known {
            // AMD's way: there a prefix 66 cuts the target of a near branch to 16 bits. Such a branch is not followed.
            let mut decoder = Decoder::with_ip(64, &bytes[..length], ip, DecoderOptions::AMD);
            *decoded = Decoded {
                instruction: decoder.decode(),
                bytes: *bytes,
            };
        }
        let instruction = decoded.instruction;
        (!instruction.is_invalid()).then_some(instruction)
    }
}

#[cfg(test)]
mod tests {
    use iced_x86::Mnemonic;

    use super::*;

    #[test]
    fn an_instruction_is_what_its_bytes_are_now() {
        let mut decodings = Decodings::new();
        let mut mnemonic = |ip, code: &[u8]| {
            let mut bytes = [0; LONGEST];
            bytes[..code.len()].copy_from_slice(code);
            let found = decodings.at(ip, &bytes, code.len());
            found.map(|instruction| (instruction.mnemonic(), instruction.next_ip()))
        };
        // jmp +0; nop; and what has the first one's place among those that are remembered.
        assert_eq!(mnemonic(0x8000, &[0xeb, 0]), Some((Mnemonic::Jmp, 0x8002)));
        assert_eq!(mnemonic(0x8000, &[0xeb, 0]), Some((Mnemonic::Jmp, 0x8002)));
        assert_eq!(mnemonic(0x8000, &[0x90]), Some((Mnemonic::Nop, 0x8001)));
        assert_eq!(mnemonic(0x8100, &[0x90]), Some((Mnemonic::Nop, 0x8101)));
        // The second byte is on a page that is missing.
        assert_eq!(mnemonic(0x8000, &[0xeb]), None);
        assert_eq!(mnemonic(0x8000, &[]), None);
    }
}
