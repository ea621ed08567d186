//! The rules of most functions in a few bytes, and those that were last used.

use alloc::boxed::Box;
use alloc::vec;

use crate::bytes::Reader;
use crate::{Cut, Registers};

pub(crate) const RBP: usize = 6;
pub(crate) const RSP: usize = 7;
/// The return address.
pub(crate) const RIP: usize = 16;
/// RBX, RBP, R12 to R15: what a function keeps for its caller.
pub(crate) const KEPT: [usize; 6] = [3, RBP, 12, 13, 14, 15];

/// Rules that are kept. A program's samples are of some hundred functions.
const PLACES: usize = 4096;

/// How a function at an instruction finds its caller: the canonical frame address (CFA) is a register and an offset, the return
/// address is below it, and what the function keeps is where it was or at an offset of the CFA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    /// The function's start in its object.
    pub(crate) start: u64,
    /// Number of the CFA's register, and its offset.
    pub(crate) cfa: (u8, i32),
    /// Where [`KEPT`] are; 0: not saved.
    pub(crate) saved: [i32; KEPT.len()],
    /// The function has no caller.
    pub(crate) is_outermost: bool,
}

impl Rule {
    /// Returns the caller's registers; `None`: there is no caller.
    pub(crate) fn apply(
        &self,
        reader: &mut Reader<'_>,
        now: &Registers,
    ) -> Result<Option<Registers>, Cut> {
        if self.is_outermost {
            return Ok(None);
        }
        let (register, offset) = self.cfa;
        let base = now.general.get(usize::from(register)).copied().unwrap_or(0);
        let cfa = base.wrapping_add_signed(offset.into());
        let mut next = *now;
        next.rip = reader.word(cfa.wrapping_sub(8))?;
        next.general[RSP] = cfa;
        for (&register, &offset) in KEPT.iter().zip(&self.saved) {
            if offset != 0 {
                next.general[register] = reader.word(cfa.wrapping_add_signed(offset.into()))?;
            }
        }
        Ok(Some(next))
    }
}

/// The identity of an object, and an address in it.
pub(crate) type Key = (u64, u64);

/// The rules last used, each at the place that its key says.
// Not a hash map: a guest that makes functions without end would make it grow.
pub(crate) struct Rules(Box<[Option<(Key, Rule)>]>);

impl Rules {
    pub(crate) fn new() -> Self {
        Self(vec![None; PLACES].into_boxed_slice())
    }

    pub(crate) fn get(&self, key: Key) -> Option<Rule> {
        self.0[place(key)]
            .filter(|(known, _)| *known == key)
            .map(|(_, rule)| rule)
    }

    pub(crate) fn put(&mut self, key: Key, rule: Rule) -> &Rule {
        &self.0[place(key)].insert((key, rule)).1
    }
}

fn place((identity, offset): Key) -> usize {
    let mixed = (identity ^ offset).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 52) as usize % PLACES
}
