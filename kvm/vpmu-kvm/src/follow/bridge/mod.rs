//! Executes the guest's instructions for it, where that spares exits: those that it takes branches by while a PMI waits
//! for them, and those of its handler from one read of a branch record to the next.
//!
//! Linux reads FROM, TO and INFO of each record by an RDMSR of its own, which is an exit. The instructions between two of
//! them are some thirty: moves, sums, a call and a return. They are executed here, on copies of the guest's registers and
//! memory, and the reads among them are answered, from the first read, which exits, to the last. Then the guest goes on
//! behind that one, as if it had executed all of it. Branches are taken in the same way.
//!
//! # Why the guest cannot tell
//!
//! - Each instruction is executed exactly or not at all: [`op`] has those that are. The first other one ends the bridge,
//!   and the guest executes it. So does a flag that the manual leaves undefined, once somebody asks for it; and the bridge
//!   ends where none is undefined.
//! - Memory is RAM, reached as the processor would without a fault ([`Paging::permits`]) and without a change of a table:
//!   pages that are present, marked accessed and, for a store, dirty. Accesses are aligned, so that none is two. A device, a
//!   LOCK prefix, or a store into the code ends the bridge.
//! - For other vCPUs all of it happens in one moment, in the order of the program: at the end all that was loaded is compared
//!   with what is there now, and only where it is the same, the stores are made ([`memory`]). Otherwise the guest executes
//!   the instructions itself.
//! - Nothing is about to happen to the guest that would come between: no exception, no PMI of this vCPU's, no breakpoint of
//!   its own, no TF. Its interrupts wait for a few thousand instructions at most.
//!
//! Not in a nested guest, or where one may run (EFER.SVME, CR4.VMXE): its addresses would be another's. Nor with shadow
//! stacks (CR4.CET) or the kernel's protection keys.
//!
//! KVM completes the first read when it is called again, and is asked to do no more. What was executed is committed then.

mod code;
mod flags;
mod goal;
mod machine;
mod memory;
mod op;
#[cfg(test)]
mod tests;

use std::mem;

use kvm_bindings::{kvm_regs, kvm_sregs};
use vpmu::x86::Ring;
use vpmu::x86::lbr::{Branch, Filter, MAX_DEPTH};

use super::space::{Pages, Space};
use super::walk::{RF, TF};
use crate::guest::paging::Paging;
use crate::guest::ring;
use crate::memory::GuestMemory;
use crate::stats::Executed;
use code::Code;
use goal::{Branches, Goal, Reads};
use machine::{Machine, Registers};
use memory::{Journal, Memory, Rule};
use op::{Action, Op};

/// Most instructions of a bridge: twice as many as Linux 6.12 executes to read 32 records; and where interrupts are not
/// blocked.
const MOST: u32 = 8192;
const MOST_INTERRUPTIBLE: u32 = 2048;
/// Most instructions from one read, or branch, to the next.
const BETWEEN: u32 = 256;
/// Most reads that bridge nothing before the next try, as a power of two.
const RAREST: u32 = 6;

const IF: u64 = 1 << 9;

/// The next instruction is not executed here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stop;

/// What was executed does not count: memory has changed meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Dropped;

/// A guest that has exited.
pub(super) struct Start<'a> {
    pub(super) regs: &'a kvm_regs,
    pub(super) sregs: &'a kvm_sregs,
    /// Asks for PKRU, which takes a while.
    pub(super) pkru: &'a dyn Fn() -> Option<u32>,
}

/// A bridge that can be crossed.
struct Plan {
    /// The registers where it begins, and where it ends.
    from: kvm_regs,
    to: kvm_regs,
    executed: Executed,
    rule: Rule,
}

/// What a bridge is planned with: made once, as a vCPU's thread may not be able to ask for memory.
struct Scratch {
    journal: Journal,
    pages: Pages,
}

/// Executes for one vCPU.
pub(super) struct Bridge {
    /// The handler's code, and any that branches are taken in, which would take the former's place.
    handler: Code,
    code: Code,
    scratch: Scratch,
    plan: Option<Plan>,
    branches: Vec<Branch>,
    /// The register that the last bridge of reads began with, and how many it had. The next one that begins there has as many.
    last: (u32, u32),
    /// Tries one after the other that bridged nothing, and reads until the next try.
    vain: u32,
    rest: u32,
}

