//! GICv3 (Arm IHI 0069): as much as the tests need.

// UNSAFETY: the CPU's interrupt interface is system registers.
#![expect(unsafe_code, reason = "system registers")]

use core::arch::asm;

use crate::machine::Machine;
use crate::mmio::{read32, write8, write32, write64};
use crate::{loops, percpu, pmu, uart};

/// INTIDs from here on are special; 1023 means "none".
const SPECIAL: u32 = 1020;
/// A device that is never quiet is masked after this many interrupts.
const STORM: u32 = 1000;

/// Priority of everything unless a test says otherwise.
pub(crate) const PRIORITY: u8 = 0xa0;

/// The distributor and this CPU's redistributor.
#[derive(Clone, Copy)]
pub(crate) struct Gic {
    distributor: u64,
    /// The SGI and PPI frame.
    private: u64,
}

macro_rules! read_icc {
    ($name:literal) => {{
        let value: u64;
        // SAFETY: reading this register does nothing but what it is for.
        unsafe { asm!(concat!("mrs {}, ", $name), out(reg) value, options(nostack)) };
        value
    }};
}

macro_rules! write_icc {
    ($name:literal, $value:expr) => {{
        let value: u64 = $value;
        // SAFETY: the interrupt interface belongs to the tests.
        unsafe { asm!(concat!("msr ", $name, ", {}"), "isb", in(reg) value, options(nostack)) };
    }};
}

const GICD_CTLR: u64 = 0x0;
const GICR_WAKER: u64 = 0x14;
const GICR_TYPER: u64 = 0x8;
const IGROUPR: u64 = 0x80;
const ISENABLER: u64 = 0x100;
const ICENABLER: u64 = 0x180;
const ISPENDR: u64 = 0x200;
const ICPENDR: u64 = 0x280;
const ISACTIVER: u64 = 0x300;
const IPRIORITYR: u64 = 0x400;
const ICFGR: u64 = 0xc00;
const GICD_IROUTER: u64 = 0x6000;

impl Gic {
    /// Sets the interrupt controller up for this CPU. Everything is disabled,
    /// and nothing is pending except the interrupts that devices hold.
    pub(crate) fn for_this_cpu(machine: &Machine<'_>) -> Self {
        let distributor = machine.distributor;
        // This enables affinity routing and both groups, with whichever of the
        // bits this security state has.
        write32(distributor + GICD_CTLR, 0x10);
        write32(distributor + GICD_CTLR, 0x13);
        let frame = redistributor(machine.redistributors.start);
        write32(frame + GICR_WAKER, read32(frame + GICR_WAKER) & !2);
        while read32(frame + GICR_WAKER) & 4 != 0 {}
        let gic = Self {
            distributor,
            private: frame + 0x1_0000,
        };
        write32(gic.private + IGROUPR, !0);
        write32(gic.private + ICENABLER, !0);
        write32(gic.private + ICPENDR, !0);
        for intid in 0..32 {
            gic.set_priority(intid, PRIORITY);
        }
        write_icc!("s3_0_c12_c12_5", read_icc!("s3_0_c12_c12_5") | 1); // ICC_SRE_EL1
        write_icc!("s3_0_c12_c12_3", 0); // ICC_BPR1_EL1
        write_icc!("s3_0_c12_c12_4", 0); // ICC_CTLR_EL1
        write_icc!("s3_0_c4_c6_0", 0xff); // ICC_PMR_EL1
        write_icc!("s3_0_c12_c12_7", 1); // ICC_IGRPEN1_EL1
        gic
    }

    /// Returns the SGI frame of this CPU's redistributor.
    pub(crate) fn private(&self) -> u64 {
        self.private
    }

    /// Reads and writes a word of the SGI frame.
    pub(crate) fn change_private(&self, register: u64, change: impl FnOnce(u32) -> u32) {
        let address = self.private + register;
        write32(address, change(read32(address)));
        self.settle();
    }

    fn frame(&self, intid: u32) -> u64 {
        if intid < 32 {
            self.private
        } else {
            self.distributor
        }
    }

    fn bit(&self, register: u64, intid: u32) -> (u64, u32) {
        let word = u64::from(intid / 32) * 4;
        (self.frame(intid) + register + word, 1 << (intid % 32))
    }

    /// Lets `intid` through.
    pub(crate) fn enable(&self, intid: u32) {
        let (address, bit) = self.bit(ISENABLER, intid);
        write32(address, bit);
        self.settle();
    }

    /// Keeps `intid` back.
    pub(crate) fn disable(&self, intid: u32) {
        let (address, bit) = self.bit(ICENABLER, intid);
        write32(address, bit);
        self.settle();
    }

    /// Makes `intid` pending.
    pub(crate) fn set_pending(&self, intid: u32) {
        let (address, bit) = self.bit(ISPENDR, intid);
        write32(address, bit);
    }

    /// Makes `intid` no longer pending.
    pub(crate) fn clear_pending(&self, intid: u32) {
        let (address, bit) = self.bit(ICPENDR, intid);
        write32(address, bit);
        self.settle();
    }

    /// Returns whether the controller calls `intid` pending.
    pub(crate) fn is_pending(&self, intid: u32) -> bool {
        let (address, bit) = self.bit(ISPENDR, intid);
        read32(address) & bit != 0
    }

    /// Returns whether the controller calls `intid` active.
    pub(crate) fn is_active(&self, intid: u32) -> bool {
        let (address, bit) = self.bit(ISACTIVER, intid);
        read32(address) & bit != 0
    }

    /// Sets the priority; lower is more urgent.
    pub(crate) fn set_priority(&self, intid: u32, priority: u8) {
        let address = self.frame(intid) + IPRIORITYR + u64::from(intid);
        write8(address, priority);
    }

