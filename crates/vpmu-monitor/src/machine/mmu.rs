//! The monitor's own address space and the guest's stage 2.
//!
//! Both map addresses to themselves. Stage 2 gives the guest everything but three holes: the
//! monitor's memory, the redistributors' SGI frames and the doorbell (whose accesses are served), so
//! a device's DMA addresses are the guest's own.
//!
//! UNSAFETY: writes the translation registers and switches the MMU on.

use alloc::vec::Vec;
use core::{mem, ops::Range};

use aarch64_paging::{
    MapError,
    descriptor::{El23Attributes, PhysicalAddress, Stage2Attributes},
    idmap::{IdMap, IdTranslation},
    paging::{Constraints, El2, MemoryRegion, RootTable, Stage2},
};
use vpmu_monitor::boot::device_tree::Machine;

use super::sysreg::{isb, read_sysreg, write_sysreg};

/// MAIR: index 0 is normal write-back memory, index 1 device memory nGnRE.
const MAIR: u64 = 0x04ff;
const NORMAL: El23Attributes = El23Attributes::VALID
    .union(El23Attributes::ATTRIBUTE_INDEX_0)
    .union(El23Attributes::INNER_SHAREABLE)
    .union(El23Attributes::USER_RES1)
    .union(El23Attributes::ACCESSED);
const DEVICE: El23Attributes = El23Attributes::VALID
    .union(El23Attributes::ATTRIBUTE_INDEX_1)
    .union(El23Attributes::USER_RES1)
    .union(El23Attributes::XN)
    .union(El23Attributes::ACCESSED);

const GUEST_NORMAL: Stage2Attributes = Stage2Attributes::VALID
    .union(Stage2Attributes::MEMATTR_NORMAL_OUTER_WB)
    .union(Stage2Attributes::MEMATTR_NORMAL_INNER_WB)
    .union(Stage2Attributes::S2AP_ACCESS_RW)
    .union(Stage2Attributes::SH_INNER)
    .union(Stage2Attributes::ACCESS_FLAG);
const GUEST_DEVICE: Stage2Attributes = Stage2Attributes::VALID
    .union(Stage2Attributes::MEMATTR_DEVICE_nGnRE)
    .union(Stage2Attributes::S2AP_ACCESS_RW)
    .union(Stage2Attributes::ACCESS_FLAG);

/// Table walks: inner shareable, write-back; 4 KiB granule.
const WALK: u64 = 3 << 12 | 1 << 10 | 1 << 8;

/// What a CPU's translation registers hold, the same on every CPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Translation {
    pub(crate) mair_el2: u64,
    pub(crate) tcr_el2: u64,
    pub(crate) ttbr0_el2: u64,
    pub(crate) sctlr_el2: u64,
    vtcr_el2: u64,
    vttbr_el2: u64,
}

/// How many address bits the two translations cover, and from which level their tables start.
struct Reach {
    bits: u64,
    level: usize,
    /// Encoding of PARange and PS.
    physical: u64,
}

fn reach() -> Reach {
    let physical = (read_sysreg!("id_aa64mmfr0_el1") & 0xf).min(5);
    // A table walk may start at level 0 only with at least 44 bits of physical address.
    if physical >= 4 {
        let bits = if physical == 4 { 44 } else { 48 };
        Reach {
            bits,
            level: 0,
            physical,
        }
    } else {
        Reach {
            bits: 39.min([32, 36, 40, 42][physical as usize]),
            level: 1,
            physical,
        }
    }
}

/// Where devices may be: the whole address space that common machines use, RAM excepted.
const DEVICE_SPACE: u64 = 1 << 40;