impl Bridge {
    pub(super) fn new() -> Self {
        Self {
            handler: Code::new(),
            code: Code::new(),
            scratch: Scratch {
                journal: Journal::new(),
                pages: Pages::new(),
            },
            plan: None,
            branches: Vec::with_capacity(2 * usize::from(MAX_DEPTH)),
            last: (0, 0),
            vain: 0,
            rest: 0,
        }
    }

    /// Returns whether there is a bridge to cross.
    pub(super) const fn is_planned(&self) -> bool {
        self.plan.is_some()
    }

    /// The guest goes its own way.
    pub(super) fn forget(&mut self) {
        self.plan = None;
    }

    /// Returns whether this read is one to try.
    pub(super) fn is_due(&mut self) -> bool {
        let is_due = self.rest == 0;
        self.rest = self.rest.saturating_sub(1);
        is_due
    }

    /// Executes what follows a read of a record that has exited, and gives `value`. `read` answers others. Returns whether
    /// there is a bridge.
    pub(super) fn plan_reads(
        &mut self,
        start: &Start<'_>,
        memory: &dyn GuestMemory,
        value: u64,
        read: impl FnMut(u32) -> Option<u64>,
    ) -> bool {
        let is_kernel = ring(start.sregs, start.regs) == Ring::Kernel;
        let msr = start.regs.rcx as u32;
        let is_known = msr == self.last.0;
        let mut goal = Reads {
            first: Some(value),
            read,
            left: if is_known { self.last.1 } else { MOST },
            is_known,
        };
        self.plan = match is_kernel && is_possible(start) {
            true => {
                let (code, scratch) = (&mut self.handler, &mut self.scratch);
                planned(start, memory, code, scratch, &mut goal)
            }
            false => None,
        };
        match self.plan {
            Some(Plan { executed, .. }) => {
                self.vain = 0;
                self.last = (msr, executed.reads);
            }
            None => {
                // The next bridge from there may be shorter.
                self.last = (0, 0);
                // A guest that reads its records in another way is not to pay for each read.
                self.rest = (1 << self.vain) - 1;
                self.vain = RAREST.min(self.vain + 1);
            }
        }
        self.plan.is_some()
    }

    /// Executes until `wanted` branches that pass the filter were taken. Returns whether there is a bridge.
    pub(super) fn plan_branches(
        &mut self,
        start: &Start<'_>,
        memory: &dyn GuestMemory,
        filter: Filter,
        wanted: usize,
    ) -> bool {
        let mut branches = mem::take(&mut self.branches);
        branches.clear();
        let mut goal = Branches {
            branches,
            ring: ring(start.sregs, start.regs),
            filter,
            wanted,
        };
        self.plan = match is_possible(start) {
            true => {
                let (code, scratch) = (&mut self.code, &mut self.scratch);
                planned(start, memory, code, scratch, &mut goal)
            }
            false => None,
        };
        self.branches = goal.branches;
        self.plan.is_some()
    }

    /// Returns the first branches that were taken, the oldest first.
    pub(super) fn taken(&self, count: u32) -> &[Branch] {
        let count = self.branches.len().min(count as usize);
        &self.branches[..count]
    }

    /// Makes the stores of the bridge, for a guest that is where it begins. Returns the registers where it ends, and what the
    /// guest need not execute.
    pub(super) fn commit(
        &mut self,
        regs: &kvm_regs,
        memory: &dyn GuestMemory,
    ) -> Option<Result<(kvm_regs, Executed), Dropped>> {
        let plan = self.plan.take()?;
        let here = kvm_regs {
            rflags: regs.rflags & !RF,
            ..*regs
        };
        Some(match here == plan.from {
            true => {
                (self.scratch.journal.commit(&plan.rule, memory)).map(|()| (plan.to, plan.executed))
            }
            false => Err(Dropped),
        })
    }
}

