//! Executes instructions on copies of the guest's registers.

use kvm_bindings::{kvm_regs, kvm_sregs};

use super::flags::{self, Computed, Lazy, STATUS, Shift, Source, mask};
use super::memory::Memory;
use super::op::{Action, Address, FS, GS, Op, Place};
use super::{Executed, Stop};

const RAX: usize = 0;
const RCX: usize = 1;
const RDX: usize = 2;
const RSP: usize = 4;
const RBP: usize = 5;

/// The registers, in the order of their numbers; behind them 0 and the bases of segments.
const REGISTERS: usize = 32;

/// The registers of a vCPU.
#[derive(Clone, Copy)]
pub(super) struct Registers {
    all: [u64; REGISTERS],
    pub(super) ip: u64,
    pub(super) flags: Lazy,
}

impl Registers {
    pub(super) fn of(regs: &kvm_regs, sregs: &kvm_sregs) -> Self {
        let general = [
            regs.rax, regs.rcx, regs.rdx, regs.rbx, regs.rsp, regs.rbp, regs.rsi, regs.rdi,
            regs.r8, regs.r9, regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15,
        ];
        let mut all = [0; REGISTERS];
        all[..16].copy_from_slice(&general);
        all[usize::from(FS)] = sregs.fs.base;
        all[usize::from(GS)] = sregs.gs.base;
        Self {
            all,
            ip: regs.rip,
            flags: Lazy::of(regs.rflags),
        }
    }

    /// Returns the registers as KVM has them; RFLAGS but for the status flags is that of `before`.
    pub(super) fn to_kvm(self, before: u64) -> kvm_regs {
        let [
            rax,
            rcx,
            rdx,
            rbx,
            rsp,
            rbp,
            rsi,
            rdi,
            r8,
            r9,
            r10,
            r11,
            r12,
            r13,
            r14,
            r15,
            ..,
        ] = self.all;
        kvm_regs {
            rax,
            rbx,
            rcx,
            rdx,
            rsi,
            rdi,
            rsp,
            rbp,
            r8,
            r9,
            r10,
            r11,
            r12,
            r13,
            r14,
            r15,
            rip: self.ip,
            rflags: before & !STATUS | self.flags.get().bits(),
        }
    }

    /// Returns ECX, which RDMSR reads.
    pub(super) const fn ecx(&self) -> u32 {
        self.all[RCX] as u32
    }

    /// Completes an RDMSR.
    pub(super) const fn rdmsr(&mut self, value: u64, next: u64) {
        self.all[RAX] = value & 0xffff_ffff;
        self.all[RDX] = value >> 32;
        self.ip = next;
    }

    const fn get(&self, register: u8) -> u64 {
        self.all[register as usize % REGISTERS]
    }

    fn set(&mut self, register: u8, size: u8, value: u64) {
        let whole = &mut self.all[usize::from(register) % 16];
        *whole = match size {
            8 => value,
            // The upper half is cleared.
            4 => value & mask(4),
            _ => *whole & !mask(size) | value & mask(size),
        };
    }

    const fn address(&self, address: &Address) -> u64 {
        self.get(address.base)
            .wrapping_add(self.get(address.index) << address.shift)
            .wrapping_add(address.displacement)
    }
}

/// A vCPU at work.
pub(super) struct Machine<'a, 'm> {
    pub(super) registers: Registers,
    pub(super) memory: Memory<'a, 'm>,
}

impl Machine<'_, '_> {
    /// Executes one instruction. Where that stops, nothing has changed.
    pub(super) fn execute(&mut self, op: &Op) -> Result<(), Stop> {
        self.registers.ip = match op.is_last {
            true => self.branch(op)?,
            false => {
                self.compute(op)?;
                op.next
            }
        };
        Ok(())
    }

    /// Executes instructions that are no branches, one after the other. Where that stops, the bridge has ended before.
    #[inline]
    pub(super) fn compute_all(&mut self, ops: &[Op]) -> Result<(), Stop> {
        for op in ops {
            self.compute(op)?;
        }
        if let Some(op) = ops.last() {
            self.registers.ip = op.next;
        }
        Ok(())
    }

    /// Returns this as a place where a bridge can end.
    pub(super) fn end(&mut self, executed: Executed) -> (Registers, Executed, usize) {
        (self.registers, executed, self.memory.journal().close())
    }

