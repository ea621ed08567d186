//! The way that a vCPU is going to take, and the places where it is seen that it has.

use iced_x86::{Code, FlowControl, Instruction, Mnemonic, OpKind};
use kvm_bindings::{kvm_regs, kvm_sregs};
use vpmu::x86::Ring;
use vpmu::x86::lbr::{Branch, Filter, Kind};

use super::execute::{Executor, Opaque, indirect_target, pop, push, ring_of};
use super::shadow::{self, Flags, Known, Shadow, Value, firm};
use super::space::{Space, mode};
use super::way::{BREAKPOINTS, Leaf, Step, Way, are};

/// Most instructions of a way.
pub(super) const LONGEST: usize = 512;
/// Most instructions of a way behind the last place where it can end: a loop whose round takes no more goes on.
// Each of them is walked again after the next exit. With 8, a sample took 6 % longer, for 4 % fewer exits.
const BLIND: usize = 3;

/// Bits of RFLAGS.
pub(super) const TF: u64 = 1 << 8;
pub(super) const RF: u64 = 1 << 16;
const NT: u64 = 1 << 14;
const VM: u64 = 1 << 17;

/// What is asked of the vCPU before it goes.
pub(super) struct Start<'a> {
    pub(super) regs: &'a kvm_regs,
    pub(super) sregs: &'a kvm_sregs,
    pub(super) ring: Ring,
    /// IA32_LSTAR, if KVM tells.
    pub(super) lstar: Option<u64>,
    pub(super) filter: Filter,
    /// Branches that pass the filter and are enough.
    pub(super) wanted: usize,
    pub(super) resume: Resume,
    /// Most instructions of the way.
    pub(super) longest: usize,
}

/// Whether RFLAGS.RF has a vCPU execute the instruction where it is, in spite of a breakpoint there (SDM vol. 3B, 18.3.1.1).
/// A KVM that is emulated may know no such thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resume {
    Unknown,
    Works,
    Fails,
}

/// Why a way goes no further.
enum Halt {
    /// The instruction is not predicted.
    Opaque,
    /// The way can end no later than before this instruction.
    Here,
}

impl From<Opaque> for Halt {
    fn from(_: Opaque) -> Self {
        Self::Opaque
    }
}

struct Walk<'a, 'm> {
    start: &'a Start<'a>,
    space: &'a mut Space<'m>,
    executor: &'a mut Executor,
    shadow: Shadow,
    ip: u64,
    /// The way so far. Its leaves are those that are watched.
    way: &'a mut Way,
    /// Branches that pass the filter.
    passed: usize,
    /// Where the resume flag, which an IRET has set, keeps a breakpoint from being seen.
    deaf: Option<u64>,
    /// The last place where the way can end, and how many leaves were watched by then.
    end: Option<(Leaf, usize)>,
    /// The step of the last such place.
    seen: usize,
}

/// Makes `way` the one that the vCPU is going to take; `false`: it cannot be followed from here.
pub(super) fn walk(
    start: &Start<'_>,
    space: &mut Space<'_>,
    executor: &mut Executor,
    way: &mut Way,
) -> bool {
    way.clear();
    let mut walk = Walk {
        shadow: Shadow::now(start.regs, start.sregs, start.ring),
        ip: start.regs.rip,
        start,
        space,
        executor,
        way,
        passed: 0,
        deaf: None,
        end: None,
        seen: 0,
    };
    walk.go();
    match walk.end.take() {
        Some((end, watched)) => {
            walk.way.leaves.truncate(watched);
            walk.way.leaves.push(end);
            true
        }
        None => walk.alone(),
    }
}

impl Walk<'_, '_> {
    fn go(&mut self) {
        loop {
            let ip = self.ip;
            // Where it is reached a second time, a breakpoint has stopped the vCPU the first time.
            if self.way.leaves.iter().any(|leaf| leaf.ip == ip) {
                return;
            }
            let is_first = self.way.steps.is_empty();
            if !is_first && self.way.visit(ip) && self.is_place(ip) {
                let leaf = self.leaf(ip, None);
                self.end = Some((leaf, self.way.leaves.len()));
                self.seen = self.way.steps.len();
            }
            let steps = self.way.steps.len();
            let is_long = steps >= self.start.longest || steps > self.seen + BLIND;
            if self.passed >= self.start.wanted || is_long {
                return;
            }
            self.way.steps.push(Step {
                ip,
                branches: self.way.branches.len(),
                general: self.shadow.general,
            });
            let Some(instruction) = self.decode() else {
                return;
            };
            if self.step(&instruction).is_err() {
                return;
            }
        }
    }

