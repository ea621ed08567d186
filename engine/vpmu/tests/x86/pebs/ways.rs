//! Random guests that ask for records, on two hosts: a host that takes an exit for each record, and a host that samples by
//! itself. Both guests find the same records, counts and interrupts.

use proptest::prelude::*;

use super::behaviour::{BUFFER, COUNT, guest};
use crate::guest::FakeGuest;
use crate::model::config;
use crate::support::{END, Guest, Happening, INSTRUCTIONS};
use vpmu::x86::Ring;
use vpmu::x86::intel::Msr::*;

const PERIODS: [u64; 2] = [1000, 1700];
/// The threshold of the buffer in records, which has room for 64.
const THRESHOLD: u64 = 40;
const RECORD: u64 = 32;

/// What a guest does.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Executes fewer instructions than a period has, at another place.
    Execute(u64, Ring, u64),
    /// Reads a counter, which is one of two.
    Read(u8),
    /// Stops all counters and lets them go on.
    Stop,
    /// Gives its PMU to a task that counts by itself, and takes it back, as Linux does.
    Switch(u64),
    /// Empties the buffer before it is due.
    Drain,
    /// Stops one counter for a while.
    Pause(u8),
}

fn step() -> impl Strategy<Value = Step> {
    let ring = prop::sample::select(vec![Ring::User, Ring::Kernel]);
    prop_oneof![
        20 => (1..PERIODS[0], ring, 1..0xfff_u64).prop_map(|(n, ring, at)| Step::Execute(n, ring, at)),
        3 => (0..2_u8).prop_map(Step::Read),
        1 => Just(Step::Stop),
        1 => (1..5000_u64).prop_map(Step::Switch),
        1 => Just(Step::Drain),
        1 => (0..2_u8).prop_map(Step::Pause),
    ]
}

/// What a guest has seen.
#[derive(Debug, Default, PartialEq, Eq)]
struct Seen {
    values: Vec<u64>,
    records: Vec<[u64; 4]>,
    /// Number of records after each drain.
    drained: Vec<usize>,
}

/// Takes the records out of the buffer.
fn drain(guest: &mut Guest, seen: &mut Seen) {
    // The guest's access brings the records that are due.
    guest.read(GlobalStatus);
    let end = guest.index();
    guest.memory().store(FakeGuest::RAM + 0x28, BUFFER);
    guest.write(GlobalOvfCtrl, 1 << 62);
    for at in (BUFFER..end).step_by(RECORD as usize) {
        let word = |n: u64| guest.memory().load(at + 8 * n);
        seen.records.push([0, 1, 2, 3].map(word));
    }
    seen.drained.push(seen.records.len());
}

/// Returns a guest that records with one counter or with two, on a host that keeps so many samples.
fn sampled(two: bool, atomic: bool, repeats: bool, keeps: u64) -> Guest {
    let mut guest = guest(THRESHOLD * RECORD);
    (guest.host.prompt, guest.host.atomic, guest.host.keeps) = (true, atomic, keeps);
    guest.host.repeats = repeats;
    guest.record(COUNT | INSTRUCTIONS, PERIODS[0]);
    if two {
        guest.set_reset(0x48, PERIODS[1]);
        guest.write(FullWidthPmc(1), END - PERIODS[1]);
        guest.write(PerfEvtSel(1), COUNT | INSTRUCTIONS);
        guest.write(PebsEnable, 3);
        guest.write(GlobalCtrl, 3);
    }
    guest
}

/// Executes `times` instructions. A report comes at its event: the host's own period begins there.
fn execute(guest: &mut Guest, times: u64, ring: Ring, seen: &mut Seen) {
    let mut left = times;
    while left > 0 {
        let counted = |config: &_| Happening::Instructions.is_counted_by(config, ring);
        let part = guest
            .host
            .soonest(counted)
            .map_or(left, |due| due.min(left));
        guest.happen(Happening::Instructions, ring, part);
        left -= part;
        if guest.take_pmi() {
            drain(guest, seen);
        }
    }
}

fn perform(guest: &mut Guest, step: Step, seen: &mut Seen) {
    let both = [COUNT | INSTRUCTIONS; 2];
    match step {
        Step::Execute(times, ring, at) => {
            guest.memory().go_on(ring, at);
            execute(guest, times, ring, seen);
        }
        Step::Read(n) => seen.values.push(guest.read(FullWidthPmc(n))),
        Step::Stop => {
            guest.write(GlobalCtrl, 0);
            let values = [0, 1].map(|n| guest.read(FullWidthPmc(n)));
            guest.write(GlobalCtrl, 3);
            seen.values.extend(values);
        }
        Step::Switch(times) => {
            guest.write(GlobalCtrl, 0);
            let recording = guest.read(PebsEnable);
            guest.write(PebsEnable, 0);
            let values = [0, 1].map(|n| guest.read(FullWidthPmc(n)));
            guest.write(PerfEvtSel(0), COUNT | 0xc4);
            guest.write(FullWidthPmc(0), 0);
            guest.write(GlobalCtrl, 1);
            execute(guest, times, Ring::User, seen);
            guest.write(GlobalCtrl, 0);
            for (n, value) in (0..).zip(values) {
                guest.write(PerfEvtSel(n), both[usize::from(n)]);
                guest.write(FullWidthPmc(n), value);
            }
            guest.write(PebsEnable, recording);
            guest.write(GlobalCtrl, 3);
            seen.values.extend(values);
        }
        Step::Drain => drain(guest, seen),
        Step::Pause(n) => {
            guest.write(PerfEvtSel(n), 0);
            execute(guest, 10, Ring::User, seen);
            guest.write(PerfEvtSel(n), both[usize::from(n)]);
        }
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_host_that_samples_gives_the_same_records(
        steps in prop::collection::vec(step(), 1..400),
        two in any::<bool>(),
        atomic in any::<bool>(),
        repeats in any::<bool>(),
    ) {
        let run = |keeps| {
            let mut guest = sampled(two, atomic, repeats, keeps);
            let mut seen = Seen::default();
            for &step in &steps {
                perform(&mut guest, step, &mut seen);
            }
            drain(&mut guest, &mut seen);
            assert_eq!(guest.pmu.pebs_statistics().lost, 0);
            if two {
                // The samples of a counter are converted together, and the room is divided anew before the threshold.
                seen.records.sort_unstable_by_key(|&[_, _, counters, tsc]| (tsc, counters));
                seen.drained.clear();
            }
            seen
        };
        prop_assert_eq!(run(0), run(100));
    }
}

/// The first of two reports divides the buffer's room anew, for which both counters are read, and asks for another report
/// of the second. The second report, which is on its way, is not that one.
#[test]
fn counters_that_overflow_at_once_count_once() {
    let mut guest = sampled(true, false, false, 100);
    let mut seen = Seen::default();
    let mut counted = [0, 0];
    for (times, pause) in [(12748, Some(1_u8)), (12748, Some(0)), (25496, None)] {
        execute(&mut guest, times, Ring::User, &mut seen);
        counted = counted.map(|all| all + times);
        if let Some(n) = pause {
            perform(&mut guest, Step::Pause(n), &mut seen);
            counted[1 - usize::from(n)] += 10;
        }
    }
    assert_eq!(
        counted.map(|all| all / 1000 * 1000),
        [51_000, 51_000],
        "30 periods, and 51"
    );
    for (n, (counted, period)) in (0..).zip(counted.into_iter().zip(PERIODS)) {
        assert_eq!(guest.read(FullWidthPmc(n)), END - period + counted % period);
    }
}
