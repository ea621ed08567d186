//! What one instruction does to the shadow.

use iced_x86::{
    Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register, RflagsBits,
};
use vpmu::x86::Ring;

use super::arithmetic::{self as alu, Computed, Shift, sign_extend};
use super::decode::Decodings;
use super::kinds::{is_conditional_move, is_opaque, is_set};
use super::shadow::{Flags, Known, Shadow, Value, firm};
use super::space::Space;

/// The instruction cannot be predicted: an address is not known, it may fault, or it does what only a processor can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Opaque;

/// Executes instructions that are no branches.
pub(super) struct Executor {
    info: InstructionInfoFactory,
    pub(super) decodings: Decodings,
}

impl Executor {
    pub(super) fn new() -> Self {
        Self {
            info: InstructionInfoFactory::new(),
            decodings: Decodings::new(),
        }
    }

    /// Does to `shadow` what `instruction`, which is no branch, does to the vCPU.
    pub(super) fn execute(
        &mut self,
        instruction: &Instruction,
        shadow: &mut Shadow,
        space: &mut Space<'_>,
    ) -> Result<(), Opaque> {
        if is_opaque(instruction) {
            return Err(Opaque);
        }
        let mut machine = Machine {
            instruction,
            shadow,
            space,
        };
        match machine.known()? {
            true => Ok(()),
            false => self.other(instruction, shadow, space),
        }
    }

    /// Forgets the general registers that `instruction` writes.
    pub(super) fn forget_written(&mut self, instruction: &Instruction, shadow: &mut Shadow) {
        for register in self.info.info(instruction).used_registers() {
            if register.access() != OpAccess::Read {
                shadow.forget(register.register());
            }
        }
    }

    /// An instruction of which nothing is known but what it may change.
    fn other(
        &mut self,
        instruction: &Instruction,
        shadow: &mut Shadow,
        space: &mut Space<'_>,
    ) -> Result<(), Opaque> {
        let info = self.info.info(instruction);
        let writes = |access| {
            matches!(
                access,
                OpAccess::Write
                    | OpAccess::CondWrite
                    | OpAccess::ReadWrite
                    | OpAccess::ReadCondWrite
            )
        };
        for memory in info.used_memory() {
            if memory.access() == OpAccess::NoMemAccess {
                continue;
            }
            let size = memory.memory_size().size();
            let address =
                memory.virtual_address(0, |register, _, _| shadow.part_of_address(register));
            let (Some(address), 1..) = (address, size) else {
                return Err(Opaque);
            };
            let written = writes(memory.access());
            if !space.is_reached(address, size as u64, written, shadow.ring) {
                return Err(Opaque);
            }
            if written {
                shadow.store(address, size, None);
            }
        }
        // PUSHF and its kin say nothing of RSP but that they change it.
        let stack = shadow
            .stack_pointer()
            .filter(|_| instruction.is_stack_instruction());
        for register in info.used_registers() {
            if writes(register.access()) {
                shadow.forget(register.register());
            }
        }
        if let Some(known) = stack {
            let by = i64::from(instruction.stack_pointer_increment());
            let bits = known.bits.wrapping_add_signed(by);
            shadow.set_stack_pointer(Some(Known { bits, ..known }));
        }
        forget_flags(&mut shadow.flags, instruction.rflags_modified());
        Ok(())
    }
}

fn forget_flags(flags: &mut Flags, modified: u32) {
    for (bit, flag) in [
        (RflagsBits::CF, &mut flags.carry),
        (RflagsBits::PF, &mut flags.parity),
        (RflagsBits::ZF, &mut flags.zero),
        (RflagsBits::SF, &mut flags.sign),
        (RflagsBits::OF, &mut flags.overflow),
    ] {
        if modified & bit != 0 {
            *flag = None;
        }
    }
}

/// One instruction at work.
struct Machine<'a, 'm> {
    instruction: &'a Instruction,
    shadow: &'a mut Shadow,
    space: &'a mut Space<'m>,
}

impl Machine<'_, '_> {
    /// Executes the instruction if its result is known from its operands. Returns whether it was such.
    fn known(&mut self) -> Result<bool, Opaque> {
        match self.instruction.mnemonic() {
            Mnemonic::Nop | Mnemonic::Endbr64 | Mnemonic::Pause => {}
            Mnemonic::Mov | Mnemonic::Movzx => {
                let value = self.read(1)?;
                self.write(0, value)?;
            }
            Mnemonic::Movsx | Mnemonic::Movsxd => {
                let (from, to) = (self.size(1), self.size(0));
                let value = self.read(1)?.map(|value| Known {
                    bits: sign_extend(value.bits, from) & super::shadow::mask(to),
                    ..value
                });
                self.write(0, value)?;
            }
            Mnemonic::Lea => {
                let address = self.effective_address();
                self.write(0, address)?;
            }
            Mnemonic::Push => {
                let value = self.read(0)?;
                self.push(value)?;
            }
            Mnemonic::Pop if self.instruction.op0_kind() == OpKind::Register => {
                let value = self.pop()?;
                self.write(0, value)?;
            }
            Mnemonic::Leave => {
                self.shadow
                    .set_stack_pointer(self.shadow.register(Register::RBP));
                let value = self.pop()?;
                self.shadow.set_register(Register::RBP, value);
            }
            Mnemonic::Cdqe => self.extend(Register::EAX, Register::RAX),
            Mnemonic::Cwde => self.extend(Register::AX, Register::EAX),
            Mnemonic::Xchg => {
                let (a, b) = (self.read(0)?, self.read(1)?);
                self.write(0, b)?;
                self.write(1, a)?;
            }
            _ => return self.computed(),
        }
        Ok(true)
    }

