//! Tests of plans: what they trap, and what they refuse.

use super::{config, leaky, machine, plan};
use vpmu::arm::partition::{Features, Isolation, PartitionConfig, Plan, PlanError, Why};
use vpmu::arm::{EventFilter, PmuVersion, Register};

const TPMCR: u64 = 1 << 5;
const TPM: u64 = 1 << 6;
const HPME: u64 = 1 << 7;
const HPMD: u64 = 1 << 17;
const HCCD: u64 = 1 << 23;
const HLP: u64 = 1 << 26;

/// Returns everything that a plan traps: name, direction, reason.
fn trapped(plan: &Plan) -> Vec<(&'static str, char, Why)> {
    let mut traps = Vec::new();
    for register in Register::all() {
        for (write, direction) in [(false, 'r'), (true, 'w')] {
            if let Some(why) = plan.is_trapped(register, write) {
                let trap = (register.name(), direction, why);
                if !traps.contains(&trap) {
                    traps.push(trap);
                }
            }
        }
    }
    traps
}

#[test]
fn no_traps_where_the_hardware_isolates() {
    let plan = plan(&config());
    assert_eq!(trapped(&plan), []);
    let traps = plan.traps();
    assert_eq!(traps.mdcr_el2, 4 | HPME | HPMD | HCCD | HLP);
    assert_eq!((traps.hdfgrtr_el2, traps.hdfgwtr_el2), (0, 0));
}

#[test]
fn the_hot_registers_do_not_trap_where_the_hardware_isolates() {
    // They do not trap even with an event filter, or where counting at EL2 must be masked away.
    let filtered = PartitionConfig {
        filter: EventFilter::deny_all(),
        ..config()
    };
    let masked = PartitionConfig {
        features: Features {
            version: PmuVersion::V3p1,
            ..config().features
        },
        ..config()
    };
    for config in [config(), filtered, masked] {
        let plan = plan(&config);
        for register in Register::all() {
            let hot = matches!(
                register,
                Register::Pmcr
                    | Register::PmcntenSet
                    | Register::PmcntenClr
                    | Register::PmintenSet
                    | Register::PmintenClr
                    | Register::PmovsSet
                    | Register::PmovsClr
                    | Register::Pmccntr
                    | Register::Pmevcntr(_)
                    | Register::Pmselr
                    | Register::Pmuserenr
                    | Register::Pmswinc
            );
            for write in [false, true] {
                assert!(
                    !hot || plan.is_trapped(register, write).is_none(),
                    "{register:?}"
                );
            }
        }
        assert_eq!(plan.traps().mdcr_el2 & (TPM | TPMCR), 0);
    }
}

#[test]
fn without_host_counters_there_is_nothing_to_isolate() {
    let config = PartitionConfig {
        host_counters: 0,
        ..leaky()
    };
    let plan = plan(&config);
    assert_eq!(trapped(&plan), []);
    assert_eq!(plan.traps().mdcr_el2, 6 | HPMD | HCCD);
}

#[test]
fn a_machine_that_is_not_proven_to_isolate_is_given_nothing() {
    for fgt in [false, true] {
        let mut config = leaky();
        config.features.fgt = fgt;
        let plan = plan(&config);
        for register in Register::all() {
            for write in [false, true] {
                let why = register.is_accessible(write).then_some(Why::NotIsolated);
                assert_eq!(plan.is_trapped(register, write), why, "{register:?}");
            }
        }
        assert_eq!(plan.traps().mdcr_el2 & (TPM | TPMCR), TPM | TPMCR);
        assert!(plan.filtered_at_exit().is_empty());
    }
}

#[test]
fn nothing_traps_for_counting_at_el2() {
    use PmuVersion::{V3, V3p1, V3p4, V3p5};
    let all = Isolation::ALL;
    let (no_hpmd, no_hccd) = (
        Isolation { hpmd: false, ..all },
        Isolation { hccd: false, ..all },
    );
    let cases = [
        (V3, all, 0x8000_000f),
        (V3p1, all, 0x8000_0000),
        (V3p4, all, 0x8000_0000),
        (V3p5, all, 0),
        (V3p1, no_hpmd, 0x8000_000f),
        (V3p5, no_hpmd, 0xf),
        (V3p5, no_hccd, 0x8000_0000),
    ];
    for (version, isolation, at_exit) in cases {
        for fgt in [false, true] {
            let features = Features {
                version,
                fgt,
                ..config().features
            };
            let plan = plan(&PartitionConfig {
                features,
                isolation,
                ..config()
            });
            assert_eq!(trapped(&plan), [], "{version:?}");
            assert_eq!(plan.filtered_at_exit().bits(), at_exit, "{version:?}");
        }
    }
}

