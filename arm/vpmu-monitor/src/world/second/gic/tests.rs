use super::*;

/// List registers, and a guest that takes and ends what is in them.
struct Cpu([u64; 4]);

impl ListRegisters for Cpu {
    fn count(&self) -> usize {
        4
    }

    fn read(&self, n: usize) -> u64 {
        self.0[n]
    }

    fn write(&mut self, n: usize, value: u64) {
        self.0[n] = value;
    }
}

impl Cpu {
    fn take(&mut self) -> Option<u32> {
        let pending = self.0.iter_mut().filter(|value| **value & lr::PENDING != 0);
        let value = pending.min_by_key(|value| **value >> lr::PRIORITY_SHIFT & 0xff)?;
        *value = *value & !lr::PENDING | lr::ACTIVE;
        Some((*value & lr::VINTID) as u32)
    }

    fn end(&mut self, intid: u32) -> bool {
        let mut values = self.0.iter_mut();
        let found = values.find(|value| **value as u32 == intid && **value & lr::ACTIVE != 0);
        found.is_some_and(|value| {
            *value &= !lr::ACTIVE;
            true
        })
    }
}

fn gic() -> VirtualGic {
    let mut gic = VirtualGic::new(0);
    gic.groups_enabled = 0b10;
    for word in 0..WORDS {
        gic.enabled.set_word(word, !0);
        gic.group1.set_word(word, !0);
    }
    gic
}

#[test]
fn more_than_fit_come_by_priority_each_once() {
    let (mut gic, mut cpu) = (gic(), Cpu([0; 4]));
    for intid in 0..12 {
        gic.priorities[intid] = 0xf0 - intid as u8 * 8;
        gic.send_sgi(5, (intid as u64) << 24 | 1);
    }
    let mut taken = Vec::new();
    loop {
        let left = gic.enter(&mut cpu);
        let Some(intid) = cpu.take() else {
            assert_eq!(left, Left::default());
            break;
        };
        taken.push(intid);
        // An exit while the guest handles it.
        gic.exit(0, &mut cpu);
        gic.enter(&mut cpu);
        // What is pending has taken its list register.
        let counted = u32::from(!cpu.end(intid));
        gic.exit(counted, &mut cpu);
    }
    assert_eq!(taken, (0..12).rev().collect::<Vec<_>>());
    assert!(!gic.has_pending());
}

#[test]
fn a_held_interrupt_is_the_hardware_s_to_end() {
    let (mut gic, mut cpu) = (gic(), Cpu([0; 4]));
    gic.hold(27);
    assert_eq!(gic.held(), 1 << 27);
    gic.enter(&mut cpu);
    assert_ne!(cpu.0[0] & lr::HW, 0);
    assert_eq!(cpu.take(), Some(27));
    assert!(cpu.end(27));
    gic.exit(0, &mut cpu);
    // The hardware has made the physical one inactive.
    assert_eq!((gic.held(), gic.take_released(0)), (0, 0));
    // Withdrawn before it was taken, it is the monitor's to end.
    gic.hold(27);
    gic.pending.put(27, false);
    gic.release_unused(0);
    assert_eq!((gic.held(), gic.take_released(0)), (0, 1 << 27));
}

#[test]
fn a_held_shared_interrupt_is_delivered_and_released_alike() {
    let (mut gic, mut cpu) = (gic(), Cpu([0; 4]));
    gic.hold(40);
    gic.enter(&mut cpu);
    assert_eq!(cpu.0[0] >> lr::PINTID_SHIFT & lr::PINTID, 40);
    assert_eq!(cpu.take(), Some(40));
    assert!(cpu.end(40));
    gic.exit(0, &mut cpu);
    assert_eq!(gic.take_released(1), 0);
    gic.hold(40);
    // GICD_ICPENDR1.
    gic.distributor(0x284, 4, Some(1 << 8));
    assert_eq!((gic.take_released(0), gic.has_pending()), (0, false));
    assert_eq!([(); 2].map(|()| gic.take_released(1)), [1 << 8, 0]);
}

#[test]
fn a_line_comes_again_while_it_is_high() {
    let (mut gic, mut cpu) = (gic(), Cpu([0; 4]));
    gic.set_line(23, true);
    for _ in 0..3 {
        gic.enter(&mut cpu);
        assert_ne!(cpu.0[0] & lr::EOI, 0);
        assert_eq!(cpu.take(), Some(23));
        assert!(cpu.end(23));
        gic.exit(0, &mut cpu);
    }
    gic.set_line(23, false);
    gic.enter(&mut cpu);
    assert_eq!(cpu.take(), None);
}

#[test]
fn what_was_ended_without_a_list_register_is_ended() {
    let (mut gic, mut cpu) = (gic(), Cpu([0; 4]));
    for intid in 0..6 {
        gic.priorities[intid as usize] = 0x80 - intid as u8 * 8;
        gic.send_sgi(5, intid << 24 | 1);
        gic.enter(&mut cpu);
        assert_eq!(cpu.take(), Some(intid as u32));
        gic.exit(0, &mut cpu);
    }
    let left = gic.enter(&mut cpu);
    assert!(!left.pending && left.active, "six are active");
    // SGIs 5 to 2 are in list registers; 1 is the most urgent of the others.
    gic.exit(1, &mut cpu);
    assert_eq!(gic.active.word(0), 0b11_1101);
}

#[test]
fn sgis_reach_only_the_one_cpu_of_their_group() {
    let mut gic = VirtualGic::new(0x1_0000_0203);
    gic.group1.set_word(0, 0xff);
    let to = |aff3: u64, aff2: u64, aff1: u64, list: u64| {
        aff3 << 48 | aff2 << 32 | 3 << 24 | aff1 << 16 | list
    };
    for (op2, value) in [
        (5, to(0, 0, 2, 1 << 3)),
        (5, to(1, 0, 3, 1 << 3)),
        (5, to(1, 0, 2, !(1 << 3) & 0xffff)),
        (5, 1 << 40 | 3 << 24),
        (5, 1 << 44 | to(1, 0, 2, 1 << 3)),
        (7, to(1, 0, 2, 1 << 3)),
    ] {
        gic.send_sgi(op2, value);
        assert_eq!(gic.pending.word(0), 0, "{value:#x}");
    }
    gic.send_sgi(5, to(1, 0, 2, 1 << 3));
    assert_eq!(gic.pending.word(0), 1 << 3);
}
