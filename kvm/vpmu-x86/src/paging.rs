//! The guest's page tables, and the rule by which they permit an access.
//!
//! Four and five levels, with pages of any size, and no paging at all. A guest with tables of another kind, which only
//! 32-bit kernels have, reaches nothing. KVM_TRANSLATE answers without any check of permissions, and takes a system call for
//! each page. Accessed and dirty bits are left as they are.

use std::ops::Range;

use crate::cpu::System;
use crate::memory::Memory;

/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// Bits of a table's entry.
const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
const NO_EXECUTE: u64 = 1 << 63;
/// The lowest bit of the protection key.
const KEY: u32 = 59;

/// A page that an address leads to: what its tables say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// Physical address of its first byte.
    pub physical: u64,
    /// R/W in all entries that lead there. A page of a shadow stack is not writable.
    pub writable: bool,
    /// U/S in all of them: an address of user mode.
    pub user: bool,
    /// XD in none of them.
    pub executable: bool,
    /// Whether all of them are marked accessed: a processor that reads there changes no table.
    pub accessed: bool,
    /// Whether the last of them is marked dirty, so that one that writes there changes none.
    pub dirty: bool,
    /// Its protection key, of user space or the supervisor's.
    pub key: u8,
}

/// What is done with a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It is read as data.
    Load,
    /// It is written.
    Store,
    /// It is executed.
    Fetch,
}

/// Whose access it is (SDM vol. 3A, 4.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// An instruction at CPL 3.
    User,
    /// An instruction at CPL 0, 1 or 2.
    Supervisor {
        /// RFLAGS.AC.
        ac: bool,
    },
    /// The processor itself: descriptor tables, the frames of exceptions, PEBS records. RFLAGS.AC does not matter.
    Implicit,
}

impl Mode {
    /// Returns the mode of a vCPU's instructions.
    pub const fn of(system: &System, rflags: u64) -> Self {
        const AC: u64 = 1 << 18;
        match system.cpl {
            3 => Self::User,
            _ => Self::Supervisor {
                ac: rflags & AC != 0,
            },
        }
    }
}

/// The settings that decide about a linear address.
#[derive(Clone, Copy, Debug)]
pub struct Paging {
    /// 0: none; `None`: of another kind.
    levels: Option<u32>,
    root: u64,
    /// CR0.WP: a page that is not writable is read-only for the supervisor, too.
    wp: bool,
    smep: bool,
    smap: bool,
    lass: bool,
    /// Keys of user space's pages (PKRU), and of the supervisor's (IA32_PKRS).
    pke: bool,
    pks: bool,
    /// IA32_EFER.NXE. Without it XD is reserved.
    nxe: bool,
}

impl Paging {
    /// Returns the settings of a vCPU.
    pub const fn of(system: &System) -> Self {
        const CR0_WP: u64 = 1 << 16;
        const CR0_PG: u64 = 1 << 31;
        const CR4_LA57: u64 = 1 << 12;
        const CR4_SMEP: u64 = 1 << 20;
        const CR4_SMAP: u64 = 1 << 21;
        const CR4_PKE: u64 = 1 << 22;
        const CR4_PKS: u64 = 1 << 24;
        const CR4_LASS: u64 = 1 << 27;
        const EFER_LMA: u64 = 1 << 10;
        const EFER_NXE: u64 = 1 << 11;
        let (cr0, cr4) = (system.cr0, system.cr4);
        Self {
            levels: match (cr0 & CR0_PG != 0, system.efer & EFER_LMA != 0) {
                (false, _) => Some(0),
                (true, true) => Some(if cr4 & CR4_LA57 != 0 { 5 } else { 4 }),
                // PAE and 32-bit tables: kernels that use PEBS are 64-bit.
                (true, false) => None,
            },
            root: system.cr3 & ADDRESS,
            wp: cr0 & CR0_WP != 0,
            smep: cr4 & CR4_SMEP != 0,
            smap: cr4 & CR4_SMAP != 0,
            lass: cr4 & CR4_LASS != 0,
            pke: cr4 & CR4_PKE != 0,
            pks: cr4 & CR4_PKS != 0,
            nxe: system.efer & EFER_NXE != 0,
        }
    }

