//! The two guests of the shared CPU, and the way from one to the other.
//!
//! UNSAFETY: writes the interrupt interface of EL2.

use vpmu::arm::partition::Residence;
use vpmu_el2::PhysicalPmu;
use vpmu_monitor::{
    regs::IchHcrEl2,
    world::{
        guest_pmu::{GuestPmu, Pmi},
        second::{
            gic::VirtualGic,
            scheduler::{Scheduler, Who, serve_interrupts},
            statistics::Figure,
        },
        statistics::Kind,
        vgic::{CpuInterface, Place},
    },
};

use super::{
    super::{
        cpu::{Cpu, Local, Monitor},
        el2::{apply_traps, follow_borrowing},
        figures::SECOND,
        frame::Frame,
        gic::{self, PhysicalInterface, highest_pending, least_mask},
        irq::{show_line, take_pmi},
        mmio::{read_device, write_device},
        sysreg::{isb, read_sysreg, write_sysreg},
    },
    context::Context,
    private::{Private, PrivateInterrupts},
};

/// Two guests on one CPU.
pub(super) struct Pair {
    pub(super) monitor: &'static Monitor,
    /// The CPU that they share.
    pub(super) cpu: &'static Cpu,
    pub(super) scheduler: Scheduler,
    /// By [`Who::index`]; stale for the guest that is in the CPU.
    pub(super) contexts: [Context; 2],
    /// The PMU of the guest that is not in the CPU.
    pub(super) other_pmu: Option<GuestPmu>,
    pub(super) gic: VirtualGic,
    pub(super) interrupts: PrivateInterrupts,
    /// The first guest's, while the second is in the CPU.
    pub(super) private: Private,
    /// The physical timer of EL2, which ends slices.
    pub(super) alarm_intid: u32,
}

impl Pair {
    /// Takes the second guest's interrupts back from the list registers.
    pub(super) fn leave_second(&mut self) {
        let control = IchHcrEl2::from_bits_retain(read_sysreg!("ich_hcr_el2"));
        let ended = (control.bits() >> IchHcrEl2::EOICOUNT_SHIFT & IchHcrEl2::EOICOUNT_MASK) as u32;
        self.gic.exit(ended, &mut PhysicalInterface);
        write_interface_control(IchHcrEl2::EN);
    }

    /// Gives the second guest its interrupts, and admits those that may interrupt it.
    pub(super) fn enter_second(&mut self, local: &Local) {
        let line = local.pmu.as_ref().and_then(GuestPmu::line);
        if let Some((line, intid)) = line.zip(self.pmi()) {
            self.gic.set_line(intid, line);
        }
        let released = self.gic.take_released(0);
        if released != 0 {
            self.interrupts.deactivate(released);
        }
        if let Some(spi) = self.monitor.kept_spi
            && self.gic.take_released(spi.intid() as usize / 32) != 0
        {
            gic::deactivate(spi.intid());
        }
        let left = self.gic.enter(&mut PhysicalInterface);
        let mut control = IchHcrEl2::EN;
        control.set(IchHcrEl2::UIE, left.pending);
        control.set(IchHcrEl2::LRENPIE, left.active);
        write_interface_control(control);
        self.admit();
    }

    /// While the second guest is in the CPU, the first guest's interrupts come in only if it waits for one.
    pub(super) fn admit(&self) {
        if self.scheduler.current() == Who::First {
            return;
        }
        let waits = self.scheduler.waits(Who::First);
        let mask = if waits { 0xff } else { least_mask() };
        // SAFETY: a priority mask loses no interrupt.
        unsafe { write_sysreg!("icc_pmr_el1", u64::from(mask)) }
        isb();
    }

    /// Serves physical interrupts while the second guest is in the CPU. Those of the first guest stay pending, and wake it.
    pub(super) fn interrupts_of_second(
        &mut self,
        frame: &Frame,
        group1: bool,
        local: &mut Local,
    ) -> Kind {
        let mut kind = Kind::Other;
        let some_left = serve_interrupts(|| {
            let Some(intid) = highest_pending(group1) else {
                return false;
            };
            if !self.is_of_second(intid) {
                kind = Kind::IrqOther;
                self.scheduler.wake(Who::First);
                return self.keep_back(intid);
            }
            let Some(irq) = gic::acknowledge(group1) else {
                return false;
            };
            // A more urgent one may have come meanwhile.
            kind = self.serve_second(&irq, frame, local);
            true
        });
        if some_left {
            self.scheduler.end_turn();
        }
        kind
    }

