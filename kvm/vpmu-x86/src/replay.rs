//! Executes a guest's instructions for it, from where it has exited until a [`Goal`] is reached: a *replay*.
//!
//! # Why the guest cannot tell
//!
//! - Each instruction is executed exactly or not at all. The first other one ends the replay, and the guest executes it. So
//!   does a flag that the manual leaves undefined, once somebody asks for it; and the replay ends where none is undefined.
//! - Memory is RAM, reached as the processor would without a fault ([`Paging::permits`]) and without a change of a table:
//!   pages that are present, marked accessed and, for a store, dirty. Accesses are aligned, so that none is two. A device, a
//!   LOCK prefix, or a store into the code ends the replay.
//! - For other vCPUs all of it happens in one moment, in the order of the program: at the commitment all that was loaded is
//!   compared with what is there now, and only where it is the same, the stores are made. Otherwise the guest
//!   executes the instructions itself.
//!
//! Not in a nested guest, or where one may run (EFER.SVME, CR4.VMXE): its addresses would be another's. Nor with shadow
//! stacks (CR4.CET) or the kernel's protection keys (CR4.PKS), at CPL 1 or 2, or where the guest steps itself (TF). That nothing is
//! about to be delivered to the guest, and that it has no breakpoints, is the embedder's to see.

pub use crate::code::Code;
use crate::cpu::{self, System};
use crate::journal::{Journal, Journaled, Rule};
use crate::machine::{Machine, Registers};
use crate::memory::Memory;
use crate::op::{Action, Kind, Op};
use crate::paging::Paging;
use crate::space::{Pages, Space};
use crate::{Executed, Stop};

const TF: u64 = 1 << 8;
const DF: u64 = 1 << 10;
const RF: u64 = 1 << 16;

/// What was executed does not count: memory has changed meanwhile, or the guest is elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dropped;

/// How much may be executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Most instructions: the guest's interrupts wait meanwhile.
    pub instructions: u32,
    /// Most instructions from one step to the next.
    pub between: u32,
}

impl Budget {
    /// Returns so many instructions, with or without a step.
    const fn of(instructions: u32) -> Self {
        Self {
            instructions,
            between: instructions,
        }
    }
}

/// What is executed for: says what a step to it is, and when it is reached.
pub trait Goal {
    /// Returns whether nothing is left to be executed for.
    fn is_reached(&self) -> bool {
        false
    }

    /// Returns whether the replay may end behind the last step. Where it may, the registers are kept.
    fn may_end(&self) -> bool {
        true
    }

    /// Answers an RDMSR that changes nothing, so that memory may be committed behind it. `None`: it is an [`Access`].
    fn read(&mut self, _msr: u32) -> Option<u64> {
        None
    }

    /// Notes a branch. Returns whether it is a step to the goal.
    ///
    /// # Errors
    ///
    /// Where the branch must not be executed here.
    fn branch(&mut self, _branch: &Branched<'_>) -> Result<bool, Stop> {
        Ok(false)
    }
}

/// An instruction that does more than compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// RDMSR of this register.
    Rdmsr(u32),
    /// WRMSR of this register and value.
    Wrmsr(u32, u64),
    /// OUT of AL to this port, with ECX.
    Out(u8, u32),
}

/// An access that was performed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Performed {
    /// What EDX and EAX get, if they do.
    pub value: Option<u64>,
    /// Most instructions that are executed for the access that comes next. 0: the replay ends here.
    pub next: u32,
}

/// Performs what a replay comes to.
pub trait Accesses: Goal {
    /// Returns whether the next access is to be performed here. Where not, the replay ends before it, at a place where all flags
    /// are defined.
    fn wants(&mut self) -> bool;

    /// Performs the access at this address. All before it has been committed: `executed` since the one before. `None`: the
    /// guest is to execute it.
    fn perform(&mut self, at: u64, access: Access, executed: Executed) -> Option<Performed>;
}

/// A replay from access to access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chained {
    /// Where the guest goes on; `None`: where it is.
    pub registers: Option<cpu::Registers>,
    /// What was executed behind the last access.
    pub executed: Executed,
    /// Instructions that were executed in vain, because they did not come to an access.
    pub vain: u32,
    /// Whether memory had changed meanwhile.
    pub is_dropped: bool,
}

