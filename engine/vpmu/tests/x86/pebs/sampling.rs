//! Tests of records that are the host's own samples: `vpmu::x86::pebs`, "An overflow".

use super::behaviour::{BUFFER, COUNT, guest};
use crate::guest::FakeGuest;
use crate::support::{Call, END, Guest, Happening, INSTRUCTIONS};
use vpmu::counter::{Counter, Policy, Report};
use vpmu::x86::Ring;
use vpmu::x86::intel::Msr::*;

const PERIOD: u64 = 1000;
/// The threshold of the buffer in records.
const THRESHOLD: u64 = 40;
const ADAPTIVE: u64 = 1 << 34;

/// Returns a guest that records each 1,000 instructions, on a host that samples, and has taken the first overflow.
fn sampled() -> Guest {
    let mut guest = begun();
    guest.execute(PERIOD);
    guest.interrupt();
    assert_eq!(guest.host.sampled(0), Some(PERIOD));
    assert_eq!(records(&guest), [1, 0]);
    guest.host.calls();
    guest
}

/// Returns such a guest before its first overflow.
fn begun() -> Guest {
    let mut guest = guest(THRESHOLD * 32);
    guest.host.prompt = true;
    guest.host.keeps = 100;
    guest.record(COUNT | INSTRUCTIONS, PERIOD);
    guest
}

/// Returns the number of records, and of those that were samples.
fn records(guest: &Guest) -> [u64; 2] {
    let statistics = guest.pmu.pebs_statistics();
    [statistics.records, statistics.sampled]
}

#[test]
fn samples_become_records_without_a_report() {
    let mut guest = sampled();
    for n in 1..=10 {
        guest.memory().go_on(Ring::Kernel, 16 * n);
        guest.execute(PERIOD);
        assert!(!guest.interrupt(), "no report is asked for");
    }
    assert_eq!(guest.index(), BUFFER + 32, "nobody has read it yet");
    assert_eq!(guest.read(GlobalCtrl), 1);
    assert_eq!(guest.index(), BUFFER + 11 * 32);
    assert_eq!(records(&guest), [11, 10]);
    for n in 1..=10 {
        let mut word = |offset| guest.memory().load(BUFFER + 32 * n + offset);
        assert_eq!([word(0), word(0x10)], [32 << 48, 1]);
        assert_eq!(word(8), 0xffff_ffff_8100_0000 + 16 * n);
        assert_eq!(word(0x18), 16 * (1..=n).sum::<u64>());
    }
    // The engine asked for nothing meanwhile.
    assert_eq!(guest.host.calls(), []);
    // The counter's value is its own.
    guest.execute(7);
    assert_eq!(guest.read(FullWidthPmc(0)), END - PERIOD + 7);
}

#[test]
fn the_threshold_is_one_report() {
    let mut guest = sampled();
    for n in 2..THRESHOLD {
        guest.execute(PERIOD);
        assert!(!guest.interrupt(), "{n}");
    }
    assert_eq!(records(&guest), [1, 0]);
    guest.execute(PERIOD);
    assert!(guest.take_pmi());
    assert_eq!(records(&guest), [THRESHOLD, THRESHOLD - 1]);
    assert_eq!(guest.read(GlobalStatus), 1 << 62);
    assert!(!guest.take_pmi(), "one PMI");

    // A guest that has emptied its buffer fills it once more without a report.
    guest.write(GlobalOvfCtrl, 1 << 62);
    guest.memory().store(FakeGuest::RAM + 0x28, BUFFER);
    guest.execute((THRESHOLD - 1) * PERIOD);
    assert!(!guest.interrupt());
    guest.execute(PERIOD);
    assert!(guest.take_pmi());
    assert_eq!(records(&guest), [2 * THRESHOLD, 2 * THRESHOLD - 1]);
}

#[test]
fn a_guest_that_leaves_its_buffer_full_loses_its_records_only() {
    let mut guest = sampled();
    guest.execute((THRESHOLD - 1) * PERIOD);
    assert!(guest.take_pmi());
    // Behind the threshold is room for 24.
    guest.execute(THRESHOLD * PERIOD);
    assert!(guest.take_pmi(), "the PMI comes again");
    assert_eq!(guest.index(), BUFFER + 0x800);
    assert_eq!(guest.pmu.pebs_statistics().lost, THRESHOLD - 24);
    guest.execute(THRESHOLD * PERIOD);
    assert!(guest.take_pmi());
    assert_eq!(guest.pmu.pebs_statistics().lost, 2 * THRESHOLD - 24);
    assert_eq!(guest.read(FullWidthPmc(0)), END - PERIOD);
}

