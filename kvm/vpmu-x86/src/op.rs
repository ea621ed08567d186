//! Instructions that are executed exactly, in a form that is quick to execute.

use iced_x86::{Code, ConditionCode, FlowControl, Instruction, Mnemonic, OpKind, Register};

use crate::cpu::Stop;
use crate::flags::{Shift, mask};

/// Places in the machine's registers behind the general ones: one that is always 0, and the bases of FS and GS.
pub(crate) const ZERO: u8 = 16;
pub(crate) const FS: u8 = 17;
pub(crate) const GS: u8 = 18;

/// The kind of a branch that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Jcc, JRCXZ, LOOP.
    Conditional,
    /// JMP to an address in the instruction.
    RelativeJump,
    /// JMP to an address in a register or in memory.
    IndirectJump,
    /// CALL to the next instruction.
    NextCall,
    /// Any other CALL to an address in the instruction.
    RelativeCall,
    /// CALL to an address in a register or in memory.
    IndirectCall,
    /// RET.
    Return,
}

/// What an instruction does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// The instruction is none of those below.
    Unknown,
    Rdmsr,
    Nothing,
    Move,
    MoveSigned,
    LoadAddress,
    Push,
    Pop,
    Exchange,
    Call(u64),
    CallIndirect,
    Jump(u64),
    JumpIndirect,
    JumpIf(ConditionCode, u64),
    /// JRCXZ and LOOP: where RCX is 0, and where it is not 0 once it was decremented.
    JumpIfZero(u64),
    Loop(u64),
    /// RET; the second number is added to RSP.
    Return(u64),
    Alu(Alu),
    AddWithCarry,
    SubtractWithBorrow,
    Not,
    Negate,
    Shift(Shift),
    /// To the left, or to the right.
    Rotate(Shift),
    /// IMUL with two operands, and with three, of which the last is a number.
    Multiply,
    MultiplyBy,
    /// BT of a register, or of memory and a number: the bit's number is cut to the operand.
    BitTest,
    Leave,
    Set(ConditionCode),
    MoveIf(ConditionCode),
    /// Moves of a register or a number to a register of 32 or 64 bits, to it from memory, and to memory.
    QuickMove,
    QuickLoad,
    QuickStore,
    /// LEA to such a register.
    QuickAddress,
    /// Sums, and shifts by a number, of a register of 32 or 64 bits and a register or a number.
    QuickAdd,
    QuickSubtract,
    QuickCompare,
    QuickAnd,
    QuickOr,
    QuickXor,
    /// XOR of a register with itself.
    QuickClear,
    QuickTest,
    QuickShiftLeft,
    QuickShiftRight,
}

/// What computes a result and flags of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Alu {
    Add,
    Subtract,
    Compare,
    And,
    Test,
    Or,
    Xor,
    Increment,
    Decrement,
}

/// An operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Register(u8),
    /// AH, CH, DH, BH.
    High(u8),
    Immediate(u64),
    Memory,
}

/// The address of the operand in memory: the sum of registers, shifted, and a displacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) base: u8,
    pub(crate) index: u8,
    pub(crate) shift: u8,
    pub(crate) segment: u8,
    pub(crate) displacement: u64,
}

/// An instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    pub(crate) action: Action,
    /// Bytes of `to`, and of `from`.
    pub(crate) size: u8,
    pub(crate) from_size: u8,
    pub(crate) to: Place,
    pub(crate) from: Place,
    /// For the quick operations and `MultiplyBy`: the numbers of the two registers, and the number that is added to the second.
    /// For an immediate the second register is `ZERO`.
    pub(crate) quick: (u8, u8, u64),
    /// The bits of `size`.
    pub(crate) mask: u64,
    pub(crate) address: Address,
    /// The address of the instruction behind it.
    pub(crate) next: u64,
    /// Whether it is the last of a run: no instruction, a read, or a branch, taken or not.
    pub(crate) is_last: bool,
}

impl Op {
    /// An instruction that is not executed.
    pub(crate) const UNKNOWN: Self = Self {
        action: Action::Unknown,
        size: 8,
        from_size: 8,
        to: Place::Immediate(0),
        from: Place::Immediate(1),
        quick: (0, 0, 0),
        mask: u64::MAX,
        address: Address {
            base: ZERO,
            index: ZERO,
            shift: 0,
            segment: ZERO,
            displacement: 0,
        },
        next: 0,
        is_last: true,
    };