    /// Makes SPI `intid` edge-triggered, of group 1, and routes it here.
    pub(crate) fn route_here(&self, intid: u32) {
        let (group, bit) = self.bit(IGROUPR, intid);
        write32(group, read32(group) | bit);
        let config = self.distributor + ICFGR + u64::from(intid / 16) * 4;
        write32(config, read32(config) | 2 << (intid % 16 * 2));
        self.set_priority(intid, PRIORITY);
        let route = self.distributor + GICD_IROUTER + u64::from(intid) * 8;
        write64(route, affinity());
    }

    /// Makes SPI `intid` a level.
    pub(crate) fn follow_level(&self, intid: u32) {
        let config = self.distributor + ICFGR + u64::from(intid / 16) * 4;
        write32(config, read32(config) & !(3 << (intid % 16 * 2)));
    }

    /// Waits until the distributor or redistributor has taken the last write.
    fn settle(&self) {
        const WRITE_PENDING: u32 = 1 << 31;
        while read32(self.distributor + GICD_CTLR) & WRITE_PENDING != 0 {}
        // GICR_CTLR.RWP
        while read32(self.private - 0x1_0000) & 1 << 3 != 0 {}
        loops::spin(100);
    }
}

/// Returns this CPU's redistributor among those from `base` on.
fn redistributor(base: u64) -> u64 {
    let this = affinity();
    let this = this >> 32 << 24 | this & 0xff_ffff;
    let mut frame = base;
    loop {
        let kind = read32(frame + GICR_TYPER);
        if u64::from(read32(frame + GICR_TYPER + 4)) == this {
            return frame;
        }
        assert!(kind & 1 << 4 == 0, "no redistributor of this CPU");
        // There are two frames of 64 KiB, or four with virtual LPIs.
        frame += if kind & 1 << 1 != 0 {
            0x4_0000
        } else {
            0x2_0000
        };
    }
}

/// Returns this CPU's affinity, as MPIDR_EL1 and GICD_IROUTER have it.
pub(crate) fn affinity() -> u64 {
    read_icc!("mpidr_el1") & 0xff_00ff_ffff
}

/// Sends SGI `intid` to the CPU with affinity `target`.
pub(crate) fn send(intid: u32, target: u64) {
    let [aff0, aff1, aff2, _, aff3, ..] = target.to_le_bytes().map(u64::from);
    let range = aff0 >> 4;
    write_icc!(
        "s3_0_c12_c11_5",
        aff3 << 48
            | range << 44
            | aff2 << 32
            | u64::from(intid) << 24
            | aff1 << 16
            | 1 << (aff0 & 15)
    );
}

/// Sends SGI `intid` to all CPUs but this one.
pub(crate) fn send_to_others(intid: u32) {
    write_icc!("s3_0_c12_c11_5", 1 << 40 | u64::from(intid) << 24);
}

/// Returns whether an interrupt waits for this CPU to unmask.
pub(crate) fn interrupt_waits() -> bool {
    read_icc!("isr_el1") & 1 << 7 != 0
}

/// Returns the interrupt that would be taken next; 1023: none.
pub(crate) fn next_interrupt() -> u64 {
    read_icc!("s3_0_c12_c12_2") & 0xff_ffff
}

/// Lets only priorities above (below in number) `mask` through.
pub(crate) fn set_priority_mask(mask: u8) {
    write_icc!("s3_0_c4_c6_0", mask.into());
}

/// Ends interrupts in two steps (EOIR, then DIR), or in one.
pub(crate) fn set_split_end(split: bool) {
    percpu::this().set_split_end(split);
    write_icc!("s3_0_c12_c12_4", u64::from(split) << 1);
}

/// Returns the generic timer's counts per second.
pub(crate) fn timer_frequency() -> u64 {
    read_icc!("cntfrq_el0")
}

/// Returns the virtual counter.
pub(crate) fn now() -> u64 {
    read_icc!("cntvct_el0")
}

/// Makes the virtual timer fire `ticks` from now.
pub(crate) fn start_timer(ticks: u64) {
    // CNTV_TVAL_EL0 does not suffice, because it has 32 bits.
    write_icc!("cntv_cval_el0", now() + ticks);
    write_icc!("cntv_ctl_el0", 1);
}

/// Stops the virtual timer.
pub(crate) fn stop_timer() {
    write_icc!("cntv_ctl_el0", 0);
}

/// Returns whether the virtual timer has fired.
pub(crate) fn timer_fired() -> bool {
    read_icc!("cntv_ctl_el0") & 4 != 0
}

/// Halts until the timer has fired. An interrupt of a monitor's below may end WFI, too.
pub(crate) fn wait_for_timer() {
    while !timer_fired() {
        loops::wait_for_interrupt();
    }
}

/// Handles an interrupt. The vectors call this function.
pub(crate) extern "C" fn handle_interrupt() {
    let cpu = percpu::this();
    let intid = (read_icc!("s3_0_c12_c12_0") & 0xff_ffff) as u32; // ICC_IAR1_EL1
    let count = cpu.count(intid);
    if intid >= SPECIAL {
        assert!(count < STORM, "spurious interrupts without end");
        return;
    }
    // The handler quiets every device that holds a line.
    if Some(intid) == cpu.uart_interrupt() {
        uart::acknowledge();
    }
    if (16..32).contains(&intid) {
        pmu::handle_interrupt(cpu, count);
        if timer_fired() {
            stop_timer();
        }
    }
    assert!(count < STORM, "interrupt {intid} comes again and again");
    write_icc!("s3_0_c12_c12_1", intid.into()); // ICC_EOIR1_EL1
    if cpu.split_end() {
        write_icc!("s3_0_c12_c11_1", intid.into()); // ICC_DIR_EL1
    }
}
