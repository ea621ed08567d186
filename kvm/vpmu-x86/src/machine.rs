//! Executes instructions on copies of a vCPU's registers.

use crate::cpu::{self, Stop};
use crate::flags::{self, Computed, Lazy, STATUS, Shift, Source, mask};
use crate::op::{Action, Address, Alu, FS, GS, Op, Place};
use crate::word::Word;

const RAX: usize = 0;
const RCX: usize = 1;
const RDX: usize = 2;
const RSP: usize = 4;
const RBP: usize = 5;

/// The registers, in the order of their numbers; behind them 0 and the bases of segments.
// A power of two: an index is cut to it, so that no access is checked.
const REGISTERS: usize = 32;

/// How a machine reaches memory.
pub(crate) trait Bus<W> {
    fn load(&mut self, address: W, size: u8) -> Result<W, Stop>;
    fn store(&mut self, address: W, size: u8, value: W) -> Result<(), Stop>;
    fn is_canonical(&self, address: u64) -> bool;
}

/// The registers of a vCPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registers<W> {
    all: [W; REGISTERS],
    pub(crate) ip: u64,
    pub(crate) flags: Lazy<W>,
}

impl<W: Word> Registers<W> {
    pub(crate) fn of(registers: &cpu::Registers, system: &cpu::System) -> Self {
        let mut all = [W::of(0); REGISTERS];
        for (register, &bits) in all.iter_mut().zip(&registers.general) {
            *register = W::of(bits);
        }
        // The place between, `ZERO`, stays 0: an operand without base or index reads it.
        all[usize::from(FS)] = W::of(system.fs_base);
        all[usize::from(GS)] = W::of(system.gs_base);
        Self {
            all,
            ip: registers.rip,
            flags: Lazy::of(registers.rflags, true),
        }
    }

    /// Returns the general registers.
    pub(crate) fn general(&self) -> [W; 16] {
        std::array::from_fn(|n| self.all[n])
    }

    #[inline(always)]
    pub(crate) const fn get(&self, register: u8) -> W {
        self.all[register as usize % REGISTERS]
    }

    /// Sets a whole general register.
    pub(crate) fn set_whole(&mut self, register: usize, value: W) {
        self.all[register % 16] = value;
    }

    fn set(&mut self, register: u8, size: u8, value: W) {
        let whole = &mut self.all[usize::from(register) % 16];
        *whole = match size {
            8 => value,
            // A write of 32 bits clears the upper half; one of 8 or 16 keeps the rest.
            4 => value.cut(mask(4)),
            _ => whole.merge(value, mask(size)),
        };
    }

    #[inline(always)]
    pub(crate) fn address(&self, address: &Address) -> W {
        let (shift, displacement) = (address.shift, address.displacement);
        self.get(address.base)
            .with(self.get(address.index), |base, index| {
                base.wrapping_add(index << shift).wrapping_add(displacement)
            })
    }
}

impl Registers<u64> {
    /// Returns the registers; RFLAGS but for the status flags is that of `before`.
    pub(crate) fn to_cpu(self, before: u64) -> cpu::Registers {
        cpu::Registers {
            general: self.general(),
            rip: self.ip,
            // Nothing that is executed here changes DF, IF, AC or the others.
            rflags: before & !STATUS | self.flags.get().bits,
        }
    }

    /// Returns ECX, which RDMSR reads.
    pub(crate) const fn ecx(&self) -> u32 {
        self.all[RCX] as u32
    }

    /// Completes an RDMSR.
    pub(crate) const fn rdmsr(&mut self, value: u64, next: u64) {
        // The upper halves of RAX and RDX are cleared (SDM vol. 2B, "RDMSR").
        self.all[RAX] = value & 0xffff_ffff;
        self.all[RDX] = value >> 32;
        self.ip = next;
    }
}

impl Alu {
    /// Returns the result, whose bits beyond the operands' are not cut yet, and what its flags come from.
    #[inline(always)]
    fn apply<W: Word>(self, a: W, b: W, before: &Lazy<W>) -> (W, Source, W, W) {
        let logic = |result| (result, Source::Logic, result, W::of(0));
        match self {
            Self::Add => (a.with(b, u64::wrapping_add), Source::Add, a, b),
            Self::Subtract | Self::Compare => {
                (a.with(b, u64::wrapping_sub), Source::Subtract, a, b)
            }
            Self::And | Self::Test => logic(a.with(b, |a, b| a & b)),
            Self::Or => logic(a.with(b, |a, b| a | b)),
            Self::Xor => logic(a.with(b, |a, b| a ^ b)),
            Self::Increment => {
                let result = a.map(|a| a.wrapping_add(1));
                (result, Source::Increment, a, before.kept_carry())
            }
            Self::Decrement => {
                let result = a.map(|a| a.wrapping_sub(1));
                (result, Source::Decrement, a, before.kept_carry())
            }
        }
    }