    /// Returns what `instruction` of 64-bit code does, if it can be executed exactly.
    pub(crate) fn of(instruction: &Instruction) -> Self {
        // A locked access is one that other vCPUs must not come between, as XCHG's with memory always is.
        let is_locked = instruction.has_lock_prefix();
        let op = Self::predicted(instruction);
        let exchanges = op.action == Action::Exchange && op.has_memory();
        if is_locked || exchanges {
            Self::UNKNOWN
        } else {
            op
        }
    }

    /// Returns what `instruction` does, if the result is known from the operands.
    pub(crate) fn predicted(instruction: &Instruction) -> Self {
        Self::known(instruction).unwrap_or(Self {
            next: instruction.next_ip(),
            ..Self::UNKNOWN
        })
    }

    fn has_memory(&self) -> bool {
        [self.to, self.from].contains(&Place::Memory)
    }

    /// Returns the kind of the branch, which has led to `to`; `None`: it was not taken. `Stop`: nobody can tell.
    #[inline]
    pub(crate) fn kind(&self, to: u64) -> Result<Option<Kind>, Stop> {
        Ok(Some(match self.action {
            Action::JumpIf(_, target) | Action::JumpIfZero(target) | Action::Loop(target) => {
                match (target == self.next, to == self.next) {
                    // Both ways lead to the next instruction; whether LBR records the branch depends on the flags, which are gone
                    // by now.
                    (true, _) => return Err(Stop),
                    (false, true) => return Ok(None),
                    (false, false) => Kind::Conditional,
                }
            }
            Action::Jump(_) => Kind::RelativeJump,
            Action::JumpIndirect => Kind::IndirectJump,
            // `call next; pop` reads RIP in old code. A call stack must not keep the call.
            Action::Call(_) if to == self.next => Kind::NextCall,
            Action::Call(_) => Kind::RelativeCall,
            Action::CallIndirect => Kind::IndirectCall,
            Action::Return(_) => Kind::Return,
            _ => return Ok(None),
        }))
    }

    fn known(instruction: &Instruction) -> Option<Self> {
        let is_plain = !instruction.has_rep_prefix() && !instruction.has_repne_prefix();
        // A prefix F2 or F3 repeats a string instruction, and changes others in ways of their own.
        let action = action(instruction).filter(|_| is_plain)?;
        let mut op = Self {
            action,
            next: instruction.next_ip(),
            is_last: action == Action::Rdmsr || instruction.flow_control() != FlowControl::Next,
            ..Self::UNKNOWN
        };
        if matches!(
            action,
            Action::Nothing
                | Action::Rdmsr
                | Action::Return(_)
                | Action::Leave
                | Action::Call(_)
                | Action::Jump(_)
                | Action::JumpIf(..)
                | Action::JumpIfZero(_)
                | Action::Loop(_)
        ) {
            return Some(op);
        }
        let extends = match instruction.mnemonic() {
            Mnemonic::Cbw => Some(2),
            Mnemonic::Cwde => Some(4),
            Mnemonic::Cdqe => Some(8),
            _ => None,
        };
        if let Some(size) = extends {
            // Their operands, parts of RAX, are implied: the decoder lists none.
            (op.to, op.from) = (Place::Register(0), Place::Register(0));
            (op.size, op.from_size) = (size, size / 2);
            return Some(op);
        }
        let count = instruction.op_count();
        (op.to, op.size) = place(instruction, 0)?;
        op.from_size = op.size;
        if count >= 2 {
            (op.from, op.from_size) = place(instruction, 1)?;
            if matches!(op.from, Place::Immediate(_)) {
                // A number is extended to the size of what it meets.
                op.from_size = op.size;
            }
        }
        if action == Action::MultiplyBy {
            op.quick.2 = instruction.try_immediate(2).ok()?;
        }
        // With a prefix 66 a push moves 16 bits.
        if action == Action::Push && instruction.stack_pointer_increment() != -8 {
            return None;
        }
        let has_memory = op.has_memory();
        if has_memory {
            op.address = address(instruction)?;
        }
        op.is_usual(count, has_memory).then(|| op.quickened())
    }

