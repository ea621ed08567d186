//! The code that is executed, decoded once as long as its bytes stay.

use iced_x86::{Decoder, DecoderOptions};

use crate::cpu::Stop;
use crate::journal::Journaled;
use crate::memory::Memory;
use crate::op::Op;

/// Runs that are remembered, each at one of `WAYS` places, and the instructions of all of them: several times what Linux
/// executes for a record.
const MOST: usize = 256;
const WAYS: usize = 8;
const MOST_OPS: usize = 2048;
/// Most instructions of a run.
const MOST_IN_RUN: usize = 32;
/// Most bytes of code of all runs.
const MOST_BYTES: usize = 8 * MOST_OPS;

/// Decoded code by its addresses, in runs: what is executed one after the other, up to a branch or a read.
pub struct Code {
    runs: Box<[Run; MOST]>,
    /// The instructions of all runs, and their bytes.
    ops: Vec<Op>,
    bytes: Vec<u8>,
    /// The number of the present replay. Within a replay, bytes that were compared stay as they were.
    replay: u64,
}

#[derive(Clone, Copy)]
struct Run {
    ip: u64,
    /// The address behind it.
    next: u64,
    replay: u64,
    /// Where its instructions begin, and how many there are; the same of its bytes.
    ops: (u32, u32),
    bytes: (u32, u32),
    /// The places of the runs that came next: the one behind it, and another one.
    after: [u16; 2],
}

const NONE: Run = Run {
    ip: 0,
    next: 0,
    replay: 0,
    ops: (0, 0),
    bytes: (0, 0),
    after: [0; 2],
};

fn part<T>(all: &[T], (begin, count): (u32, u32)) -> &[T] {
    all.get(begin as usize..(begin + count) as usize)
        .unwrap_or_default()
}

impl Code {
    /// Makes room.
    #[expect(
        clippy::new_without_default,
        reason = "it takes 200 KB, which nobody makes by the way"
    )]
    pub fn new() -> Self {
        Self {
            runs: Box::new([NONE; MOST]),
            // All that there will be: a vCPU's thread may not be able to ask for memory.
            ops: Vec::with_capacity(MOST_OPS),
            bytes: Vec::with_capacity(MOST_BYTES),
            replay: 0,
        }
    }

    /// Another replay begins: the guest may have changed its code.
    pub(crate) fn begin(&mut self) {
        self.replay += 1;
        // Not in the midst of a replay, where the instructions are in use.
        let is_full = self.ops.len() > MOST_OPS / 2 || self.bytes.len() > MOST_BYTES / 2;
        if is_full {
            *self.runs = [NONE; MOST];
            self.ops.clear();
            self.bytes.clear();
        }
    }

    /// Returns where the run at `ip` is, or where there is room for it: that of the one which was not executed for longest.
    fn place(&self, ip: u64) -> usize {
        let begin = (ip ^ ip >> 9) as usize % MOST;
        let places = || (begin..begin + WAYS).map(|at| at % MOST);
        let found = places().find(|&at| self.runs[at].ip == ip);
        let oldest = || places().min_by_key(|&at| self.runs[at].replay);
        found.or_else(oldest).unwrap_or(begin)
    }

    /// Returns the instructions of the run at a place: one at least.
    #[inline]
    pub(crate) fn ops(&self, place: u16) -> &[Op] {
        part(&self.ops, self.runs[usize::from(place) % MOST].ops)
    }

    /// Returns the place of the run at `ip`, to which the one at `from` leads.
    #[inline]
    pub(crate) fn next<M: Memory + ?Sized>(
        &mut self,
        from: u16,
        ip: u64,
        memory: &mut Journaled<'_, '_, M>,
    ) -> Result<u16, Stop> {
        let known = &self.runs[usize::from(from) % MOST];
        let way = usize::from(known.next != ip);
        let after = known.after[way];
        let next = &self.runs[usize::from(after) % MOST];
        if next.ip == ip && next.replay == self.replay {
            return Ok(after);
        }
        let found = self.at(ip, memory)?;
        self.runs[usize::from(from) % MOST].after[way] = found;
        Ok(found)
    }

    /// Returns the place of the run at `ip`.
    #[inline(never)]
    pub(crate) fn at<M: Memory + ?Sized>(
        &mut self,
        ip: u64,
        memory: &mut Journaled<'_, '_, M>,
    ) -> Result<u16, Stop> {
        let at = self.place(ip);
        let known = self.runs[at];
        if known.ip == ip && known.replay == self.replay {
            return Ok(at as u16);
        }
        let bytes = part(&self.bytes, known.bytes);
        let is_known = known.ip == ip && !bytes.is_empty() && memory.has_code(ip, bytes);
        if !is_known {
            self.runs[at] = self.decoded(ip, memory)?;
        }
        self.runs[at].replay = self.replay;
        Ok(at as u16)
    }

    /// Decodes a run.
    fn decoded<M: Memory + ?Sized>(
        &mut self,
        ip: u64,
        memory: &mut Journaled<'_, '_, M>,
    ) -> Result<Run, Stop> {
        let (ops, bytes) = (self.ops.len(), self.bytes.len());
        let mut next = ip;
        while self.ops.len() < ops + MOST_IN_RUN {
            let Ok((code, length)) = memory.code(next) else {
                break;
            };
            // AMD's way: there a prefix 66 cuts the target of a near branch to 16 bits, which is executed by neither vendor's
            // way. All other instructions that are executed here are the same.
            let mut decoder = Decoder::with_ip(64, &code[..length], next, DecoderOptions::AMD);
            let instruction = decoder.decode();
            let op = Op::of(&instruction);
            let has_room = self.ops.len() < MOST_OPS && self.bytes.len() + code.len() < MOST_BYTES;
            if instruction.is_invalid() || !has_room {
                break;
            }
            self.ops.push(op);
            self.bytes.extend_from_slice(&code[..instruction.len()]);
            next = instruction.next_ip();
            if op.is_last {
                break;
            }
        }
        let count = |all: usize, begin: usize| (begin as u32, (all - begin) as u32);
        let run = Run {
            ip,
            next,
            ops: count(self.ops.len(), ops),
            bytes: count(self.bytes.len(), bytes),
            ..NONE
        };
        if next == ip { Err(Stop) } else { Ok(run) }
    }
}
