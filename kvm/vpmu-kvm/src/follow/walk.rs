//! What a vCPU is going to execute, and the places where it is seen that it has.

use kvm_bindings::kvm_sregs;
use vpmu::x86::Ring;
use vpmu::x86::lbr::{Branch, Filter, Kind};
use vpmu_x86::Stop;
use vpmu_x86::cpu::{Registers, System};
use vpmu_x86::predict::{Decoded, Flow, Prediction, Predictor};
use vpmu_x86::word::{Masked, Word};

use super::replay::kind_of;
use super::trace::{BREAKPOINTS, Leaf, Trace, are};
use crate::memory::GuestMemory;

/// Most instructions of a trace.
pub(super) const LONGEST: usize = 512;
/// Most instructions of a trace behind the last place where it can end: a loop whose round takes no more goes on.
// Each of them is walked again after the next exit. With 8, a sample took 6 % longer, for 4 % fewer exits.
const UNSEEN: usize = 3;

/// Bits of RFLAGS.
pub(super) const TF: u64 = 1 << 8;
pub(super) const RF: u64 = 1 << 16;
const NT: u64 = 1 << 14;
const VM: u64 = 1 << 17;

/// General registers by their numbers.
const RCX: usize = 1;
const RSP: usize = 4;
const R11: usize = 11;

/// What is asked of the vCPU before it goes.
pub(super) struct Start<'a> {
    pub(super) registers: &'a Registers,
    pub(super) system: &'a System,
    /// Tables of descriptors, and the code segment.
    pub(super) sregs: &'a kvm_sregs,
    pub(super) ring: Ring,
    /// IA32_LSTAR, if KVM tells.
    pub(super) lstar: Option<u64>,
    pub(super) filter: Filter,
    /// Branches that pass the filter and are enough.
    pub(super) wanted: usize,
    pub(super) resume: Resume,
    /// Most instructions of the trace.
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

/// Why a trace goes no further.
enum Halt {
    /// The instruction is not predicted.
    Opaque,
    /// The trace can end no later than before this instruction.
    Here,
}

impl From<Stop> for Halt {
    fn from(_: Stop) -> Self {
        Self::Opaque
    }
}

struct Walk<'a> {
    start: &'a Start<'a>,
    vcpu: Prediction<'a, dyn GuestMemory + 'a>,
    ring: Ring,
    ip: u64,
    /// The trace so far. Its leaves are those that are watched.
    trace: &'a mut Trace,
    /// Branches that pass the filter.
    passed: usize,
    /// Where the resume flag, which an IRET has set, masks a breakpoint.
    masked: Option<u64>,
    /// The last place where the trace can end, and how many leaves were watched by then.
    end: Option<(Leaf, usize)>,
    /// The step of the last such place.
    seen: usize,
}

/// Makes `trace` what the vCPU is going to execute; `false`: it cannot be followed from here.
pub(super) fn walk(
    start: &Start<'_>,
    memory: &dyn GuestMemory,
    predictor: &mut Predictor,
    trace: &mut Trace,
) -> bool {
    trace.clear();
    let mut walk = Walk::new(start, memory, predictor, trace);
    walk.go();
    let end = walk.end.take();
    trace.is_cut = predictor.is_exhausted();
    match end {
        Some((end, watched)) => {
            trace.leaves.truncate(watched);
            trace.leaves.push(end);
            true
        }
        None => Walk::new(start, memory, predictor, trace).alone(),
    }
}

impl<'a> Walk<'a> {
    fn new(
        start: &'a Start<'a>,
        memory: &'a dyn GuestMemory,
        predictor: &'a mut Predictor,
        trace: &'a mut Trace,
    ) -> Self {
        Self {
            vcpu: predictor.begin(start.registers, start.system, memory),
            ring: start.ring,
            ip: start.registers.rip,
            start,
            trace,
            passed: 0,
            masked: None,
            end: None,
            seen: 0,
        }
    }

