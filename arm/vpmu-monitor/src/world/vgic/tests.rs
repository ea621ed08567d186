//! The list registers beside a small GIC: what is pending in it, what is active, and the priority mask.

use std::collections::{BTreeMap, BTreeSet};
use std::vec::Vec;

use super::*;

const REGISTERS: usize = 4;

struct Fake {
    lr: [u64; REGISTERS],
    limit: Limit,
    /// Pending in the GIC, with priority.
    pending: BTreeMap<u32, u8>,
    /// Active in the GIC.
    active: BTreeSet<u32>,
    vgic: Option<VirtualInterface>,
}

impl Fake {
    fn new() -> Self {
        Self {
            lr: [0; REGISTERS],
            limit: Limit::None,
            pending: BTreeMap::new(),
            active: BTreeSet::new(),
            vgic: Some(VirtualInterface::default()),
        }
    }

    fn vgic<T>(&mut self, call: impl FnOnce(&mut VirtualInterface, &mut Self) -> T) -> T {
        let mut vgic = self.vgic.take().unwrap();
        let result = call(&mut vgic, self);
        self.vgic = Some(vgic);
        result
    }

    fn inject(&mut self, interrupt: Interrupt) -> bool {
        self.vgic(|vgic, fake| vgic.inject(interrupt, fake))
    }

    fn set_line(&mut self, high: bool) -> bool {
        self.vgic(|vgic, fake| vgic.set_line(high, pmi(), fake))
    }

    fn refill(&mut self) {
        self.vgic(VirtualInterface::refill);
    }

    /// Takes every physical interrupt that the mask lets in, as the exit's loop does.
    fn take_physical(&mut self) {
        for _ in 0..10_000 {
            let Some((&intid, &priority)) = self
                .pending
                .iter()
                .filter(|(intid, _)| !self.active.contains(intid))
                .min_by_key(|&(_, priority)| priority)
            else {
                return;
            };
            let passes = match self.limit {
                Limit::None => true,
                Limit::MoreUrgentThan(limit) => priority < limit,
                Limit::Own => false,
            };
            if !passes {
                return;
            }
            self.pending.remove(&intid);
            self.active.insert(intid);
            self.inject(Interrupt {
                priority,
                ..device(intid)
            });
        }
        panic!("interrupts come in without end");
    }

    /// Exits until nothing more is to be done: physical interrupts, then the maintenance interrupt.
    fn run(&mut self) {
        self.take_physical();
        let pending = |lr: &u64| lr >> 62 == 1;
        let wanted = match self.limit {
            Limit::None => false,
            Limit::MoreUrgentThan(_) => !self.lr.iter().any(pending),
            Limit::Own => self.lr.iter().filter(|&&lr| lr != 0).count() <= 1,
        };
        if wanted || self.ended() != 0 {
            self.refill();
            self.take_physical();
        }
    }

    /// The guest takes the most urgent pending interrupt.
    fn acknowledge(&mut self) -> Option<u32> {
        let n = (0..REGISTERS)
            .filter(|&n| self.lr[n] & lr::PENDING != 0)
            .min_by_key(|&n| Interrupt::decode(self.lr[n]).priority)?;
        self.lr[n] = self.lr[n] & !lr::PENDING | lr::ACTIVE;
        Some(self.lr[n] as u32)
    }

    fn end(&mut self, intid: u32) -> bool {
        let n = (0..REGISTERS)
            .find(|&n| self.lr[n] as u32 == intid && self.lr[n] & lr::ACTIVE != 0)
            .unwrap();
        self.lr[n] &= !lr::ACTIVE;
        let hardware = self.lr[n] & lr::HW != 0;
        if hardware {
            self.active.remove(&intid);
        }
        let notice = !hardware && self.lr[n] & lr::EOI != 0;
        if self.lr[n] & lr::PENDING == 0 && !notice {
            self.lr[n] = 0;
        }
        notice
    }
}

