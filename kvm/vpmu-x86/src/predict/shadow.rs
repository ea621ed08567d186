//! The guest's memory as it will be: what is there now, under what was stored since.

use crate::cpu::Stop;
use crate::flags::mask;
use crate::machine::Bus;
use crate::memory::Memory;
use crate::paging::{Access, Mode};
use crate::space::Space;
use crate::word::{Masked, Word};

/// Places for words that were stored, and how many of them are searched for one.
const PLACES: usize = 4096;
const PROBES: usize = 8;

/// Returns the mode of an instruction of user space, or of the kernel.
pub(super) const fn mode(is_user: bool) -> Mode {
    match is_user {
        true => Mode::User,
        // A kernel sets AC before it reaches pages of user space. What would fault without is a fault of the kernel's.
        false => Mode::Supervisor { ac: true },
    }
}

/// A word that this vCPU stores before others can see it.
#[derive(Clone, Copy)]
struct Word64 {
    at: u64,
    /// The prediction that has stored it.
    prediction: u64,
    /// The bits that were stored.
    stored: u64,
    value: Masked,
}

const NONE: Word64 = Word64 {
    at: 0,
    prediction: 0,
    stored: 0,
    value: Masked::new(0, 0, true),
};

/// The words that were stored, by their addresses. A guest that stores long is stopped where a word finds no place.
pub(super) struct Written {
    words: Box<[Word64]>,
    prediction: u64,
    is_exhausted: bool,
}

impl Written {
    pub(super) fn new() -> Self {
        Self {
            words: vec![NONE; PLACES].into(),
            prediction: 1,
            is_exhausted: false,
        }
    }

    pub(super) const fn is_exhausted(&self) -> bool {
        self.is_exhausted
    }

    /// Another prediction begins.
    pub(super) fn clear(&mut self) {
        self.is_exhausted = false;
        self.prediction += 1;
    }

    /// Returns the places where the word at `at` may be. Neighbours are neighbours, so that a line is one of the host's.
    fn places(at: u64) -> impl Iterator<Item = usize> {
        let begin = ((at / 8) ^ (at >> 20)) as usize;
        (0..PROBES).map(move |n| (begin + n) % PLACES)
    }

    fn find(&self, at: u64) -> Option<&Word64> {
        Self::places(at)
            .map(|place| &self.words[place])
            // A place that this prediction has not used ends the search: `store` would have taken it.
            .take_while(|word| word.prediction == self.prediction)
            .find(|word| word.at == at)
    }

    /// Notes a store to bits of the aligned word at `at`.
    fn store(&mut self, at: u64, stored: u64, value: Masked) -> Result<(), Stop> {
        let prediction = self.prediction;
        let words = &mut self.words;
        let place = Self::places(at)
            .find(|&place| words[place].prediction != prediction || words[place].at == at);
        let Some(place) = place else {
            self.is_exhausted = true;
            return Err(Stop);
        };
        let word = &mut words[place];
        if word.prediction != prediction {
            *word = Word64 {
                at,
                prediction,
                ..NONE
            };
        }
        // The word is one place whatever the sizes of its stores: vectors are eight of them.
        word.stored |= stored;
        // Firm as a whole or not: a firm byte beside one that is not is rarely asked for.
        word.value = word.value.merge(value, stored);
        Ok(())
    }
}

/// Memory by linear address, which is stored to for nobody to see.
pub(super) struct Shadow<'a, M: ?Sized> {
    pub(super) space: Space<'a, M>,
    pub(super) written: &'a mut Written,
}

impl<M: Memory + ?Sized> Shadow<'_, M> {
    /// Notes a store of bytes that are not known.
    pub(super) fn forget(&mut self, address: u64, size: usize) -> Result<(), Stop> {
        self.space.check(address, size, Access::Store)?;
        let (mut at, mut left) = (address, size as u64);
        while left > 0 {
            let count = left.min(8 - at % 8);
            let bits = mask(count as u8) << (8 * (at % 8));
            self.written.store(at & !7, bits, Masked::UNKNOWN)?;
            (at, left) = (at.wrapping_add(count), left - count);
        }
        Ok(())
    }
}

/// Returns the parts of an access in aligned words: the word, the access's first bit there, and that in the value; and how many
/// bits of the value are in the first word.
fn parts(address: u64, size: u8) -> [Option<(u64, u32, u32)>; 2] {
    let (offset, size) = ((address % 8) as u32, u32::from(size));
    let first = (address & !7, 8 * offset, 0);
    let second = ((address & !7).wrapping_add(8), 0, 8 * (8 - offset));
    [Some(first), (offset + size > 8).then_some(second)]
}

impl<M: Memory + ?Sized> Bus<Masked> for Shadow<'_, M> {
    fn load(&mut self, address: Masked, size: u8) -> Result<Masked, Stop> {
        let address = address.bits().ok_or(Stop)?;
        self.space.check(address, size.into(), Access::Load)?;
        let mut bytes = [0; 8];
        if !self.space.read(address, &mut bytes[..usize::from(size)]) {
            // A device answers, and nobody may ask it twice.
            return Ok(Masked::UNKNOWN.cut(mask(size)));
        }
        let (mut value, mut seen) = (Masked::of(u64::from_le_bytes(bytes)), 0);
        for (at, low, from) in parts(address, size).into_iter().flatten() {
            let Some(word) = self.written.find(at) else {
                continue;
            };
            let place = |word: u64| word >> low << from & mask(size);
            let stored = place(word.stored);
            // What was not stored is what memory has now.
            value = value.merge(word.value.bitwise(place), stored);
            seen |= stored;
        }
        // What others can write is not firm.
        Ok(match seen == mask(size) {
            true => value,
            false => value.not_firm(),
        })
    }

    fn store(&mut self, address: Masked, size: u8, value: Masked) -> Result<(), Stop> {
        let address = address.bits().ok_or(Stop)?;
        // Both halves are checked before either is noted: a store that faults stores nothing.
        self.space.check(address, size.into(), Access::Store)?;
        for (at, low, from) in parts(address, size).into_iter().flatten() {
            let stored = mask(size) >> from << low;
            let value = value.bitwise(|bits| bits >> from << low);
            self.written.store(at, stored, value)?;
        }
        Ok(())
    }

    fn is_canonical(&self, address: u64) -> bool {
        self.space.is_canonical(address)
    }
}
