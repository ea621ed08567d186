//! The guest's page tables.
//!
//! The processor writes PEBS records by linear addresses, as implicit accesses of the supervisor (SDM vol. 3A, 4.6): with
//! CR4.SMAP they never reach a page of user space, whatever RFLAGS.AC is. KVM_TRANSLATE answers without any check of
//! permissions, and takes a system call for each page. Accessed and dirty bits are left as they are.
//!
//! Four and five levels, with pages of any size, and no paging at all. A guest with tables of another kind, which only
//! 32-bit kernels have, gets no records.

use kvm_bindings::kvm_sregs;

use crate::memory::GuestMemory;

pub(crate) const PAGE: u64 = 4096;

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

/// A page that an address leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Page {
    /// Physical address of its first byte.
    pub(crate) physical: u64,
    /// Whether it may be written. All may be read.
    pub(crate) writable: bool,
    /// Whether user space has it.
    pub(crate) user: bool,
    /// Whether its bytes may be executed.
    pub(crate) executable: bool,
    /// Whether all entries that lead there are marked accessed: a processor that reads there changes no table.
    pub(crate) accessed: bool,
    /// Whether the last of them is marked dirty, so that one that writes there changes none.
    pub(crate) dirty: bool,
    /// Its protection key, which counts for a page of user space where CR4.PKE says so.
    pub(crate) key: u8,
}

/// The settings that decide about a linear address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Paging {
    /// 0: none; `None`: of another kind.
    levels: Option<u32>,
    root: u64,
    /// CR4.SMAP: no page of user space is reached.
    smap: bool,
    /// CR0.WP: a page that is not writable is read-only for the supervisor, too.
    protects: bool,
}

impl Paging {
    pub(crate) fn of(sregs: &kvm_sregs) -> Self {
        const CR0_WP: u64 = 1 << 16;
        const CR0_PG: u64 = 1 << 31;
        const CR4_LA57: u64 = 1 << 12;
        const CR4_SMAP: u64 = 1 << 21;
        const EFER_LMA: u64 = 1 << 10;
        let is_set = |register: u64, bit| register & bit != 0;
        let paged = is_set(sregs.cr0, CR0_PG);
        Self {
            levels: match (paged, is_set(sregs.efer, EFER_LMA)) {
                (false, _) => Some(0),
                (true, true) => Some(4 + u32::from(is_set(sregs.cr4, CR4_LA57))),
                // PAE and 32-bit tables: kernels that use PEBS are 64-bit.
                (true, false) => None,
            },
            root: sregs.cr3 & ADDRESS,
            smap: is_set(sregs.cr4, CR4_SMAP),
            protects: is_set(sregs.cr0, CR0_WP),
        }
    }

    /// Returns the physical address of the first table.
    #[cfg(feature = "lbr")]
    pub(crate) fn root(&self) -> u64 {
        self.root
    }

    /// Returns the same with SMAP off: user space reads its own pages.
    pub(crate) fn of_user(self) -> Self {
        Self {
            smap: false,
            ..self
        }
    }

    /// Returns whether `address` is canonical (SDM vol. 1, 3.3.7.1).
    pub(crate) fn is_canonical(&self, address: u64) -> bool {
        match self.levels {
            Some(levels @ 1..) => {
                let unused = 64 - 12 - 9 * levels;
                address.cast_signed() << unused >> unused == address.cast_signed()
            }
            Some(0) | None => address <= u32::MAX.into(),
        }
    }

