//! GICv3: the physical CPU interface at EL2, and the list registers.
//!
//! UNSAFETY: writes system registers, distributor and redistributor registers.

use core::{
    ops::RangeInclusive,
    sync::atomic::Ordering::{Relaxed, SeqCst},
};

use vpmu_monitor::{
    boot::words::Interrupts,
    regs::{IccCtlrEl1, IccSreEl2, IchHcrEl2, IdAa64pfr0El1},
    world::{
        distributor,
        offer::Sharing,
        redistributor::ISPENDR0,
        second::registers::ICC_SRE,
        vgic::{CpuInterface, Interrupt, Limit, ListRegisters, Place, Source},
    },
};

use super::{
    cpu::{Cpu, Monitor, cpus},
    mmio::{read_device, write_device},
    sysreg::{isb, numbered_sysreg, read_sysreg, write_sysreg},
};

/// INTIDs that say that there is nothing to acknowledge.
const SPECIAL: RangeInclusive<u32> = 1020..=1023;

/// Priority of the monitor's own interrupts, which no priority mask keeps out.
pub(crate) const OWN_PRIORITY: u8 = 0;

/// Opens this CPU's interface for the monitor: every priority, end-of-interrupt split into priority drop and
/// deactivation, the guest's virtual interface on. Where interrupts are [`Interrupts::Direct`] the interface is
/// the guest's, as after reset.
pub(crate) fn init_cpu_interface(monitor: &Monitor) {
    let (mask, control, enabled, virtual_interface) = match monitor.settings.interrupts {
        Interrupts::Virtual => (0xff_u64, IccCtlrEl1::EOIMODE, 1_u64, IchHcrEl2::EN),
        Interrupts::Direct => (0, IccCtlrEl1::empty(), 0, IchHcrEl2::empty()),
    };
    // SAFETY: interrupts are masked at EL2, and the guest is not running yet.
    unsafe {
        // With Enable, EL1's accesses to ICC_SRE_EL1 do not trap.
        write_sysreg!("icc_sre_el2", IccSreEl2::ENABLE.bits() | ICC_SRE);
        isb();
        if monitor.sharing() == Sharing::Two {
            write_sysreg!("icc_sre_el1", ICC_SRE);
            isb();
            write_sysreg!("icc_sre_el2", ICC_SRE);
        }
        write_sysreg!("icc_pmr_el1", mask);
        write_sysreg!("icc_bpr1_el1", 0_u64);
        write_sysreg!("icc_ctlr_el1", control.bits());
        if owns_group0() {
            write_sysreg!("icc_igrpen0_el1", enabled);
        }
        write_sysreg!("icc_igrpen1_el1", enabled);
        write_sysreg!("ich_vmcr_el2", 0_u64);
        write_sysreg!("ich_hcr_el2", virtual_interface.bits());
        for n in 0..PhysicalInterface.count() {
            PhysicalInterface.write(n, 0);
        }
    }
    isb();
}

/// Whether group 0 is the monitor's. With an EL3, group 0 is the firmware's: SCR_EL3.FIQ sends it there,
/// and an access to its registers from EL2 as well.
pub(crate) fn owns_group0() -> bool {
    read_sysreg!("id_aa64pfr0_el1") >> IdAa64pfr0El1::EL3_SHIFT & 0xf == 0
}

/// An acknowledged physical interrupt.
pub(crate) struct Acknowledged(pub(crate) Interrupt);

/// Takes the most urgent pending interrupt of the group; `None` when there is none.
pub(crate) fn acknowledge(group1: bool) -> Option<Acknowledged> {
    let intid = numbered_sysreg!(read "icc_iar", u8::from(group1), "_el1"; 0 1) as u32;
    (!SPECIAL.contains(&intid)).then(|| {
        Acknowledged(Interrupt {
            intid,
            priority: read_sysreg!("icc_rpr_el1") as u8,
            group1,
            source: Source::Hardware,
        })
    })
}

/// The most urgent interrupt of the group that is pending, whatever the priority mask says.
pub(crate) fn highest_pending(group1: bool) -> Option<u32> {
    let intid = numbered_sysreg!(read "icc_hppir", u8::from(group1), "_el1"; 0 1) as u32;
    (!SPECIAL.contains(&intid)).then_some(intid)
}

impl Acknowledged {
    /// Lets further interrupts in, while this one stays active: the guest deactivates it.
    pub(crate) fn drop_priority(&self) {
        let intid = u64::from(self.0.intid);
        // SAFETY: ends an interrupt that this CPU has acknowledged.
        unsafe { numbered_sysreg!(write "icc_eoir", u8::from(self.0.group1), "_el1", intid; 0 1) }
    }

    /// Ends the interrupt altogether.
    pub(crate) fn finish(&self) {
        self.drop_priority();
        deactivate(self.0.intid);
    }
}

pub(crate) fn deactivate(intid: u32) {
    // SAFETY: ends an interrupt that this CPU has acknowledged.
    unsafe {
        write_sysreg!("icc_dir_el1", u64::from(intid));
    }
}