    fn decode(&mut self) -> Option<Instruction> {
        let (bytes, length) = self.space.code(self.ip, mode(self.shadow.ring));
        self.executor.decodings.at(self.ip, &bytes, length)
    }

    fn leaf(&self, ip: u64, off: Option<Branch>) -> Leaf {
        Leaf {
            ip,
            branches: self.way.branches.len(),
            off,
            general: self.shadow.general,
            ring: self.shadow.ring,
            is_fault: false,
        }
    }

    /// Returns whether a breakpoint at `ip` is seen when the vCPU comes there with the registers that it has now.
    fn is_place(&self, ip: u64) -> bool {
        if self.deaf == Some(ip) {
            return false;
        }
        let is_start = ip == self.start.regs.rip;
        let has_moved = || !are(&self.shadow.general, &shadow::general(self.start.regs));
        match self.start.resume {
            Resume::Works => true,
            // Only registers tell whether the vCPU has gone round.
            Resume::Unknown => !is_start || has_moved(),
            Resume::Fails => !is_start,
        }
    }

    fn branch(&self, to: u64, kind: Kind, to_ring: Ring) -> Branch {
        Branch {
            from: self.ip,
            to,
            kind,
            from_ring: self.shadow.ring,
            to_ring,
            mispredicted: None,
            cycles: None,
        }
    }

    fn take(&mut self, to: u64, kind: Kind, to_ring: Ring) {
        let branch = self.branch(to, kind, to_ring);
        self.passed += usize::from(self.start.filter.passes(&branch));
        self.way.branches.push(branch);
        self.shadow.ring = to_ring;
        self.ip = to;
    }

    /// Goes over one instruction.
    fn step(&mut self, instruction: &Instruction) -> Result<(), Halt> {
        if is_cut(instruction) {
            return Err(Halt::Opaque);
        }
        let (next, ring) = (instruction.next_ip(), self.shadow.ring);
        let near = instruction.near_branch_target();
        match instruction.flow_control() {
            FlowControl::Next if instruction.mnemonic() == Mnemonic::Popfq => {
                let rflags = pop(&mut self.shadow, self.space, 8)?.ok_or(Halt::Opaque)?;
                self.set_flags(rflags)?;
                self.ip = next;
            }
            FlowControl::Next => {
                self.executor
                    .execute(instruction, &mut self.shadow, self.space)?;
                self.ip = next;
            }
            FlowControl::ConditionalBranch => return self.conditional(instruction),
            FlowControl::UnconditionalBranch if instruction.is_jmp_short_or_near() => {
                self.take(near, Kind::RelativeJump, ring);
            }
            FlowControl::IndirectBranch if instruction.is_jmp_near_indirect() => {
                let to = self.target(instruction)?;
                self.take(to, Kind::IndirectJump, ring);
            }
            FlowControl::Call if instruction.is_call_near() => {
                push(&mut self.shadow, self.space, firm(next), 8)?;
                let kind = match near == next {
                    true => Kind::NextCall,
                    false => Kind::RelativeCall,
                };
                self.take(near, kind, ring);
            }
            FlowControl::IndirectCall if instruction.is_call_near_indirect() => {
                let to = self.target(instruction)?;
                push(&mut self.shadow, self.space, firm(next), 8)?;
                self.take(to, Kind::IndirectCall, ring);
            }
            _ => return self.far(instruction),
        }
        Ok(())
    }

    /// Returns the target of an indirect branch, to which the processor can go.
    fn target(&mut self, instruction: &Instruction) -> Result<u64, Halt> {
        let to = indirect_target(instruction, &mut self.shadow, self.space)?;
        let to = to.ok_or(Halt::Opaque)?.bits;
        self.canonical(to)
    }

    fn canonical(&self, to: u64) -> Result<u64, Halt> {
        match self.space.is_canonical(to) {
            true => Ok(to),
            false => Err(Halt::Opaque),
        }
    }