/// A near branch that was executed.
#[derive(Debug)]
pub struct Branched<'a> {
    op: &'a Op,
    /// Its address.
    pub from: u64,
    /// The address of the instruction that was executed next.
    pub to: u64,
}

impl Branched<'_> {
    /// Returns the kind; `None`: the branch was not taken.
    ///
    /// # Errors
    ///
    /// Where nobody can tell: both ways lead to the next instruction.
    #[inline]
    pub fn kind(&self) -> Result<Option<Kind>, Stop> {
        self.op.kind(self.to)
    }
}

/// A guest that has exited.
#[derive(Clone, Copy)]
pub struct Start<'a> {
    /// Its registers.
    pub registers: &'a cpu::Registers,
    /// Its system registers.
    pub system: &'a System,
    /// Asks for PKRU, which takes a while. `None`: nobody knows it.
    pub pkru: &'a dyn Fn() -> Option<u32>,
}

/// A replay that can be committed.
struct Plan {
    /// The registers where it begins, and where it ends.
    from: cpu::Registers,
    to: cpu::Registers,
    executed: Executed,
    rule: Rule,
}

/// Plans replays of one vCPU and commits them. Its room is made once: a vCPU's thread may not be able to ask for memory.
pub struct Replayer {
    journal: Journal,
    pages: Pages,
    plan: Option<Plan>,
}

impl Replayer {
    /// Makes room.
    #[expect(
        clippy::new_without_default,
        reason = "it takes 100 KB, which nobody makes by the way"
    )]
    pub fn new() -> Self {
        Self {
            journal: Journal::new(),
            pages: Pages::new(),
            plan: None,
        }
    }

    /// Returns whether there is a replay to commit.
    pub const fn is_planned(&self) -> bool {
        self.plan.is_some()
    }

    /// The guest goes its own way.
    pub fn forget(&mut self) {
        self.plan = None;
    }

    /// Executes for `goal` from where the guest is, and changes nothing of it. Returns what was executed; `None`: there is
    /// no replay. `code` keeps what was decoded.
    pub fn plan<M: Memory + ?Sized>(
        &mut self,
        start: &Start<'_>,
        memory: &M,
        code: &mut Code,
        budget: Budget,
        goal: &mut impl Goal,
    ) -> Option<Executed> {
        self.plan = None;
        if !is_possible(start) {
            return None;
        }
        // The guest has run since, and may have changed its tables.
        self.pages.forget();
        code.begin();
        self.journal.clear();
        let space = Space::new(Paging::of(start.system), memory, &mut self.pages);
        let rule = Rule::of(start.registers, start.system);
        let mut machine = Machine {
            registers: Registers::of(start.registers, start.system),
            memory: Journaled::new(space, &mut self.journal, rule, start.pkru),
        };
        let from = machine.registers;
        let end = machine.run(code, budget, goal, false).end?;
        let rule = machine.memory.rule;
        self.journal.cut(end.stores);
        // The flag is cleared by each instruction that completes.
        let rflags = start.registers.rflags & !RF;
        self.plan = Some(Plan {
            from: from.to_cpu(rflags),
            to: end.registers.to_cpu(rflags),
            executed: end.executed,
            rule,
        });
        Some(end.executed)
    }

    /// Makes the stores of the replay, for a guest that is where it begins. Returns the registers where it ends, and what the
    /// guest need not execute. `None`: there is no replay.
    pub fn commit<M: Memory + ?Sized>(
        &mut self,
        registers: &cpu::Registers,
        memory: &M,
    ) -> Option<Result<(cpu::Registers, Executed), Dropped>> {
        let plan = self.plan.take()?;
        let here = cpu::Registers {
            rflags: registers.rflags & !RF,
            ..*registers
        };
        if here != plan.from {
            return Some(Err(Dropped));
        }
        let committed = self.journal.commit(&plan.rule, memory);
        Some(committed.map(|()| (plan.to, plan.executed)))
    }
}

/// Instructions, at most, behind the last access of a replay until all flags are defined: Linux has 42 and fewer.
const TO_DEFINED: u32 = 64;