#[test]
fn a_switch_of_tasks_goes_on_where_it_was() {
    let mut guest = sampled();
    guest.execute(PERIOD / 2);
    // What Linux does when a task goes and comes back.
    guest.write(GlobalCtrl, 0);
    guest.write(PebsEnable, 0);
    let value = guest.read(FullWidthPmc(0));
    guest.write(PerfEvtSel(0), COUNT & !(1 << 22) | INSTRUCTIONS);
    guest.write(GlobalCtrl, 1);
    guest.execute(5 * PERIOD);
    guest.write(GlobalCtrl, 0);
    guest.write(FullWidthPmc(0), value);
    guest.write(PerfEvtSel(0), COUNT | INSTRUCTIONS);
    guest.write(PebsEnable, 1);
    guest.write(GlobalCtrl, 1);
    assert_eq!(guest.host.sampled(0), Some(PERIOD));
    guest.execute(PERIOD / 2);
    assert!(!guest.interrupt());
    guest.read(GlobalStatus);
    assert_eq!(records(&guest), [2, 1]);
}

/// The counter's value is as far as its samples when the sampling ends: no overflow is taken for another, and none twice.
#[test]
fn what_ends_the_sampling_settles_it_first() {
    type Change = fn(&mut Guest);
    let changes: [(&str, Change); 3] = [
        ("reset value", |g| g.set_reset(0x40, 3 * PERIOD)),
        ("throttled", |g| g.host.throttle(0)),
        ("groups", |g| g.write(PebsDataCfg, 2)),
    ];
    for (name, change) in changes {
        let mut guest = sampled();
        // With basic records until then, the counter goes on being sampled.
        guest.write(PerfEvtSel(0), COUNT | ADAPTIVE | INSTRUCTIONS);
        guest.execute(PERIOD);
        guest.interrupt();
        guest.read(GlobalCtrl);
        assert_eq!(guest.host.sampled(0), Some(PERIOD), "{name}");
        let [before, _] = records(&guest);
        guest.execute(5 * PERIOD + 10);
        change(&mut guest);
        assert_eq!(guest.read(FullWidthPmc(0)), END - PERIOD + 10, "{name}");
        assert_eq!(records(&guest)[0], before + 5, "{name}");
        assert_eq!(guest.pmu.pebs_statistics().skipped, 0, "{name}");
        assert_eq!(guest.host.sampled(0), None, "{name}");
    }
}

#[test]
fn what_changes_the_period_ends_the_sampling() {
    type Change = fn(&mut Guest);
    let changes: [(&str, Change); 7] = [
        ("value", |g| g.write(FullWidthPmc(0), END - 300)),
        ("event", |g| {
            g.write(PerfEvtSel(0), COUNT | 0xc4);
            g.write(PerfEvtSel(0), COUNT | INSTRUCTIONS);
        }),
        ("ring", |g| {
            g.write(PerfEvtSel(0), COUNT & !(1 << 16) | INSTRUCTIONS);
        }),
        ("groups", |g| {
            g.write(PebsDataCfg, 2);
            g.write(PerfEvtSel(0), COUNT | ADAPTIVE | INSTRUCTIONS);
        }),
        ("no records", |g| g.write(PebsEnable, 0)),
        ("throttled", |g| g.host.throttle(0)),
        ("reset value", |g| {
            g.set_reset(0x40, 3 * PERIOD);
            g.execute(PERIOD);
        }),
    ];
    for (name, change) in changes {
        let mut guest = sampled();
        guest.execute(PERIOD);
        change(&mut guest);
        // The samples up to there are records.
        guest.read(GlobalCtrl);
        assert!(records(&guest)[1] >= 1, "{name}");
        assert_eq!(guest.host.sampled(0), None, "{name}");
    }
    let mut guest = sampled();
    guest.write(FullWidthPmc(0), END - 300);
    guest.execute(300);
    guest.interrupt();
    assert_eq!(records(&guest), [2, 0], "by an exit");
    assert_eq!(
        guest.host.sampled(0),
        Some(PERIOD),
        "and then sampled again"
    );
}

#[test]
fn other_records_are_made_at_the_overflow() {
    type Make = fn(&mut Guest);
    let cases: [(&str, Make); 5] = [
        ("groups", |g| {
            g.write(PebsDataCfg, 1);
            g.write(PerfEvtSel(0), COUNT | ADAPTIVE | INSTRUCTIONS);
        }),
        ("one record up to the threshold", |g| {
            g.memory().store(FakeGuest::RAM + 0x38, BUFFER + 32);
        }),
        ("no reset value", |g| {
            g.memory().store(FakeGuest::RAM + 0x40, 0);
        }),
        ("a host with little memory", |g| g.host.keeps = 3),
        ("a host that does not sample", |g| g.host.keeps = 0),
    ];
    for (name, make) in cases {
        let mut guest = begun();
        make(&mut guest);
        guest.execute(PERIOD);
        guest.interrupt();
        assert_eq!(records(&guest), [1, 0], "{name}");
        guest.execute(PERIOD);
        if !name.starts_with("no reset") {
            guest.interrupt();
            assert_eq!(records(&guest), [2, 0], "{name}");
        }
    }
}