    /// Instructions with flags.
    fn computed(&mut self) -> Result<bool, Opaque> {
        let size = self.size(0);
        let before = self.shadow.flags;
        let one = firm(1);
        let computed: Computed = match self.instruction.mnemonic() {
            Mnemonic::Add => alu::add(self.read(0)?, self.read(1)?, false, size),
            Mnemonic::Sub | Mnemonic::Cmp => {
                alu::subtract(self.read(0)?, self.read(1)?, false, size)
            }
            Mnemonic::Neg => alu::subtract(firm(0), self.read(0)?, false, size),
            Mnemonic::And | Mnemonic::Test => {
                alu::logic(self.read(0)?, self.read(1)?, size, |a, b| a & b)
            }
            Mnemonic::Or => alu::logic(self.read(0)?, self.read(1)?, size, |a, b| a | b),
            Mnemonic::Xor if self.is_same_register() => {
                alu::logic(firm(0), firm(0), size, |_, _| 0)
            }
            Mnemonic::Xor => alu::logic(self.read(0)?, self.read(1)?, size, |a, b| a ^ b),
            Mnemonic::Inc => alu::keeping_carry(alu::add(self.read(0)?, one, false, size), &before),
            Mnemonic::Dec => {
                alu::keeping_carry(alu::subtract(self.read(0)?, one, false, size), &before)
            }
            Mnemonic::Shl | Mnemonic::Sal => self.shift(Shift::Left)?,
            Mnemonic::Shr => self.shift(Shift::Right)?,
            Mnemonic::Sar => self.shift(Shift::Arithmetic)?,
            Mnemonic::Imul if self.instruction.op_count() == 2 => {
                alu::multiply(self.read(0)?, self.read(1)?, size)
            }
            Mnemonic::Imul if self.instruction.op_count() == 3 => {
                alu::multiply(self.read(1)?, self.read(2)?, size)
            }
            Mnemonic::Not => {
                let value = self.read(0)?.map(|value| Known {
                    bits: !value.bits & super::shadow::mask(size),
                    ..value
                });
                (value, before)
            }
            _ => return self.conditional(),
        };
        self.shadow.flags = computed.1;
        let compares = matches!(self.instruction.mnemonic(), Mnemonic::Cmp | Mnemonic::Test);
        if !compares {
            self.write(0, computed.0)?;
        }
        Ok(true)
    }

