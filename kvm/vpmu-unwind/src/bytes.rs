//! Reads of a program's memory, by a budget.

use crate::Cut;

/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// The memory of a program that does not run.
pub trait Memory {
    /// Reads bytes that are all on one page. Returns `false` if the page is not present, or if the program itself may not read
    /// it: what is read here becomes visible to the program's user.
    fn read(&mut self, address: u64, bytes: &mut [u8]) -> bool;

    /// Returns a number for what is mapped at `address`, as the page's physical address is; `None`: nothing is present.
    fn page(&mut self, address: u64) -> Option<u64>;

    /// Returns the address of the highest page that is present, at or below `address` and not below `lowest`.
    fn present_below(&mut self, address: u64, lowest: u64) -> Option<u64>;
}

/// What one stack may cost. A read costs one, in a guest some four reads of page tables. The largest programs have 40,000 pages of
/// code, of which those that are present are looked at once for each address space.
const BUDGET: u32 = 16384;

/// Memory, and what one stack may still cost.
pub(crate) struct Reader<'a> {
    memory: &'a mut dyn Memory,
    left: u32,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(memory: &'a mut dyn Memory) -> Self {
        let left = BUDGET;
        Self { memory, left }
    }

    pub(crate) fn spend(&mut self, reads: u32) -> Result<(), Cut> {
        self.left = self.left.checked_sub(reads).ok_or(Cut::Budget)?;
        Ok(())
    }

    /// Reads any bytes.
    pub(crate) fn read(&mut self, mut address: u64, mut bytes: &mut [u8]) -> Result<(), Cut> {
        while !bytes.is_empty() {
            let rest = (PAGE - address % PAGE) as usize;
            let (part, more) = bytes.split_at_mut(rest.min(bytes.len()));
            self.spend(1)?;
            if !self.memory.read(address, part) {
                return Err(Cut::PageAbsent);
            }
            address = address.wrapping_add(part.len() as u64);
            bytes = more;
        }
        Ok(())
    }

    pub(crate) fn array<const N: usize>(&mut self, address: u64) -> Result<[u8; N], Cut> {
        let mut bytes = [0; N];
        self.read(address, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads a word of the stack.
    pub(crate) fn word(&mut self, address: u64) -> Result<u64, Cut> {
        let bytes = self.array(address).map_err(|cut| match cut {
            Cut::PageAbsent => Cut::StackAbsent,
            cut => cut,
        })?;
        Ok(u64::from_le_bytes(bytes))
    }

    pub(crate) fn page(&mut self, address: u64) -> Result<Option<u64>, Cut> {
        self.spend(1)?;
        Ok(self.memory.page(address))
    }

    pub(crate) fn present_below(&mut self, address: u64, lowest: u64) -> Result<Option<u64>, Cut> {
        /// What one page of tables maps, as a power of two.
        const TABLE: u32 = 21;
        let page = self.memory.present_below(address, lowest);
        let passed = address.saturating_sub(page.unwrap_or(lowest)) >> TABLE;
        self.spend(1 + passed as u32)?;
        Ok(page)
    }
}