#[test]
fn a_sample_of_the_other_ring_is_no_record() {
    const USER: u64 = COUNT & !(1 << 17);
    let mut guest = guest(THRESHOLD * 32);
    guest.host.keeps = 100;
    guest.record(USER | INSTRUCTIONS, PERIOD);
    guest.execute(PERIOD);
    guest.interrupt();
    // The interrupt that samples came late.
    guest.memory().go_on(Ring::Kernel, 1);
    guest.happen(Happening::Instructions, Ring::User, PERIOD);
    guest.memory().go_on(Ring::User, 16);
    guest.happen(Happening::Instructions, Ring::User, PERIOD);
    guest.host.outside = 3;
    guest.read(GlobalCtrl);
    let statistics = guest.pmu.pebs_statistics();
    assert_eq!([statistics.filtered, statistics.outside], [1, 3]);
    assert_eq!(records(&guest), [2, 1]);
    assert_eq!(guest.memory().load(BUFFER + 40), 0x40_1010);
}

#[test]
fn a_saved_guest_has_its_records() {
    let mut guest = sampled();
    guest.execute(3 * PERIOD + 11);
    let state = guest.save();
    assert_eq!(records(&guest), [4, 3]);
    assert_eq!(state.pmc[0], END - PERIOD + 11);
    assert_eq!(guest.host.sampled(0), Some(PERIOD), "nothing stops");
    guest.restore(&state).unwrap();
    guest.execute(PERIOD - 11);
    guest.interrupt();
    assert_eq!(records(&guest), [5, 3], "the first by an exit");
}

#[test]
fn a_host_that_does_not_sample_what_it_promised_is_not_believed() {
    let mut guest = sampled();
    guest.host.keeps = 0;
    guest.execute((THRESHOLD - 1) * PERIOD);
    guest.interrupt();
    assert_eq!(records(&guest), [1, 0]);
    assert_eq!(guest.pmu.pebs_statistics().skipped, THRESHOLD - 1);
    assert_eq!(guest.host.sampled(0), None);
    guest.execute(PERIOD);
    guest.interrupt();
    assert_eq!(records(&guest), [2, 0], "by an exit");
}

/// As by a timer that gains on the count.
#[test]
fn an_early_report_vouches_for_no_period_that_is_sampled() {
    let mut guest = sampled();
    guest.execute(15 * PERIOD + 11);
    let counter = Counter::at::<0>();
    let pmi = guest.pmu.overflow(counter, Report::Due, &mut guest.host);
    assert!(!pmi, "the buffer has room");
    assert_eq!(records(&guest), [16, 15]);
    assert_eq!(guest.pmu.pebs_statistics().skipped, 0);
    assert_eq!(guest.read(FullWidthPmc(0)), END - PERIOD + 11);
    guest.execute((THRESHOLD - 16) * PERIOD - 11);
    assert!(guest.take_pmi(), "on time");
    assert_eq!(records(&guest), [THRESHOLD, THRESHOLD - 1]);
}

#[test]
fn two_counters_share_the_buffer() {
    let mut guest = begun();
    guest.set_reset(0x48, 3 * PERIOD);
    guest.write(FullWidthPmc(1), END - 3 * PERIOD);
    guest.write(PerfEvtSel(1), COUNT | INSTRUCTIONS);
    guest.write(PebsEnable, 3);
    guest.write(GlobalCtrl, 3);
    let (mut pmis, mut reports) = (0, 0);
    for _ in 0..10 * THRESHOLD {
        guest.execute(PERIOD);
        reports += u32::from(!guest.host.reports.is_empty());
        if guest.take_pmi() {
            pmis += 1;
            assert_eq!(guest.index(), BUFFER + THRESHOLD * 32);
            guest.write(GlobalOvfCtrl, 1 << 62);
            guest.memory().store(FakeGuest::RAM + 0x28, BUFFER);
        }
    }
    assert_eq!(guest.pmu.pebs_statistics().lost, 0);
    // Of 400 and 133 records, 40 a PMI.
    assert_eq!(pmis, 13);
    assert!(reports <= 7 * pmis, "{reports}");
}

#[test]
fn each_policy_has_all_records() {
    for policy in Policy::ALL {
        let mut guest = begun();
        guest.pmu = vpmu::x86::Pmu::new(vpmu::x86::PmuConfig {
            policy,
            ..vpmu::x86::PmuConfig::new(guest.pmu.capability())
        })
        .unwrap();
        let memory = guest.host.guest.take();
        guest.host = crate::support::FakeHost::new(policy);
        (guest.host.guest, guest.host.keeps, guest.host.prompt) = (memory, 100, true);
        guest.write(DsArea, FakeGuest::RAM);
        guest.record(COUNT | INSTRUCTIONS, PERIOD);
        for n in 1..=12_u64 {
            guest.execute(PERIOD);
            guest.interrupt();
            if n % 3 == 0 {
                guest.write(GlobalCtrl, 0);
                guest.write(GlobalCtrl, 1);
            }
        }
        guest.read(GlobalCtrl);
        assert_eq!(records(&guest)[0], 12, "{policy:?}");
        assert!(
            !guest.host.calls().contains(&Call::SetPeriod(0, None)),
            "{policy:?}"
        );
    }
}