impl ListRegisters for Fake {
    fn count(&self) -> usize {
        REGISTERS
    }
    fn read(&self, n: usize) -> u64 {
        self.lr[n]
    }
    fn write(&mut self, n: usize, value: u64) {
        self.lr[n] = value;
    }
}

impl CpuInterface for Fake {
    fn empty(&self) -> u32 {
        (0..REGISTERS)
            .filter(|&n| self.lr[n] == 0)
            .map(|n| 1 << n)
            .sum()
    }
    fn ended(&self) -> u32 {
        let ended = |lr: u64| lr >> 62 == 0 && lr & lr::EOI != 0;
        (0..REGISTERS)
            .filter(|&n| ended(self.lr[n]))
            .map(|n| 1 << n)
            .sum()
    }
    fn admit(&mut self, limit: Limit) {
        self.limit = limit;
    }
    fn give_back(&mut self, interrupt: Interrupt) {
        if interrupt.source != Source::Line {
            self.active.remove(&interrupt.intid);
            self.pending.insert(interrupt.intid, interrupt.priority);
        }
    }
}

fn sgi(intid: u32, priority: u8) -> Interrupt {
    Interrupt {
        intid,
        priority,
        group1: true,
        source: Source::Software,
    }
}

fn device(intid: u32) -> Interrupt {
    Interrupt {
        source: Source::Hardware,
        ..sgi(intid, 0xa0)
    }
}

fn pmi() -> Interrupt {
    Interrupt {
        source: Source::Line,
        ..sgi(23, 0xa0)
    }
}

#[test]
fn a_device_interrupt_carries_the_hardware_bit() {
    let mut fake = Fake::new();
    fake.inject(device(33));
    assert_eq!(fake.lr[0] & lr::HW, lr::HW);
    assert_eq!(fake.lr[0] >> lr::PINTID_SHIFT & lr::PINTID, 33);
    assert_eq!(fake.acknowledge(), Some(33));
    assert!(!fake.end(33));
}

/// Any number of interrupts, pending while the guest masks them, arrives: each once, the most urgent first.
#[test]
fn however_many_wait_all_arrive_once_and_in_order() {
    for count in [4, 5, 60, 64, 68, 90, 900] {
        for spread in [1, 7, 31] {
            let mut fake = Fake::new();
            // In an order that is neither of the priorities' nor of the numbers'.
            for n in 0..count {
                let intid = 32 + n * 7 % count;
                fake.pending.insert(intid, (intid % spread * 8) as u8 + 8);
                fake.run();
            }
            let mut taken = Vec::new();
            while let Some(intid) = fake.acknowledge() {
                taken.push(intid);
                fake.end(intid);
                fake.run();
            }
            assert!(
                taken.is_sorted_by_key(|intid| intid % spread),
                "{count} {spread}: {taken:?}"
            );
            taken.sort_unstable();
            taken.dedup();
            let distinct = (0..count).map(|n| n * 7 % count).collect::<BTreeSet<_>>();
            assert_eq!(taken.len(), distinct.len(), "{count} {spread}");
            assert!(fake.pending.is_empty() && fake.active.is_empty());
            assert_eq!(fake.limit, Limit::None);
        }
    }
}

#[test]
fn with_all_list_registers_being_handled_the_rest_wait_for_their_ends() {
    let mut fake = Fake::new();
    for intid in 32..36 {
        fake.pending.insert(intid, 0xa0);
        fake.run();
        fake.acknowledge();
    }
    fake.pending.insert(40, 0x10);
    fake.refill();
    fake.run();
    assert_eq!(fake.limit, Limit::Own);
    assert_eq!(fake.acknowledge(), None);
    for intid in 32..35 {
        fake.end(intid);
        fake.run();
    }
    assert_eq!(fake.acknowledge(), Some(40));
}

#[test]
fn an_sgi_sent_while_it_is_handled_comes_again() {
    let mut fake = Fake::new();
    fake.inject(sgi(3, 0xa0));
    fake.acknowledge();
    fake.inject(sgi(3, 0xa0));
    fake.end(3);
    assert_eq!(fake.acknowledge(), Some(3));
    fake.end(3);
    assert_eq!(fake.acknowledge(), None);
}

