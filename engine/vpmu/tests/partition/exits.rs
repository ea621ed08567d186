//! Checks that nothing counts at EL2, on any version of PMUv3.

use super::machine::Place;
use super::{Vm, config};
use vpmu::arm::partition::{Features, Isolation, PartitionConfig};
use vpmu::arm::{PmuVersion, Register};

const E: u64 = 1;

/// Returns a machine before PMUv3p1, on which only their types keep counters from counting at EL2.
fn old() -> PartitionConfig {
    PartitionConfig {
        features: Features {
            version: PmuVersion::V3,
            ..config().features
        },
        ..config()
    }
}

/// Returns machines of each version, with MDCR_EL2's prohibitions working or not.
fn machines() -> impl Iterator<Item = PartitionConfig> {
    use PmuVersion::{V3, V3p1, V3p4, V3p5};
    [V3, V3p1, V3p4, V3p5].into_iter().flat_map(|version| {
        (0..16).map(move |bits| PartitionConfig {
            features: Features {
                version,
                fgt: bits & 1 != 0,
                mtpmu: bits & 2 != 0,
                multithreaded: bits & 2 != 0,
                ..config().features
            },
            isolation: Isolation {
                partition: true,
                hpmd: bits & 4 == 0,
                hccd: bits & 8 == 0,
            },
            ..config()
        })
    })
}

#[test]
fn nothing_counts_at_el2_whatever_the_guest_writes() {
    for config in machines() {
        let mut vm = Vm::new(&config);
        let nsh = 1 << 27;
        vm.write(Register::Pmevtyper(0), nsh | 0x11);
        vm.write(Register::Pmselr, 1);
        vm.write(Register::Pmxevtyper, nsh | 0x11);
        vm.write(Register::Pmselr, 31);
        vm.write(Register::Pmxevtyper, nsh);
        vm.write(Register::PmcntenSet, u64::MAX);
        vm.write(Register::Pmcr, E);
        vm.exit();
        vm.machine.happen(0x11, Place::El2, 7);
        assert_eq!(vm.machine.guest_counts(), [0; 5], "{config:?}");
        vm.machine.happen(0x11, Place::El1, 2);
        assert_eq!(vm.machine.guest_counts(), [2, 2, 0, 0, 2]);
    }
}

#[test]
fn an_exit_reads_only_what_mdcr_does_not_prohibit() {
    use PmuVersion::{V3, V3p1, V3p4, V3p5};
    for (version, reads) in [(V3, 5), (V3p1, 1), (V3p4, 1), (V3p5, 0)] {
        for fgt in [false, true] {
            let mut config = config();
            config.features.version = version;
            config.features.fgt = fgt;
            let mut vm = Vm::new(&config);
            vm.pmu.exited(&mut vm.machine);
            assert_eq!(vm.machine.el2_accesses, 0, "nothing is loaded");
            vm.write(Register::Pmccfiltr, 1 << 30);
            let before = vm.machine.el2_accesses;
            vm.pmu.exited(&mut vm.machine);
            assert_eq!(vm.machine.el2_accesses - before, reads, "{version:?}");
            assert_eq!(vm.read(Register::Pmccfiltr), 1 << 30);
        }
    }
}

#[test]
fn nothing_counts_at_el2_after_a_load_either() {
    let mut vm = Vm::new(&old());
    let mut state = vm.pmu.save(&mut vm.machine);
    state.pmevtyper = [0xffff_0011; 31];
    state.pmccfiltr = u64::MAX;
    state.pmcnten = 0x8000_000f;
    state.pmcr |= E;
    vm.pmu
        .restore(&state, &mut vm.machine)
        .expect("a state of this PMU");
    vm.load();
    assert_eq!(vm.machine.evtyper[0], 0xf000_0011);
    assert_eq!(vm.machine.evtyper[31], 0xf000_0000);
    vm.machine.happen(0x11, Place::El2, 7);
    assert_eq!(vm.machine.guest_counts(), [0; 5]);
}