    /// Returns the physical address of the first table.
    pub const fn root(&self) -> u64 {
        self.root
    }

    /// Returns whether `address` is canonical (SDM vol. 1, 3.3.7.1).
    #[inline]
    pub fn is_canonical(&self, address: u64) -> bool {
        match self.levels {
            Some(levels @ 1..) => {
                let unused = 64 - 12 - 9 * levels;
                address.cast_signed() << unused >> unused == address.cast_signed()
            }
            Some(0) | None => address <= u32::MAX.into(),
        }
    }

    /// Returns whether an access of the byte at `address`, on `page`, is made without a fault (SDM vol. 3A, 4.4 to 4.6.2;
    /// APM vol. 2, 5.6). `rights`: PKRU for a page of user space, or IA32_PKRS; it is asked for only where keys count, and
    /// where nobody knows it, nothing is permitted.
    ///
    /// Accesses of a shadow stack by CALL and RET are not among them.
    pub fn permits(
        &self,
        address: u64,
        page: &Page,
        access: Access,
        mode: Mode,
        rights: impl FnOnce() -> Option<u32>,
    ) -> bool {
        if self.levels == Some(0) {
            return true;
        }
        let is_user = mode == Mode::User;
        // LASS comes before the tables are walked, and tells the halves of linear memory apart by the address alone.
        let is_upper = address >> 63 != 0;
        let is_open = !self.smap || mode == Mode::Supervisor { ac: true };
        let is_in_half = match access {
            _ if is_user => !is_upper,
            Access::Fetch => is_upper,
            Access::Load | Access::Store => is_upper || is_open,
        };
        // No setting opens the supervisor's pages to user mode.
        if self.lass && !is_in_half || is_user && !page.user {
            return false;
        }
        let is_users = !is_user && page.user;
        let is_permitted = match access {
            Access::Fetch => page.executable && !(is_users && self.smep),
            Access::Load => !is_users || is_open,
            // WP is the supervisor's alone: it never lets user mode write what is read-only.
            Access::Store => (!is_users || is_open) && (page.writable || !is_user && !self.wp),
        };
        if !is_permitted {
            return false;
        }
        let has_keys = if page.user { self.pke } else { self.pks };
        if !has_keys || access == Access::Fetch {
            return true;
        }
        const ACCESS_DISABLED: u32 = 0b01;
        const WRITE_DISABLED: u32 = 0b10;
        // Without WP the supervisor writes in spite of WD.
        let forbidden = match access == Access::Store && (is_user || self.wp) {
            true => ACCESS_DISABLED | WRITE_DISABLED,
            false => ACCESS_DISABLED,
        };
        rights().is_some_and(|rights| rights >> (2 * (page.key & 0xf)) & forbidden == 0)
    }

    /// Returns the page behind `address`, whoever may access it.
    pub fn translate<M: Memory + ?Sized>(&self, memory: &M, address: u64) -> Option<Page> {
        let levels = self.levels?;
        if !self.is_canonical(address) {
            return None;
        }
        let mut page = Page {
            physical: address & !(PAGE - 1),
            writable: true,
            user: levels > 0,
            executable: true,
            accessed: true,
            dirty: true,
            key: 0,
        };
        if levels == 0 {
            return Some(page);
        }
        let mut table = self.root;
        for level in (0..levels).rev() {
            let shift = 12 + 9 * level;
            let index = address >> shift & 0x1ff;
            let mut bytes = [0; 8];
            if !memory.read(table + 8 * index, &mut bytes) {
                return None;
            }
            let entry = u64::from_le_bytes(bytes);
            if entry & PRESENT == 0 || !self.nxe && entry & NO_EXECUTE != 0 {
                return None;
            }
            // One entry that forbids is enough.
            page.writable &= entry & WRITABLE != 0;
            page.user &= entry & USER != 0;
            page.executable &= entry & NO_EXECUTE == 0;
            page.accessed &= entry & ACCESSED != 0;
            let is_large = entry & LARGE != 0;
            if level > 2 && is_large {
                // The bit is reserved there.
                return None;
            }
            if level == 0 || is_large && level > 0 {
                let offset = (1 << shift) - 1;
                // Between the address of a large page and the bit of PAT, all are reserved.
                let reserved = offset & ADDRESS & !PAGE;
                if entry & reserved != 0 {
                    return None;
                }
                page.physical = (entry & ADDRESS & !offset | address & offset) & !(PAGE - 1);
                page.dirty = entry & DIRTY != 0;
                page.key = (entry >> KEY & 0xf) as u8;
                return Some(page);
            }
            table = entry & ADDRESS;
        }
        None
    }

