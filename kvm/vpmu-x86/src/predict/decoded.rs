//! Instructions that were decoded before: a loop is decoded for each of its rounds.

use iced_x86::{CodeSize, Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind};

use crate::cpu::Stop;
use crate::op::{Action, Kind, Op};
use crate::space::LONGEST;

/// Instructions that are remembered.
const MOST: usize = 256;

/// Instructions by their addresses. Each is compared with the bytes that are there now.
pub(super) struct Decodings(Box<[Entry]>);

#[derive(Clone, Copy)]
struct Entry {
    decoded: Decoded,
    bytes: [u8; LONGEST],
}

/// A decoded instruction.
#[derive(Clone, Copy, Debug)]
pub struct Decoded {
    pub(super) instruction: Instruction,
    pub(super) op: Op,
    flow: Flow,
}

/// Where an instruction leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// To the next instruction, unless it faults.
    Next,
    /// A near branch that is taken.
    Branch,
    /// To this address, or to the next instruction.
    Conditional(u64),
    /// POPFQ: to the next instruction, with other flags.
    PopFlags,
    /// SYSCALL.
    SystemCall,
    /// SYSRETQ.
    SystemReturn,
    /// IRETQ.
    InterruptReturn,
    /// To a place that is not predicted.
    Other,
}

impl Decoded {
    fn of(instruction: Instruction) -> Self {
        let op = Op::predicted(&instruction);
        let flow = match (op.action, instruction.mnemonic()) {
            (Action::JumpIf(_, to) | Action::JumpIfZero(to) | Action::Loop(to), _) => {
                Flow::Conditional(to)
            }
            (_, Mnemonic::Popfq) => Flow::PopFlags,
            (_, Mnemonic::Syscall) => Flow::SystemCall,
            (_, Mnemonic::Sysretq) => Flow::SystemReturn,
            (_, Mnemonic::Iretq) => Flow::InterruptReturn,
            _ if instruction.flow_control() == FlowControl::Next => Flow::Next,
            (Action::Unknown, _) => Flow::Other,
            _ => Flow::Branch,
        };
        Self {
            instruction,
            op,
            flow,
        }
    }

    /// Returns where the instruction leads to.
    pub const fn flow(&self) -> Flow {
        self.flow
    }

    /// Returns the address behind the instruction.
    pub const fn next_ip(&self) -> u64 {
        self.instruction.next_ip()
    }

    /// Returns the kind of the near branch, which has led to `to`; `None`: it was not taken.
    ///
    /// # Errors
    ///
    /// Fails if the branch's target is the next instruction: `to` then does not say whether the branch was taken.
    pub fn kind(&self, to: u64) -> Result<Option<Kind>, Stop> {
        self.op.kind(to)
    }

    /// Returns whether the instruction, which is not predicted, is followed by the next one, unless it faults.
    pub fn goes_on(&self) -> bool {
        match self.instruction.mnemonic() {
            // They wait; behind POPF, TF would be the guest's.
            Mnemonic::Hlt
            | Mnemonic::Mwait
            | Mnemonic::Mwaitx
            | Mnemonic::Popf
            | Mnemonic::Popfq => false,
            // A host answers a hypercall, and the vCPU goes on behind it.
            Mnemonic::Vmcall | Mnemonic::Vmmcall => true,
            _ => self.instruction.flow_control() == FlowControl::Next,
        }
    }

