//! The monitor's own address space and the guest's stage 2.
//!
//! Both map addresses to themselves. Stage 2 gives the guest everything but some holes: the
//! monitor's memory, what of the interrupt controller is filtered and the doorbell (whose accesses are
//! served), and the interrupt translation services. So a device's DMA addresses are the guest's own.
//!
//! UNSAFETY: writes the translation registers and switches the MMU on.

use core::{alloc::Layout, mem::ManuallyDrop, ops::Range, ptr, slice};

use aarch64_paging::{
    MapError,
    descriptor::{El23Attributes, PhysicalAddress, Stage2Attributes},
    idmap::{IdMap, IdTranslation},
    paging::{Constraints, El2, MemoryRegion, RootTable, Stage2},
};
use vpmu_monitor::{
    boot::{device_tree::Machine, home::without},
    regs::{CtrEl0, IdAa64mmfr0El1, MairEl2, SCTLR_EL2_RES1, SctlrEl2, TcrEl2, VtcrEl2, VttbrEl2},
};

use super::sysreg::{isb, read_sysreg, write_sysreg};

const NORMAL: El23Attributes = El23Attributes::VALID
    .union(El23Attributes::ATTRIBUTE_INDEX_0)
    .union(El23Attributes::INNER_SHAREABLE)
    .union(El23Attributes::USER_RES1)
    .union(El23Attributes::ACCESSED);
/// A page that is not there.
const NOTHING: El23Attributes = El23Attributes::empty();
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

/// `TCR_EL2` and `VTCR_EL2`: table walks are inner shareable (SH0), and cached, write-back with allocation (ORGN0, IRGN0). TG0 = 0
/// is the granule of 4 KiB.
const INNER_SHAREABLE: u8 = 0b11;
const WRITE_BACK: u8 = 0b01;

/// A table descriptor's kind, bits 1:0, and the address of the next table in it, with 4 KiB granules and 48 bits (Arm ARM DDI 0487,
/// D8.3).
const TABLE: u64 = 0b11;
const NEXT_TABLE: u64 = 0xffff_ffff_f000;

/// What a CPU's translation registers hold, the same on every CPU; the layout is known to `entry.s`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Translation {
    mair_el2: u64,
    tcr_el2: u64,
    ttbr0_el2: u64,
    sctlr_el2: u64,
    vtcr_el2: u64,
    vttbr_el2: u64,
}

/// How many bits a physical address has, and their encoding (ID_AA64MMFR0_EL1.PARange, TCR_EL2.PS). Both
/// translations reach as far.
fn reach() -> (u8, u8) {
    // Beyond 48 bits addresses need another table format.
    let range = read_sysreg!("id_aa64mmfr0_el1") >> IdAa64mmfr0El1::PARANGE_SHIFT;
    let encoding = (range & 0xf).min(5);
    ([32, 36, 40, 42, 44, 48][encoding as usize], encoding as u8)
}

/// The first address that is neither RAM nor device.
pub(crate) fn end(machine: &Machine) -> u64 {
    // Blocks of 1 GiB keep the tables small.
    machine.end.next_multiple_of(1 << 30).min(1 << reach().0)
}

/// Builds both translations. `holes` stay out of the guest's; `monitor` is the monitor's memory, of which `guards` stay out
/// of its own.
pub(crate) fn build(
    machine: &Machine,
    monitor: &Range<u64>,
    holes: &[Range<u64>],
    guards: impl Iterator<Item = Range<u64>>,
) -> Result<Translation, MapError> {
    let (bits, physical) = reach();
    let mut own = IdMap::<El2>::new(0, El2);
    for ram in &machine.ram {
        own.map_range(&region(ram), NORMAL)?;
    }
    for range in guards.chain(machine.unmapped.iter().cloned()) {
        own.map_range(&region(&range), NOTHING)?;
    }
    // The registers of any serial port are in one page.
    let consoles = machine.consoles.iter().map(|console| {
        let page = console.base & !0xfff;
        page..page + 0x1000
    });
    let controller = machine.redistributors.iter().chain([&machine.distributor]);
    for device in consoles.chain(controller.cloned()) {
        own.map_range(&region(&device), DEVICE)?;
    }
    let ttbr0_el2 = own.root_address().0 as u64;
    // The tables live as long as the machine.
    let _ = ManuallyDrop::new(own);

    let mut guest = RootTable::<Stage2, _>::new(IdTranslation::new(), 0, Stage2);
    let holes = [holes, slice::from_ref(monitor)].concat();
    for range in without(&(0..end(machine)), &holes) {
        let range = region(&range);
        let address = PhysicalAddress(range.start().0);
        // Devices, too: a guest's stage 1 makes them Device, and some of their memory Normal (Arm ARM DDI 0487, D8.6.4).
        guest.map_range(&range, address, GUEST_NORMAL, Constraints::empty())?;
    }
    let (vttbr_el2, start_level) = finish(guest, bits);
    // Attribute 0 is normal memory, write-back; attribute 1 is Device-nGnRE.
    let mair = MairEl2::empty().with_attr(0, 0xff).with_attr(1, 0x04);
    let tcr = TcrEl2::RES1
        .with_ps(physical)
        .with_sh0(INNER_SHAREABLE)
        .with_orgn0(WRITE_BACK)
        .with_irgn0(WRITE_BACK)
        .with_t0sz(64 - 48);
    // No alignment checks beyond the architecture's.
    let sctlr = SctlrEl2::I | SctlrEl2::C | SctlrEl2::M;
    let vtcr = VtcrEl2::RES1
        .with_ps(physical)
        .with_sh0(INNER_SHAREABLE)
        .with_orgn0(WRITE_BACK)
        .with_irgn0(WRITE_BACK)
        .with_sl0(start_level)
        .with_t0sz(64 - bits);
    Ok(Translation {
        mair_el2: mair.bits(),
        tcr_el2: tcr.bits(),
        ttbr0_el2,
        sctlr_el2: SCTLR_EL2_RES1 | sctlr.bits(),
        vtcr_el2: vtcr.bits(),
        vttbr_el2,
    })
}