    fn go(&mut self) {
        loop {
            let ip = self.ip;
            // Where it is reached a second time, a breakpoint has stopped the vCPU the first time.
            if self.trace.leaves.iter().any(|leaf| leaf.ip == ip) {
                return;
            }
            let is_first = self.trace.steps.is_empty();
            if !is_first && self.trace.visit(ip) && self.is_place(ip) {
                let leaf = self.leaf(ip, None);
                self.end = Some((leaf, self.trace.leaves.len()));
                self.seen = self.trace.steps.len();
            }
            let steps = self.trace.steps.len();
            let is_long = steps >= self.start.longest || steps > self.seen + UNSEEN;
            if self.passed >= self.start.wanted || is_long {
                return;
            }
            self.trace.steps.push((ip, self.trace.branches.len()));
            let Some(decoded) = self.vcpu.decode(ip) else {
                return;
            };
            if self.step(&decoded).is_err() {
                return;
            }
        }
    }

    fn leaf(&self, ip: u64, off: Option<Branch>) -> Leaf {
        Leaf {
            ip,
            branches: self.trace.branches.len(),
            off,
            general: self.vcpu.general(),
            ring: self.ring,
            is_fault: false,
        }
    }

    /// Returns whether a breakpoint at `ip` is seen when the vCPU comes there with the registers that it has now.
    fn is_place(&self, ip: u64) -> bool {
        if self.masked == Some(ip) {
            return false;
        }
        let is_start = ip == self.start.registers.rip;
        let has_moved = || !are(&self.vcpu.general(), &self.start.registers.general);
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
            from_ring: self.ring,
            to_ring,
            mispredicted: None,
            cycles: None,
        }
    }

    fn take(&mut self, to: u64, kind: Kind, to_ring: Ring) {
        let branch = self.branch(to, kind, to_ring);
        self.passed += usize::from(self.start.filter.passes(&branch));
        self.trace.branches.push(branch);
        if to_ring != self.ring {
            self.vcpu.set_user(to_ring == Ring::User);
            self.ring = to_ring;
        }
        self.ip = to;
    }

    /// Goes over one instruction.
    fn step(&mut self, decoded: &Decoded) -> Result<(), Halt> {
        let next = decoded.next_ip();
        match decoded.flow() {
            Flow::Next => {
                self.vcpu.execute(decoded)?;
                self.ip = next;
            }
            Flow::PopFlags => {
                let rflags = self.vcpu.pop()?;
                self.set_flags(rflags)?;
                self.ip = next;
            }
            Flow::Conditional(to) => self.conditional(decoded, to)?,
            Flow::Branch => {
                let to = self.vcpu.branch(decoded)?;
                if let Some(kind) = decoded.kind(to)? {
                    self.take(to, kind_of(kind), self.ring);
                }
            }
            Flow::SystemCall if self.has_syscall() => {
                let to = self.start.lstar.ok_or(Halt::Opaque)?;
                self.vcpu.set_register(RCX, Masked::of(next));
                self.vcpu.set_register(R11, Masked::UNKNOWN);
                // What IA32_FMASK leaves of them.
                self.vcpu.forget_flags();
                self.take(to, Kind::Other, Ring::Kernel);
            }
            Flow::SystemReturn if self.ring == Ring::Kernel && self.has_syscall() => {
                let general = self.vcpu.general();
                let to = self.canonical(general[RCX])?;
                self.set_flags(general[R11])?;
                self.take(to, Kind::Other, Ring::User);
            }
            Flow::InterruptReturn if self.ring == Ring::Kernel => self.interrupt_return()?,
            Flow::SystemCall | Flow::SystemReturn | Flow::InterruptReturn | Flow::Other => {
                return Err(Halt::Opaque);
            }
        }
        Ok(())
    }

    fn canonical(&self, to: Masked) -> Result<u64, Halt> {
        let to = to.bits().filter(|&to| self.vcpu.is_canonical(to));
        to.ok_or(Halt::Opaque)
    }

    /// A branch that may be taken or not: where that is not firm, the other way is watched.
    fn conditional(&mut self, decoded: &Decoded, to: u64) -> Result<(), Halt> {
        let next = decoded.next_ip();
        let (holds, is_firm) = self.vcpu.decide(decoded);
        let branch = self.branch(to, Kind::Conditional, self.ring);
        // Where nothing is known, a way back is a loop's.
        let is_taken = holds.unwrap_or(to < self.ip);
        if holds.is_none() || !is_firm {
            let (other, off) = match is_taken {
                true => (next, None),
                false => (to, Some(branch)),
            };
            let is_seen = self.trace.has_visited(other) || !self.is_place(other);
            if self.trace.leaves.len() + 1 == BREAKPOINTS || is_seen || next == to {
                return Err(Halt::Here);
            }
            let leaf = self.leaf(other, off);
            self.trace.leaves.push(leaf);
        }
        match is_taken {
            true => self.take(to, Kind::Conditional, self.ring),
            false => self.ip = next,
        }
        Ok(())
    }

    const fn has_syscall(&self) -> bool {
        const EFER_SCE: u64 = 1 << 0;
        self.start.system.efer & EFER_SCE != 0
    }

    fn set_flags(&mut self, rflags: Masked) -> Result<(), Halt> {
        let bits = rflags.bits().filter(|bits| bits & (TF | VM) == 0);
        self.vcpu
            .set_flags(bits.ok_or(Halt::Opaque)?, rflags.is_firm());
        Ok(())
    }

    fn interrupt_return(&mut self) -> Result<(), Halt> {
        let (to, cs, rflags) = (self.vcpu.pop()?, self.vcpu.pop()?, self.vcpu.pop()?);
        let (rsp, _ss) = (self.vcpu.pop()?, self.vcpu.pop()?);
        let cs = cs.bits().ok_or(Halt::Opaque)?;
        if self.start.registers.rflags & NT != 0 || !self.is_64_bit(cs) {
            return Err(Halt::Opaque);
        }
        let to = self.canonical(to)?;
        self.set_flags(rflags)?;
        self.vcpu.set_register(RSP, rsp);
        let resumes = rflags.bits().is_some_and(|rflags| rflags & RF != 0);
        self.masked = resumes.then_some(to);
        let ring = match cs & 3 {
            0 => Ring::Kernel,
            3 => Ring::User,
            _ => return Err(Halt::Opaque),
        };
        self.take(to, Kind::Other, ring);
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
        let descriptor = self.vcpu.word(at);
        selector & LDT == 0 && descriptor.is_some_and(|descriptor| descriptor & LONG != 0)
    }

    /// Makes the trace that over the first instruction alone, which is not predicted. `false`: there is none.
    fn alone(mut self) -> bool {
        /// #DE, #GP, #PF: what an instruction of a sound guest may end in.
        const FAULTS: [u64; 3] = [0, 13, 14];
        let is_cut = self.trace.is_cut;
        self.trace.clear();
        self.trace.is_cut = is_cut;
        let decoded = self.vcpu.decode(self.ip);
        for vector in FAULTS {
            let Some(handler) = self.handler(vector) else {
                continue;
            };
            let off = Some(self.branch(handler, Kind::Other, Ring::Kernel));
            let mut leaf = self.leaf(handler, off);
            leaf.is_fault = true;
            leaf.ring = Ring::Kernel;
            // The frame is on a stack of the kernel's.
            leaf.general[RSP] = Masked::UNKNOWN;
            self.trace.leaves.push(leaf);
        }
        match decoded {
            Some(decoded) if decoded.goes_on() => {
                self.vcpu.forget_written(&decoded);
                let leaf = self.leaf(decoded.next_ip(), None);
                self.trace.leaves.push(leaf);
            }
            Some(_) => return false,
            // Its page is missing.
            None => {}
        }
        // Where the vCPU stops before the instruction was executed, or amid its repetitions.
        self.trace.steps.push((self.ip, 0));
        self.trace.is_opaque = true;
        let leaves = &self.trace.leaves;
        let is_apart = |n: usize, leaf: &Leaf| leaves[..n].iter().all(|other| other.ip != leaf.ip);
        !leaves.is_empty() && (leaves.iter().enumerate()).all(|(n, leaf)| is_apart(n, leaf))
    }

    /// Returns the address of the handler of an exception (SDM vol. 3A, 6.14.1).
    fn handler(&mut self, vector: u64) -> Option<u64> {
        const PRESENT: u64 = 1 << 47;
        let gate = self.start.sregs.idt.base.wrapping_add(16 * vector);
        let (low, high) = (self.vcpu.word(gate)?, self.vcpu.word(gate.wrapping_add(8))?);
        let offset = low & 0xffff | low >> 32 & 0xffff_0000 | high << 32;
        (low & PRESENT != 0).then_some(offset)
    }
}
