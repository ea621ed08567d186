//! Tests of a PMU's state as a value.

use super::behaviour::Guest;
use crate::support::{END, SAMPLE};
use vpmu::x86::amd::Interface::{Core, Legacy, V2};
use vpmu::x86::amd::{Capability, Msr, PmuState};
use vpmu::x86::{Pmu, PmuConfig, RestoreError, intel};

fn sampling() -> Guest {
    let mut guest = Guest::new(V2);
    guest.write(Msr::Ctr(0), END - 1000);
    guest.write(Msr::Ctl(0), SAMPLE | 0xc0);
    guest.write(Msr::GlobalCtl, 0b11);
    guest
}

#[test]
fn a_sampling_run_goes_on_in_another_process() {
    let mut first = sampling();
    first.execute(400);
    let state = first.save();
    assert_eq!(state.perf_ctr[0], END - 600);
    assert_eq!((state.global_ctl, state.global_status), (0b11, 0));

    let mut second = Guest::new(V2);
    assert_eq!(second.restore(&state), Ok(()));
    assert_eq!(second.save(), state);
    second.execute(599);
    assert!(!second.take_pmi());
    second.execute(1);
    assert!(second.take_pmi(), "the sample comes where it was due");
}

#[test]
fn a_pending_interrupt_is_saved() {
    let mut first = sampling();
    first.execute(1000);
    // The report has not arrived, yet saving finds the overflow.
    let state = first.save();
    assert_eq!(state.global_status, 1);
    let mut second = Guest::new(V2);
    second.restore(&state).expect("the same kind of PMU");
    assert!(second.pmu.take_pmi());
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let mut guest = sampling();
    let good = guest.save();
    type Change = fn(&mut PmuState);
    let changes: [(&str, Change); 6] = [
        ("PERF_CTL", |state| state.perf_ctl[1] = 1 << 19),
        ("PERF_CTL", |state| state.perf_ctl[5] = 1 << 63),
        ("PERF_CTR", |state| state.perf_ctr[0] = 1 << 48),
        ("PerfCntrGlobalCtl", |state| state.global_ctl = 1 << 6),
        ("PerfCntrGlobalStatus", |state| {
            state.global_status = 1 << 59;
        }),
        ("", |state| state.layout = 0),
    ];
    for (name, change) in changes {
        let mut state = good.clone();
        change(&mut state);
        match guest.restore(&state) {
            Err(RestoreError::Reserved { register, .. }) => assert_eq!(register, name),
            Err(RestoreError::Layout { saved: 0, .. }) => assert_eq!(name, ""),
            other => panic!("{name}: {other:?}"),
        }
        assert_eq!(guest.save(), good, "as it was");
    }
    for offered in [Legacy, Core] {
        let mut other = Guest::new(offered);
        let error = RestoreError::Interface { saved: V2, offered };
        assert_eq!(other.restore(&good), Err(error));
    }
    // A register that an interface lacks is zero in its state.
    let mut legacy = Guest::new(Legacy);
    let mut state = legacy.save();
    state.perf_ctr[4] = 1;
    assert!(legacy.restore(&state).is_err());
}

#[test]
fn a_guest_keeps_its_vendor() {
    let mut guest = sampling();
    let amd = Capability::new(V2);
    let mut amd = Pmu::new(PmuConfig::new(amd)).expect("possible");
    let state = amd.save(&mut guest.host);
    let intel = intel::Capability::new(intel::Version::V2);
    let mut intel = Pmu::new(PmuConfig::new(intel)).expect("possible");
    assert_eq!(
        intel.restore(&state, &mut guest.host),
        Err(RestoreError::Vendor)
    );
}