    const fn writes(self) -> bool {
        !matches!(self, Self::Compare | Self::Test)
    }
}

/// A vCPU at work.
pub(crate) struct Machine<W, B> {
    pub(crate) registers: Registers<W>,
    pub(crate) memory: B,
}

impl<W: Word, B: Bus<W>> Machine<W, B> {
    /// Executes instructions that are no branches, one after the other. Where that stops, RIP is behind none of them, and all
    /// since then is to be dropped.
    #[inline(always)]
    pub(crate) fn compute_all(&mut self, ops: &[Op]) -> Result<(), Stop> {
        for op in ops {
            self.compute(op)?;
        }
        if let Some(op) = ops.last() {
            self.registers.ip = op.next;
        }
        Ok(())
    }

    /// Executes one instruction that is no branch, but for RIP. Where that stops, nothing has changed.
    // A call of its own would take as long as a move.
    #[inline(always)]
    pub(crate) fn compute(&mut self, op: &Op) -> Result<(), Stop> {
        match op.action {
            Action::Nothing => {}
            Action::QuickMove => {
                let (_, from, number) = op.quick;
                // A number has no bits beyond its size, and another source is cut to its own.
                let value = self.number(from, number).cut(mask(op.from_size));
                self.set_quick(op, value);
            }
            Action::QuickLoad => {
                let value = self.memory.load(self.linear(op), op.from_size)?;
                self.set_quick(op, value);
            }
            Action::QuickStore => {
                let (_, from, number) = op.quick;
                let value = self.number(from, number);
                self.memory.store(self.linear(op), op.size, value)?;
            }
            Action::QuickAddress => {
                self.set_quick(op, self.registers.address(&op.address));
            }
            Action::QuickAdd => self.quick_alu(op, Alu::Add),
            Action::QuickSubtract => self.quick_alu(op, Alu::Subtract),
            Action::QuickCompare => self.quick_alu(op, Alu::Compare),
            Action::QuickTest => self.quick_alu(op, Alu::Test),
            Action::QuickAnd => self.quick_alu(op, Alu::And),
            Action::QuickOr => self.quick_alu(op, Alu::Or),
            Action::QuickXor => self.quick_alu(op, Alu::Xor),
            Action::QuickClear => {
                // Whatever the register was.
                self.set_quick(op, W::of(0));
                (self.registers.flags).set(Source::Logic, W::of(0), W::of(0), op.size);
            }
            Action::QuickShiftLeft => {
                let (a, b) = self.quick(op);
                self.set_quick(op, a.with(b, |a, b| a << b));
                let source = Source::Shift(Shift::Left);
                self.registers.flags.set(source, a, b, op.size);
            }
            Action::QuickShiftRight => {
                let (a, b) = self.quick(op);
                self.set_quick(op, a.with(b, |a, b| a >> b));
                let source = Source::Shift(Shift::Right);
                self.registers.flags.set(source, a, b, op.size);
            }
            Action::Push => {
                let value = self.read(op.to, 8, op)?;
                self.push(value)?;
            }
            Action::Pop => {
                let value = self.pop()?;
                self.write(op, value)?;
            }
            _ => self.compute_other(op)?,
        }
        Ok(())
    }

    /// Returns a register with a number added: one of them is 0.
    #[inline(always)]
    fn number(&self, register: u8, number: u64) -> W {
        self.registers
            .get(register)
            .map(|bits| bits.wrapping_add(number))
    }

    /// Returns the operands of a quick instruction. A number that shifts is smaller than the register.
    #[inline(always)]
    fn quick(&self, op: &Op) -> (W, W) {
        let (to, from, number) = op.quick;
        let b = self.number(from, number);
        (self.registers.get(to).cut(op.mask), b.cut(op.mask))
    }

    // With a number for the operation, what it computes is all that is left of `apply`.
    #[inline(always)]
    fn quick_alu(&mut self, op: &Op, alu: Alu) {
        let (a, b) = self.quick(op);
        let (result, source, a, b) = alu.apply(a, b, &self.registers.flags);
        if alu.writes() {
            self.set_quick(op, result);
        }
        self.registers.flags.set(source, a, b, op.size);
    }

    /// Writes the result of a quick instruction, which has no bits beyond its size.
    // The others of a value that is not known are set to 0 by this.
    #[inline(always)]
    fn set_quick(&mut self, op: &Op, value: W) {
        self.registers.all[op.quick.0 as usize % REGISTERS] = value.cut(op.mask);
    }

