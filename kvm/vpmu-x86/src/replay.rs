//! Executes a guest's instructions for it, from where it has exited until a [`Goal`] is reached: a *replay*.
//!
//! # Why the guest cannot tell
//!
//! - Each instruction is executed exactly or not at all. The first other one ends the replay, and the guest executes it. So
//!   does a flag that the manual leaves undefined, once somebody asks for it; and the replay ends where none is undefined.
//! - Memory is RAM, reached as the processor would without a fault ([`permits`](crate::paging::Paging::permits)) and without
//!   a change of a table: pages that are present, marked accessed and, for a store, dirty. Accesses are aligned, so that none is
//!   two. A device, a LOCK prefix, or a store into the code ends the replay.
//! - For other vCPUs all of it happens in one moment, in the order of the program: at the commitment all that was loaded is
//!   compared with what is there now, and only where it is the same, the stores are made. Otherwise the guest
//!   executes the instructions itself.
//!
//! Not in a nested guest, or where one may run (EFER.SVME, CR4.VMXE): its addresses would be another's. Nor with shadow
//! stacks (CR4.CET) or the kernel's protection keys (CR4.PKS), at CPL 1 or 2, or where the guest steps itself (TF). That nothing is
//! about to be delivered to the guest, and that it has no breakpoints, is the embedder's to see.

pub use crate::code::Code;
use crate::cpu::{self, Executed, Stop, System};
pub use crate::journal::Dropped;
use crate::journal::{Journal, Journaled, Rule};
use crate::machine::{Machine, Registers};
use crate::memory::Memory;
use crate::op::{Action, Kind, Op};
use crate::space::{Pages, Space};

const TF: u64 = 1 << 8;
const RF: u64 = 1 << 16;

/// How much may be executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Most instructions: the guest's interrupts wait meanwhile.
    pub instructions: u32,
    /// Most instructions from one step to the next.
    pub between: u32,
}

/// What is executed for: says what a step to it is, and when it is reached.
pub trait Goal {
    /// Returns what the first instruction, an RDMSR, gives, if it is one that has exited.
    fn first(&mut self) -> Option<u64> {
        None
    }

    /// Returns whether nothing is left to be executed for.
    fn is_reached(&self) -> bool {
        false
    }

    /// Returns whether the replay may end behind the last step. Where it may, the registers are kept.
    fn may_end(&self) -> bool {
        true
    }

    /// Answers RDMSR. `None`: the guest is to execute it.
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
    /// Fails where both ways lead to the next instruction, which does not say whether the branch was taken.
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
        let rule = Rule::of(start.registers, start.system);
        let space = Space::new(rule.paging, rule.mode, memory, &mut self.pages);
        let mut machine = Machine {
            registers: Registers::of(start.registers, start.system),
            memory: Journaled::new(space, &mut self.journal, rule, start.pkru),
        };
        let from = machine.begin(code, goal).ok()?;
        let end = machine.run(code, budget, goal)?;
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

/// A place where a replay can end.
struct End {
    registers: Registers<u64>,
    executed: Executed,
    /// How many of the stores were made by then.
    stores: usize,
}

impl<M: Memory + ?Sized> Machine<u64, Journaled<'_, '_, M>> {
    /// Completes the first instruction, if the goal has its result. Returns the registers with which the replay begins.
    fn begin(&mut self, code: &mut Code, goal: &mut impl Goal) -> Result<Registers<u64>, Stop> {
        let at = code.at(self.registers.ip, &mut self.memory)?;
        if let Some(value) = goal.first() {
            let op = code.ops(at).first().ok_or(Stop)?;
            if op.action != Action::Rdmsr {
                return Err(Stop);
            }
            self.registers.rdmsr(value, op.next);
        }
        Ok(self.registers)
    }

    /// Executes until the goal is reached, an instruction stops, or the budget is spent. Returns the last place behind a step
    /// where the replay can end.
    fn run(&mut self, code: &mut Code, budget: Budget, goal: &mut impl Goal) -> Option<End> {
        let (mut end, mut executed) = (None, Executed::default());
        // `bound`: up to which instruction the replay goes, unless it comes nearer to its goal before. `is_new`: it has since the
        // last end.
        let (mut bound, mut is_new) = (budget.between, false);
        let mut at = code.at(self.registers.ip, &mut self.memory).ok()?;
        while executed.instructions < bound && (is_new || !goal.is_reached()) {
            let Ok(next) = code.next(at, self.registers.ip, &mut self.memory) else {
                break;
            };
            at = next;
            let ops = code.ops(at);
            let left = (bound - executed.instructions) as usize;
            let mut ops = &ops[..ops.len().min(left)];
            // Behind a step the replay can end before any instruction, but only where all flags are defined: KVM takes a whole
            // RFLAGS, and the guest may push it.
            while is_new
                && let [op, rest @ ..] = ops
                && !op.is_last
            {
                ops = rest;
                executed.instructions += 1;
                if self.compute_one(op).is_err() {
                    return end;
                }
                self.note_end(executed, &mut is_new, &mut end);
            }
            if !is_new && goal.is_reached() {
                break;
            }
            executed.instructions += ops.len() as u32;
            let (last, straight) = match ops.split_last() {
                Some((last, straight)) if last.is_last => (Some(last), straight),
                _ => (None, ops),
            };
            // What was executed of `straight` before it stops is behind the last end, and is dropped with its registers.
            if self.compute_all(straight).is_err() {
                break;
            }
            let Some(op) = last else {
                continue;
            };
            let Ok(is_step) = self.step(op, goal, &mut executed) else {
                break;
            };
            if is_step {
                bound = (budget.instructions).min(executed.instructions + budget.between);
                is_new = goal.may_end();
            }
            self.note_end(executed, &mut is_new, &mut end);
        }
        end
    }

    /// Keeps the registers, where the replay can end here and has come nearer to its goal since the last end.
    #[inline]
    fn note_end(&mut self, executed: Executed, is_new: &mut bool, end: &mut Option<End>) {
        if *is_new && self.registers.flags.are_defined() {
            *is_new = false;
            *end = Some(End {
                registers: self.registers,
                executed,
                stores: self.memory.journal.close(),
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

    /// Executes a read or a branch. Returns whether that is a step to the goal.
    fn step(
        &mut self,
        op: &Op,
        goal: &mut impl Goal,
        executed: &mut Executed,
    ) -> Result<bool, Stop> {
        let from = self.registers.ip;
        if op.action == Action::Rdmsr {
            let value = goal.read(self.registers.ecx()).ok_or(Stop)?;
            self.registers.rdmsr(value, op.next);
            executed.reads += 1;
            return Ok(true);
        }
        let to = self.branch(op)?;
        self.registers.ip = to;
        executed.branches += 1;
        let is_step = goal.branch(&Branched { op, from, to })?;
        executed.taken += u32::from(is_step);
        Ok(is_step)
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
        && start.registers.rflags & TF == 0
}