    /// A branch that may be taken or not: where that is not firm, the other way is watched.
    fn conditional(&mut self, instruction: &Instruction) -> Result<(), Halt> {
        let (next, to) = (instruction.next_ip(), instruction.near_branch_target());
        let holds = if instruction.is_jcc_short_or_near() {
            self.shadow.flags.holds(instruction.condition_code())
        } else if matches!(instruction.mnemonic(), Mnemonic::Jrcxz | Mnemonic::Loop) {
            let is_loop = instruction.mnemonic() == Mnemonic::Loop;
            let count: Value = self.shadow.general[1].map(|count| Known {
                bits: count.bits.wrapping_sub(u64::from(is_loop)),
                ..count
            });
            self.shadow.general[1] = count;
            count.map(|count| ((count.bits == 0) != is_loop, count.firm))
        } else {
            // JECXZ, and loops that read flags, too.
            return Err(Halt::Opaque);
        };
        let branch = self.branch(to, Kind::Conditional, self.shadow.ring);
        // Where nothing is known, a way back is a loop's.
        let (is_taken, is_firm) = holds.unwrap_or((to < self.ip, false));
        if !is_firm {
            let (other, off) = match is_taken {
                true => (next, None),
                false => (to, Some(branch)),
            };
            let is_seen = self.way.has_visited(other) || !self.is_place(other);
            if self.way.leaves.len() + 1 == BREAKPOINTS || is_seen || next == to {
                return Err(Halt::Here);
            }
            let leaf = self.leaf(other, off);
            self.way.leaves.push(leaf);
        }
        match is_taken {
            true => self.take(to, Kind::Conditional, self.shadow.ring),
            false => self.ip = next,
        }
        Ok(())
    }

    /// Returns, and system calls.
    fn far(&mut self, instruction: &Instruction) -> Result<(), Halt> {
        let (next, ring) = (instruction.next_ip(), self.shadow.ring);
        match instruction.mnemonic() {
            Mnemonic::Ret => {
                let to = pop(&mut self.shadow, self.space, 8)?.ok_or(Halt::Opaque)?;
                let to = self.canonical(to.bits)?;
                if instruction.op_count() == 1 {
                    let more = u64::from(instruction.immediate16());
                    let stack = self.shadow.stack_pointer().map(|stack| Known {
                        bits: stack.bits.wrapping_add(more),
                        ..stack
                    });
                    self.shadow.set_stack_pointer(stack);
                }
                self.take(to, Kind::Return, ring);
            }
            Mnemonic::Syscall if self.has_syscall() => {
                let to = self.start.lstar.ok_or(Halt::Opaque)?;
                self.shadow.general[1] = firm(next);
                self.shadow.general[11] = None;
                // What IA32_FMASK leaves of them.
                self.shadow.flags = Flags::UNKNOWN;
                self.take(to, Kind::Other, Ring::Kernel);
            }
            Mnemonic::Sysretq if ring == Ring::Kernel && self.has_syscall() => {
                let to = self.shadow.general[1].ok_or(Halt::Opaque)?;
                let rflags = self.shadow.general[11].ok_or(Halt::Opaque)?;
                let to = self.canonical(to.bits)?;
                self.set_flags(rflags)?;
                self.take(to, Kind::Other, Ring::User);
            }
            Mnemonic::Iretq if ring == Ring::Kernel => self.interrupt_return()?,
            _ => return Err(Halt::Opaque),
        }
        Ok(())
    }

    fn has_syscall(&self) -> bool {
        const EFER_SCE: u64 = 1 << 0;
        self.start.sregs.efer & EFER_SCE != 0
    }

    fn set_flags(&mut self, rflags: Known) -> Result<(), Halt> {
        if rflags.bits & (TF | VM) != 0 {
            return Err(Halt::Opaque);
        }
        self.shadow.flags = Flags::of(rflags);
        Ok(())
    }