    /// Keeps the first guest's interrupt `intid` pending until that guest is in the CPU. Returns whether there is more to look
    /// at: its priority was the monitor's own, which passes any mask, and is the next lower now.
    fn keep_back(&self, intid: u32) -> bool {
        let place = Place::of(intid);
        let frame = self.monitor.frame_of(&place);
        let least = least_mask();
        // SAFETY: a priority mask loses no interrupt.
        unsafe { write_sysreg!("icc_pmr_el1", u64::from(least)) }
        isb();
        if read_device(frame + place.priority, 1) >= u64::from(least) {
            return false;
        }
        write_device(frame + place.priority, 1, least.into());
        true
    }

    /// Serves an acknowledged interrupt while the second guest is in the CPU.
    fn serve_second(&mut self, irq: &gic::Acknowledged, frame: &Frame, local: &mut Local) -> Kind {
        let intid = irq.0.intid;
        if Some(intid) == self.pmi()
            && let Some((pmi, kind)) = take_pmi(local, frame)
        {
            if pmi == Pmi::Physical {
                irq.drop_priority();
                self.gic.hold(intid);
                SECOND.pmi();
            } else {
                irq.finish();
            }
            return kind;
        }
        if self.is_private(intid) {
            irq.drop_priority();
            self.gic.hold(intid);
            return Kind::IrqTimer;
        }
        if let Some(kind) = self.serve_any(irq) {
            return kind;
        }
        if intid == self.monitor.machine.maintenance_intid {
            irq.finish();
            follow_borrowing(local, self.monitor);
            return Kind::IrqMaintenance;
        }
        give_back(irq);
        self.scheduler.wake(Who::First);
        Kind::IrqOther
    }

    /// Serves an acknowledged interrupt that is the same whichever guest is in the CPU; `None`: this is none.
    pub(super) fn serve_any(&mut self, irq: &gic::Acknowledged) -> Option<Kind> {
        let intid = irq.0.intid;
        if intid == self.alarm_intid {
            set_alarm(None);
            irq.finish();
            return Some(Kind::IrqSlice);
        }
        if self.is_serial(intid) {
            // Active until the second guest ends it.
            irq.drop_priority();
            self.gic.hold(intid);
            self.scheduler.wake(Who::Second);
            return Some(Kind::IrqOther);
        }
        None
    }

    fn is_serial(&self, intid: u32) -> bool {
        (self.monitor.kept_spi).is_some_and(|spi| spi.intid() == intid)
    }

    /// Both guests wait, and a physical interrupt has come: wakes the guest that it is for, which takes it.
    pub(super) fn find_interrupts(&mut self) {
        let current = self.scheduler.current();
        // Where group 0 is EL3's, a read of its registers traps there.
        let group0 = || gic::owns_group0().then(|| highest_pending(false)).flatten();
        match highest_pending(true).or_else(group0) {
            Some(intid) if intid == self.alarm_intid || self.is_serial(intid) => {
                // A more urgent one may have come meanwhile: it is found again where it belongs.
                if let Some(irq) = gic::acknowledge(true)
                    && self.serve_any(&irq).is_none()
                {
                    give_back(&irq);
                }
            }
            Some(intid) if current == Who::Second && !self.is_of_second(intid) => {
                self.scheduler.wake(Who::First);
            }
            _ => self.scheduler.wake(current),
        }
    }

    /// Whether a physical interrupt is served while the second guest is in the CPU: its own, and the monitor's.
    fn is_of_second(&self, intid: u32) -> bool {
        self.is_private(intid)
            || intid == self.alarm_intid
            || self.is_serial(intid)
            || intid == self.monitor.machine.maintenance_intid
            || Some(intid) == self.pmi()
    }

    /// The interrupt of the CPU's PMU.
    fn pmi(&self) -> Option<u32> {
        self.monitor.pmu_intid(Cpu::number())
    }

    /// Whether the interrupt is of whichever guest is in the CPU.
    fn is_private(&self, intid: u32) -> bool {
        intid < 32 && self.interrupts.intids >> intid & 1 != 0
    }

