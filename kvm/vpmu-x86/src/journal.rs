//! The guest's memory while a replay is planned: what it loads is remembered to be compared, what it stores waits.
//!
//! The stores become visible to other vCPUs at once and in their order, and only if all that was loaded is still the same.
//! So the replay is one moment for all others: that of the commitment.

use crate::cpu::{Registers, Stop, System};
use crate::flags::mask;
use crate::machine::Bus;
use crate::memory::{Memory, Store};
use crate::paging::{Access, Mode, PAGE, Page, Paging};
use crate::space::{LONGEST, Space};

/// What was executed does not count: memory has changed meanwhile, or the guest is elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dropped;

/// Bytes, and words, of a line.
const LINE: u64 = 64;
const WORDS: usize = 8;
/// Most lines and most stores of a replay. There is room for them from the beginning: a vCPU's thread may not be able to
/// ask for memory.
const MOST_LINES: usize = 128;
const MOST_STORES: usize = 4096;
/// Most pages of code.
const MOST_PAGES: usize = 16;
/// Places for lines that were found by their linear addresses.
const PLACES: usize = 64;

/// A line of memory by its physical address.
#[derive(Clone, Copy)]
struct Line {
    at: u64,
    /// The words that were there, and those that are there for this vCPU.
    seen: [u64; WORDS],
    now: [u64; WORDS],
    /// Bits for words: loaded.
    loaded: u8,
}

/// What a replay has loaded and stored.
pub(crate) struct Journal {
    lines: Vec<Line>,
    stores: Vec<Store>,
    /// Stores of which none may be joined with a later one.
    closed: usize,
    /// Pages of code, by physical address.
    code: Vec<u64>,
    /// Pages that were stored to, by linear and by physical address.
    stored: Vec<(u64, u64)>,
}

impl Journal {
    pub(crate) fn new() -> Self {
        Self {
            lines: Vec::with_capacity(MOST_LINES),
            stores: Vec::with_capacity(MOST_STORES),
            closed: 0,
            code: Vec::with_capacity(MOST_PAGES),
            stored: Vec::with_capacity(MOST_PAGES),
        }
    }

    pub(crate) fn clear(&mut self) {
        self.lines.clear();
        self.stores.clear();
        self.closed = 0;
        self.code.clear();
        self.stored.clear();
    }

    /// Returns how many stores there are, to which [`cut`](Self::cut) can go back.
    #[inline]
    pub(crate) fn close(&mut self) -> usize {
        self.closed = self.stores.len();
        self.closed
    }

    /// Forgets the stores behind the first `count`.
    pub(crate) fn cut(&mut self, count: usize) {
        self.stores.truncate(count);
    }

    /// Makes the stores, in their order, if all that was loaded is still there, and if they still lead where they did.
    pub(crate) fn commit<M: Memory + ?Sized>(
        &self,
        rule: &Rule,
        memory: &M,
    ) -> Result<(), Dropped> {
        // A guest may have vCPUs forget a page without waiting for one that is out of KVM_RUN (PV_TLB_FLUSH, Hyper-V's calls): the
        // page may be another's by now. What was loaded through the old tables is the same as if the processor had loaded it when
        // it was read here, which x86's order lets come before older stores of the same vCPU. A store would come after the flush,
        // which no processor does: so each is translated again. A page could still change hands between that and the store, so
        // guests that are replayed are not offered PV_TLB_FLUSH (`vpmu-kvm`, `promises.rs`).
        let leads = |&(linear, physical): &(u64, u64)| {
            let page = rule.paging.translate(memory, linear);
            page.and_then(|page| rule.reached(linear, &page, Access::Store, || rule.pkru))
                == Some(physical)
        };
        if !self.stored.iter().all(leads) {
            return Err(Dropped);
        }
        for line in self.lines.iter().filter(|line| line.loaded != 0) {
            let now = read_line(memory, line.at).ok_or(Dropped)?;
            let is_same = |n: usize| line.loaded >> n & 1 == 0 || now[n] == line.seen[n];
            if !(0..WORDS).all(is_same) {
                return Err(Dropped);
            }
        }
        let is_near = |a: &Store, b: &Store| a.at / PAGE == b.at / PAGE;
        // The embedder finds a page's memory once for all stores that follow each other there.
        for stores in self.stores.chunk_by(is_near) {
            memory.store(stores);
        }
        Ok(())
    }
}