    fn interrupt_return(&mut self) -> Result<(), Halt> {
        let mut word = || pop(&mut self.shadow, self.space, 8)?.ok_or(Opaque);
        let (to, cs, rflags, rsp) = (word()?, word()?, word()?, word()?);
        word()?;
        if self.start.regs.rflags & NT != 0 || !self.is_64_bit(cs.bits) {
            return Err(Halt::Opaque);
        }
        let to = self.canonical(to.bits)?;
        self.set_flags(rflags)?;
        self.shadow.set_stack_pointer(Some(rsp));
        self.deaf = (rflags.bits & RF != 0).then_some(to);
        self.take(to, Kind::Other, ring_of(cs.bits));
        Ok(())
    }

    /// Returns whether the selector is one of 64-bit code.
    fn is_64_bit(&mut self, selector: u64) -> bool {
        const LDT: u64 = 1 << 2;
        const LONG: u64 = 1 << 53;
        if selector == u64::from(self.start.sregs.cs.selector) {
            return true;
        }
        let at = self.start.sregs.gdt.base.wrapping_add(selector & 0xfff8);
        let descriptor = self.space.word(at);
        selector & LDT == 0 && descriptor.is_some_and(|descriptor| descriptor & LONG != 0)
    }

    /// Makes the way that over the first instruction alone, which is not predicted. `false`: there is none.
    fn alone(mut self) -> bool {
        /// #DE, #GP, #PF: what an instruction of a sound guest may end in.
        const FAULTS: [u64; 3] = [0, 13, 14];
        self.ip = self.start.regs.rip;
        self.way.clear();
        self.shadow = Shadow::now(self.start.regs, self.start.sregs, self.start.ring);
        let instruction = self.decode();
        for vector in FAULTS {
            let Some(handler) = self.handler(vector) else {
                continue;
            };
            let off = Some(self.branch(handler, Kind::Other, Ring::Kernel));
            let mut leaf = self.leaf(handler, off);
            leaf.is_fault = true;
            leaf.ring = Ring::Kernel;
            // The frame is on a stack of the kernel's.
            leaf.general[4] = None;
            self.way.leaves.push(leaf);
        }
        match instruction {
            Some(instruction) if goes_on(&instruction) => {
                self.executor.forget_written(&instruction, &mut self.shadow);
                let leaf = self.leaf(instruction.next_ip(), None);
                self.way.leaves.push(leaf);
            }
            Some(_) => return false,
            // Its page is missing.
            None => {}
        }
        // Where the vCPU stops before the instruction was executed, it has its registers. Repeated, it may have others.
        self.way.steps.push(Step {
            ip: self.start.regs.rip,
            branches: 0,
            general: self.shadow.general,
        });
        self.way.is_opaque = true;
        let leaves = &self.way.leaves;
        let is_apart = |n: usize, leaf: &Leaf| leaves[..n].iter().all(|other| other.ip != leaf.ip);
        !leaves.is_empty() && (leaves.iter().enumerate()).all(|(n, leaf)| is_apart(n, leaf))
    }

    /// Returns the address of the handler of an exception (SDM vol. 3A, 6.14.1).
    fn handler(&mut self, vector: u64) -> Option<u64> {
        const PRESENT: u64 = 1 << 47;
        let gate = self.start.sregs.idt.base.wrapping_add(16 * vector);
        let (low, high) = (
            self.space.word(gate)?,
            self.space.word(gate.wrapping_add(8))?,
        );
        let offset = low & 0xffff | low >> 32 & 0xffff_0000 | high << 32;
        (low & PRESENT != 0).then_some(offset)
    }
}

/// Returns whether the instruction is a near branch with 16 bits of target on AMD's processors, and with 64 on Intel's.
fn is_cut(instruction: &Instruction) -> bool {
    let is_short = matches!(instruction.code(), Code::Retnw | Code::Retnw_imm16);
    is_short || instruction.op0_kind() == OpKind::NearBranch16
}

/// Returns whether the instruction that is not predicted is followed by the next one, unless it faults.
fn goes_on(instruction: &Instruction) -> bool {
    let waits = matches!(
        instruction.mnemonic(),
        Mnemonic::Hlt | Mnemonic::Mwait | Mnemonic::Mwaitx | Mnemonic::Popf | Mnemonic::Popfq
    );
    let is_call_of_host = matches!(instruction.mnemonic(), Mnemonic::Vmcall | Mnemonic::Vmmcall);
    !waits && (instruction.flow_control() == FlowControl::Next || is_call_of_host)
}