#[test]
fn event_types_trap_where_other_threads_could_be_counted() {
    let features = config().features;
    for (mtpmu, multithreaded, fgt) in [
        (true, true, true),
        (true, true, false),
        (true, false, true),
        (false, true, true),
    ] {
        let features = Features {
            mtpmu,
            multithreaded,
            fgt,
            ..features
        };
        let plan = plan(&PartitionConfig {
            features,
            ..config()
        });
        let why = Why::CountsOutsideGuest;
        let types = [
            // PMXEVTYPER_EL0 can select the cycle counter, so these three trap together.
            ("PMXEVTYPER_EL0", 'w', why),
            ("PMCCFILTR_EL0", 'w', why),
            ("PMEVTYPERn_EL0", 'w', why),
        ];
        match (mtpmu && multithreaded, fgt) {
            (true, true) => {
                assert_eq!(trapped(&plan), types);
                assert_eq!(plan.traps().hdfgwtr_el2, 3 << 13);
            }
            (true, false) => {
                assert!(types.iter().all(|trap| trapped(&plan).contains(trap)));
                assert_eq!(
                    plan.is_trapped(Register::Pmcr, false),
                    Some(Why::NoFineGrainedTraps)
                );
                assert_eq!(plan.traps().mdcr_el2 & (TPM | TPMCR), TPM | TPMCR);
                assert_eq!((plan.traps().hdfgrtr_el2, plan.traps().hdfgwtr_el2), (0, 0));
            }
            (false, _) => assert_eq!(trapped(&plan), []),
        }
    }
}

#[test]
fn a_filter_traps_pmceid_only_if_it_hides_something_there() {
    let filtered = |event| PartitionConfig {
        filter: EventFilter::allow_all()
            .deny(event..=event)
            .expect("one rule"),
        ..config()
    };
    let pmceid = |config: &PartitionConfig| {
        let plan = plan(config);
        let why = plan.is_trapped(Register::Pmceid0, false);
        assert_eq!(why, plan.is_trapped(Register::Pmceid1, false));
        assert_eq!(
            plan.is_trapped(Register::Pmevtyper(0), true),
            Some(Why::EventFilter)
        );
        assert_eq!(
            plan.is_trapped(Register::Pmevtyper(0), false),
            Some(Why::EventFilter)
        );
        why
    };
    assert_eq!(pmceid(&filtered(0x11)), Some(Why::EventFilter));
    // One event is the implementer's own, and one does not exist on this machine.
    assert_eq!(pmceid(&filtered(0xc001)), None);
    assert_eq!(pmceid(&filtered(0x3f)), None);
}

#[test]
fn the_limit_design_traps_nothing_on_any_machine() {
    let features = Features {
        version: PmuVersion::V3,
        fgt: false,
        hpmn0: false,
        mtpmu: true,
        multithreaded: true,
    };
    let plan = Plan::untrapped(6, features).expect("six counters");
    assert_eq!(trapped(&plan), []);
    assert_eq!(plan.traps().mdcr_el2, 6);
    assert!(plan.host_counters().is_empty());
}

#[test]
fn before_the_first_touch_everything_traps() {
    let plan = plan(&config());
    assert_eq!(
        plan.trap_all().mdcr_el2,
        plan.traps().mdcr_el2 | TPM | TPMCR
    );
}

#[test]
fn host_counters_come_from_the_top() {
    let plan = plan(&config());
    assert_eq!(plan.hpmn(), 4);
    assert_eq!(plan.guest_counters().bits(), 0x8000_000f);
    assert_eq!(plan.host_counters().bits(), 0x30);
}

#[test]
fn impossible_partitions_are_refused() {
    let with = |implemented, host_counters, hpmn0| {
        let features = Features {
            hpmn0,
            ..config().features
        };
        Plan::new(&PartitionConfig {
            implemented,
            host_counters,
            features,
            ..config()
        })
        .map(|p| p.hpmn())
    };
    assert_eq!(
        with(6, 7, true),
        Err(PlanError::HostCounters {
            host_counters: 7,
            implemented: 6
        })
    );
    assert_eq!(
        with(32, 0, true),
        Err(PlanError::Implemented { implemented: 32 })
    );
    assert_eq!(
        with(6, 6, false),
        Err(PlanError::NoGuestCounter { implemented: 6 })
    );
    assert_eq!(with(6, 6, true), Ok(0));
    assert_eq!(with(6, 5, false), Ok(1));
    assert_eq!(with(31, 0, false), Ok(31));
    // A CPU with a cycle counter alone: HPMN equals PMCR_EL0.N, as it does out of reset.
    assert_eq!(with(0, 0, false), Ok(0));
}

#[test]
fn errors_say_what_to_do() {
    let error = PlanError::NoGuestCounter { implemented: 6 };
    assert_eq!(
        error.to_string(),
        "plan the PMU partition: all 6 event counters wanted by the host, but MDCR_EL2.HPMN = 0 \
         needs FEAT_HPMN0, which this CPU lacks; leave the guest one"
    );
}

/// Checks that `is_trapped` and the register values say the same.
#[test]
fn the_values_do_what_the_plan_says() {
    use super::machine::Exit;
    use vpmu::arm::ExceptionLevel::El1;

    let filtered = PartitionConfig {
        filter: EventFilter::deny_all(),
        ..config()
    };
    for base in [config(), leaky(), filtered] {
        for fgt in [false, true] {
            let features = Features {
                fgt,
                ..base.features
            };
            let config = PartitionConfig { features, ..base };
            let plan = plan(&config);
            let mut machine = machine(&config);
            machine.traps = plan.traps();
            for register in Register::all() {
                // Only the guest's counters are compared. The hardware itself protects the others.
                if matches!(register, Register::Pmevtyper(n) | Register::Pmevcntr(n) if n >= 4) {
                    continue;
                }
                for write in [None, Some(0)] {
                    let expected = plan.is_trapped(register, write.is_some()).is_some();
                    let exit = machine.guest(register, write, El1);
                    assert_eq!(exit == Exit::TrapToEl2, expected, "{register:?} {write:?}");
                }
            }
        }
    }
}