#[test]
fn a_line_that_stays_high_is_offered_again_after_the_end() {
    let mut fake = Fake::new();
    assert!(fake.set_line(true));
    assert!(!fake.set_line(true));
    assert_eq!(fake.acknowledge(), Some(23));
    assert!(
        fake.end(23),
        "the end of a line that is still high is noticed"
    );
    assert_eq!(fake.ended(), 1);
    fake.refill();
    assert_eq!(fake.ended(), 0, "and its notice taken back");
    assert!(fake.set_line(true));
    assert_eq!(fake.acknowledge(), Some(23));
    fake.set_line(false);
    assert!(!fake.end(23), "and one that fell costs no exit");
    assert_eq!(fake.acknowledge(), None);
}

#[test]
fn a_line_that_rises_again_while_it_is_handled_comes_again() {
    let mut fake = Fake::new();
    fake.set_line(true);
    fake.acknowledge();
    fake.set_line(false);
    fake.set_line(true);
    assert!(fake.end(23));
    fake.refill();
    assert!(fake.set_line(true));
}

#[test]
fn a_line_that_fell_is_withdrawn() {
    let mut fake = Fake::new();
    fake.set_line(true);
    fake.set_line(false);
    assert_eq!(fake.acknowledge(), None);
}

#[test]
fn a_line_that_finds_no_list_register_is_shown_after_the_maintenance_interrupt() {
    let mut fake = Fake::new();
    for intid in 32..40 {
        fake.pending.insert(intid, 0x20);
    }
    fake.run();
    assert!(!fake.set_line(true), "less urgent than all that is offered");
    let mut taken = Vec::new();
    while let Some(intid) = fake.acknowledge() {
        taken.push(intid);
        if intid == 23 {
            fake.set_line(false);
        }
        fake.end(intid);
        let limited = fake.limit != Limit::None;
        fake.run();
        if limited && fake.limit == Limit::None {
            fake.set_line(!taken.contains(&23));
        }
    }
    assert_eq!(taken.iter().filter(|&&intid| intid == 23).count(), 1);
    assert_eq!(taken.len(), 9, "{taken:?}");
}

#[test]
fn a_cpu_that_goes_off_leaves_nothing_behind() {
    let mut fake = Fake::new();
    for intid in 32..42 {
        fake.pending.insert(intid, 0xa0);
    }
    fake.run();
    fake.inject(sgi(5, 0x10));
    let handled = fake.acknowledge().unwrap();
    assert!(!fake.vgic(|vgic, fake| vgic.may_wait(fake)));
    fake.vgic(VirtualInterface::give_all_back);
    assert_eq!(fake.lr, [0; REGISTERS]);
    assert_eq!(fake.limit, Limit::None);
    assert!(fake.active.is_empty() && !fake.pending.contains_key(&handled));
    assert_eq!(
        fake.pending.len(),
        10,
        "all but the SGI that is being handled"
    );
    assert!(fake.vgic(|vgic, fake| vgic.may_wait(fake)));
}

/// Arm IHI 0069: GICR_ISPENDR0 0x200 and R1E 0x204, GICR_IPRIORITYR 0x400 and 0x420; GICD_ISPENDR 0x200, RnE 0x1600;
/// GICD_IPRIORITYR 0x400, RnE 0x2000.
#[test]
fn each_interrupt_has_its_registers() {
    for (intid, redistributor, pending, priority) in [
        (0, true, (0x200, 0), 0x400),
        (31, true, (0x200, 31), 0x41f),
        (1056, true, (0x204, 0), 0x420),
        (1119, true, (0x208, 31), 0x45f),
        (32, false, (0x204, 0), 0x420),
        (1019, false, (0x27c, 27), 0x7fb),
        (4096, false, (0x1600, 0), 0x2000),
        (5119, false, (0x167c, 31), 0x23ff),
    ] {
        let place = Place {
            redistributor,
            pending,
            priority,
        };
        assert_eq!(Place::of(intid), place, "{intid}");
    }
}
