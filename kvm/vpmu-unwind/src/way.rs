//! Code without CFI: Go's, and that of just-in-time compilers which keep frame pointers.
//!
//! RBP alone does not say who called: a function that begins, ends or calls nobody has no frame, and RBP is its caller's, so that
//! a call would be left out. So the function's own way to its return is followed from where it stands. What the
//! instructions do to RSP and RBP says where the return address is, in any function. Its stack is the same there whichever way it
//! goes, so conditional jumps are not taken.
//!
//! A call on that way may be one that does not return, and what stands behind it another function's, or another part of this one. So
//! RBP must be this frame's pointer at each call that is passed, and at the return address of a frame that has called: it
//! holds the address below the return address that is found. Without both answers, or where they differ, the stack is cut.

use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic,
    OpAccess, OpKind, Register,
};

use crate::bytes::{PAGE, Reader};
use crate::rules::{RBP, RSP};
use crate::{Cut, Registers, call};

/// Instructions of one way.
const MOST_STEPS: u32 = 512;
/// Words that a way has written.
const MOST_WORDS: usize = 16;
/// The longest instruction.
const LONGEST: usize = 15;

/// Finds callers by code.
pub(crate) struct Ways(InstructionInfoFactory);

/// A function on its way to its return.
#[derive(Clone, Copy)]
struct Way {
    at: u64,
    rsp: u64,
    /// `None`: not known.
    rbp: Option<u64>,
    /// What RBP was at the calls that were passed.
    frame: Option<u64>,
    /// What was written on the way: addresses, and what is known of the words there.
    words: [(u64, Option<u64>); MOST_WORDS],
    written: usize,
}

enum Step {
    On,
    To(u64),
    Jumps(u64),
    Returns,
}

impl Ways {
    pub(crate) fn new() -> Self {
        Self(InstructionInfoFactory::new())
    }

    /// Returns the caller's registers: RIP, RSP and RBP. The others are not known.
    pub(crate) fn caller(
        &mut self,
        reader: &mut Reader<'_>,
        now: &Registers,
        is_exact: bool,
    ) -> Result<Registers, Cut> {
        let rbp = now.general[RBP];
        let mut way = Way {
            at: now.rip,
            rsp: now.general[RSP],
            rbp: Some(rbp),
            frame: (!is_exact).then_some(rbp),
            words: [(0, None); MOST_WORDS],
            written: 0,
        };
        // The way out of a loop that ends with a jump to its start.
        let mut exit: Option<Way> = None;
        for _ in 0..MOST_STEPS {
            let instruction = fetch(reader, way.at)?;
            let behind = instruction.next_ip();
            match self.step(reader, &mut way, &instruction)? {
                Step::On => way.at = behind,
                // The end of a loop. The way goes on where a conditional jump leads out of it.
                Step::To(target) if target < behind => match exit.take() {
                    Some(other) if other.at >= behind => way = other,
                    _ => way.at = target,
                },
                Step::To(target) => way.at = target,
                Step::Jumps(target) => {
                    if target > behind {
                        exit = Some(Way { at: target, ..way });
                    }
                    way.at = behind;
                }
                Step::Returns => return way.returned(reader, now, &instruction),
            }
        }
        Err(Cut::NoCfi)
    }