impl Replayer {
    /// Executes from access to access, from where the guest is: `most` instructions, and `next` up to the first access. What
    /// comes before an access is committed before that is performed, so that there is no way back behind it.
    ///
    /// The replay ends where all flags are defined. Only where that place is not reached behind the last access, because a page
    /// is missing there or memory changes, flags that the manual leaves undefined have values that are not this processor's.
    pub fn chain<M: Memory + ?Sized>(
        &mut self,
        start: &Start<'_>,
        memory: &M,
        code: &mut Code,
        (most, next): (u32, u32),
        accesses: &mut impl Accesses,
    ) -> Chained {
        let mut chained = Chained {
            registers: None,
            executed: Executed::default(),
            vain: 0,
            is_dropped: false,
        };
        self.plan = None;
        // All accesses are the kernel's.
        if !is_possible(start) || start.system.cpl != 0 {
            return chained;
        }
        self.pages.forget();
        code.begin();
        self.journal.clear();
        let space = Space::new(Paging::of(start.system), memory, &mut self.pages);
        let rule = Rule::of(start.registers, start.system);
        let mut machine = Machine {
            registers: Registers::of(start.registers, start.system),
            memory: Journaled::new(space, &mut self.journal, rule, start.pkru),
        };
        let (mut here, mut left, mut next) = (None, most, next);
        loop {
            let is_over = left == 0 || next == 0;
            let is_open = !machine.registers.flags.are_defined();
            if is_over && !is_open {
                break;
            }
            // Behind the last access, nothing is wanted but a place to end.
            let budget = match is_over {
                true => Budget::of(TO_DEFINED),
                false => Budget {
                    instructions: left,
                    between: next.min(left),
                },
            };
            let run = machine.run(code, budget, accesses, is_open);
            let rule = machine.memory.rule;
            let Some((access, executed, behind)) =
                run.access.filter(|_| !is_over && accesses.wants())
            else {
                if let Some(end) = run.end {
                    machine.memory.journal().cut(end.stores);
                    match machine.memory.journal().commit(&rule, memory) {
                        Ok(()) => {
                            (here, chained.executed) = (Some(end.registers), end.executed);
                        }
                        Err(Dropped) => chained.is_dropped = true,
                    }
                }
                chained.vain = run.executed - chained.executed.instructions;
                break;
            };
            if machine.memory.journal().commit(&rule, memory).is_err() {
                chained.is_dropped = true;
                break;
            }
            here = Some(machine.registers);
            let Some(performed) = accesses.perform(machine.registers.ip, access, executed) else {
                break;
            };
            machine.registers.complete(performed.value, behind);
            here = Some(machine.registers);
            left = left.saturating_sub(executed.instructions + 1);
            next = performed.next;
        }
        let rflags = start.registers.rflags & !RF;
        chained.registers = here.map(|registers| registers.to_cpu(rflags));
        chained
    }
}

/// A place where a replay can end.
struct End {
    registers: Registers<u64>,
    executed: Executed,
    /// How many of the stores were made by then.
    stores: usize,
}

/// What a run has come to.
struct Run {
    /// The last place behind a step where the replay can end.
    end: Option<End>,
    /// An access that is next, what was executed before it, and the address behind it.
    access: Option<(Access, Executed, u64)>,
    /// All instructions that were executed.
    executed: u32,
}

/// What a read, a branch or another access comes to.
enum Step {
    /// It leads to the next instruction. Whether that is a step to the goal.
    Done(bool),
    /// It is not executed here.
    Access(Access),
}

impl<M: Memory + ?Sized> Machine<u64, Journaled<'_, '_, M>> {
    /// Executes until the goal is reached, an instruction stops, or the budget is spent. `is_new`: the first place where all
    /// flags are defined is one to end at.
    fn run(
        &mut self,
        code: &mut Code,
        budget: Budget,
        goal: &mut impl Goal,
        mut is_new: bool,
    ) -> Run {
        let (mut end, mut executed) = (None, Executed::default());
        let access = self.run_to_access(code, budget, goal, (&mut is_new, &mut end, &mut executed));
        Run {
            end,
            access: access.map(|(access, behind)| (access, executed, behind)),
            executed: executed.instructions,
        }
    }