    /// Returns whether only a processor can execute the instruction, or the vCPU is to do so alone.
    pub(super) fn is_opaque(&self) -> bool {
        let instruction = &self.instruction;
        let repeats = instruction.has_rep_prefix() || instruction.has_repne_prefix();
        let loads_segment = instruction.op_count() > 0
            && instruction.op0_kind() == OpKind::Register
            && !instruction.op0_register().is_gpr()
            && !instruction.op0_register().is_vector_register()
            && !instruction.op0_register().is_k()
            && !instruction.op0_register().is_mm()
            && !instruction.op0_register().is_st();
        match instruction.mnemonic() {
            // They only change bits of RFLAGS that no condition reads.
            Mnemonic::Cli
            | Mnemonic::Sti
            | Mnemonic::Clac
            | Mnemonic::Stac
            | Mnemonic::Cld
            | Mnemonic::Std => false,
            // Zero divisors fault.
            Mnemonic::Div | Mnemonic::Idiv => true,
            // It may be another instruction.
            Mnemonic::Pause => self.op.action == Action::Unknown,
            // TF would be the guest's.
            Mnemonic::Popf | Mnemonic::Popfq => true,
            // CR4.UMIP keeps them from user space, and Linux executes them for programs.
            Mnemonic::Sgdt | Mnemonic::Sidt | Mnemonic::Sldt | Mnemonic::Str | Mnemonic::Smsw => {
                true
            }
            // They change what addresses are made of and may reach, or come to the host.
            Mnemonic::Wrfsbase
            | Mnemonic::Wrgsbase
            | Mnemonic::Wrpkru
            | Mnemonic::Cpuid
            | Mnemonic::Rdpmc
            | Mnemonic::Vmcall
            | Mnemonic::Vmmcall => true,
            _ => {
                instruction.flow_control() != FlowControl::Next
                    || instruction.code_size() == CodeSize::Code16
                    || instruction.is_privileged()
                    || instruction.is_save_restore_instruction()
                    || (repeats && instruction.is_string_instruction())
                    || loads_segment
            }
        }
    }
}

impl Decodings {
    pub(super) fn new() -> Self {
        let none = Entry {
            decoded: Decoded::of(Instruction::default()),
            bytes: [0; LONGEST],
        };
        Self(vec![none; MOST].into())
    }

    /// Returns the instruction at `ip`, where the first `length` of `bytes` are; `None`: there is none.
    pub(super) fn at(&mut self, ip: u64, bytes: &[u8; LONGEST], length: usize) -> Option<Decoded> {
        let entry = &mut self.0[ip as usize % MOST];
        let known = entry.decoded.instruction.len();
        let is_known = entry.decoded.instruction.ip() == ip
            && (1..=length).contains(&known)
            // Code that the guest rewrites keeps its address.
            && entry.bytes[..known] == bytes[..known];
        if !is_known {
            // AMD's way: there a prefix 66 cuts the target of a near branch to 16 bits. Such a branch is not followed.
            let mut decoder = Decoder::with_ip(64, &bytes[..length], ip, DecoderOptions::AMD);
            *entry = Entry {
                decoded: Decoded::of(decoder.decode()),
                bytes: *bytes,
            };
        }
        let decoded = entry.decoded;
        (!decoded.instruction.is_invalid()).then_some(decoded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instruction_is_what_its_bytes_are_now() {
        let mut decodings = Decodings::new();
        let mut mnemonic = |ip, code: &[u8]| {
            let mut bytes = [0; LONGEST];
            bytes[..code.len()].copy_from_slice(code);
            let found = decodings.at(ip, &bytes, code.len());
            found.map(|decoded| (decoded.instruction.mnemonic(), decoded.next_ip()))
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

    #[test]
    fn an_exchange_that_the_decoder_calls_pause_is_left_to_the_processor() {
        let mut decodings = Decodings::new();
        // pause; xchg r8d, eax behind a prefix F3.
        for (code, is_pause) in [(&[0xf3, 0x90][..], true), (&[0xf3, 0x41, 0x90], false)] {
            let mut bytes = [0; LONGEST];
            bytes[..code.len()].copy_from_slice(code);
            let decoded = decodings.at(0x8000, &bytes, code.len()).unwrap();
            assert_eq!(decoded.op.action == Action::Nothing, is_pause);
            assert_eq!(decoded.is_opaque(), !is_pause);
        }
    }
}
