//! The guest's linear memory, as a vCPU reaches it.

use crate::cpu::Stop;
use crate::memory::Memory;
use crate::paging::{Access, Mode, PAGE, Page, Paging, each_page};

/// The longest instruction (SDM vol. 2A, 2.3.11).
pub(crate) const LONGEST: usize = 15;

/// Most bytes of an access: those of a vector register.
const MOST_BYTES: usize = 64;
/// Bytes of code that are read at once: those of a small loop.
const WINDOW: usize = 128;
/// Most pages that are remembered.
const MOST: usize = 64;

/// The pages that a vCPU has been seen to reach. They stay where they were found until the vCPU executes what
/// only a processor can: it takes no interrupt meanwhile, so that nobody may rely on a change of its tables yet.
#[derive(Debug)]
pub(crate) struct Pages {
    root: u64,
    found: Vec<(u64, Page)>,
}

impl Pages {
    pub(crate) fn new() -> Self {
        Self {
            root: 0,
            found: Vec::with_capacity(MOST),
        }
    }

    /// The vCPU may have changed its tables.
    pub(crate) fn forget(&mut self) {
        self.found.clear();
    }
}

/// Linear memory under the tables that the vCPU has now.
pub(crate) struct Space<'a, M: ?Sized> {
    paging: Paging,
    pub(crate) mode: Mode,
    memory: &'a M,
    pages: &'a mut Pages,
    /// Code that was last executed: its physical address, and as many bytes as count.
    window: (u64, usize),
    code: [u8; WINDOW],
}

impl<'a, M: Memory + ?Sized> Space<'a, M> {
    pub(crate) fn new(paging: Paging, mode: Mode, memory: &'a M, pages: &'a mut Pages) -> Self {
        // Another address space: its pages lie elsewhere.
        if pages.root != paging.root() {
            pages.root = paging.root();
            pages.forget();
        }
        Self {
            paging,
            mode,
            memory,
            pages,
            window: (0, 0),
            code: [0; WINDOW],
        }
    }

    pub(crate) fn page(&mut self, address: u64) -> Option<Page> {
        let linear = address & !(PAGE - 1);
        // A list: what is executed touches a handful of pages.
        let found = &mut self.pages.found;
        if let Some((_, page)) = found.iter().find(|(at, _)| *at == linear) {
            return Some(*page);
        }
        // A page that is missing may be there the next time, without a word to anybody.
        let page = self.paging.translate(self.memory, linear)?;
        if found.len() >= MOST {
            found.clear();
        }
        found.push((linear, page));
        Some(page)
    }

    pub(crate) const fn memory(&self) -> &'a M {
        self.memory
    }

    /// Checks that an access, which lies on two pages at most, is made without a fault.
    pub(crate) fn check(&mut self, address: u64, size: usize, access: Access) -> Result<(), Stop> {
        let last = address.checked_add(size.saturating_sub(1) as u64);
        let is_reached = [address, last.ok_or(Stop)?].into_iter().all(|at| {
            // A page whose key forbids the access ends in a fault, which is noticed by CR2.
            (self.page(at))
                .is_some_and(|page| (self.paging).permits(at, &page, access, self.mode, || Some(0)))
        });
        match is_reached && size <= MOST_BYTES {
            true => Ok(()),
            false => Err(Stop),
        }
    }

    /// Fills `bytes`; `false`: not all of that is RAM.
    pub(crate) fn read(&mut self, address: u64, bytes: &mut [u8]) -> bool {
        each_page(address, bytes.len(), |at, part| {
            self.page(at).is_some_and(|page| {
                let physical = page.physical + at % PAGE;
                self.memory.read(physical, &mut bytes[part])
            })
        })
    }

    pub(crate) fn is_canonical(&self, address: u64) -> bool {
        self.paging.is_canonical(address)
    }

    /// Returns the word at `address`, which the processor reads for itself.
    pub(crate) fn word(&mut self, address: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)
            .then(|| u64::from_le_bytes(bytes))
    }

    /// Returns the bytes that are executed at `address`, as many as there are up to those of the longest instruction.
    pub(crate) fn code(&mut self, address: u64) -> ([u8; LONGEST], usize) {
        let (mut bytes, mut done) = ([0; LONGEST], 0);
        while done < LONGEST {
            let at = address.wrapping_add(done as u64);
            let Some(code) = self.executed(at) else {
                break;
            };
            let end = LONGEST.min(done + code.len());
            bytes[done..end].copy_from_slice(&code[..end - done]);
            done = end;
        }
        (bytes, done)
    }

    /// Returns whether these bytes are executed at `address`.
    pub(crate) fn has_code(&mut self, address: u64, bytes: &[u8]) -> bool {
        let mut done = 0;
        while done < bytes.len() {
            let at = address.wrapping_add(done as u64);
            let Some(code) = self.executed(at) else {
                return false;
            };
            let count = code.len().min(bytes.len() - done);
            if code[..count] != bytes[done..done + count] {
                return false;
            }
            done += count;
        }
        true
    }

    /// Returns the code at `address`, as much as there is in the window: at least a byte.
    fn executed(&mut self, address: u64) -> Option<&[u8]> {
        let page = self.page(address)?;
        let permits = (self.paging).permits(address, &page, Access::Fetch, self.mode, || None);
        if !permits {
            return None;
        }
        const ALIGNED: u64 = WINDOW as u64 / 2;
        let physical = page.physical + address % PAGE;
        // By the physical address: two linear ones may lead to one page.
        let is_inside = |(at, length)| physical >= at && physical - at < length as u64;
        if !is_inside(self.window) {
            let at = physical & !(ALIGNED - 1);
            let length = WINDOW.min((page.physical + PAGE - at) as usize);
            self.window = (at, 0);
            if !self.memory.read(at, &mut self.code[..length]) {
                return None;
            }
            self.window = (at, length);
        }
        let (at, length) = self.window;
        Some(&self.code[(physical - at) as usize..length])
    }
}