    fn run_to_access(
        &mut self,
        code: &mut Code,
        budget: Budget,
        goal: &mut impl Goal,
        (is_new, end, executed): (&mut bool, &mut Option<End>, &mut Executed),
    ) -> Option<(Access, u64)> {
        // Up to which instruction the replay goes, unless it comes nearer to its goal before.
        let mut bound = budget.between;
        let mut at = code.at(self.registers.ip, &mut self.memory).ok()?;
        while executed.instructions < bound && (*is_new || !goal.is_reached()) {
            at = code.next(at, self.registers.ip, &mut self.memory).ok()?;
            let ops = code.ops(at);
            let left = (bound - executed.instructions) as usize;
            let mut ops = &ops[..ops.len().min(left)];
            // Behind a step the replay can end before any instruction, but only where all flags are defined: KVM takes a whole
            // RFLAGS, and the guest may push it.
            while *is_new
                && let [op, rest @ ..] = ops
                && !op.is_last
            {
                ops = rest;
                executed.instructions += 1;
                self.compute_one(op).ok()?;
                self.note_end(*executed, is_new, end);
            }
            if !*is_new && goal.is_reached() {
                break;
            }
            executed.instructions += ops.len() as u32;
            let (last, straight) = match ops.split_last() {
                Some((last, straight)) if last.is_last => (Some(last), straight),
                _ => (None, ops),
            };
            // What was executed of `straight` before it stops is behind the last end, and is dropped with its registers.
            self.compute_all(straight).ok()?;
            let Some(op) = last else {
                continue;
            };
            let is_step = match self.step(op, goal, executed).ok()? {
                Step::Done(is_step) => is_step,
                Step::Access(access) => {
                    executed.instructions -= 1;
                    return Some((access, op.next));
                }
            };
            if is_step {
                bound = (budget.instructions).min(executed.instructions + budget.between);
                *is_new = goal.may_end();
            }
            self.note_end(*executed, is_new, end);
        }
        None
    }

    /// Keeps the registers, where the replay can end here and has come nearer to its goal since the last end.
    #[inline]
    fn note_end(&mut self, executed: Executed, is_new: &mut bool, end: &mut Option<End>) {
        if *is_new && self.registers.flags.are_defined() {
            *is_new = false;
            *end = Some(End {
                registers: self.registers,
                executed,
                stores: self.memory.journal().close(),
            });
        }
    }

    /// Executes one instruction that is no branch.
    // Not a part of the loop, whose instructions are executed in a row.
    #[inline(never)]
    fn compute_one(&mut self, op: &Op) -> Result<(), Stop> {
        self.compute(op)?;
        self.registers.ip = op.next;
        Ok(())
    }

    /// Executes a read or a branch.
    fn step(
        &mut self,
        op: &Op,
        goal: &mut impl Goal,
        executed: &mut Executed,
    ) -> Result<Step, Stop> {
        let (from, ecx) = (self.registers.ip, self.registers.ecx());
        match op.action {
            Action::Rdmsr => {
                let Some(value) = goal.read(ecx) else {
                    return Ok(Step::Access(Access::Rdmsr(ecx)));
                };
                self.registers.complete(Some(value), op.next);
                executed.reads += 1;
                return Ok(Step::Done(true));
            }
            Action::Wrmsr => {
                let value = self.registers.edx_eax();
                return Ok(Step::Access(Access::Wrmsr(ecx, value)));
            }
            Action::Out(port) => return Ok(Step::Access(Access::Out(port, ecx))),
            _ => {}
        }
        let to = self.branch(op)?;
        self.registers.ip = to;
        executed.branches += 1;
        let is_step = goal.branch(&Branched { op, from, to })?;
        executed.taken += u32::from(is_step);
        Ok(Step::Done(is_step))
    }
}

/// Returns whether the guest is in 64-bit code that is executed as the manual says, one instruction after the other.
const fn is_possible(start: &Start<'_>) -> bool {
    const EFER_LMA: u64 = 1 << 10;
    const EFER_NXE: u64 = 1 << 11;
    const EFER_SVME: u64 = 1 << 12;
    const CR4_VMXE: u64 = 1 << 13;
    const CR4_CET: u64 = 1 << 23;
    const CR4_PKS: u64 = 1 << 24;
    let system = start.system;
    system.efer & (EFER_LMA | EFER_NXE | EFER_SVME) == EFER_LMA | EFER_NXE
        && system.cr4 & (CR4_VMXE | CR4_CET | CR4_PKS) == 0
        && system.is_long
        && matches!(system.cpl, 0 | 3)
        && start.registers.rflags & (TF | DF) == 0
}