/// The rule by which a replay reaches memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rule {
    pub(crate) paging: Paging,
    pub(crate) mode: Mode,
    /// PKRU, once it was asked for.
    pkru: Option<u32>,
}

impl Rule {
    pub(crate) const fn of(registers: &Registers, system: &System) -> Self {
        Self {
            paging: Paging::of(system),
            mode: Mode::of(system, registers.rflags),
            pkru: None,
        }
    }

    /// Returns the physical address behind a linear one on `page`, if that is reached without a fault, and without that the
    /// processor changes a table for it.
    fn reached(
        &self,
        address: u64,
        page: &Page,
        access: Access,
        // No guest is executed for whose kernel's pages have keys.
        pkru: impl FnOnce() -> Option<u32>,
    ) -> Option<u64> {
        let is_marked = page.accessed && (page.dirty || access != Access::Store);
        let is_reached = is_marked && (self.paging).permits(address, page, access, self.mode, pkru);
        is_reached.then_some(page.physical + address % PAGE)
    }
}

fn read_line<M: Memory + ?Sized>(memory: &M, at: u64) -> Option<[u64; WORDS]> {
    let mut bytes = [0; LINE as usize];
    memory.read(at, &mut bytes).then(|| {
        let (words, _) = bytes.as_chunks();
        std::array::from_fn(|n| u64::from_le_bytes(words[n]))
    })
}

/// A line that was found at a linear address.
#[derive(Clone, Copy)]
struct Found {
    linear: u64,
    line: u8,
    may_store: bool,
}

/// Memory by linear address, as an instruction at this privilege reaches it.
pub(crate) struct Journaled<'a, 'm, M: ?Sized> {
    space: Space<'m, M>,
    pub(crate) journal: &'a mut Journal,
    pub(crate) rule: Rule,
    ask_pkru: &'a dyn Fn() -> Option<u32>,
    found: [Found; PLACES],
    /// The page whose code was noted last.
    noted: u64,
}

impl<'a, 'm, M: Memory + ?Sized> Journaled<'a, 'm, M> {
    pub(crate) fn new(
        space: Space<'m, M>,
        journal: &'a mut Journal,
        rule: Rule,
        ask_pkru: &'a dyn Fn() -> Option<u32>,
    ) -> Self {
        const NONE: Found = Found {
            // No line's address.
            linear: 1,
            line: 0,
            may_store: false,
        };
        Self {
            space,
            journal,
            rule,
            ask_pkru,
            found: [NONE; PLACES],
            noted: NONE.linear,
        }
    }

    /// Returns the physical address behind a linear one that is reached without a fault, and without that the processor
    /// changes a table for it.
    fn physical(&mut self, address: u64, access: Access) -> Result<u64, Stop> {
        let page = self.space.page(address).ok_or(Stop)?;
        let rule = self.rule;
        let reached = rule.reached(address, &page, access, || {
            self.rule.pkru = self.rule.pkru.or_else(self.ask_pkru);
            self.rule.pkru
        });
        reached.ok_or(Stop)
    }

    /// Returns the line at a linear address.
    #[inline]
    fn line(&mut self, address: u64, access: Access) -> Result<&mut Line, Stop> {
        let linear = address & !(LINE - 1);
        let place = (address / LINE) as usize % PLACES;
        let found = self.found[place];
        let line = match found.linear == linear && (found.may_store || access == Access::Load) {
            true => found.line,
            false => self.find(linear, access)?,
        };
        self.journal.lines.get_mut(usize::from(line)).ok_or(Stop)
    }