/// Builds both translations. `holes` stay out of the guest's; `monitor` is the monitor's memory.
pub(crate) fn build(
    machine: &Machine,
    monitor: &Range<u64>,
    holes: &[Range<u64>],
) -> Result<Translation, MapError> {
    let Reach {
        bits,
        level,
        physical,
    } = reach();

    // RAM is identity-mapped at EL2 with 39 bits, which reach 512 GiB.
    let mut own = IdMap::<El2>::new(1, El2);
    for ram in &machine.ram {
        own.map_range(&region(ram), NORMAL)?;
    }
    let uart = machine
        .uart
        .map(|base| base & !0xfff..(base & !0xfff) + 0x1000);
    for device in uart
        .iter()
        .chain([&machine.distributor, &machine.redistributors])
    {
        own.map_range(&region(device), DEVICE)?;
    }
    let ttbr0_el2 = own.root_address().0 as u64;
    // The tables live as long as the machine.
    mem::forget(own);

    let mut guest = RootTable::<Stage2, _>::new(IdTranslation::new(), level, Stage2);
    let mut map = |range: Range<u64>, attributes| {
        let range = region(&range);
        let address = PhysicalAddress(range.start().0);
        guest.map_range(&range, address, attributes, Constraints::empty())
    };
    let mut edges: Vec<Range<u64>> = holes.to_vec();
    edges.push(monitor.clone());
    let mut at = 0;
    let end = DEVICE_SPACE.min(1 << bits);
    // From edge to edge: RAM, hole or device, whatever begins next.
    while at < end {
        let next = |from: u64| {
            machine
                .ram
                .iter()
                .chain(&edges)
                .flat_map(|range| [range.start, range.end])
                .filter(|&edge| edge > from)
                .min()
                .map_or(end, |edge| edge.min(end))
        };
        let to = next(at);
        if !edges.iter().any(|hole| hole.contains(&at)) {
            let is_ram = machine.ram.iter().any(|ram| ram.contains(&at));
            map(at..to, if is_ram { GUEST_NORMAL } else { GUEST_DEVICE })?;
        }
        at = to;
    }
    let vttbr_el2 = guest.to_physical().0 as u64;
    mem::forget(guest);

    let start_level = if level == 0 { 2_u64 } else { 1 };
    Ok(Translation {
        mair_el2: MAIR,
        tcr_el2: 1 << 31 | 1 << 23 | physical << 16 | WALK | 25,
        ttbr0_el2,
        // RES1 bits, caches and MMU on; no alignment checks beyond the architecture's.
        sctlr_el2: 0x30c5_0830 | 1 << 12 | 1 << 2 | 1,
        vtcr_el2: 1 << 31 | physical << 16 | WALK | start_level << 6 | (64 - bits),
        vttbr_el2,
    })
}

fn region(range: &Range<u64>) -> MemoryRegion {
    MemoryRegion::new(range.start as usize, range.end as usize)
}

impl Translation {
    /// Switches this CPU's EL2 MMU on.
    pub(crate) fn enable(&self) {
        // SAFETY: the tables map the running code, its data and its devices to themselves.
        unsafe {
            write_sysreg!("mair_el2", self.mair_el2);
            write_sysreg!("tcr_el2", self.tcr_el2);
            write_sysreg!("ttbr0_el2", self.ttbr0_el2);
            core::arch::asm!("isb", "tlbi alle2", "dsb nsh", "isb", options(nostack));
            write_sysreg!("sctlr_el2", self.sctlr_el2);
        }
        isb();
    }

    /// Puts the guest's stage 2 in place on this CPU.
    pub(crate) fn enable_stage_2(&self) {
        // SAFETY: the guest reaches only what `build` mapped.
        unsafe {
            write_sysreg!("vtcr_el2", self.vtcr_el2);
            write_sysreg!("vttbr_el2", self.vttbr_el2);
            core::arch::asm!("isb", "tlbi vmalls12e1", "dsb nsh", "isb", options(nostack));
        }
    }
}

/// Makes the caches forget `range`, which this CPU has written with its MMU off, past them: a line that was
/// there before would hide what was written once the MMU is on (Linux, Documentation/arch/arm64/booting.rst:
/// the bootloader has cleaned the image, so that no line is dirty).
pub(crate) fn forget_cached(range: &Range<u64>) {
    // CTR_EL0.DminLine: log2 of the words in the smallest line.
    let line = 4_u64 << (read_sysreg!("ctr_el0") >> 16 & 0xf);
    let mut at = range.start & !(line - 1);
    while at < range.end {
        // SAFETY: no line of the range is dirty, so memory keeps its value.
        unsafe {
            core::arch::asm!("dc ivac, {}", in(reg) at, options(nostack));
        }
        at += line;
    }
    // SAFETY: a barrier only orders.
    unsafe {
        core::arch::asm!("dsb sy", options(nostack));
    }
}

/// Writes `range` back from the caches, for who reads it with its caches off.
pub(crate) fn clean_to_memory(range: Range<u64>) {
    const LINE: u64 = 16;
    let mut at = range.start & !(LINE - 1);
    while at < range.end {
        // SAFETY: cleaning a cache line changes no value.
        unsafe {
            core::arch::asm!("dc civac, {}", in(reg) at, options(nostack));
        }
        at += LINE;
    }
    // SAFETY: a barrier only orders.
    unsafe {
        core::arch::asm!("dsb sy", options(nostack));
    }
}
