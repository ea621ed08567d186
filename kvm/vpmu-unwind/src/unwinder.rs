//! From frame to frame: each function's caller by its CFI, or by its code where it has none.

use crate::bytes::{Memory, Reader};
use crate::cfi::{self, Entries};
use crate::object::Objects;
use crate::rules::{RBP, RSP, Rules};
use crate::way::{self, Ways};
use crate::{Call, Cut, End, Frame, MOST_CALLS, Outcome, Registers, call, table};

/// Finds the open calls of programs. One serves any number of address spaces.
pub struct Unwinder {
    objects: Objects,
    rules: Rules,
    entries: Entries,
    ways: Ways,
}

impl core::fmt::Debug for Unwinder {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Unwinder").finish_non_exhaustive()
    }
}

impl Default for Unwinder {
    fn default() -> Self {
        Self::new()
    }
}

impl Unwinder {
    /// Returns one whose caches are empty. It takes half a megabyte, and no more later.
    pub fn new() -> Self {
        Self {
            objects: Objects::new(),
            rules: Rules::new(),
            entries: Entries::new(),
            ways: Ways::new(),
        }
    }

    /// Finds the open calls of the program in `space`, a number of the caller's for an address space, as the root of its page
    /// tables is. `calls` gets them, the innermost first, at most [`MOST_CALLS`].
    ///
    /// The program must not run meanwhile.
    pub fn unwind(
        &mut self,
        memory: &mut dyn Memory,
        space: u64,
        registers: &Registers,
        calls: &mut [Call],
    ) -> Outcome {
        self.objects.begin(space);
        let mut reader = Reader::new(memory);
        let most = calls.len().min(MOST_CALLS);
        let calls = &mut calls[..most];
        let mut found = 0;
        let end = self.walk(&mut reader, registers, calls, &mut found);
        let end = end.unwrap_or_else(End::Cut);
        Outcome { calls: found, end }
    }

    fn walk(
        &mut self,
        reader: &mut Reader<'_>,
        registers: &Registers,
        calls: &mut [Call],
        found: &mut usize,
    ) -> Result<End, Cut> {
        let mut now = *registers;
        let mut is_exact = true;
        // Code without CFI says nothing of what it has kept for its caller.
        let mut is_partial = false;
        loop {
            let Some(place) = calls.get_mut(*found) else {
                return Ok(End::Full);
            };
            // Each frame costs something, so that a stack that leads to itself ends.
            reader.spend(1)?;
            let Some((frame, next)) = self.step(reader, &now, is_exact, &mut is_partial)? else {
                return Ok(End::Complete);
            };
            // A signal handler's return is no function: the handler was not called from it.
            if !frame.is_signal {
                *place = match self.signal(reader, &next, &mut is_partial)? {
                    Some(interrupted) => Call {
                        from: interrupted,
                        to: frame.start,
                        is_direct: false,
                    },
                    None => call::before(reader, next.rip, &frame),
                };
                *found += 1;
            }
            is_exact = frame.is_signal;
            now = next;
        }
    }

    /// Returns the function and its caller's registers; `None`: it has no caller.
    fn step(
        &mut self,
        reader: &mut Reader<'_>,
        now: &Registers,
        is_exact: bool,
        is_partial: &mut bool,
    ) -> Result<Option<(Frame, Registers)>, Cut> {
        let pc = now.rip;
        // A call may be the last instruction of its function: what it returns to is then another one.
        let at = match is_exact {
            true => pc,
            false => pc.wrapping_sub(1),
        };
        let Some(object) = self.objects.find(reader, at)? else {
            return self.by_way(reader, now, is_exact, is_partial);
        };
        let key = (object.identity, at.wrapping_sub(object.base));
        let rule = match self.rules.get(key) {
            Some(rule) => rule,
            None => {
                let found = match table::search(reader, &object, at)? {
                    Some(fde) => (self.entries).rule(reader, &object, fde, at, now, *is_partial)?,
                    None => cfi::Found::Nothing,
                };
                match found {
                    // Assembly, among functions that have CFI.
                    cfi::Found::Nothing => return self.by_way(reader, now, is_exact, is_partial),
                    cfi::Found::Rule(rule) => *self.rules.put(key, rule),
                    cfi::Found::Caller(start, is_signal, next) => {
                        // What was interrupted has all of its registers.
                        *is_partial &= !is_signal;
                        let frame = Frame { start, is_signal };
                        return ascend(now, frame, next);
                    }
                }
            }
        };
        if *is_partial && !matches!(usize::from(rule.cfa.0), RBP | RSP) {
            return Err(Cut::NoCfi);
        }
        let frame = Frame {
            start: object.base.wrapping_add(rule.start),
            is_signal: false,
        };
        ascend(now, frame, rule.apply(reader, now)?)
    }

    /// Returns the caller of a function that no CFI covers.
    fn by_way(
        &mut self,
        reader: &mut Reader<'_>,
        now: &Registers,
        is_exact: bool,
        is_partial: &mut bool,
    ) -> Result<Option<(Frame, Registers)>, Cut> {
        if !is_exact && way::is_outermost(reader, now)? {
            return Ok(None);
        }
        *is_partial = true;
        let next = self.ways.caller(reader, now, is_exact)?;
        let frame = Frame {
            start: now.rip,
            is_signal: false,
        };
        ascend(now, frame, Some(next))
    }

    /// Returns what a signal interrupted, if `frame` is where its handler returns to.
    fn signal(
        &mut self,
        reader: &mut Reader<'_>,
        frame: &Registers,
        is_partial: &mut bool,
    ) -> Result<Option<u64>, Cut> {
        // MOV RAX, 15; SYSCALL: what each C library returns from a handler by, and what debuggers know it by.
        const RETURN: [u8; 9] = [0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05];
        let mut code = [0; RETURN.len()];
        if reader.read(frame.rip, &mut code).is_err() || code != RETURN {
            return Ok(None);
        }
        let next = self.step(reader, frame, true, is_partial)?;
        Ok(next.map(|(_, interrupted)| interrupted.rip))
    }
}

/// Returns the function with `next` where that is a caller's; `None`: there is none.
fn ascend(
    now: &Registers,
    frame: Frame,
    next: Option<Registers>,
) -> Result<Option<(Frame, Registers)>, Cut> {
    match next {
        None => Ok(None),
        Some(next) if next.rip == 0 => Ok(None),
        // The stack of a signal's handler may be anywhere. A caller's frame is above.
        Some(next) if frame.is_signal || next.general[RSP] > now.general[RSP] => {
            Ok(Some((frame, next)))
        }
        Some(_) => Err(Cut::BadCfi),
    }
}