    fn step(
        &mut self,
        reader: &mut Reader<'_>,
        way: &mut Way,
        instruction: &Instruction,
    ) -> Result<Step, Cut> {
        match instruction.flow_control() {
            FlowControl::Next => {}
            FlowControl::Return => {
                return match instruction.code() {
                    Code::Retnq | Code::Retnq_imm16 => Ok(Step::Returns),
                    _ => Err(Cut::NoCfi),
                };
            }
            FlowControl::UnconditionalBranch if instruction.op0_kind() == OpKind::NearBranch64 => {
                return Ok(Step::To(instruction.near_branch64()));
            }
            FlowControl::ConditionalBranch => {
                return Ok(Step::Jumps(instruction.near_branch64()));
            }
            FlowControl::Call | FlowControl::IndirectCall => {
                // A call of the next instruction is how code finds its own address: what it pushes is never returned to.
                let is_next = instruction.op0_kind() == OpKind::NearBranch64
                    && instruction.near_branch64() == instruction.next_ip();
                let rbp = way.rbp.ok_or(Cut::NoCfi)?;
                if is_next || way.frame.is_some_and(|frame| frame != rbp) {
                    return Err(Cut::NoCfi);
                }
                way.frame = Some(rbp);
                return Ok(Step::On);
            }
            _ => return Err(Cut::NoCfi),
        }
        let of = |operand| match instruction.op_kind(operand) {
            OpKind::Register => instruction.op_register(operand),
            _ => Register::None,
        };
        let (first, second) = (of(0), of(1));
        match (instruction.mnemonic(), first, second) {
            (Mnemonic::Push, register, _) if instruction.stack_pointer_increment() == -8 => {
                way.rsp = way.rsp.wrapping_sub(8);
                let value = way.rbp.filter(|_| register == Register::RBP);
                way.write(way.rsp, value)?;
            }
            (Mnemonic::Pop, Register::RBP, _) => way.pop(reader)?,
            (Mnemonic::Leave, ..) if instruction.code() == Code::Leaveq => {
                way.rsp = way.rbp.ok_or(Cut::NoCfi)?;
                way.pop(reader)?;
            }
            (Mnemonic::Mov, Register::RSP, Register::RBP) => {
                way.rsp = way.rbp.ok_or(Cut::NoCfi)?;
            }
            (Mnemonic::Mov, Register::RBP, Register::RSP) => way.rbp = Some(way.rsp),
            (Mnemonic::Add | Mnemonic::Sub, Register::RSP, Register::None)
                if instruction.op1_kind() != OpKind::Memory =>
            {
                let by = instruction.immediate(1);
                way.rsp = match instruction.mnemonic() {
                    Mnemonic::Add => way.rsp.wrapping_add(by),
                    _ => way.rsp.wrapping_sub(by),
                };
            }
            (Mnemonic::Lea, Register::RSP, _) => {
                way.rsp = way.address(instruction).ok_or(Cut::NoCfi)?;
            }
            (Mnemonic::Lea, Register::RBP, _) => way.rbp = way.address(instruction),
            (Mnemonic::Mov, Register::RBP, Register::None)
                if instruction.op1_kind() == OpKind::Memory =>
            {
                way.rbp = match way.address(instruction) {
                    Some(address) => way.read(reader, address)?,
                    None => None,
                };
            }
            (Mnemonic::Mov, Register::None, Register::RBP) => {
                if let Some(address) = way.address(instruction) {
                    way.write(address, way.rbp)?;
                }
            }
            _ => self.other(way, instruction)?,
        }
        Ok(Step::On)
    }

    /// An instruction that is nothing to frames, or whose RSP or RBP is not known.
    fn other(&mut self, way: &mut Way, instruction: &Instruction) -> Result<(), Cut> {
        let pops = instruction.stack_pointer_increment();
        way.rsp = way.rsp.wrapping_add_signed(pops.into());
        for used in self.0.info(instruction).used_registers() {
            let is_written = !matches!(used.access(), OpAccess::Read | OpAccess::CondRead);
            match used.register().full_register() {
                Register::RSP if is_written && pops == 0 => return Err(Cut::NoCfi),
                Register::RBP if is_written => way.rbp = None,
                _ => {}
            }
        }
        // POP RSP.
        let is_pop = instruction.mnemonic() == Mnemonic::Pop;
        match is_pop && instruction.op0_register() == Register::RSP {
            true => Err(Cut::NoCfi),
            false => Ok(()),
        }
    }
}

impl Way {
    /// Returns the address of an operand in the frame: of RSP or RBP and a displacement.
    fn address(&self, instruction: &Instruction) -> Option<u64> {
        let is_plain = instruction.memory_index() == Register::None
            && instruction.segment_prefix() == Register::None;
        let base = match instruction.memory_base() {
            Register::RSP if is_plain => self.rsp,
            Register::RBP if is_plain => self.rbp?,
            _ => return None,
        };
        Some(base.wrapping_add(instruction.memory_displacement64()))
    }