    /// Returns the instruction in its quick form, if it has one.
    fn quickened(self) -> Self {
        // `quick` adds the register and the number without a look at which of them it is: the other one is 0.
        let (from, number) = match self.from {
            Place::Register(from) => (from, 0),
            Place::Immediate(number) => (ZERO, number & mask(self.from_size)),
            Place::High(_) | Place::Memory => (ZERO, 0),
        };
        let is_number = from == ZERO;
        let is_simple = matches!(self.from, Place::Register(_) | Place::Immediate(_));
        let is_long = matches!((self.to, self.size), (Place::Register(_), 4 | 8));
        let to = match self.to {
            Place::Register(to) => to,
            _ => ZERO,
        };
        let count = number & if self.size == 8 { 0x3f } else { 0x1f };
        // A shift by 0 keeps the flags, which the quick form does not.
        let shifts = is_number && count != 0;
        let action = match self.action {
            Action::Move if self.from == Place::Memory && is_long => Action::QuickLoad,
            Action::Move if self.to == Place::Memory && is_simple => Action::QuickStore,
            Action::LoadAddress if is_long => Action::QuickAddress,
            _ if !is_long || !is_simple => self.action,
            Action::Move => Action::QuickMove,
            Action::Alu(Alu::Add) => Action::QuickAdd,
            Action::Alu(Alu::Subtract) => Action::QuickSubtract,
            Action::Alu(Alu::Compare) => Action::QuickCompare,
            Action::Alu(Alu::And) => Action::QuickAnd,
            Action::Alu(Alu::Or) => Action::QuickOr,
            // What compilers write for 0 has a known result even where the register is not known.
            Action::Alu(Alu::Xor) if self.from == self.to => Action::QuickClear,
            Action::Alu(Alu::Xor) => Action::QuickXor,
            Action::Alu(Alu::Test) => Action::QuickTest,
            Action::Shift(Shift::Left) if shifts => Action::QuickShiftLeft,
            Action::Shift(Shift::Right) if shifts => Action::QuickShiftRight,
            action => action,
        };
        let quick = match action {
            Action::MultiplyBy => self.quick,
            Action::QuickShiftLeft | Action::QuickShiftRight => (to, from, count),
            _ => (to, from, number),
        };
        Self {
            action,
            quick,
            mask: mask(self.size),
            ..self
        }
    }

    /// Returns whether the operands are of the forms that the action is executed with.
    fn is_usual(&self, count: u32, has_memory: bool) -> bool {
        let same = self.size == self.from_size;
        if self.from_size == 0 && self.action != Action::LoadAddress {
            return false;
        }
        match self.action {
            Action::Push | Action::Pop | Action::CallIndirect | Action::JumpIndirect => {
                // POP to memory computes the address with the RSP behind the pop.
                let is_popped = self.action != Action::Pop || matches!(self.to, Place::Register(_));
                count == 1 && self.size == 8 && is_popped
            }
            Action::Not
            | Action::Negate
            | Action::Alu(Alu::Increment | Alu::Decrement)
            | Action::Set(_) => count == 1,
            // MOVSXD with a prefix 66 reads 32 bits on AMD, and keeps 16.
            Action::Move | Action::MoveSigned => count == 2 && self.from_size <= self.size,
            Action::LoadAddress => count == 2 && self.from == Place::Memory,
            Action::Shift(_) | Action::Rotate(_) => count <= 2,
            Action::MultiplyBy => count == 3 && same,
            // Another register's number would reach beyond the operand in memory.
            Action::BitTest => !has_memory || matches!(self.from, Place::Immediate(_)),
            _ => count == 2 && same,
        }
    }
}

