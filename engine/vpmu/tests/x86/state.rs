//! Tests of a PMU's state as a value.

use crate::support::{END, Guest, INSTRUCTIONS};
use vpmu::counter::Policy;
use vpmu::x86::intel::Msr::*;
use vpmu::x86::intel::{Capability, PmuState, Version};
use vpmu::x86::{PmuConfig, RestoreError};

fn sampling(policy: Policy) -> Guest {
    let mut guest = Guest::with_policy(policy);
    guest.sample(0, INSTRUCTIONS, 1000);
    guest.write(FixedCtrCtrl, 0xbb);
    guest.write(FixedCtr(0), 77);
    guest.write(GlobalCtrl, 0x3_0000_0001);
    guest
}

#[test]
fn a_sampling_run_goes_on_in_another_process() {
    for (from, to) in [
        (Policy::Recreate, Policy::ReusePaused),
        (Policy::ReusePaused, Policy::Reuse),
    ] {
        let mut first = sampling(from);
        first.execute(400);
        let state = first.save();
        assert_eq!(state.pmc[0], END - 600);
        assert_eq!(state.fixed_ctr[0], 477);
        first.execute(1);
        assert_ne!(first.save(), state, "saving stops nothing");

        let mut second = Guest::with_policy(to);
        let restored = second.restore(&state);
        assert_eq!(restored, Ok(()));
        assert_eq!(second.save(), state);
        second.execute(599);
        assert!(!second.interrupt());
        second.execute(1);
        assert!(second.interrupt(), "the sample comes where it was due");
        assert_eq!(second.read(FixedCtr(0)), 1077);
    }
}

#[test]
fn a_pending_interrupt_is_saved() {
    for frozen in [0, 1 << 12] {
        let mut first = sampling(Policy::ReusePaused);
        first.write(DebugCtl, frozen);
        first.execute(1000);
        // The report has not arrived, yet saving finds the overflow.
        let state = first.save();
        assert_eq!(state.global_status, 1);
        let mut second = Guest::new(Version::V2);
        second.restore(&state).expect("the same kind of PMU");
        assert!(second.pmu.take_pmi());
        assert_eq!(second.host.running().is_empty(), frozen != 0);
    }
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let mut guest = sampling(Policy::ReusePaused);
    let good = guest.save();
    let mut refuse = |change: &dyn Fn(&mut PmuState)| {
        let mut state = good.clone();
        change(&mut state);
        let refused = guest.restore(&state);
        assert_eq!(guest.save(), good, "as it was");
        refused.expect_err("it does not fit")
    };
    assert_eq!(
        refuse(&|state| state.layout = 1),
        RestoreError::Layout {
            saved: 1,
            reads: PmuState::LAYOUT
        }
    );
    assert_eq!(
        refuse(&|state| state.version = Version::V4),
        RestoreError::Version {
            saved: Version::V4,
            offered: Version::V2
        }
    );
    assert_eq!(
        refuse(&|state| state.general.0 = 8),
        RestoreError::General {
            saved: (8, 48),
            offered: (4, 48)
        }
    );
    assert_eq!(
        refuse(&|state| state.fixed.1 = 40),
        RestoreError::Fixed {
            saved: (7, 40),
            offered: (7, 48)
        }
    );
    type Change = fn(&mut PmuState);
    let changes: [(&str, Change); 12] = [
        ("IA32_PERFEVTSELx", |state| state.perfevtsel[1] = 1 << 21),
        ("IA32_PERFEVTSELx", |state| state.perfevtsel[4] = 1),
        ("IA32_PMCx", |state| state.pmc[0] = 1 << 48),
        ("IA32_PMCx", |state| state.pmc[7] = 1),
        ("IA32_FIXED_CTRx", |state| state.fixed_ctr[3] = 1),
        ("IA32_FIXED_CTR_CTRL", |state| state.fixed_ctr_ctrl = 4),
        ("IA32_PERF_GLOBAL_CTRL", |state| state.global_ctrl = 1 << 4),
        ("IA32_PERF_GLOBAL_STATUS", |state| {
            state.global_status = 1 << 59;
        }),
        ("IA32_DEBUGCTL", |state| state.debugctl = 1),
        // Without PEBS.
        ("IA32_PEBS_ENABLE", |state| state.pebs_enable = 1),
        ("MSR_PEBS_DATA_CFG", |state| state.pebs_data_cfg = 1),
        ("IA32_DS_AREA", |state| state.ds_area = 0x1000),
    ];
    for (name, change) in changes {
        let error = refuse(&change);
        assert!(
            matches!(error, RestoreError::Reserved { register, .. } if register == name),
            "{error:?}"
        );
    }
    let message = refuse(&|state| state.pmc[7] = 1).to_string();
    assert_eq!(
        message,
        "restore IA32_PMCx = 0x1: reserved bits are set in the saved state"
    );
}

#[test]
fn version_4_keeps_its_freeze_bits() {
    let config = PmuConfig::new(Capability::new(Version::V4));
    let mut first = Guest::with(config.clone());
    first.write(GlobalStatusSet, 1 << 59 | 1 << 62 | 1 << 32);
    let state = first.save();
    let mut second = Guest::with(config);
    second.restore(&state).expect("the same kind of PMU");
    assert_eq!(second.read(GlobalStatus), 1 << 59 | 1 << 62 | 1 << 32);
}