    #[inline(never)]
    fn find(&mut self, linear: u64, access: Access) -> Result<u8, Stop> {
        let is_store = access == Access::Store;
        let at = self.physical(linear, access)?;
        if is_store {
            self.may_store(linear & !(PAGE - 1), at & !(PAGE - 1))?;
        }
        let journal = &mut *self.journal;
        let line = match journal.lines.iter().position(|line| line.at == at) {
            Some(line) => line,
            None if journal.lines.len() < MOST_LINES => {
                let seen = read_line(self.space.memory(), at).ok_or(Stop)?;
                journal.lines.push(Line {
                    at,
                    seen,
                    now: seen,
                    loaded: 0,
                });
                journal.lines.len() - 1
            }
            None => return Err(Stop),
        };
        self.found[(linear / LINE) as usize % PLACES] = Found {
            linear,
            line: line as u8,
            may_store: is_store,
        };
        Ok(line as u8)
    }

    /// Checks that a page has no code that is executed here, and can be written.
    fn may_store(&mut self, linear: u64, page: u64) -> Result<(), Stop> {
        if self.journal.stored.contains(&(linear, page)) {
            return Ok(());
        }
        let is_full = self.journal.stored.len() == MOST_PAGES;
        let is_code = self.journal.code.contains(&page);
        if is_full || is_code || !self.space.memory().is_writable(page) {
            return Err(Stop);
        }
        self.journal.stored.push((linear, page));
        Ok(())
    }

    /// Returns the bytes that are executed at `address`, as many as there are up to those of the longest instruction.
    pub(crate) fn code(&mut self, address: u64) -> Result<([u8; LONGEST], usize), Stop> {
        let (bytes, length) = self.space.code(address);
        self.note_code(address, length)?;
        Ok((bytes, length))
    }

    /// Returns whether these bytes are executed at `address`.
    pub(crate) fn has_code(&mut self, address: u64, bytes: &[u8]) -> bool {
        self.space.has_code(address, bytes) && self.note_code(address, bytes.len()).is_ok()
    }

    /// Notes that `length` bytes at `address`, on two pages at most, are executed.
    fn note_code(&mut self, address: u64, length: usize) -> Result<(), Stop> {
        let last = address.wrapping_add(length.saturating_sub(1) as u64);
        for at in [address, last].map(|at| at & !(PAGE - 1)) {
            if at == self.noted {
                continue;
            }
            let page = self.physical(at, Access::Fetch)?;
            if !self.journal.code.contains(&page) {
                let is_full = self.journal.code.len() == MOST_PAGES;
                let mut stored = self.journal.stored.iter();
                if is_full || stored.any(|&(_, stored)| stored == page) {
                    return Err(Stop);
                }
                self.journal.code.push(page);
            }
            self.noted = at;
        }
        Ok(())
    }
}

impl<M: Memory + ?Sized> Bus<u64> for Journaled<'_, '_, M> {
    /// Loads. An address that is not a multiple of the size stops: such an access may be two.
    #[inline]
    fn load(&mut self, address: u64, size: u8) -> Result<u64, Stop> {
        if address & (u64::from(size) - 1) != 0 {
            return Err(Stop);
        }
        let line = self.line(address, Access::Load)?;
        let word = (address % LINE / 8) as usize;
        line.loaded |= 1 << word;
        Ok(line.now[word] >> (8 * (address % 8)) & mask(size))
    }

    /// Stores. Either all is noted, or nothing.
    #[inline]
    fn store(&mut self, address: u64, size: u8, value: u64) -> Result<(), Stop> {
        if address & (u64::from(size) - 1) != 0 || self.journal.stores.len() == MOST_STORES {
            return Err(Stop);
        }
        let (word, by) = ((address % LINE / 8) as usize, 8 * (address % 8));
        let (mask, value) = (mask(size) << by, (value & mask(size)) << by);
        let line = self.line(address, Access::Store)?;
        line.now[word] = line.now[word] & !mask | value;
        let (at, journal) = (line.at + 8 * word as u64, &mut *self.journal);
        match journal.stores[journal.closed..].last_mut() {
            // Nobody can tell two stores to one word, one after the other, from one.
            Some(last) if last.at == at => {
                last.value = last.value & !mask | value;
                last.mask |= mask;
            }
            _ => journal.stores.push(Store { at, mask, value }),
        }
        Ok(())
    }

    #[inline]
    fn is_canonical(&self, address: u64) -> bool {
        self.space.is_canonical(address)
    }
}