    /// Executes one instruction that is no branch, but for RIP. Where that stops, nothing has changed.
    // A call of its own would take as long as a move.
    #[inline(always)]
    fn compute(&mut self, op: &Op) -> Result<(), Stop> {
        match op.action {
            Action::Nothing => {}
            Action::QuickMove => {
                let (_, from, number) = op.quick;
                // A number has no bits beyond its size, and another source is cut to its own.
                let value = self.registers.get(from).wrapping_add(number) & op.from_mask;
                self.set_quick(op, value);
            }
            Action::QuickLoad => {
                let value = self.memory.load(self.linear(op), op.from_size)?;
                self.set_quick(op, value);
            }
            Action::QuickStore => {
                let (_, from, number) = op.quick;
                let value = self.registers.get(from).wrapping_add(number);
                self.memory.store(self.linear(op), op.size, value)?;
            }
            Action::QuickAddress => {
                let value = self.registers.address(&op.address) & op.mask;
                self.set_quick(op, value);
            }
            Action::QuickAdd => {
                let (a, b) = self.quick(op);
                self.set_quick(op, a.wrapping_add(b) & op.mask);
                self.registers.flags.set(Source::Add, a, b, op.size);
            }
            Action::QuickSubtract => {
                let (a, b) = self.quick(op);
                self.set_quick(op, a.wrapping_sub(b) & op.mask);
                self.registers.flags.set(Source::Subtract, a, b, op.size);
            }
            Action::QuickCompare => {
                let (a, b) = self.quick(op);
                self.registers.flags.set(Source::Subtract, a, b, op.size);
            }
            Action::QuickTest => {
                let (a, b) = self.quick(op);
                self.registers.flags.set(Source::Logic, a & b, 0, op.size);
            }
            Action::QuickAnd => {
                let (a, b) = self.quick(op);
                self.set_quick(op, a & b);
                self.registers.flags.set(Source::Logic, a & b, 0, op.size);
            }
            Action::QuickOr => {
                let (a, b) = self.quick(op);
                self.set_quick(op, a | b);
                self.registers.flags.set(Source::Logic, a | b, 0, op.size);
            }
            Action::QuickXor => {
                let (a, b) = self.quick(op);
                self.set_quick(op, a ^ b);
                self.registers.flags.set(Source::Logic, a ^ b, 0, op.size);
            }
            Action::QuickShiftLeft => {
                let (a, b) = self.quick(op);
                self.set_quick(op, a << b & op.mask);
                let source = Source::Shift(Shift::Left);
                self.registers.flags.set(source, a, b, op.size);
            }
            Action::QuickShiftRight => {
                let (a, b) = self.quick(op);
                self.set_quick(op, a >> b);
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

    /// Returns the operands of a quick instruction. A number that shifts is smaller than the register.
    #[inline(always)]
    const fn quick(&self, op: &Op) -> (u64, u64) {
        let (to, from, number) = op.quick;
        let b = self.registers.get(from).wrapping_add(number);
        (self.registers.get(to) & op.mask, b & op.mask)
    }

    /// Writes the result of a quick instruction, which has no bits beyond its size.
    #[inline(always)]
    const fn set_quick(&mut self, op: &Op, value: u64) {
        self.registers.all[op.quick.0 as usize % REGISTERS] = value;
    }

    /// Executes a branch, and returns the address that it leads to.
    #[inline]
    pub(super) fn branch(&mut self, op: &Op) -> Result<u64, Stop> {
        match op.action {
            Action::Call(to) => {
                let to = self.canonical(to)?;
                self.push(op.next)?;
                Ok(to)
            }
            Action::CallIndirect => {
                let to = self.read(op.to, 8, op)?;
                let to = self.canonical(to)?;
                self.push(op.next)?;
                Ok(to)
            }
            Action::Jump(to) => self.canonical(to),
            Action::JumpIndirect => {
                let to = self.read(op.to, 8, op)?;
                self.canonical(to)
            }
            Action::JumpIf(condition, to) => {
                match self.registers.flags.holds(condition).ok_or(Stop)? {
                    true => self.canonical(to),
                    false => Ok(op.next),
                }
            }
            Action::Return => {
                let to = self.memory.load(self.registers.all[RSP], 8)?;
                let to = self.canonical(to)?;
                self.registers.all[RSP] = self.registers.all[RSP].wrapping_add(8);
                Ok(to)
            }
            _ => Err(Stop),
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
                let value = (value << unused).cast_signed() >> unused;
                self.write(op, value.cast_unsigned())
            }
            // Without the segment's base.
            Action::LoadAddress => self.write(op, self.registers.address(&op.address)),
            Action::Exchange => {
                let (a, b) = (
                    self.read(op.to, op.size, op)?,
                    self.read(op.from, op.size, op)?,
                );
                self.put(op.to, op.size, op, b)?;
                self.put(op.from, op.size, op, a)
            }
            Action::Leave => {
                let frame = self.registers.all[RBP];
                self.registers.all[RBP] = self.memory.load(frame, 8)?;
                self.registers.all[RSP] = frame.wrapping_add(8);
                Ok(())
            }
            Action::Set(condition) => {
                let holds = self.registers.flags.holds(condition).ok_or(Stop)?;
                self.write(op, holds.into())
            }
            Action::MoveIf(condition) => {
                // The source is read, and 32 bits clear the upper half, whatever the condition is.
                let value = self.read(op.from, op.size, op)?;
                let holds = self.registers.flags.holds(condition).ok_or(Stop)?;
                let kept = self.read(op.to, op.size, op)?;
                self.write(op, if holds { value } else { kept })
            }
            _ => self.compute_flags(op),
        }
    }

    /// Executes any other instruction that computes.
    #[inline]
    fn compute_flags(&mut self, op: &Op) -> Result<(), Stop> {
        let (size, mask) = (op.size, op.mask);
        let a = self.read(op.to, size, op)?;
        let b = self.read(op.from, size, op)?;
        let (result, source, a, b) = match op.action {
            Action::Add => (a.wrapping_add(b) & mask, Source::Add, a, b),
            Action::Subtract | Action::Compare => {
                (a.wrapping_sub(b) & mask, Source::Subtract, a, b)
            }
            Action::And | Action::Test => (a & b, Source::Logic, a & b, 0),
            Action::Or => (a | b, Source::Logic, a | b, 0),
            Action::Xor => (a ^ b, Source::Logic, a ^ b, 0),
            Action::Increment => {
                let carry = self.registers.flags.kept_carry();
                (a.wrapping_add(1) & mask, Source::Increment, a, carry)
            }
            Action::Decrement => {
                let carry = self.registers.flags.kept_carry();
                (a.wrapping_sub(1) & mask, Source::Decrement, a, carry)
            }
            Action::Not => return self.write(op, !a & mask),
            _ => return self.compute_rest(op, a, b),
        };
        if !matches!(op.action, Action::Compare | Action::Test) {
            self.write(op, result)?;
        }
        self.registers.flags.set(source, a, b, size);
        Ok(())
    }

    /// Executes what is rare, or whose flags are known with the result.
    fn compute_rest(&mut self, op: &Op, a: u64, b: u64) -> Result<(), Stop> {
        let size = op.size;
        let before = self.registers.flags.get();
        let carry = || before.carry().ok_or(Stop);
        if op.action == Action::BitTest {
            let flags = flags::bit_test(a, b, size, &before);
            self.registers.flags.set_known(flags);
            return Ok(());
        }
        let (result, flags): Computed = match op.action {
            Action::AddWithCarry => flags::add(a, b, carry()?, size),
            Action::SubtractWithBorrow => flags::subtract(a, b, carry()?, size),
            Action::Negate => flags::subtract(0, a, false, size),
            Action::ShiftLeft => flags::shift(a, b, size, Shift::Left, &before),
            Action::ShiftRight => flags::shift(a, b, size, Shift::Right, &before),
            Action::ShiftSigned => flags::shift(a, b, size, Shift::Signed, &before),
            Action::RotateLeft => flags::rotate(a, b, size, Shift::Left, &before),
            Action::RotateRight => flags::rotate(a, b, size, Shift::Right, &before),
            Action::Multiply => flags::multiply(a, b, size),
            Action::MultiplyBy => flags::multiply(b, op.quick.2 & mask(size), size),
            _ => return Err(Stop),
        };
        self.write(op, result)?;
        self.registers.flags.set_known(flags);
        Ok(())
    }

    #[inline]
    fn canonical(&self, address: u64) -> Result<u64, Stop> {
        self.memory
            .is_canonical(address)
            .then_some(address)
            .ok_or(Stop)
    }

    fn linear(&self, op: &Op) -> u64 {
        let address = self.registers.address(&op.address);
        address.wrapping_add(self.registers.get(op.address.segment))
    }

    /// Returns an operand, whose bits beyond `size` are 0.
    fn read(&mut self, place: Place, size: u8, op: &Op) -> Result<u64, Stop> {
        Ok(match place {
            Place::Register(register) => self.registers.get(register) & mask(size),
            Place::High(register) => self.registers.get(register) >> 8 & 0xff,
            Place::Immediate(value) => value & mask(size),
            Place::Memory => self.memory.load(self.linear(op), size)?,
        })
    }

    fn write(&mut self, op: &Op, value: u64) -> Result<(), Stop> {
        self.put(op.to, op.size, op, value)
    }

    fn put(&mut self, place: Place, size: u8, op: &Op, value: u64) -> Result<(), Stop> {
        match place {
            Place::Register(register) => self.registers.set(register, size, value),
            Place::High(register) => {
                let whole = &mut self.registers.all[usize::from(register) % 16];
                *whole = *whole & !0xff00 | (value & 0xff) << 8;
            }
            Place::Memory => self.memory.store(self.linear(op), size, value)?,
            Place::Immediate(_) => return Err(Stop),
        }
        Ok(())
    }

    fn push(&mut self, value: u64) -> Result<(), Stop> {
        let at = self.registers.all[RSP].wrapping_sub(8);
        self.memory.store(at, 8, value)?;
        self.registers.all[RSP] = at;
        Ok(())
    }

    fn pop(&mut self) -> Result<u64, Stop> {
        let at = self.registers.all[RSP];
        let value = self.memory.load(at, 8)?;
        self.registers.all[RSP] = at.wrapping_add(8);
        Ok(value)
    }
}