/// The smallest priority mask that lets [`OWN_PRIORITY`] in. A machine has 4 to 8 bits of priority, and the
/// low bits of the mask that it lacks read as zero.
pub(crate) fn least_mask() -> u8 {
    let mask = read_icc_pmr();
    // SAFETY: a priority mask loses no interrupt, and EL2 takes none meanwhile.
    let bits = unsafe {
        write_sysreg!("icc_pmr_el1", 0xff_u64);
        let bits = read_icc_pmr();
        write_sysreg!("icc_pmr_el1", mask);
        bits
    };
    1 << bits.trailing_zeros().min(7)
}

fn read_icc_pmr() -> u8 {
    read_sysreg!("icc_pmr_el1") as u8
}

/// Performs the guest's write of ICC_SGI1R_EL1 (op2 = 5), ICC_ASGI1R_EL1 (6) or ICC_SGI0R_EL1 (7).
pub(crate) fn send_sgi(op2: u8, value: u64) {
    // SAFETY: the guest owns every CPU; an SGI reaches only them.
    unsafe {
        match op2 {
            5 => write_sysreg!("icc_sgi1r_el1", value),
            6 => write_sysreg!("icc_asgi1r_el1", value),
            _ => write_sysreg!("icc_sgi0r_el1", value),
        }
    }
    isb();
}

/// Has the distributor send interrupts of group 1, whether or not the guest ever says so, where the monitor needs its own.
pub(crate) fn enable_group1(monitor: &Monitor) {
    if !monitor.keeps_group1() {
        return;
    }
    let distributor = monitor.machine.distributor.start;
    let control = read_device(distributor, 4);
    if let Some(control) = distributor::write(0, 4, control, distributor::CTLR_GROUP1) {
        write_device(distributor, 4, control);
    }
}

/// Has every other CPU that is on leave its guest: the maintenance interrupt, which is the monitor's, becomes pending there.
pub(crate) fn call_others(monitor: &Monitor) {
    // SAFETY: a barrier: what has been written before is seen by whoever takes the interrupt.
    unsafe { core::arch::asm!("dsb ishst", options(nostack)) }
    let this = Cpu::number();
    let others = cpus().iter().enumerate().filter(|&(n, _)| n != this);
    for (number, _) in others.filter(|(_, cpu)| cpu.on.load(SeqCst)) {
        let frame = monitor.redistributor(number).0.sgi_frame();
        let bit = 1 << (monitor.machine.maintenance_intid & 31);
        write_device(frame + ISPENDR0, 4, bit);
    }
}

/// The interrupt interface of the CPU this runs on.
pub(crate) struct PhysicalInterface;

impl ListRegisters for PhysicalInterface {
    fn count(&self) -> usize {
        (read_sysreg!("ich_vtr_el2") & 0x1f) as usize + 1
    }

    fn read(&self, n: usize) -> u64 {
        numbered_sysreg!(read "ich_lr", n, "_el2"; 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    }

    fn write(&mut self, n: usize, value: u64) {
        // SAFETY: list registers only say which interrupts the guest has.
        unsafe {
            numbered_sysreg!(write "ich_lr", n, "_el2", value; 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
        }
    }
}

impl CpuInterface for PhysicalInterface {
    fn empty(&self) -> u32 {
        let existing = (1_u32 << self.count()) - 1;
        read_sysreg!("ich_elrsr_el2") as u32 & existing
    }

    fn ended(&self) -> u32 {
        read_sysreg!("ich_eisr_el2") as u32
    }

    fn admit(&mut self, limit: Limit) {
        let (mask, notice) = match limit {
            Limit::None => (0xff, IchHcrEl2::empty()),
            Limit::MoreUrgentThan(priority) => (priority.max(least_mask()), IchHcrEl2::NPIE),
            Limit::Own => (least_mask(), IchHcrEl2::UIE),
        };
        // SAFETY: a priority mask loses no interrupt, and the rest only says when the maintenance
        // interrupt is raised.
        unsafe {
            write_sysreg!("icc_pmr_el1", mask);
            write_sysreg!("ich_hcr_el2", (IchHcrEl2::EN | notice).bits());
        }
    }

    fn give_back(&mut self, interrupt: Interrupt) {
        let Some(monitor) = Monitor::installed() else {
            return;
        };
        let Interrupt { intid, source, .. } = interrupt;
        // A computed line is shown again later.
        if source == Source::Line {
            return;
        }
        let cpu = Cpu::this();
        if source == Source::Hardware && monitor.redistributor(Cpu::number()).1.owns(intid) {
            // It stays active. Pending, as urgent as the monitor's, it would pass every mask.
            cpu.pmi_waits.store(true, Relaxed);
            return;
        }
        let place = Place::of(intid);
        let frame = monitor.frame_of(&place);
        let priority = least_mask();
        if interrupt.priority < priority {
            // At the monitor's own priority it would pass every mask and come back at once, for ever.
            write_device(frame + place.priority, 1, priority.into());
        }
        let (word, bit) = place.pending;
        write_device(frame + word, 4, 1 << bit);
        if source == Source::Hardware {
            deactivate(intid);
        }
    }
}
