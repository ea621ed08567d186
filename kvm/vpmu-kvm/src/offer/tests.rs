//! What hosts of each kind offer.

use super::*;
use crate::{Perfmon, Skid};

fn support(events: u32) -> Support {
    Support {
        backing: Backing::Clock,
        events,
        counters: None,
        mediated: false,
    }
}

#[test]
fn a_guest_is_promised_no_more_counters_than_the_host_has_left() {
    for (free, promised) in [(None, 4), (Some(8), 4), (Some(2), 2), (Some(0), 1)] {
        let support = Support {
            backing: Backing::Hardware,
            counters: free,
            ..support(0b101)
        };
        let model = Model::Intel {
            version: Perfmon::V2,
            pebs: false,
        };
        match best(model, Vendor::Intel, support) {
            Ok(Pmu::Architectural(Capability::Intel(found))) => {
                assert_eq!(found.general, promised, "{free:?}");
            }
            other => panic!("{other:?}"),
        }
        match best(Model::Paravirtual, Vendor::Intel, support) {
            Ok(Pmu::Paravirtual(offer)) => {
                assert_eq!(offer.counters, promised.min(HARDWARE_COUNTERS), "{free:?}");
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Six counters, as AMD's processors have, count four general ones and the two fixed ones whose events are there.
#[test]
fn fixed_counters_are_promised_beside_general_ones_on_any_processor() {
    let support = Support {
        backing: Backing::Hardware,
        counters: Some(6),
        ..support(0b11)
    };
    for (host, promised) in [(Vendor::Intel, 6), (Vendor::Amd, 4)] {
        match best(Model::INTEL, host, support) {
            Ok(Pmu::Architectural(Capability::Intel(found))) => {
                assert_eq!((found.general, found.fixed), (promised, 0b11), "{host:?}");
            }
            other => panic!("{other:?}"),
        }
    }
}

fn found(model: Model, host: Vendor) -> Result<Offer, Error> {
    best(model, host, support(0b101)).map(Offer::from)
}

#[test]
fn a_guest_gets_the_hosts_vendor() {
    let amd = |interface| {
        let events = 0b101;
        Ok(Offer::from(Capability::from(amd::Capability {
            events,
            ..amd::Capability::new(interface)
        })))
    };
    assert_eq!(found(Model::Auto, Vendor::Amd), amd(amd::Interface::Core));
    for interface in [amd::Interface::Core, amd::Interface::V2] {
        assert_eq!(found(Model::Amd(interface), Vendor::Amd), amd(interface));
        for host in [Vendor::Intel, Vendor::Other] {
            assert_eq!(found(Model::Amd(interface), host), Err(Error::NoAmd));
        }
    }
    for host in [Vendor::Intel, Vendor::Other] {
        assert_eq!(found(Model::Auto, host), found(Model::INTEL, Vendor::Amd));
    }
    for pebs in [false, true] {
        let version = Perfmon::V5;
        let offer = found(Model::Intel { version, pebs }, Vendor::Amd).unwrap();
        assert_eq!(offer.has_pebs(), pebs);
    }
}

#[test]
fn a_fixed_counter_that_nothing_backs_is_not_offered_where_it_can_be_left_out() {
    let fixed = |version, events| {
        let model = Model::Intel {
            version,
            pebs: false,
        };
        match best(model, Vendor::Amd, support(events)) {
            Ok(Pmu::Architectural(Capability::Intel(found))) => {
                assert_eq!((found.version, found.check()), (version, Ok(())));
                assert_eq!(found.leaf_0a().ebx, !events & 0x7f);
                found.fixed
            }
            other => panic!("{other:?}"),
        }
    };
    for version in [Perfmon::V2, Perfmon::V3, Perfmon::V4] {
        assert_eq!(fixed(version, 0b101), 0b111, "no gaps");
    }
    for (events, counters) in [(0b101, 0b110), (0b111, 0b111), (0x7b, 0b011)] {
        assert_eq!(fixed(Perfmon::V5, events), counters);
    }
}

#[test]
fn each_part_has_its_msrs() {
    assert!(Offer::default().msrs().is_empty());
    let both = Offer {
        deadline: true,
        ..found(Model::Paravirtual, Vendor::Other).unwrap()
    };
    assert_eq!(
        both.msrs(),
        [
            PMU_PAGE_MSR,
            PMU_DOORBELL_MSR,
            DEADLINE_SLOT_MSR,
            DEADLINE_MSR
        ]
    );
    let intel = found(Model::INTEL, Vendor::Intel).unwrap();
    assert!(intel.msrs().contains(&0x38f) && !intel.msrs().contains(&DEADLINE_MSR));
}

#[test]
fn late_records_are_not_offered_unless_they_are_accepted() {
    let check = |backing, skid| pebs::check_skid(skid, backing);
    assert_eq!(
        check(Backing::Hardware, Skid::default()),
        Err(Error::PebsSkid)
    );
    assert_eq!(check(Backing::Hardware, Skid::Accepted), Ok(()));
    for skid in [Skid::Refused, Skid::Accepted] {
        assert_eq!(check(Backing::Clock, skid), Ok(()), "{skid:?}");
    }
}

#[test]
fn misc_enable_says_unavailable_where_it_is() {
    let with = |pebs| {
        let version = Perfmon::V5;
        found(Model::Intel { version, pebs }, Vendor::Intel).unwrap()
    };
    for (offer, unavailable) in [
        (Offer::default(), 0x1800),
        (with(false), 0x1800),
        (with(true), 0x800),
    ] {
        assert_eq!(offer.misc_enable(0x1801), 1 | unavailable);
        assert_eq!(offer.misc_enable(1), 1 | unavailable);
    }
}

/// Intel's model and the paravirtual PMU do not offer what nobody counts, and guests print `<not supported>`.
#[test]
fn a_log_warns_of_zeros_that_a_guest_cannot_find_out() {
    let (cycles, all) = (0b101, 0x7f);
    let warns = |model, events| {
        let offer = Offer::from(best(model, Vendor::Amd, support(events)).unwrap());
        offer.warning_beside(|| None).is_some()
    };
    assert!(warns(Model::Auto, cycles) && !warns(Model::Auto, all));
    assert!(!warns(Model::INTEL, cycles) && !warns(Model::Paravirtual, cycles));
    assert_eq!(Offer::default().warning_beside(|| None), None);
}

/// A watchdog has one of six counters. Where CPUID says a number the guest is promised five, and else the log says it.
#[test]
fn no_guest_shares_counters_unawares() {
    let beside = Support {
        counters: Some(5),
        ..support(0x7f)
    };
    let of = |model| Offer::from(best(model, Vendor::Amd, beside).unwrap());
    let (core, v2) = (
        of(Model::Amd(amd::Interface::Core)),
        of(Model::Amd(amd::Interface::V2)),
    );
    let counters = |offer: &Offer| offer.pmu.as_ref().map(Pmu::counters);
    assert_eq!((counters(&core), counters(&v2)), (Some(6), Some(5)));
    let warns = |offer: &Offer, free| offer.warning_beside(|| Some(free)).is_some();
    assert!(warns(&core, 5) && !warns(&core, 6));
    assert!(!warns(&v2, 5) && warns(&v2, 4), "others came since");
}
