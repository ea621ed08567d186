//! The guest's linear memory, as the vCPU that is followed would reach it.

use vpmu::x86::Ring;

use crate::guest::paging::{PAGE, Page, Paging};
use crate::memory::GuestMemory;

/// The longest instruction (SDM vol. 2A, 2.3.11).
const LONGEST: usize = 15;

/// Linear memory under the tables that the vCPU has now. A page stays where it was found: the tables are those of a vCPU
/// that takes no interrupt meanwhile, so that nobody may rely on a change of them yet.
pub(super) struct Space<'a> {
    paging: Paging,
    memory: &'a dyn GuestMemory,
    /// CR4.SMEP.
    smep: bool,
    pages: Vec<(u64, Option<Page>)>,
    /// The bytes of the page that was last executed.
    code: Option<(u64, Box<[u8; PAGE as usize]>)>,
}

impl<'a> Space<'a> {
    pub(super) fn new(paging: Paging, smep: bool, memory: &'a dyn GuestMemory) -> Self {
        Self {
            // A kernel sets AC before it reaches pages of user space. What would fault without is a fault of the kernel's.
            paging: paging.of_user(),
            memory,
            smep,
            pages: Vec::new(),
            code: None,
        }
    }

    fn page(&mut self, address: u64) -> Option<Page> {
        let linear = address & !(PAGE - 1);
        // A list: a way touches a handful of pages.
        if let Some((_, page)) = self.pages.iter().find(|(at, _)| *at == linear) {
            return *page;
        }
        let page = self.paging.translate(self.memory, linear);
        self.pages.push((linear, page));
        page
    }

    /// Returns whether all of the range can be reached without a fault.
    pub(super) fn is_reached(
        &mut self,
        address: u64,
        length: u64,
        write: bool,
        ring: Ring,
    ) -> bool {
        let Some(last) = address.checked_add(length.saturating_sub(1)) else {
            return false;
        };
        [address, last].into_iter().all(|at| {
            self.page(at).is_some_and(|page| {
                (page.writable || !write) && (page.user || ring == Ring::Kernel)
            })
        })
    }

    /// Fills `bytes`; `false`: not all of that is RAM.
    pub(super) fn read(&mut self, address: u64, bytes: &mut [u8]) -> bool {
        let mut done = 0;
        while done < bytes.len() {
            let at = address.wrapping_add(done as u64);
            let end = bytes.len().min(done + (PAGE - at % PAGE) as usize);
            let read = self.page(at).is_some_and(|page| {
                let physical = page.physical + at % PAGE;
                self.memory.read(physical, &mut bytes[done..end])
            });
            if !read {
                return false;
            }
            done = end;
        }
        true
    }

    pub(super) fn is_canonical(&self, address: u64) -> bool {
        self.paging.is_canonical(address)
    }

    /// Returns the word at `address`, which the processor reads for itself.
    pub(super) fn word(&mut self, address: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)
            .then(|| u64::from_le_bytes(bytes))
    }

    /// Returns the bytes that are executed at `address`, as many as there are up to those of the longest instruction.
    pub(super) fn code(&mut self, address: u64, ring: Ring) -> ([u8; LONGEST], usize) {
        let (mut bytes, mut done) = ([0; LONGEST], 0);
        while done < LONGEST {
            let at = address.wrapping_add(done as u64);
            let Some(page) = self.executed(at, ring) else {
                break;
            };
            let offset = (at % PAGE) as usize;
            let end = LONGEST.min(done + page.len() - offset);
            bytes[done..end].copy_from_slice(&page[offset..offset + end - done]);
            done = end;
        }
        (bytes, done)
    }

    fn executed(&mut self, address: u64, ring: Ring) -> Option<&[u8; PAGE as usize]> {
        let page = self.page(address)?;
        let may = match ring {
            Ring::User => page.user,
            Ring::Kernel => !(self.smep && page.user),
        };
        if !(may && page.executable) {
            return None;
        }
        // Most instructions are on the page of the one before.
        if self
            .code
            .as_ref()
            .is_none_or(|(at, _)| *at != page.physical)
        {
            let mut bytes = Box::new([0; PAGE as usize]);
            if !self.memory.read(page.physical, &mut bytes[..]) {
                return None;
            }
            self.code = Some((page.physical, bytes));
        }
        self.code.as_ref().map(|(_, bytes)| &**bytes)
    }
}