/// Executes for `goal` from where the guest is.
fn planned(
    start: &Start<'_>,
    memory: &dyn GuestMemory,
    code: &mut Code,
    Scratch { journal, pages }: &mut Scratch,
    goal: &mut impl Goal,
) -> Option<Plan> {
    // The guest has run since, and may have changed its tables.
    pages.forget();
    let space = Space::new(Paging::of(start.sregs), memory, pages);
    code.begin();
    journal.clear();
    let mut machine = Machine {
        registers: Registers::of(start.regs, start.sregs),
        memory: Memory::new(space, memory, &mut *journal, start),
    };
    let mut at = (code.at(machine.registers.ip, &mut machine.memory)).ok()?;
    if let Some(value) = goal.first() {
        let op = code.ops(at).first()?;
        if op.action != Action::Rdmsr {
            return None;
        }
        machine.registers.rdmsr(value, op.next);
    }
    let (from, mut end, mut executed) = (machine.registers, None, Executed::default());
    // Up to which instruction the bridge goes, at most, and whether it has come nearer to its goal since the last end.
    let most = match start.regs.rflags & IF {
        0 => MOST,
        _ => MOST_INTERRUPTIBLE,
    };
    let (mut bound, mut is_new) = (BETWEEN, false);
    'bridge: while executed.instructions < bound && (is_new || !goal.is_reached()) {
        let ip = machine.registers.ip;
        let Ok(next) = code.next(at, ip, &mut machine.memory) else {
            break;
        };
        at = next;
        let ops = code.ops(at);
        let left = (bound - executed.instructions) as usize;
        let mut ops = &ops[..ops.len().min(left)];
        // Only where all flags are defined, the bridge can end.
        while is_new
            && let [op, rest @ ..] = ops
            && !op.is_last
        {
            ops = rest;
            executed.instructions += 1;
            if machine.execute(op).is_err() {
                break 'bridge;
            }
            if machine.registers.flags.are_defined() {
                is_new = false;
                end = Some(machine.end(executed));
            }
        }
        if !is_new && goal.is_reached() {
            break;
        }
        executed.instructions += ops.len() as u32;
        let (last, straight) = match ops.split_last() {
            Some((last, straight)) if last.is_last => (Some(last), straight),
            _ => (None, ops),
        };
        if machine.compute_all(straight).is_err() {
            break;
        }
        let Some(op) = last else {
            continue;
        };
        let Ok(is_step) = step(&mut machine, op, goal, &mut executed) else {
            break;
        };
        if is_step {
            bound = most.min(executed.instructions + BETWEEN);
            is_new = goal.may_end();
        }
        if is_new && machine.registers.flags.are_defined() {
            is_new = false;
            end = Some(machine.end(executed));
        }
    }
    let (rule, (to, executed, stores)) = (machine.memory.rule, end?);
    journal.cut(stores);
    let rflags = start.regs.rflags & !RF;
    Some(Plan {
        from: from.to_kvm(rflags),
        to: to.to_kvm(rflags),
        executed,
        rule,
    })
}

/// Executes a read or a branch. Returns whether that is a step to the goal.
fn step(
    machine: &mut Machine<'_, '_>,
    op: &Op,
    goal: &mut impl Goal,
    executed: &mut Executed,
) -> Result<bool, Stop> {
    let ip = machine.registers.ip;
    if op.action == Action::Rdmsr {
        let value = goal.read(machine.registers.ecx()).ok_or(Stop)?;
        machine.registers.rdmsr(value, op.next);
        executed.reads += 1;
        return Ok(true);
    }
    machine.execute(op)?;
    executed.branches += 1;
    let is_step = goal.branch(op, ip, machine.registers.ip)?;
    executed.taken += u32::from(is_step);
    Ok(is_step)
}

/// Returns whether the guest is in 64-bit code that is executed as the manual says, one instruction after the other.
fn is_possible(start: &Start<'_>) -> bool {
    const EFER_LMA: u64 = 1 << 10;
    const EFER_NXE: u64 = 1 << 11;
    const EFER_SVME: u64 = 1 << 12;
    const CR4_VMXE: u64 = 1 << 13;
    const CR4_CET: u64 = 1 << 23;
    const CR4_PKS: u64 = 1 << 24;
    let (regs, sregs) = (start.regs, start.sregs);
    sregs.efer & (EFER_LMA | EFER_NXE | EFER_SVME) == EFER_LMA | EFER_NXE
        && sregs.cr4 & (CR4_VMXE | CR4_CET | CR4_PKS) == 0
        && sregs.cs.l != 0
        && matches!(sregs.ss.dpl, 0 | 3)
        && regs.rflags & TF == 0
}