    /// Returns the address of the highest page of user space that is present, at or below `address` and not below `lowest`.
    /// Whether it may be read is not looked at. For each 512 pages in between, four tables are read, or 4 KiB of one.
    pub fn last_present<M: Memory + ?Sized>(
        &self,
        memory: &M,
        address: u64,
        lowest: u64,
    ) -> Option<u64> {
        let levels = self.levels.filter(|&levels| levels > 0)?;
        let mut at = address & !(PAGE - 1);
        while at >= lowest && self.is_canonical(at) {
            let mut table = self.root;
            let mut level = levels - 1;
            // The entry that ends the walk, and whether it leads to a page.
            let is_page = loop {
                let index = at >> (12 + 9 * level) & 0x1ff;
                let mut bytes = [0; 8];
                if !memory.read(table + 8 * index, &mut bytes) {
                    return None;
                }
                let entry = u64::from_le_bytes(bytes);
                // An entry that is absent leaves out all that is below it.
                let is_present = entry & (PRESENT | USER) == PRESENT | USER;
                if !is_present || level == 0 || entry & LARGE != 0 {
                    break is_present;
                }
                table = entry & ADDRESS;
                level -= 1;
            };
            if is_page {
                return Some(at);
            }
            if level == 0 {
                at = below(memory, table, at)?;
            } else {
                let first = at >> (12 + 9 * level) << (12 + 9 * level);
                at = first.checked_sub(PAGE)?;
            }
        }
        None
    }
}

/// Calls `body` with the linear address of each page's part of the range, and the bytes of the range that it has: neighbours
/// in linear memory need not be neighbours in RAM, and the next page may be missing. Returns whether all calls have done so.
pub fn each_page(
    address: u64,
    length: usize,
    mut body: impl FnMut(u64, Range<usize>) -> bool,
) -> bool {
    let mut done = 0;
    while done < length {
        let Some(at) = address.checked_add(done as u64) else {
            return false;
        };
        let end = length.min(done + (PAGE - at % PAGE) as usize);
        if !body(at, done..end) {
            return false;
        }
        done = end;
    }
    true
}

/// Returns the page below `at` whose entry of `table` is present for user space, or the last one that another table has.
fn below<M: Memory + ?Sized>(memory: &M, table: u64, at: u64) -> Option<u64> {
    const TABLE: u64 = 512 * PAGE;
    const ENTRIES: usize = 64;
    let first = at & !(TABLE - 1);
    let mut end = (at - first) / PAGE;
    while end > 0 {
        let from = (end - 1) / ENTRIES as u64 * ENTRIES as u64;
        let mut bytes = [0; 8 * ENTRIES];
        if !memory.read(table + 8 * from, &mut bytes) {
            return None;
        }
        let (words, _) = bytes[..8 * (end - from) as usize].as_chunks::<8>();
        // A table of the kernel's pages is passed as one of absent ones: each would cost a walk otherwise.
        let is_users = |word| u64::from_le_bytes(word) & (PRESENT | USER) == PRESENT | USER;
        let present = words.iter().rposition(|&word| is_users(word));
        if let Some(n) = present {
            return Some(first + (from + n as u64) * PAGE);
        }
        end = from;
    }
    first.checked_sub(PAGE)
}

#[cfg(all(test, target_os = "linux", target_arch = "x86_64"))]
mod tests;
