//! Runs the probe on machines that break one promise each. It must find every leak, and must
//! believe nothing of an attack that has no effect.

use super::config;
use super::machine::{Machine, Quirks, access_bit};
use vpmu::arm::partition::{Features, Findings, Isolation, probe};
use vpmu::arm::{PmuVersion, Register};

const VERSIONS: [PmuVersion; 4] = [
    PmuVersion::V3,
    PmuVersion::V3p1,
    PmuVersion::V3p4,
    PmuVersion::V3p5,
];

fn features(version: PmuVersion, fgt: bool) -> Features {
    Features {
        version,
        fgt,
        ..config().features
    }
}

fn probed(quirks: Quirks, features: Features, host_counters: u8) -> Findings {
    let mut machine = Machine::new(6, features, quirks);
    probe(&mut machine, 6, host_counters, &features, true)
}

fn newest(quirks: Quirks) -> Findings {
    probed(quirks, config().features, 2)
}

/// Returns all accesses by which the architecture gives EL1 the guest's event counters.
fn ways() -> impl Iterator<Item = (Register, bool)> {
    use Register as R;
    [
        R::Pmcr,
        R::PmcntenSet,
        R::PmcntenClr,
        R::PmintenSet,
        R::PmintenClr,
        R::PmovsSet,
        R::PmovsClr,
        R::Pmswinc,
        R::Pmxevtyper,
        R::Pmxevcntr,
        R::Pmevtyper(0),
        R::Pmevcntr(0),
    ]
    .into_iter()
    .flat_map(|register| [(register, false), (register, true)])
    .filter(|(register, write)| *write || *register != R::Pmswinc)
}

#[test]
fn a_machine_that_follows_the_manual_is_proven_to() {
    for version in VERSIONS {
        for fgt in [false, true] {
            for host_counters in 0..6 {
                let found = probed(Quirks::default(), features(version, fgt), host_counters);
                let isolation = Isolation {
                    partition: true,
                    hpmd: version >= PmuVersion::V3p1,
                    hccd: version >= PmuVersion::V3p5,
                };
                assert_eq!(found.isolation, isolation, "{found:?}");
                assert!(found.open.is_empty() && found.unproven.is_empty());
            }
        }
    }
}

#[test]
fn each_leak_is_found_wherever_it_can_be_reached_from() {
    for (register, write) in ways() {
        let el1_only = matches!(register, Register::PmintenSet | Register::PmintenClr);
        for from in [1, 2, 4] {
            let quirks = Quirks {
                open: access_bit(register, write),
                from,
                ..Quirks::default()
            };
            let found = newest(quirks);
            let leaks = from == 1 || !el1_only;
            assert_eq!(found.isolation.partition, !leaks, "{register:?} {write}");
            assert_eq!(found.open.contains(register, write), leaks, "{found:?}");
            assert_eq!(found.open.iter().count(), usize::from(leaks), "{found:?}");
        }
    }
}

#[test]
fn an_attack_that_does_nothing_proves_nothing() {
    for (register, write) in ways() {
        let quirks = Quirks {
            dead: access_bit(register, write),
            ..Quirks::default()
        };
        let found = newest(quirks);
        assert!(!found.isolation.partition, "{register:?} {write}");
        assert!(found.unproven.contains(register, write), "{found:?}");
        assert!(found.open.is_empty(), "{found:?}");
    }
}

#[test]
fn what_the_guests_pmcr_does_to_host_counters_is_found() {
    for quirks in [
        Quirks {
            e_gates_all: true,
            ..Quirks::default()
        },
        Quirks {
            lp_is_for_all: true,
            ..Quirks::default()
        },
    ] {
        let found = newest(quirks);
        assert!(found.open.contains(Register::Pmcr, true), "{found:?}");
        assert!(!found.isolation.partition);
    }
}

#[test]
fn prohibitions_that_do_nothing_are_not_believed() {
    for (no_hpmd, no_hccd) in [(true, false), (false, true), (true, true)] {
        let quirks = Quirks {
            no_hpmd,
            no_hccd,
            ..Quirks::default()
        };
        let isolation = newest(quirks).isolation;
        assert_eq!((isolation.hpmd, isolation.hccd), (!no_hpmd, !no_hccd));
    }
}

#[test]
fn nothing_is_left_behind() {
    for quirks in [Quirks::default(), Quirks::OPEN] {
        let features = config().features;
        let mut machine = Machine::new(6, features, quirks);
        let _ = probe(&mut machine, 6, 2, &features, true);
        assert_eq!((machine.cnten, machine.inten, machine.ovs), (0, 0, 0));
        assert_eq!((machine.evcntr, machine.evtyper), ([0; 32], [0; 32]));
        assert_eq!((machine.selr, machine.userenr, machine.pmcr), (0, 0, 0));
        assert_eq!(machine.traps.mdcr_el2, 6);
        assert!(!machine.interrupt());
    }
}

#[test]
fn a_cpu_too_small_to_divide_is_not_proven_and_not_harmed() {
    for (implemented, hpmn0) in [(0, false), (0, true), (1, false)] {
        let features = Features {
            hpmn0,
            ..config().features
        };
        let mut machine = Machine::new(implemented, features, Quirks::default());
        let found = probe(&mut machine, implemented, 0, &features, false);
        assert!(!found.isolation.partition);
        assert_eq!(found.isolation.hpmd, implemented > 0);
        assert!(found.isolation.hccd);
    }
}

#[test]
fn findings_are_told_by_name() {
    let found = newest(Quirks {
        open: access_bit(Register::Pmswinc, true) | access_bit(Register::Pmevcntr(0), false),
        from: 1,
        ..Quirks::default()
    });
    assert_eq!(
        format!("{:?}", found.open),
        r#"{"PMSWINC_EL0:w", "PMEVCNTRn_EL0:r"}"#
    );
}