    /// Executes a branch, and returns the address that it leads to, if that is canonical or not known.
    #[inline]
    pub(crate) fn branch(&mut self, op: &Op) -> Result<W, Stop> {
        match op.action {
            Action::Call(to) => {
                // A call to an address that is not canonical faults at the call, before it pushes.
                let to = self.canonical(W::of(to))?;
                self.push(W::of(op.next))?;
                Ok(to)
            }
            Action::CallIndirect => {
                // Read before the push: the operand may lie on the stack, or be RSP's.
                let to = self.read(op.to, 8, op)?;
                let to = self.canonical(to)?;
                self.push(W::of(op.next))?;
                Ok(to)
            }
            Action::Jump(to) => self.canonical(W::of(to)),
            Action::JumpIndirect => {
                let to = self.read(op.to, 8, op)?;
                self.canonical(to)
            }
            Action::JumpIf(_, to) | Action::JumpIfZero(to) | Action::Loop(to) => {
                // Whether that is firm is not asked.
                match self.decide(op).0.ok_or(Stop)? {
                    true => self.canonical(W::of(to)),
                    false => Ok(W::of(op.next)),
                }
            }
            Action::Return(more) => {
                let stack = self.registers.all[RSP];
                let to = self.memory.load(stack, 8)?;
                let to = self.canonical(to)?;
                // Behind all that can stop, so that a RET that stops has changed nothing.
                self.registers.all[RSP] = stack.map(|at| at.wrapping_add(8).wrapping_add(more));
                Ok(to)
            }
            _ => Err(Stop),
        }
    }

    /// Returns whether a conditional branch is taken, and whether that is firm. LOOP counts.
    #[inline]
    pub(crate) fn decide(&mut self, op: &Op) -> (Option<bool>, bool) {
        match op.action {
            Action::JumpIf(condition, _) => self.condition(condition),
            Action::Loop(_) => {
                // LOOP leaves the flags as they are, unlike DEC.
                let count = self.registers.all[RCX].map(|count| count.wrapping_sub(1));
                self.registers.all[RCX] = count;
                (count.bits().map(|count| count != 0), count.is_firm())
            }
            _ => {
                let count = self.registers.all[RCX];
                (count.bits().map(|count| count == 0), count.is_firm())
            }
        }
    }

    /// Executes any other instruction that is no branch.
    #[inline(never)]
    fn compute_other(&mut self, op: &Op) -> Result<(), Stop> {
        match op.action {
            Action::Move => {
                let value = self.read(op.from, op.from_size, op)?;
                self.write(op, value)
            }
            Action::MoveSigned => {
                let value = self.read(op.from, op.from_size, op)?;
                let unused = 64 - 8 * u32::from(op.from_size);
                let extend = |bits: u64| ((bits << unused).cast_signed() >> unused).cast_unsigned();
                self.write(op, value.map(extend).cut(op.mask))
            }
            // Without the segment's base.
            Action::LoadAddress => self.write(op, self.registers.address(&op.address)),
            Action::Exchange => {
                let a = self.read(op.to, op.size, op)?;
                let b = self.read(op.from, op.size, op)?;
                // Both are read before either is written; with memory it is locked, and is not executed exactly.
                self.put(op.to, op.size, op, b)?;
                self.put(op.from, op.size, op, a)
            }
            Action::Leave => {
                let frame = self.registers.all[RBP];
                // RSP follows RBP only where the load does not stop.
                self.registers.all[RBP] = self.memory.load(frame, 8)?;
                self.registers.all[RSP] = frame.map(|frame| frame.wrapping_add(8));
                Ok(())
            }
            Action::Set(condition) => {
                let (holds, firm) = self.condition(condition);
                self.write(op, W::choose(holds, firm, W::of(1), W::of(0))?)
            }
            Action::MoveIf(condition) => {
                // The source is read, and 32 bits clear the upper half, whatever the condition is.
                let value = self.read(op.from, op.size, op)?;
                let (holds, firm) = self.condition(condition);
                let kept = self.read(op.to, op.size, op)?;
                self.write(op, W::choose(holds, firm, value, kept)?)
            }
            _ => self.compute_flags(op),
        }
    }

    #[inline]
    fn condition(&self, condition: iced_x86::ConditionCode) -> (Option<bool>, bool) {
        let flags = &self.registers.flags;
        (flags.holds(condition), flags.is_firm())
    }

