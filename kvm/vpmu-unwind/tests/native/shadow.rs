//! The stack of calls that single steps keep.

use std::collections::BTreeSet;
use std::fmt;
use std::process::Command;
use std::time::Duration;

use vpmu_unwind::{Call, Cut, End, MOST_CALLS, Memory, PAGE, Unwinder};

use crate::process::{Process, Step};

/// An open call.
#[derive(Clone, Copy, Debug)]
struct Open {
    from: u64,
    to: u64,
    /// Where the return address is, or RSP at the start of a signal's handler.
    slot: u64,
}

/// The outcome of a program's stacks.
#[derive(Debug, Default)]
pub(crate) struct Table {
    /// Calls before some moment are not known: that of an attachment, or of a change of the stack.
    is_partial: bool,
    pub(crate) stacks: u64,
    /// Calls that were found, and those of them that are compared.
    found: u64,
    pub(crate) calls: u64,
    pub(crate) complete: u64,
    pub(crate) full: u64,
    /// Cut, with each open call all the same: only that the last one is the outermost is not known.
    pub(crate) whole: u64,
    pub(crate) wrong: u64,
    pub(crate) first_wrong: Option<String>,
    /// Indirect calls of what then jumped to the function that runs.
    pub(crate) moved: u64,
    pub(crate) cuts: Vec<(Cut, u64)>,
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} stacks, {} complete, {} full, {} whole, cut {:?}; {} frames of {}, {} wrong, {} by way of a jump",
            self.stacks,
            self.complete,
            self.full,
            self.whole,
            self.cuts,
            self.calls,
            self.found,
            self.wrong,
            self.moved
        )
    }
}

impl Table {
    fn compare(&mut self, rip: u64, found: &[Call], end: End, open: &[Open]) {
        self.found += found.len() as u64;
        let found = match self.is_partial {
            true => &found[..found.len().min(open.len())],
            false => found,
        };
        self.stacks += 1;
        self.calls += found.len() as u64;
        match end {
            End::Complete => self.complete += 1,
            End::Full => self.full += 1,
            End::Cut(_) if open.len() == found.len() && !self.is_partial => self.whole += 1,
            End::Cut(cut) => match self.cuts.iter_mut().find(|(known, _)| *known == cut) {
                Some((_, times)) => *times += 1,
                None => self.cuts.push((cut, 1)),
            },
        }
        let mut wrong = 0;
        for (n, call) in found.iter().enumerate() {
            let Some(expected) = open.len().checked_sub(n + 1).map(|n| open[n]) else {
                wrong += 1;
                continue;
            };
            let is_target = call.to == expected.to;
            self.moved += u64::from(!is_target && !call.is_direct);
            // The call may begin with a prefix, or what seems to be one may be of the instruction before.
            let is_near = call.from.abs_diff(expected.from) <= 1;
            let is_call = is_near && (is_target || !call.is_direct);
            wrong += u64::from(!is_call);
        }
        if end == End::Complete && !self.is_partial {
            wrong += open.len().abs_diff(found.len()) as u64;
        }
        if wrong != 0 && self.first_wrong.is_none() {
            let open: Vec<_> = open.iter().rev().collect();
            self.first_wrong = Some(format!("{rip:#x} {end:x?}: {found:x?} for {open:x?}"));
        }
        self.wrong += wrong;
    }
}

/// Executes a program for so many instructions, and unwinds it whenever `every` more were executed.
pub(crate) fn compare(arguments: &[&str], steps: u64, every: u64) -> Table {
    let process = Process::start(arguments).expect("started");
    follow(process, Table::default(), steps, every)
}

/// Executes so many instructions of a program that runs for a while, and whose calls until then are not known.
pub(crate) fn compare_running(command: &mut Command, steps: u64, every: u64) -> Table {
    let process = Process::attach(command, Duration::from_secs(4)).expect("attached");
    let table = Table {
        is_partial: true,
        ..Table::default()
    };
    follow(process, table, steps, every)
}

fn follow(mut process: Process, mut table: Table, steps: u64, every: u64) -> Table {
    /// A stack's distance from another one.
    const FAR: u64 = 1 << 16;
    let mut unwinder = Unwinder::new();
    let mut open: Vec<Open> = Vec::new();
    let mut before = process.registers();
    let mut signal = 0;
    for n in 1..=steps {
        let delivered = std::mem::take(&mut signal);
        match process.step(delivered) {
            Step::Done => {}
            Step::Signal(number) => {
                signal = number;
                continue;
            }
            Step::Exited => break,
        }
        let now = process.registers();
        let rsp = now.general[7];
        while open.last().is_some_and(|call| call.slot < rsp) {
            open.pop();
        }
        if rsp.abs_diff(before.general[7]) > FAR {
            open.clear();
            table.is_partial = true;
        } else if delivered != 0 {
            // The step has entered the handler, and executed nothing of it.
            open.push(Open {
                from: before.rip,
                to: now.rip,
                slot: rsp,
            });
        } else if rsp == before.general[7].wrapping_sub(8) {
            let mut word = [0; 8];
            let _ = process.read(rsp, &mut word);
            let back = u64::from_le_bytes(word);
            let length = back.wrapping_sub(before.rip);
            // A call of the next instruction reads RIP.
            if (2..=8).contains(&length) && now.rip != back {
                open.push(Open {
                    from: before.rip,
                    to: now.rip,
                    slot: rsp,
                });
            }
        }
        before = now;
        if n % every == 0 {
            process.read_maps();
            let mut calls = [Call::default(); MOST_CALLS];
            let outcome = unwinder.unwind(&mut process, 1, &now, &mut calls);
            let found = &calls[..outcome.calls];
            table.compare(now.rip, found, outcome.end, &open);
        }
    }
    table
}

/// A process, and the pages that were read.
struct Traced(Process, BTreeSet<u64>);

impl Memory for Traced {
    fn read(&mut self, address: u64, bytes: &mut [u8]) -> bool {
        self.1.insert(address / PAGE);
        self.0.read(address, bytes)
    }

    fn page(&mut self, address: u64) -> Option<u64> {
        self.0.page(address)
    }

    fn present_below(&mut self, address: u64, lowest: u64) -> Option<u64> {
        self.0.present_below(address, lowest)
    }
}

/// Returns a program's registers after so many instructions, and the pages that its calls are found by, as the test `hostile` reads
/// them.
pub(crate) fn space(arguments: &[&str], steps: u64) -> Vec<u8> {
    let mut process = Process::start(arguments).expect("started");
    for _ in 0..steps {
        process.step(0);
    }
    process.read_maps();
    let registers = process.registers();
    let mut traced = Traced(process, BTreeSet::new());
    let mut calls = [Call::default(); MOST_CALLS];
    let outcome = Unwinder::new().unwind(&mut traced, 1, &registers, &mut calls);
    println!("{outcome:?}, {} pages", traced.1.len());
    let words = registers.general.iter().chain([&registers.rip]);
    let mut bytes: Vec<u8> = words.flat_map(|word| word.to_le_bytes()).collect();
    for page in traced.1 {
        let mut content = [0; PAGE as usize];
        if traced.0.read(page * PAGE, &mut content) {
            let length = content
                .iter()
                .rposition(|&byte| byte != 0)
                .map_or(0, |n| n + 1);
            bytes.extend((page * PAGE).to_le_bytes());
            bytes.extend((length as u64).to_le_bytes());
            bytes.extend(&content[..length]);
        }
    }
    bytes
}