    /// SETcc and CMOVcc.
    fn conditional(&mut self) -> Result<bool, Opaque> {
        let holds = self.shadow.flags.holds(self.instruction.condition_code());
        let is_move = self.instruction.op_count() == 2;
        match self.instruction.mnemonic() {
            mnemonic if is_set(mnemonic) && !is_move => {
                let value = holds.map(|(holds, firm)| Known {
                    bits: u64::from(holds),
                    firm,
                });
                self.write(0, value)?;
            }
            mnemonic if is_conditional_move(mnemonic) && is_move => {
                // The source is read, and may fault, whatever the condition is.
                let (source, kept) = (self.read(1)?, self.read(0)?);
                let value = holds.and_then(|(holds, firm)| {
                    let value = if holds { source } else { kept }?;
                    Some(Known {
                        firm: value.firm && firm,
                        ..value
                    })
                });
                self.write(0, value)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn shift(&mut self, way: Shift) -> Result<Computed, Opaque> {
        let (value, size) = (self.read(0)?, self.size(0));
        let count = match self.instruction.op_count() {
            2 => self.read(1)?,
            _ => firm(1),
        };
        Ok(alu::shift(value, count, size, way, &self.shadow.flags))
    }

    fn extend(&mut self, from: Register, to: Register) {
        let value = self.shadow.register(from).map(|value| Known {
            bits: sign_extend(value.bits, from.size()),
            ..value
        });
        self.shadow.set_register(to, value);
    }

    fn is_same_register(&self) -> bool {
        self.instruction.op0_kind() == OpKind::Register
            && self.instruction.op1_kind() == OpKind::Register
            && self.instruction.op0_register() == self.instruction.op1_register()
    }

    fn size(&self, operand: u32) -> usize {
        match self.instruction.op_kind(operand) {
            OpKind::Register => self.instruction.op_register(operand).size(),
            OpKind::Memory => self.instruction.memory_size().size(),
            _ => 8,
        }
    }

    fn address(&self, operand: u32) -> Option<u64> {
        let shadow = &*self.shadow;
        self.instruction
            .virtual_address(operand, 0, |register, _, _| {
                shadow.part_of_address(register)
            })
    }

    /// Returns what LEA computes: no segment's base.
    fn effective_address(&self) -> Value {
        let shadow = &*self.shadow;
        let mut is_firm = true;
        let bits = self.instruction.virtual_address(1, 0, |register, _, _| {
            if register.is_segment_register() {
                return Some(0);
            }
            let value = shadow.register(register)?;
            is_firm &= value.firm;
            Some(value.bits)
        });
        bits.map(|bits| Known {
            bits,
            firm: is_firm,
        })
    }

    fn read(&mut self, operand: u32) -> Result<Value, Opaque> {
        Ok(match self.instruction.op_kind(operand) {
            OpKind::Register => {
                let register = self.instruction.op_register(operand);
                if !register.is_gpr() {
                    // A segment's selector, for instance.
                    return Ok(None);
                }
                self.shadow.register(register)
            }
            OpKind::Memory => {
                let (address, size) = (self.address(operand).ok_or(Opaque)?, self.size(operand));
                if !self
                    .space
                    .is_reached(address, size as u64, false, self.shadow.ring)
                {
                    return Err(Opaque);
                }
                self.shadow.load(self.space, address, size)
            }
            _ => match self.instruction.try_immediate(operand) {
                Ok(value) => firm(value),
                Err(_) => return Err(Opaque),
            },
        })
    }

    fn write(&mut self, operand: u32, value: Value) -> Result<(), Opaque> {
        match self.instruction.op_kind(operand) {
            OpKind::Register => {
                let register = self.instruction.op_register(operand);
                self.shadow.set_register(register, value);
                Ok(())
            }
            OpKind::Memory => {
                let (address, size) = (self.address(operand).ok_or(Opaque)?, self.size(operand));
                self.store(address, size, value)
            }
            _ => Err(Opaque),
        }
    }

    fn store(&mut self, address: u64, size: usize, value: Value) -> Result<(), Opaque> {
        if !self
            .space
            .is_reached(address, size as u64, true, self.shadow.ring)
        {
            return Err(Opaque);
        }
        self.shadow.store(address, size, value);
        Ok(())
    }

    fn push(&mut self, value: Value) -> Result<(), Opaque> {
        let size = self.instruction.stack_pointer_increment().unsigned_abs();
        push(self.shadow, self.space, value, size as usize)
    }

    fn pop(&mut self) -> Result<Value, Opaque> {
        let size = match self.instruction.op_count() {
            0 => 8,
            _ => self.size(0),
        };
        pop(self.shadow, self.space, size)
    }
}

/// Pushes `size` bytes.
pub(super) fn push(
    shadow: &mut Shadow,
    space: &mut Space<'_>,
    value: Value,
    size: usize,
) -> Result<(), Opaque> {
    let before = shadow.stack_pointer().ok_or(Opaque)?;
    let at = before.bits.wrapping_sub(size as u64);
    if !space.is_reached(at, size as u64, true, shadow.ring) {
        return Err(Opaque);
    }
    shadow.store(at, size, value);
    shadow.set_stack_pointer(Some(Known { bits: at, ..before }));
    Ok(())
}

/// Pops `size` bytes.
pub(super) fn pop(
    shadow: &mut Shadow,
    space: &mut Space<'_>,
    size: usize,
) -> Result<Value, Opaque> {
    let at = shadow.stack_pointer().ok_or(Opaque)?;
    if !space.is_reached(at.bits, size as u64, false, shadow.ring) {
        return Err(Opaque);
    }
    let value = shadow.load(space, at.bits, size);
    let bits = at.bits.wrapping_add(size as u64);
    shadow.set_stack_pointer(Some(Known { bits, ..at }));
    Ok(value)
}

/// Returns the general register or the memory that an indirect branch takes its target from.
pub(super) fn indirect_target(
    instruction: &Instruction,
    shadow: &mut Shadow,
    space: &mut Space<'_>,
) -> Result<Value, Opaque> {
    let mut machine = Machine {
        instruction,
        shadow,
        space,
    };
    match machine.size(0) {
        8 => machine.read(0),
        _ => Err(Opaque),
    }
}

/// Returns the ring of a code segment's selector.
pub(super) const fn ring_of(selector: u64) -> Ring {
    match selector & 3 {
        0 => Ring::Kernel,
        _ => Ring::User,
    }
}