    /// Takes one guest out of the CPU and puts the other one in.
    pub(super) fn switch(&mut self, frame: &mut Frame, local: &mut Local) {
        let to = self.scheduler.current();
        let from = to.other();
        self.contexts[from.index()].save(frame);
        self.put_pmu(from, local);
        match from {
            Who::First => self.private = self.interrupts.save(),
            Who::Second => self.interrupts.clear(),
        }
        core::mem::swap(&mut local.pmu, &mut self.other_pmu);
        local.is_second = to == Who::Second;
        match to {
            Who::First => self.interrupts.load(&self.private),
            Who::Second => self.interrupts.load_second(self.gic.held()),
        }
        self.contexts[to.index()].load(frame);
        self.load_pmu(local);
        // An overflow may have been found when its guest was put away.
        show_line(local, self.cpu, self.monitor);
        apply_traps(local, false);
        self.cpu.statistics.switched(Figure::Count, 1);
    }

    fn put_pmu(&mut self, from: Who, local: &mut Local) {
        let Some(pmu) = &mut local.pmu else { return };
        moved(pmu, Figure::Ended, |pmu| pmu.put(&mut PhysicalPmu));
        if pmu.wakes(&mut PhysicalPmu) {
            // Out of the hardware, the line cannot wake it.
            self.scheduler.wake(from);
        }
    }

    fn load_pmu(&mut self, local: &mut Local) {
        let left = self.other_pmu.as_ref();
        let Some(pmu) = &mut local.pmu else { return };
        // The counters may have been borrowed or given back while the other guest was in the CPU. Both have one
        // configuration, so what that one's PMU could do this one's can.
        let kept = left.map_or(pmu.kept(), GuestPmu::kept);
        let taken = (pmu.kept() != kept).then(|| pmu.replan(kept)).flatten();
        moved(pmu, Figure::Began, |pmu| pmu.load(left, &mut PhysicalPmu));
        if let Some(taken) = taken {
            let lost = pmu.lost(taken, &mut PhysicalPmu);
            self.cpu.statistics.lost(lost);
        }
    }
}

/// Makes an acknowledged interrupt pending again.
fn give_back(irq: &gic::Acknowledged) {
    irq.drop_priority();
    PhysicalInterface.give_back(irq.0);
}

/// Has `work` put `pmu` away or load it, and counts what that cost; `figure` is of from where to where it goes.
fn moved(
    pmu: &mut GuestPmu,
    figure: fn(Residence, Residence) -> Figure,
    work: impl FnOnce(&mut GuestPmu),
) {
    let (was, accesses) = (pmu.residence(), pmu.switch_accesses);
    let instructions = measured(pmu, work);
    let registers = pmu.switch_accesses - accesses;
    let statistics = &Cpu::this().statistics;
    statistics.switched(Figure::Instructions, instructions);
    statistics.switched(Figure::Registers, registers);
    if let Some((was, is)) = was.zip(pmu.residence()) {
        statistics.switched(figure(was, is), 1);
    }
}

/// Returns how many instructions `work` took, where a host counter counts the monitor's; the counting's own are taken off.
fn measured(pmu: &mut GuestPmu, work: impl FnOnce(&mut GuestPmu)) -> u64 {
    let count = |pmu: &GuestPmu| pmu.own_instructions(&mut PhysicalPmu).unwrap_or(0);
    let (before, begun) = (count(pmu), count(pmu));
    work(pmu);
    let counting = begun.wrapping_sub(before);
    let took = count(pmu).wrapping_sub(begun);
    took.saturating_sub(counting)
}

fn write_interface_control(control: IchHcrEl2) {
    // SAFETY: switches the virtual interface on, and asks for notices.
    unsafe { write_sysreg!("ich_hcr_el2", control.bits()) }
    isb();
}

/// Has EL2's timer interrupt at a time.
pub(super) fn set_alarm(at: Option<u64>) {
    // SAFETY: the timer is EL2's own.
    unsafe {
        match at {
            Some(at) => {
                write_sysreg!("cnthp_cval_el2", at);
                write_sysreg!("cnthp_ctl_el2", 1_u64);
            }
            None => write_sysreg!("cnthp_ctl_el2", 0_u64),
        }
    }
    isb();
}