    /// Executes any other instruction that computes.
    #[inline]
    fn compute_flags(&mut self, op: &Op) -> Result<(), Stop> {
        let (size, mask) = (op.size, op.mask);
        let a = self.read(op.to, size, op)?;
        let b = self.read(op.from, size, op)?;
        let alu = match op.action {
            Action::Alu(alu) => alu,
            Action::Not => return self.write(op, a.map(|a| !a & mask)),
            _ => return self.compute_rest(op, a, b),
        };
        let (result, source, a, b) = alu.apply(a, b, &self.registers.flags);
        if alu.writes() {
            self.write(op, result.cut(mask))?;
        }
        self.registers.flags.set(source, a, b, size);
        Ok(())
    }

    /// Executes what is rare, or whose flags are known with the result.
    fn compute_rest(&mut self, op: &Op, a: W, b: W) -> Result<(), Stop> {
        let size = op.size;
        let before = self.registers.flags.get();
        let firm = a.is_firm() && b.is_firm() && self.registers.flags.is_firm();
        let (Some(x), Some(y)) = (a.bits(), b.bits()) else {
            if op.action != Action::BitTest {
                // BT has no result.
                self.write(op, W::unknown()?)?;
            }
            self.registers.flags.forget();
            return Ok(());
        };
        if op.action == Action::BitTest {
            let flags = flags::bit_test(x, y, size, &before);
            self.registers.flags.set_known(flags, firm);
            return Ok(());
        }
        // The sum with a carry that nobody knows is nobody's either.
        let uses_carry = matches!(op.action, Action::AddWithCarry | Action::SubtractWithBorrow);
        let Some(carry) = before.carry().or((!uses_carry).then_some(false)) else {
            self.write(op, W::unknown()?)?;
            self.registers.flags.forget();
            return Ok(());
        };
        let (result, flags): Computed = match op.action {
            Action::AddWithCarry => flags::add(x, y, carry, size),
            Action::SubtractWithBorrow => flags::subtract(x, y, carry, size),
            Action::Negate => flags::subtract(0, x, false, size),
            Action::Shift(way) => flags::shift(x, y, size, way, &before),
            Action::Rotate(way) => flags::rotate(x, y, size, way, &before),
            Action::Multiply => flags::multiply(x, y, size),
            Action::MultiplyBy => flags::multiply(y, op.quick.2 & mask(size), size),
            _ => return Err(Stop),
        };
        self.write(op, W::computed(result, firm))?;
        self.registers.flags.set_known(flags, firm);
        Ok(())
    }

    #[inline]
    fn canonical(&self, address: W) -> Result<W, Stop> {
        match address.bits() {
            Some(bits) if !self.memory.is_canonical(bits) => Err(Stop),
            _ => Ok(address),
        }
    }

    #[inline(always)]
    fn linear(&self, op: &Op) -> W {
        let base = self.registers.get(op.address.segment);
        self.registers
            .address(&op.address)
            .with(base, u64::wrapping_add)
    }

    /// Returns an operand, whose bits beyond `size` are 0.
    fn read(&mut self, place: Place, size: u8, op: &Op) -> Result<W, Stop> {
        Ok(match place {
            Place::Register(register) => self.registers.get(register).cut(mask(size)),
            Place::High(register) => self
                .registers
                .get(register)
                .bitwise(|bits| bits >> 8 & 0xff),
            Place::Immediate(value) => W::of(value & mask(size)),
            Place::Memory => self.memory.load(self.linear(op), size)?,
        })
    }

    fn write(&mut self, op: &Op, value: W) -> Result<(), Stop> {
        self.put(op.to, op.size, op, value)
    }

    fn put(&mut self, place: Place, size: u8, op: &Op, value: W) -> Result<(), Stop> {
        match place {
            Place::Register(register) => self.registers.set(register, size, value),
            Place::High(register) => {
                let whole = &mut self.registers.all[usize::from(register) % 16];
                *whole = whole.merge(value.bitwise(|bits| bits << 8), 0xff00);
            }
            Place::Memory => self.memory.store(self.linear(op), size, value)?,
            Place::Immediate(_) => return Err(Stop),
        }
        Ok(())
    }

    pub(crate) fn push(&mut self, value: W) -> Result<(), Stop> {
        let at = self.registers.all[RSP].map(|at| at.wrapping_sub(8));
        // PUSH RSP pushes the RSP before the push: the caller has read it already.
        self.memory.store(at, 8, value)?;
        self.registers.all[RSP] = at;
        Ok(())
    }

    pub(crate) fn pop(&mut self) -> Result<W, Stop> {
        let at = self.registers.all[RSP];
        let value = self.memory.load(at, 8)?;
        self.registers.all[RSP] = at.map(|at| at.wrapping_add(8));
        Ok(value)
    }
}