    fn write(&mut self, address: u64, value: Option<u64>) -> Result<(), Cut> {
        let place = self.words.get_mut(self.written).ok_or(Cut::NoCfi)?;
        *place = (address, value);
        self.written += 1;
        Ok(())
    }

    fn read(&self, reader: &mut Reader<'_>, address: u64) -> Result<Option<u64>, Cut> {
        let mut written = self.words[..self.written].iter().rev();
        match written.find(|(at, _)| *at == address) {
            Some(&(_, value)) => Ok(value),
            None => reader.word(address).map(Some),
        }
    }

    /// Takes RBP from the stack.
    fn pop(&mut self, reader: &mut Reader<'_>) -> Result<(), Cut> {
        self.rbp = self.read(reader, self.rsp)?;
        self.rsp = self.rsp.wrapping_add(8);
        Ok(())
    }

    fn returned(
        &self,
        reader: &mut Reader<'_>,
        now: &Registers,
        instruction: &Instruction,
    ) -> Result<Registers, Cut> {
        let slot = self.rsp;
        let is_frames = (self.frame).is_none_or(|frame| frame == slot.wrapping_sub(8));
        // What this way has pushed is no return address.
        let is_written = self.words[..self.written].iter().any(|(at, _)| *at == slot);
        let rbp = self.rbp.filter(|_| is_frames && !is_written);
        let rbp = rbp.ok_or(Cut::NoCfi)?;
        let back = reader.word(slot)?;
        if !call::ends_at(reader, back) {
            return Err(Cut::NoCfi);
        }
        let more = match instruction.code() {
            Code::Retnq_imm16 => u64::from(instruction.immediate16()),
            _ => 0,
        };
        let mut next = *now;
        next.rip = back;
        next.general[RSP] = slot.wrapping_add(8).wrapping_add(more);
        next.general[RBP] = rbp;
        Ok(next)
    }
}

/// Returns whether a program's first instructions have called, which nobody has: RBP is 0, and RSP is at the number of
/// arguments, their addresses and a 0 (System V ABI, AMD64, 3.4.1). The dynamic loader's have no CFI to say so.
pub(crate) fn is_outermost(reader: &mut Reader<'_>, now: &Registers) -> Result<bool, Cut> {
    const MOST_ARGUMENTS: u64 = 1 << 16;
    let rsp = now.general[RSP];
    if now.general[RBP] != 0 || !rsp.is_multiple_of(16) {
        return Ok(false);
    }
    let count = reader.word(rsp)?;
    if !(1..MOST_ARGUMENTS).contains(&count) {
        return Ok(false);
    }
    let first = reader.word(rsp.wrapping_add(8))?;
    Ok(first > rsp && reader.word(rsp.wrapping_add(8 * (count + 1)))? == 0)
}

/// Returns the instruction at `at`.
fn fetch(reader: &mut Reader<'_>, at: u64) -> Result<Instruction, Cut> {
    let mut code = [0; LONGEST];
    let here = LONGEST.min((PAGE - at % PAGE) as usize);
    reader
        .read(at, &mut code[..here])
        .map_err(|cut| match cut {
            Cut::Budget => Cut::Budget,
            _ => Cut::NoCfi,
        })?;
    let behind = at.wrapping_add(here as u64);
    let length = match reader.read(behind, &mut code[here..]) {
        Ok(()) => LONGEST,
        Err(Cut::Budget) => return Err(Cut::Budget),
        // An instruction at the end of a page may be whole.
        Err(_) => here,
    };
    let mut decoder = Decoder::with_ip(64, &code[..length], at, DecoderOptions::NONE);
    let instruction = decoder.decode();
    match instruction.is_invalid() {
        true => Err(Cut::NoCfi),
        false => Ok(instruction),
    }
}
