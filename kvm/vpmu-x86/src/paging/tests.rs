//! Tables in a memory of 1 MiB, and the manual's rule of access.

mod processor;

use super::*;
use crate::memory::Store;
use crate::tests::Ram;

const ROOT: u64 = 0x1000;
/// PRESENT, WRITABLE, accessed, dirty.
const KERNEL: u64 = 0x63;
const ADDR: u64 = 0xffff_fe00_0001_2000;

/// Returns tables of `levels` levels for ADDR, the last of which has `entry`. The entries of `level` and above are
/// tables.
fn tables(levels: u32, level: u32, entry: u64) -> Ram {
    let ram = Ram::new(0x10_0000);
    let mut table = ROOT;
    for level in (level..levels).rev() {
        let next = table + PAGE;
        let index = ADDR >> (12 + 9 * level) & 0x1ff;
        ram.write(table + 8 * index, next | KERNEL | USER);
        table = next;
    }
    let last = level.checked_sub(1).expect("a level for the entry");
    let index = ADDR >> (12 + 9 * last) & 0x1ff;
    ram.write(table + 8 * index, entry);
    ram
}

fn paging(cr0: u64, cr4: u64, efer: u64) -> Paging {
    Paging::of(&System {
        cr0,
        cr3: ROOT | 0x18,
        cr4,
        efer,
        ..Default::default()
    })
}

/// Returns paging with PG, WP, PE; PAE; LMA, LME.
fn four_levels() -> Paging {
    paging(0x8001_0001, 0x20, 0xd01)
}

const SMAP: u64 = 1 << 21;