    /// Returns the page behind `address`, where an access is allowed at all.
    pub(crate) fn translate(&self, memory: &dyn GuestMemory, address: u64) -> Option<Page> {
        let levels = self.levels?;
        if !self.is_canonical(address) {
            return None;
        }
        if levels == 0 {
            return Some(Page {
                physical: address & !(PAGE - 1),
                writable: true,
                user: false,
                executable: true,
                accessed: true,
                dirty: true,
                key: 0,
            });
        }
        let (mut table, mut writable, mut user) = (self.root, true, true);
        let (mut executable, mut accessed) = (true, true);
        for level in (0..levels).rev() {
            let shift = 12 + 9 * level;
            let index = address >> shift & 0x1ff;
            let mut bytes = [0; 8];
            if !memory.read(table + 8 * index, &mut bytes) {
                return None;
            }
            let entry = u64::from_le_bytes(bytes);
            if entry & PRESENT == 0 {
                return None;
            }
            writable &= entry & WRITABLE != 0;
            user &= entry & USER != 0;
            executable &= entry & NO_EXECUTE == 0;
            accessed &= entry & ACCESSED != 0;
            let is_large = entry & LARGE != 0;
            if level > 2 && is_large {
                // The bit is reserved there.
                return None;
            }
            if level == 0 || is_large {
                if self.smap && user {
                    return None;
                }
                let offset = (1 << shift) - 1;
                // Between the address of a large page and the bit of PAT, all are reserved.
                let reserved = offset & ADDRESS & !PAGE;
                if entry & reserved != 0 {
                    return None;
                }
                return Some(Page {
                    physical: (entry & ADDRESS & !offset | address & offset) & !(PAGE - 1),
                    writable: writable || !self.protects,
                    user,
                    executable,
                    accessed,
                    dirty: entry & DIRTY != 0,
                    key: (entry >> KEY & 0xf) as u8,
                });
            }
            table = entry & ADDRESS;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{GuestAddress, GuestMemoryMmap};

    use super::*;

    const ROOT: u64 = 0x1000;
    /// PRESENT, WRITABLE, accessed, dirty.
    const KERNEL: u64 = 0x63;
    const ADDR: u64 = 0xffff_fe00_0001_2000;

    /// Returns tables of `levels` levels for ADDR, the last of which has `entry`. The entries of `level` and above are
    /// tables.
    fn tables(levels: u32, level: u32, entry: u64) -> GuestMemoryMmap {
        let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x10_0000)]).unwrap();
        let mut table = ROOT;
        for level in (level..levels).rev() {
            let next = table + PAGE;
            let index = ADDR >> (12 + 9 * level) & 0x1ff;
            assert!(ram.write(table + 8 * index, &(next | KERNEL | USER).to_le_bytes()));
            table = next;
        }
        let last = level.checked_sub(1).expect("a level for the entry");
        let index = ADDR >> (12 + 9 * last) & 0x1ff;
        assert!(ram.write(table + 8 * index, &entry.to_le_bytes()));
        ram
    }

    fn paging(cr0: u64, cr4: u64, efer: u64) -> Paging {
        Paging::of(&kvm_sregs {
            cr0,
            cr3: ROOT | 0x18,
            cr4,
            efer,
            ..Default::default()
        })
    }

    /// Returns paging with PG, WP, PE; PAE; LMA, LME.
    fn four_levels() -> Paging {
        paging(0x8001_0001, 0x20, 0x500)
    }

    const SMAP: u64 = 1 << 21;

    #[test]
    fn pages_of_each_size_in_four_and_five_levels() {
        for levels in [4, 5] {
            let paging = paging(0x8001_0001, 0x20 | u64::from(levels == 5) << 12, 0x500);
            for (level, large, page) in [
                (1, 0, 0x5_6000_u64),
                (2, LARGE, 0x20_0000),
                (3, LARGE, 0x4000_0000),
            ] {
                let ram = tables(levels, level, page | KERNEL | large | 1 << 63);
                let offset = (1_u64 << (12 + 9 * (level - 1))) - 1;
                let expected = Page {
                    physical: page | ADDR & offset,
                    writable: true,
                    user: false,
                    executable: false,
                    accessed: true,
                    dirty: true,
                    key: 0,
                };
                let found = paging.translate(&ram, ADDR + 0x123);
                assert_eq!(found, Some(expected), "{levels} {level}");
            }
        }
    }

    #[test]
    fn what_the_processor_would_not_reach_is_not_reached() {
        let ram = tables(4, 1, 0x5_6000 | KERNEL);
        let four = four_levels();
        assert!(four.translate(&ram, ADDR).is_some());
        for other in [0, ADDR + PAGE, ADDR & !(1 << 63), 1 << 47, ADDR ^ 1 << 50] {
            assert_eq!(four.translate(&ram, other), None, "{other:#x}");
        }
        // The cases are: not present; a table outside RAM; a large page where there is none.
        assert_eq!(
            four.translate(&tables(4, 1, 0x5_6000 | KERNEL & !1), ADDR),
            None
        );
        assert_eq!(
            four.translate(&tables(4, 2, 0x7_0000_0000 | KERNEL), ADDR),
            None
        );
        assert_eq!(four.translate(&tables(4, 4, LARGE | KERNEL), ADDR), None);
        let askew = 0x20_0000 | KERNEL | LARGE | 0x2000;
        assert_eq!(
            four.translate(&tables(4, 2, askew), ADDR),
            None,
            "a reserved bit"
        );
        // These are 32-bit tables.
        assert_eq!(paging(0x8001_0001, 0x20, 0).translate(&ram, ADDR), None);
    }

    #[test]
    fn permissions_are_the_supervisors() {
        let read_only = tables(4, 1, 0x5_6000 | KERNEL & !WRITABLE);
        let four = four_levels();
        let writable =
            |paging: Paging| paging.translate(&read_only, ADDR).map(|page| page.writable);
        assert_eq!(writable(four), Some(false));
        assert_eq!(writable(paging(0x8000_0001, 0x20, 0x500)), Some(true));

        let marks = |entry| {
            let page = four.translate(&tables(4, 1, 0x5_6000 | entry), ADDR);
            page.map(|page| (page.accessed, page.dirty))
        };
        assert_eq!(marks(KERNEL), Some((true, true)));
        assert_eq!(marks(KERNEL & !DIRTY), Some((true, false)));
        assert_eq!(marks(KERNEL & !ACCESSED), Some((false, true)));

        let user = tables(4, 1, 0x5_6000 | KERNEL | USER);
        let kernel = tables(4, 1, 0x5_6000 | KERNEL);
        let smap = paging(0x8001_0001, 0x20 | SMAP, 0x500);
        assert!(four.translate(&user, ADDR).is_some());
        assert_eq!(smap.translate(&user, ADDR), None);
        assert!(smap.translate(&kernel, ADDR).is_some());
        let of_user = smap.of_user();
        assert!(
            of_user
                .translate(&user, ADDR)
                .is_some_and(|page| page.user && page.executable)
        );
        assert!(
            of_user
                .translate(&kernel, ADDR)
                .is_some_and(|page| !page.user)
        );
    }

    #[test]
    fn without_paging_an_address_is_itself() {
        let none = paging(1, 0, 0);
        let ram = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 4096)]).unwrap();
        let itself = Page {
            physical: 0x1000,
            writable: true,
            user: false,
            executable: true,
            accessed: true,
            dirty: true,
            key: 0,
        };
        assert_eq!(none.translate(&ram, 0x1234), Some(itself));
        assert_eq!(none.translate(&ram, 1 << 32), None);
    }
}
