//! The three designs over registers that are plain storage.

mod fake;

use super::*;
use fake::FakeRegisters;
use vpmu::arm::{
    EventFilter, PmuVersion,
    emulated::Identity,
    partition::{Features, Isolation},
    pmcr, pmuserenr,
};
use vpmu::counter::Policy;

const DESIGNS: [Design; 3] = [Design::Emulated, Design::Partitioned, Design::Untrapped];

/// Six counters of PMUv3p5 with INST_RETIRED and CPU_CYCLES, as QEMU's.
fn hardware() -> Hardware {
    let partition = PartitionConfig {
        implemented: 6,
        host_counters: 0,
        features: Features {
            version: PmuVersion::V3p5,
            fgt: true,
            hpmn0: true,
            mtpmu: false,
            multithreaded: false,
        },
        isolation: Isolation::ALL,
        filter: EventFilter::default(),
        events: [1 << 0x11 | 1 << INST_RETIRED, 0],
    };
    Hardware {
        emulated: EmulatedConfig {
            counters: partition.implemented,
            version: partition.features.version,
            el3: false,
            aarch32: true,
            identity: Identity::from_pmcr(0),
            events: partition.events,
            pmmir: 0,
            filter: partition.filter,
            policy: Policy::default(),
        },
        partition,
        findings: Findings {
            isolation: Isolation::ALL,
            ..Findings::default()
        },
    }
}

fn pmu(design: Design, host_counters: u8, registers: &mut FakeRegisters) -> GuestPmu {
    pmu_on(&hardware(), design, host_counters, registers)
}

/// The emulated PMU where every access traps.
fn closed(registers: &mut FakeRegisters) -> GuestPmu {
    let mut hardware = hardware();
    hardware.partition.features.fgt = false;
    pmu_on(&hardware, Design::Emulated, 0, registers)
}

fn pmu_on(
    hardware: &Hardware,
    design: Design,
    host_counters: u8,
    registers: &mut FakeRegisters,
) -> GuestPmu {
    let settings = Settings {
        design,
        host_counters,
        ..Settings::default()
    };
    GuestPmu::new(settings, hardware, registers).unwrap()
}

#[test]
fn a_guest_that_never_touches_its_pmu_costs_no_register_access_at_a_switch() {
    for design in DESIGNS {
        let registers = &mut FakeRegisters::default();
        let mut pmu = pmu(design, 0, registers);
        registers.writes.clear();
        for _ in 0..3 {
            pmu.load(None, registers);
            pmu.put(registers);
        }
        assert_eq!(pmu.switch_accesses, 0, "{design:?}");
        assert!(registers.writes.is_empty(), "{design:?}");
    }
}

#[test]
fn the_emulated_line_follows_the_physical_overflow() {
    let registers = &mut FakeRegisters::default();
    let mut pmu = closed(registers);
    for (register, value) in [
        (Register::Pmevtyper(1), INST_RETIRED.into()),
        (Register::Pmevcntr(1), 0xffff_ff00),
        (Register::PmintenSet, 0b10),
        (Register::PmcntenSet, 0b10),
        (Register::Pmcr, pmcr::E),
    ] {
        let outcome = pmu.access(register, ExceptionLevel::El1, Some(value), registers);
        assert_eq!(outcome, Outcome::Done);
    }
    assert_eq!(
        registers.get(Register::Pmevcntr(1)),
        0x100_u64.wrapping_neg()
    );
    assert_eq!(pmu.line(), Some(false));

    registers.count(Register::Pmevcntr(1), 0x100, u64::MAX);
    registers.set(Register::PmovsSet, 0b10);
    assert_eq!(pmu.interrupt(registers).0, Pmi::Line);
    assert_eq!(pmu.line(), Some(true));
    assert_eq!(registers.last_write(Register::PmovsClr), Some(0b10));

    let read = pmu.access(Register::PmovsClr, ExceptionLevel::El1, None, registers);
    assert_eq!(read, Outcome::Value(0b10));
    let write = pmu.access(
        Register::PmovsClr,
        ExceptionLevel::El1,
        Some(0b10),
        registers,
    );
    assert_eq!(write, Outcome::Done);
    assert_eq!(pmu.line(), Some(false));
}

#[test]
fn el0_gets_no_physical_permission_beyond_en() {
    let registers = &mut FakeRegisters::default();
    let mut pmu = closed(registers);
    for value in [
        0,
        pmuserenr::EN,
        pmuserenr::ER,
        pmuserenr::CR | pmuserenr::SW,
    ] {
        let _ = pmu.access(
            Register::Pmuserenr,
            ExceptionLevel::El1,
            Some(value),
            registers,
        );
        let physical = registers.get(Register::Pmuserenr);
        assert_eq!(physical, u64::from(value != 0), "guest wrote {value:#x}");
    }
}

#[test]
fn a_partitioned_interrupt_without_a_cause_is_the_guests() {
    let registers = &mut FakeRegisters::default();
    let mut pmu = pmu(Design::Partitioned, 2, registers);
    let _ = pmu.access(
        Register::Pmcr,
        ExceptionLevel::El1,
        Some(pmcr::E),
        registers,
    );
    registers.set(Register::PmovsSet, 0);
    assert_eq!(pmu.interrupt(registers).0, Pmi::Physical);
}

#[test]
fn the_monitors_own_counter_is_the_topmost_and_counts_only_el2() {
    for design in [Design::Emulated, Design::Partitioned] {
        let registers = &mut FakeRegisters::default();
        let pmu = pmu(design, 2, registers);
        assert_eq!(pmu.own_counter, Some(5));
        let kind = registers.get(Register::Pmevtyper(5));
        let filters = RawPmevtyper::P | RawPmevtyper::U | RawPmevtyper::NSH;
        assert_eq!(kind, filters | u64::from(INST_RETIRED));
        assert_eq!(
            pmu.trap_registers().mdcr_el2 & (MDCR_HPME | 0x1f),
            MDCR_HPME | 4
        );
        registers.set(Register::Pmevcntr(5), 77);
        assert_eq!(pmu.own_instructions(registers), Some(77));
    }
}

#[test]
fn what_is_trapped_is_what_is_told() {
    for design in DESIGNS {
        let registers = &mut FakeRegisters::default();
        let text = pmu(design, 0, registers).describe().to_string();
        let traps_pmcr = text.contains("\"PMCR_EL0:w\"");
        assert_eq!(traps_pmcr, design == Design::Emulated, "{text}");
        assert!(
            text.contains(r#""implemented":6,"guest_counters":6"#),
            "{text}"
        );
    }
}

#[test]
fn nothing_that_reset_or_a_bootloader_left_counts_or_interrupts() {
    for design in DESIGNS {
        let registers = &mut FakeRegisters::default();
        let _ = pmu(design, 0, registers);
        for register in [
            Register::PmcntenClr,
            Register::PmintenClr,
            Register::PmovsClr,
        ] {
            assert!(
                registers.writes.contains(&(register, 0x1_ffff_ffff)),
                "{register:?}"
            );
        }
    }
}

#[test]
fn an_impossible_reservation_is_an_error_with_both_numbers() {
    let settings = Settings {
        design: Design::Partitioned,
        host_counters: 7,
        ..Settings::default()
    };
    let registers = &mut FakeRegisters::default();
    let error = GuestPmu::new(settings, &hardware(), registers).unwrap_err();
    let text = error.to_string();
    assert!(text.contains('7') && text.contains('6'), "{text}");
}