#[test]
fn pages_of_each_size_in_four_and_five_levels() {
    for levels in [4, 5] {
        let paging = paging(0x8001_0001, 0x20 | u64::from(levels == 5) << 12, 0xd01);
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
fn marks_are_those_of_the_tables() {
    let four = four_levels();
    let page = |entry| {
        four.translate(&tables(4, 1, 0x5_6000 | entry), ADDR)
            .unwrap()
    };
    let marks = |entry| (page(entry).accessed, page(entry).dirty);
    assert_eq!(marks(KERNEL), (true, true));
    assert_eq!(marks(KERNEL & !DIRTY), (true, false));
    assert_eq!(marks(KERNEL & !ACCESSED), (false, true));
    assert!(page(KERNEL).writable && !page(KERNEL & !WRITABLE).writable);
    assert!(page(KERNEL | USER).user && !page(KERNEL).user);
    // Without NXE the bit is reserved.
    let no_nxe = paging(0x8001_0001, 0x20, 0x500);
    assert_eq!(
        no_nxe.translate(&tables(4, 1, 0x5_6000 | KERNEL | NO_EXECUTE), ADDR),
        None
    );
    assert!(!page(KERNEL | NO_EXECUTE).executable);
}

/// Without a page's tables: what the settings and the page say.
#[derive(Clone, Copy, Debug)]
struct Case {
    access: Access,
    mode: Mode,
    page: Page,
    wp: bool,
    smep: bool,
    smap: bool,
}

impl Case {
    fn system(self) -> System {
        System {
            cr0: 0x8000_0001 | u64::from(self.wp) << 16,
            cr4: 0x20 | u64::from(self.smep) << 20 | u64::from(self.smap) << 21,
            efer: 0xd01,
            ..Default::default()
        }
    }

    fn is_permitted(self) -> bool {
        Paging::of(&self.system()).permits(0x1000, &self.page, self.access, self.mode, || None)
    }

    /// All that there are.
    fn all() -> impl Iterator<Item = Self> {
        let accesses = [Access::Load, Access::Store, Access::Fetch];
        let modes = [
            Mode::User,
            Mode::Supervisor { ac: false },
            Mode::Supervisor { ac: true },
            Mode::Implicit,
        ];
        let pairs = accesses
            .into_iter()
            .flat_map(move |a| modes.map(move |m| (a, m)));
        pairs.flat_map(|(access, mode)| {
            (0..64_u32).map(move |bits| {
                let bit = |n: u32| bits >> n & 1 != 0;
                let page = Page {
                    physical: 0,
                    writable: bit(0),
                    user: bit(1),
                    executable: bit(2),
                    accessed: true,
                    dirty: true,
                    key: 0,
                };
                let (wp, smep, smap) = (bit(3), bit(4), bit(5));
                Self {
                    access,
                    mode,
                    page,
                    wp,
                    smep,
                    smap,
                }
            })
        })
    }
}

/// The bullets of SDM vol. 3A, 4.6.1 (revision 083), and of APM vol. 2, 5.6: an access; whose it is, `u` user mode's, `e` an
/// explicit one of the supervisor's, `i` an implicit one; the address, `u` user mode's or `s` the supervisor's; the values of
/// WP, SMEP, SMAP and AC, `-` for any; and what the bullet permits: `y` any address, `n` none, `w` one with R/W set in all
/// entries, `x` one with XD clear in all of them.
const MANUAL: &[(&str, char)] = &[
    // access, whose, address, WP SMEP SMAP AC
    ("load u u ----", 'y'),
    ("load u s ----", 'n'),
    ("load e s ----", 'y'),
    ("load i s ----", 'y'),
    ("load e u --0-", 'y'),
    ("load e u --11", 'y'),
    ("load e u --10", 'n'),
    ("load i u --0-", 'y'),
    ("load i u --1-", 'n'),
    ("store u u ----", 'w'),
    ("store u s ----", 'n'),
    ("store e s 0---", 'y'),
    ("store e s 1---", 'w'),
    ("store i s 0---", 'y'),
    ("store i s 1---", 'w'),
    ("store e u 0-0-", 'y'),
    ("store e u 0-11", 'y'),
    ("store e u 0-10", 'n'),
    ("store e u 1-0-", 'w'),
    ("store e u 1-11", 'w'),
    ("store e u 1-10", 'n'),
    ("store i u 0-0-", 'y'),
    ("store i u 1-0-", 'w'),
    ("store i u --1-", 'n'),
    ("fetch u u ----", 'x'),
    ("fetch u s ----", 'n'),
    ("fetch e s ----", 'x'),
    ("fetch e u -0--", 'x'),
    ("fetch e u -1--", 'n'),
    // The processor fetches no code for itself: vpmu-kvm searches the kernel's.
    ("fetch i s ----", 'x'),
    ("fetch i u -0--", 'x'),
    ("fetch i u -1--", 'n'),
];

#[test]
fn an_access_is_permitted_by_the_manuals_table() {
    for case in Case::all() {
        let access = match case.access {
            Access::Load => "load",
            Access::Store => "store",
            Access::Fetch => "fetch",
        };
        let (whose, ac) = match case.mode {
            Mode::User => ("u", None),
            Mode::Supervisor { ac } => ("e", Some(ac)),
            Mode::Implicit => ("i", None),
        };
        let address = if case.page.user { "u" } else { "s" };
        let settings = [Some(case.wp), Some(case.smep), Some(case.smap), ac];
        let mut found = MANUAL.iter().filter(|(row, _)| {
            let [a, w, at, values] = *row.split(' ').collect::<Vec<_>>() else {
                panic!("{row}");
            };
            let is_so = |(value, is_set): (char, Option<bool>)| match (value, is_set) {
                ('-', _) => true,
                (value, Some(is_set)) => (value == '1') == is_set,
                (_, None) => false,
            };
            (a, w, at) == (access, whose, address) && values.chars().zip(settings).all(is_so)
        });
        let &(row, what) = found.next().unwrap_or_else(|| panic!("{case:?}"));
        assert!(found.next().is_none(), "{case:?}");
        let expected = match what {
            'y' => true,
            'n' => false,
            'w' => case.page.writable,
            _ => case.page.executable,
        };
        assert_eq!(case.is_permitted(), expected, "{row}: {case:?}");
    }
}

#[test]
fn keys_forbid_data_and_no_code() {
    const PKE: u64 = 1 << 22;
    const PKS: u64 = 1 << 24;
    let page = |user| Page {
        physical: 0,
        writable: true,
        user,
        executable: true,
        accessed: true,
        dirty: true,
        key: 3,
    };
    // SDM vol. 3A, 4.6.2: AD forbids loads and stores; WD stores, by the supervisor only with WP. Key 3 alone counts.
    for (rights, wp, is_user_mode, expected) in [
        (0, true, true, (true, true)),
        (0xffff_ff3f, true, true, (true, true)),
        (0x80, true, true, (true, false)),
        (0x80, false, true, (true, false)),
        (0x80, true, false, (true, false)),
        (0x80, false, false, (true, true)),
        (0x40, true, true, (false, false)),
        (0x40, false, false, (false, false)),
        (0xc0, false, false, (false, false)),
    ] {
        for (cr4, user) in [(PKE, true), (PKS, false)] {
            if is_user_mode && !user {
                continue;
            }
            let paging = paging(0x8000_0001 | u64::from(wp) << 16, 0x20 | cr4, 0xd01);
            let mode = match is_user_mode {
                true => Mode::User,
                false => Mode::Supervisor { ac: false },
            };
            let may = |access, rights| paging.permits(0, &page(user), access, mode, || rights);
            let both = |rights| (may(Access::Load, rights), may(Access::Store, rights));
            let what = format!("{rights:#x} {wp} {mode:?}");
            assert_eq!(both(Some(rights)), expected, "{what}");
            assert_eq!(both(None), (false, false), "{what}");
            assert!(may(Access::Fetch, None), "{what}");
            // Pages of the other half have no keys.
            let other = |access| paging.permits(0, &page(!user), access, mode, || None);
            assert_eq!(other(Access::Store), !is_user_mode, "{what}");
        }
    }
}

#[test]
fn linear_halves_are_apart_by_lass() {
    // SDM vol. 3A, 4.6, "linear-address space separation": user mode never reaches the upper half; the supervisor fetches
    // nothing in the lower one, and reads and writes there with SMAP only by an explicit access with AC.
    const LASS: u64 = 1 << 27;
    let page = |user| Page {
        physical: 0,
        writable: true,
        user,
        executable: true,
        accessed: true,
        dirty: true,
        key: 0,
    };
    let (lower, upper) = (0x1000, 1 << 63);
    let may = |cr4, at, user, access, mode| {
        paging(0x8001_0001, 0x20 | cr4, 0xd01).permits(at, &page(user), access, mode, || None)
    };
    let (ac, no_ac) = (
        Mode::Supervisor { ac: true },
        Mode::Supervisor { ac: false },
    );
    for (access, mode, cr4, expected) in [
        (Access::Load, Mode::User, LASS, (true, false)),
        (Access::Fetch, Mode::User, LASS, (true, false)),
        (Access::Load, no_ac, LASS, (true, true)),
        (Access::Load, no_ac, LASS | SMAP, (false, true)),
        (Access::Store, ac, LASS | SMAP, (true, true)),
        (Access::Store, Mode::Implicit, LASS | SMAP, (false, true)),
        (Access::Store, Mode::Implicit, LASS, (true, true)),
        (Access::Fetch, ac, LASS | SMAP, (false, true)),
        (Access::Fetch, no_ac, LASS, (false, true)),
        (Access::Fetch, no_ac, 0, (true, true)),
    ] {
        let user = mode == Mode::User;
        let at = [lower, upper].map(|at| may(cr4, at, user, access, mode));
        assert_eq!((at[0], at[1]), expected, "{access:?} {mode:?} {cr4:#x}");
    }
}

#[test]
fn without_paging_an_address_is_itself() {
    let none = paging(1, 0, 0);
    let ram = Ram::new(4096);
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

#[test]
fn the_last_page_that_is_present_is_found_across_absent_tables() {
    let paging = four_levels();
    // Tables of user space at 0x5000_0000 and up: pages 3, 70 and 400 of one table, none of the next, page 0 of the third.
    let ram = Ram::new(0x10_0000);
    let put = |at: u64, entry: u64| ram.write(at, entry | KERNEL | USER);
    put(ROOT, 0x2000);
    put(0x2000 + 8, 0x3000);
    for (n, table) in [(0x80, 0x4000), (0x82, 0x5000)] {
        put(0x3000 + 8 * n, table);
    }
    for n in [3, 70, 400] {
        put(0x4000 + 8 * n, 0x8_0000);
    }
    put(0x5000, 0x9_0000);
    let base = 0x5000_0000;
    let last = |from: u64, lowest: u64| {
        let found = paging.last_present(&ram, base + from * PAGE, lowest);
        found.map(|at| (at - base) / PAGE)
    };
    assert_eq!(last(2000, base), Some(1024));
    assert_eq!(last(1024, base), Some(1024));
    assert_eq!(last(1023, base), Some(400));
    assert_eq!(last(399, base), Some(70));
    assert_eq!(last(70, base), Some(70));
    assert_eq!(last(69, base), Some(3));
    assert_eq!(last(69, base + 4 * PAGE), None);
    assert_eq!(last(2, base - (1 << 21)), None);
    // Each page but the ones that are there, one by one.
    let present = [3, 70, 400, 1024];
    for from in 0..1100 {
        let expected = present.iter().copied().rfind(|&page| page <= from);
        assert_eq!(last(from, base), expected, "{from}");
    }
    // The kernel's addresses are none of user space's.
    let ram = tables(4, 1, 0x5_6000 | KERNEL);
    assert_eq!(paging.last_present(&ram, ADDR, 0), None);
}

/// Counts the reads of a memory.
struct Counted<'a>(&'a Ram, std::cell::Cell<u32>);

impl Memory for Counted<'_> {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        self.1.set(self.1.get() + 1);
        self.0.read(address, bytes)
    }

    fn is_writable(&self, _: u64) -> bool {
        unreachable!("nothing is written")
    }

    fn store(&self, _: &[Store]) {
        unreachable!("nothing is written")
    }
}

#[test]
fn tables_that_are_built_to_lengthen_a_search_cost_as_much_as_empty_ones() {
    let paging = four_levels();
    let base = 0x5000_0000;
    // The kernel's pages, in a table of user space.
    for flags in [0, KERNEL] {
        let ram = Ram::new(0x10_0000);
        let put = |at: u64, entry: u64| ram.write(at, entry);
        put(ROOT, 0x2000 | KERNEL | USER);
        put(0x2000 + 8, 0x3000 | KERNEL | USER);
        put(0x3000 + 8 * 0x80, 0x4000 | KERNEL | USER);
        for n in 0..512 {
            put(
                0x4000 + 8 * n,
                if flags == 0 { 0 } else { 0x8_0000 | flags },
            );
        }
        let counted = Counted(&ram, std::cell::Cell::new(0));
        assert_eq!(paging.last_present(&counted, base + 511 * PAGE, base), None);
        assert!(counted.1.get() <= 4 + 8, "{} reads", counted.1.get());
    }
}