fn action(instruction: &Instruction) -> Option<Action> {
    let near = || {
        let is_near = instruction.op0_kind() == OpKind::NearBranch64;
        is_near.then(|| instruction.near_branch_target())
    };
    let mnemonic = instruction.mnemonic();
    let (condition, flow) = (instruction.condition_code(), instruction.flow_control());
    Some(match mnemonic {
        Mnemonic::Rdmsr => Action::Rdmsr,
        // ENDBR64 ends a check of indirect branches, in whose midst no replay is: it wants CR4.CET clear.
        Mnemonic::Nop | Mnemonic::Endbr64 => Action::Nothing,
        // A longer one may be XCHG R8, RAX: the decoder does not see REX.B behind a prefix F3.
        Mnemonic::Pause if instruction.len() == 2 => Action::Nothing,
        Mnemonic::Mov | Mnemonic::Movzx => Action::Move,
        Mnemonic::Movsx | Mnemonic::Movsxd => Action::MoveSigned,
        Mnemonic::Lea => Action::LoadAddress,
        Mnemonic::Push => Action::Push,
        Mnemonic::Pop => Action::Pop,
        Mnemonic::Xchg => Action::Exchange,
        Mnemonic::Add => Action::Alu(Alu::Add),
        Mnemonic::Adc => Action::AddWithCarry,
        Mnemonic::Sub => Action::Alu(Alu::Subtract),
        Mnemonic::Sbb => Action::SubtractWithBorrow,
        Mnemonic::Cmp => Action::Alu(Alu::Compare),
        Mnemonic::And => Action::Alu(Alu::And),
        Mnemonic::Or => Action::Alu(Alu::Or),
        Mnemonic::Xor => Action::Alu(Alu::Xor),
        Mnemonic::Test => Action::Alu(Alu::Test),
        Mnemonic::Not => Action::Not,
        Mnemonic::Neg => Action::Negate,
        Mnemonic::Inc => Action::Alu(Alu::Increment),
        Mnemonic::Dec => Action::Alu(Alu::Decrement),
        Mnemonic::Shl | Mnemonic::Sal => Action::Shift(Shift::Left),
        Mnemonic::Shr => Action::Shift(Shift::Right),
        Mnemonic::Sar => Action::Shift(Shift::Signed),
        Mnemonic::Rol => Action::Rotate(Shift::Left),
        Mnemonic::Ror => Action::Rotate(Shift::Right),
        Mnemonic::Imul => match instruction.op_count() {
            2 => Action::Multiply,
            3 => Action::MultiplyBy,
            _ => return None,
        },
        Mnemonic::Bt => Action::BitTest,
        Mnemonic::Cbw | Mnemonic::Cwde | Mnemonic::Cdqe => Action::MoveSigned,
        _ if instruction.is_jcc_short_or_near() => Action::JumpIf(condition, near()?),
        // FCMOVcc and CMPccXADD have other operands.
        _ if condition != ConditionCode::None && flow == FlowControl::Next => {
            match instruction.op_count() {
                1 => Action::Set(condition),
                2 => Action::MoveIf(condition),
                _ => return None,
            }
        }
        _ => match instruction.code() {
            Code::Call_rel32_64 => Action::Call(near()?),
            Code::Jmp_rel8_64 | Code::Jmp_rel32_64 => Action::Jump(near()?),
            Code::Call_rm64 => Action::CallIndirect,
            Code::Jmp_rm64 => Action::JumpIndirect,
            Code::Retnq => Action::Return(0),
            Code::Retnq_imm16 => Action::Return(instruction.immediate16().into()),
            Code::Jrcxz_rel8_64 => Action::JumpIfZero(near()?),
            Code::Loop_rel8_64_RCX => Action::Loop(near()?),
            Code::Leaveq => Action::Leave,
            _ => return None,
        },
    })
}

/// Returns an operand and its size.
fn place(instruction: &Instruction, operand: u32) -> Option<(Place, u8)> {
    match instruction.op_kind(operand) {
        OpKind::Register => {
            let register = instruction.op_register(operand);
            // Segments, control and vector registers are none of the machine's.
            if !register.is_gpr() {
                return None;
            }
            let number = register.full_register().number() as u8;
            let is_high = matches!(
                register,
                Register::AH | Register::CH | Register::DH | Register::BH
            );
            let place = match is_high {
                true => Place::High(number),
                false => Place::Register(number),
            };
            Some((place, register.size() as u8))
        }
        OpKind::Memory => {
            // LEA's operand is none, and has the size 0.
            let size = instruction.memory_size().size();
            // Wider ones are vectors or pairs of numbers.
            matches!(size, 0 | 1 | 2 | 4 | 8).then_some((Place::Memory, size as u8))
        }
        _ => {
            let value = instruction.try_immediate(operand).ok()?;
            // Sign-extended already, and cut where it is used.
            Some((Place::Immediate(value), 8))
        }
    }
}

fn address(instruction: &Instruction) -> Option<Address> {
    let register = |register: Register| match register {
        // The displacement has RIP in it.
        Register::None | Register::RIP => Some(ZERO),
        // With a prefix 67 the sum is cut to 32 bits.
        register => (register.is_gpr() && register.size() == 8).then(|| register.number() as u8),
    };
    Some(Address {
        base: register(instruction.memory_base())?,
        index: register(instruction.memory_index())?,
        shift: instruction.memory_index_scale().trailing_zeros() as u8,
        segment: match instruction.memory_segment() {
            Register::FS => FS,
            Register::GS => GS,
            // In 64-bit code the bases of ES, CS, SS and DS count as 0 (SDM vol. 1, 3.4.2.1).
            _ => ZERO,
        },
        displacement: instruction.memory_displacement64(),
    })
}