/// Builds the stage 2 of a second guest, which has `memory` and the serial port at `serial`; returns its `VTTBR_EL2`.
pub(crate) fn build_second(memory: &Range<u64>, serial: u64) -> Result<u64, MapError> {
    const VMID: u64 = 1 << VttbrEl2::VMID_SHIFT;
    let page = serial & !0xfff;
    let mut guest = RootTable::<Stage2, _>::new(IdTranslation::new(), 0, Stage2);
    for (range, attributes) in [
        (memory.clone(), GUEST_NORMAL),
        (page..page + 0x1000, GUEST_DEVICE),
    ] {
        let range = region(&range);
        let address = PhysicalAddress(range.start().0);
        guest.map_range(&range, address, attributes, Constraints::empty())?;
    }
    Ok(finish(guest, reach().0).0 | VMID)
}

/// Keeps a stage 2 for as long as the machine lives; returns where a walk of `bits` bits starts, and SL0.
fn finish(guest: RootTable<Stage2, IdTranslation<Stage2Attributes>>, bits: u8) -> (u64, u8) {
    let root = guest.to_physical().0 as u64;
    let _ = ManuallyDrop::new(guest);
    // A walk may start at level 0 only with at least 44 bits (Arm ARM DDI 0487, D8.2.3): with fewer it starts
    // at tables of level 1, side by side.
    if bits >= 44 {
        (root, 2)
    } else {
        (side_by_side(root, 1 << bits.saturating_sub(39)), 1)
    }
}

/// Copies the first `count` tables that the table at `root` points to into one block; returns its address.
fn side_by_side(root: u64, count: usize) -> u64 {
    const ENTRIES: usize = 512;
    let layout = Layout::array::<[u64; ENTRIES]>(count)
        .and_then(|layout| layout.align_to(count * size_of::<[u64; ENTRIES]>()));
    let Ok(layout) = layout else { return root };
    // SAFETY: `root` and what it points to are tables of this module; the new block is as large as the layout.
    unsafe {
        let block = alloc::alloc::alloc_zeroed(layout).cast::<u64>();
        if block.is_null() {
            alloc::alloc::handle_alloc_error(layout);
        }
        for n in 0..count {
            let entry = *(root as *const u64).add(n);
            if entry & TABLE == TABLE {
                let table = (entry & NEXT_TABLE) as *const u64;
                ptr::copy_nonoverlapping(table, block.add(n * ENTRIES), ENTRIES);
            }
        }
        block as u64
    }
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
/// there before would hide what was written once the MMU is on. No line of it is dirty: whoever put the image
/// there has cleaned it (Linux, Documentation/arch/arm64/booting.rst).
pub(crate) fn forget_cached(range: &Range<u64>) {
    // SAFETY: no line of the range is dirty, so memory keeps its value.
    each_line(range, |at| unsafe {
        core::arch::asm!("dc ivac, {}", in(reg) at, options(nostack));
    });
}

/// Makes this CPU fetch instructions anew that were written since it last did.
pub(crate) fn forget_instructions() {
    // SAFETY: only costs time.
    unsafe {
        core::arch::asm!("dsb sy", "ic iallu", "dsb sy", "isb", options(nostack));
    }
}

/// Writes `range` back from the caches and forgets it there, for who reads it with its caches off.
pub(crate) fn clean_to_memory(range: Range<u64>) {
    // SAFETY: cleaning a cache line changes no value.
    each_line(&range, |at| unsafe {
        core::arch::asm!("dc civac, {}", in(reg) at, options(nostack));
    });
}

/// Does `operation` with an address in each cache line of `range`, and waits until all have ended.
fn each_line(range: &Range<u64>, operation: impl Fn(u64)) {
    // As a power of two of words.
    let line = 4_u64 << CtrEl0::from_bits_retain(read_sysreg!("ctr_el0")).dminline();
    let first = range.start & !(line - 1);
    (first..range.end)
        .step_by(line as usize)
        .for_each(operation);
    // SAFETY: a barrier only orders.
    unsafe {
        core::arch::asm!("dsb sy", options(nostack));
    }
}

/// Copies to where the guest will read with its caches off.
pub(crate) fn copy(from: u64, to: u64, len: u64) {
    // SAFETY: callers have checked both ranges to be RAM outside the monitor's own data.
    unsafe {
        ptr::copy(from as *const u8, to as *mut u8, len as usize);
    }
    clean_to_memory(to..to + len);
}
