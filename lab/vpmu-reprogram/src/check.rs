//! Checks that this machine's perf events keep the promises of a [`CounterHost`].
//!
//! The engine's own tests run against fakes and against the clock that every machine has. A hardware PMU differs:
//! whether its events can count guests alone, when it reports overflows, and what it does with too few counters. So
//! this program tries the promises on the machine itself: on bare metal, or in a guest whose PMU is this project's own.

mod apart;

use std::num::NonZeroU64;
use std::thread;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use vpmu::counter::{Counter, CounterHost, CounterSet, Lost, Report, Slots};
use vpmu::x86::intel::{RawPerfEvtSel, Version};
use vpmu::x86::pebs::{Host, Sample};
use vpmu::x86::{CounterConfig, Ring};
use vpmu_perf::{Backing, PerfHost, PerfOptions};

pub(crate) fn options(backing: Option<Backing>) -> PerfOptions {
    PerfOptions {
        // The rate of the checks' clock.
        tsc_hz: 1_000_000_000,
        backing,
        ..PerfOptions::default()
    }
}

/// The reason why a promise was not seen to hold.
pub(crate) enum Unseen {
    /// It does not hold: the observation.
    Broken(String),
    /// There is nothing to check here.
    Skipped(String),
}

impl From<String> for Unseen {
    fn from(seen: String) -> Self {
        Self::Broken(seen)
    }
}

/// Says that there is nothing to check here.
pub(crate) fn skipped<T>(why: impl Into<String>) -> Result<T, Unseen> {
    Err(Unseen::Skipped(why.into()))
}

/// What a check has found: the observation where the promise holds.
pub(crate) type Found = Result<String, Unseen>;

pub(crate) type Check = (&'static str, fn(Backing) -> Found);

pub(crate) const CHECKS: [Check; 15] = [
    ("counts while it runs, and only then", counts),
    ("an event made anew begins at zero", anew),
    ("an overflow is reported once, and not early", overflow),
    ("a running event's period can be replaced", replaced),
    ("without a period there is no report", unasked),
    ("a period that repeats needs no call", repeated),
    ("the kernel's samples are a period apart", sampled),
    ("several are paused and read at once", together),
    ("overflows at one time are all reported", at_once),
    ("a storm is bounded", storm),
    ("a rare event has each of its reports", rare),
    ("a guest's event does not count this thread", guests_only),
    ("events that share a counter are known to", shared),
    ("each privilege ring is counted by itself", apart::rings),
    (
        "a thread is counted by itself, wherever it runs",
        apart::threads,
    ),
];

/// A period of cycles, or of nanoseconds: some hundred microseconds either way.
const PERIOD: u64 = 200_000;
const CYCLES: CounterConfig = event(0x3c | RawPerfEvtSel::USR | RawPerfEvtSel::OS);
const FIRST: Counter = Counter::at::<0>();
const SECOND: Counter = Counter::at::<1>();
const THIRD: Counter = Counter::at::<2>();
const NOWHERE: Sample = Sample {
    ip: 0,
    ring: Ring::Kernel,
    tsc: 0,
};
const MOMENT: Duration = Duration::from_millis(3);
const PATIENCE: Duration = Duration::from_secs(10);

/// Returns an event by Intel's select, which hosts of other vendors know as an architectural one.
pub(crate) const fn event(select: u64) -> CounterConfig {
    RawPerfEvtSel(select).config(Version::V2)
}

pub(crate) fn host(backing: Backing) -> Result<PerfHost, String> {
    host_of(options(Some(backing)))
}

pub(crate) fn host_of(options: PerfOptions) -> Result<PerfHost, String> {
    PerfHost::of_thread(options).map_err(|error| error.to_string())
}

/// Skips a check that a clock cannot do.
fn hardware_only(backing: Backing) -> Result<(), Unseen> {
    match backing {
        Backing::Hardware => Ok(()),
        Backing::Clock => skipped("only hardware events can"),
    }
}

fn create(host: &mut PerfHost, counter: Counter) -> Result<(), String> {
    host.create(counter, &CYCLES)
        .map_err(|lost| format!("cycles cannot be counted: {lost}"))
}

/// Returns a host with one event, which has begun to count, and reports each `period`.
fn begun(options: PerfOptions, counter: Counter, period: u64) -> Result<PerfHost, String> {
    let mut host = host_of(options)?;
    create(&mut host, counter)?;
    host.set_period(counter, NonZeroU64::new(period));
    host.resume(counter.alone());
    Ok(host)
}

/// Returns the time that this thread has had on a processor. On a busy machine, other time may pass without it.
fn used() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).expect("a thread's time is never negative")
}

/// Uses the CPU for `time`, and returns the reports that came meanwhile.
fn spin(host: &mut PerfHost, time: Duration) -> Vec<(Counter, Report)> {
    let start = used();
    let mut reports = Vec::new();
    while used() - start < time {
        reports.extend(host.take_overflows());
    }
    reports
}

/// Has `counters` count while the CPU is used for `time`.
pub(crate) fn count(host: &mut PerfHost, counters: CounterSet, time: Duration) {
    host.resume(counters);
    spin(host, time);
    host.pause(counters);
}

/// Returns whether this machine's processor is a hypervisor's.
pub(crate) fn is_virtual() -> bool {
    std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| {
        let flags = text.lines().find(|line| line.starts_with("flags"));
        flags.is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor"))
    })
}

/// Uses the CPU until a report comes.
fn wait(host: &mut PerfHost) -> Result<(Counter, Report), String> {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        if let Some(report) = host.take_overflows().next() {
            return Ok(report);
        }
    }
    Err("no overflow was reported in 10 s".to_owned())
}

pub(crate) fn holds_if(condition: bool, seen: String) -> Found {
    match condition {
        true => Ok(seen),
        false => Err(Unseen::Broken(seen)),
    }
}

fn counts(backing: Backing) -> Found {
    let mut host = host(backing)?;
    create(&mut host, FIRST)?;
    spin(&mut host, MOMENT);
    let before = host.read(FIRST);
    count(&mut host, FIRST.alone(), MOMENT);
    let ran = host.read(FIRST);
    spin(&mut host, MOMENT);
    let after = host.read(FIRST);
    let seen = format!("{before} before, {ran} when paused, {after} later");
    holds_if(before == 0 && ran > 0 && after == ran, seen)
}

fn anew(backing: Backing) -> Found {
    let mut host = host(backing)?;
    create(&mut host, FIRST)?;
    count(&mut host, FIRST.alone(), MOMENT);
    let first = host.read(FIRST);
    host.release(FIRST);
    create(&mut host, FIRST)?;
    let second = host.read(FIRST);
    holds_if(first > 0 && second == 0, format!("{first}, then {second}"))
}

fn overflow(backing: Backing) -> Found {
    // Nothing vouches for a report of two overflows, so the second is long after the first.
    const LONG: u64 = 10 * PERIOD;
    let mut host = begun(options(Some(backing)), THIRD, LONG)?;
    let report = wait(&mut host)?;
    let total = host.read(THIRD);
    let more = spin(&mut host, 5 * MOMENT);
    holds_if(
        report == (THIRD, Report::Due) && total >= LONG && more.is_empty(),
        format!("{report:?} at {total} of {LONG}, then {} more", more.len()),
    )
}

fn replaced(backing: Backing) -> Found {
    let mut host = begun(options(Some(backing)), FIRST, 1 << 46)?;
    spin(&mut host, MOMENT);
    // The period is replaced at any moment around the end of the previous one, whose signal may be on its way. A report
    // that is vouched for is of the new period. The others only make the engine read the counter.
    let mut vouched_for = 0;
    for round in 0..100 {
        const SHORT: u64 = 60_000;
        host.set_period(FIRST, NonZeroU64::new(SHORT));
        let start = Instant::now();
        while start.elapsed() < Duration::from_nanos(SHORT / 2 + round * SHORT / 100) {}
        let before = host.read(FIRST);
        host.set_period(FIRST, NonZeroU64::new(PERIOD));
        let report = wait(&mut host)?;
        let since = host.read(FIRST) - before;
        if report == (FIRST, Report::Due) {
            vouched_for += 1;
            if since < PERIOD {
                return Err(format!("{report:?} after {since} of {PERIOD}").into());
            }
        }
    }
    holds_if(vouched_for > 0, format!("{vouched_for} of 100 vouched for"))
}

fn unasked(backing: Backing) -> Found {
    let mut host = begun(options(Some(backing)), FIRST, PERIOD)?;
    host.set_period(FIRST, None);
    let reports = spin(&mut host, MOMENT);
    let total = host.read(FIRST);
    let seen = format!("{} reports in {total}", reports.len());
    holds_if(reports.is_empty() && total > PERIOD, seen)
}

fn repeated(backing: Backing) -> Found {
    const TIMES: u64 = 10;
    let options = PerfOptions {
        repeating: true,
        ..options(Some(backing))
    };
    let mut host = begun(options, FIRST, PERIOD)?;
    let mut vouched_for = 0;
    for _ in 0..TIMES {
        // Signals that were not taken in time are one report, for which nothing vouches.
        if wait(&mut host)? == (FIRST, Report::Due) {
            vouched_for += 1;
        }
    }
    let total = host.read(FIRST);
    let seen = format!("{TIMES} reports, {vouched_for} vouched for, in {total} of {PERIOD} each");
    holds_if(vouched_for > 0 && total >= TIMES * PERIOD, seen)
}

fn sampled(backing: Backing) -> Found {
    let mut host = host_of(PerfOptions {
        sampling: true,
        ..options(Some(backing))
    })?;
    create(&mut host, FIRST)?;
    let period = NonZeroU64::new(PERIOD).expect("no period is 0");
    if host.begin_sampling(FIRST, period) == 0 {
        // As in a guest with kvmclock.
        return skipped("perf's clock is not the TSC");
    }
    count(&mut host, FIRST.alone(), 20 * MOMENT);
    let periods = host.read(FIRST) / PERIOD;
    // A place of this thread is outside any guest.
    let taken = host.take_samples(FIRST, &mut [NOWHERE]);
    let outside = taken.outside;
    let least = match backing {
        // By kernel.perf_event_max_sample_rate. The engine then asks for a report of each overflow.
        _ if taken.ended => 1,
        Backing::Hardware => periods.saturating_sub(2),
        // A clock's timer that comes late takes one sample for all the periods that are over.
        Backing::Clock => 1,
    };
    let ended = match taken.ended {
        true => ", and the kernel says that it has ended them",
        false => "",
    };
    // The sampler starts and stops a call before the counter, and may be ended at any time, also at the last sample.
    holds_if(
        periods > 10 && (least..=periods + 2).contains(&outside),
        format!("{outside} samples in {periods} periods{ended}"),
    )
}

fn together(backing: Backing) -> Found {
    let mut host = host(backing)?;
    let both = CounterSet::first(2);
    for counter in both {
        create(&mut host, counter)?;
    }
    host.resume(both);
    spin(&mut host, MOMENT);
    let mut totals = Slots::filled(0);
    let read = host.pause_and_read(both, &mut totals);
    spin(&mut host, MOMENT);
    let totals = [totals[FIRST], totals[SECOND]];
    let still = [FIRST, SECOND].map(|counter| host.read(counter));
    holds_if(
        read && totals == still && still.iter().all(|&total| total > 0),
        format!("{} and {}, later {still:?}", totals[0], totals[1]),
    )
}

fn at_once(backing: Backing) -> Found {
    // A report that is lost comes a period later, every time. A machine that is taken away from this program for a
    // period gives the same picture, but not always.
    const TRIES: u32 = 10;
    let in_time = 20 * PERIOD..40 * PERIOD;
    let mut totals = [0; 3];
    for _ in 0..TRIES {
        totals = reported_at(backing)?;
        if totals.iter().all(|total| in_time.contains(total)) {
            break;
        }
    }
    let seen = format!("at {totals:?} of {}", 20 * PERIOD);
    holds_if(totals.iter().all(|total| in_time.contains(total)), seen)
}

/// Returns the totals at which three counters report the same period.
fn reported_at(backing: Backing) -> Result<[u64; 3], String> {
    let mut host = host(backing)?;
    let all = CounterSet::first(3);
    for counter in all {
        create(&mut host, counter)?;
        // The period is long enough that nobody is kept from the CPU until the next overflow.
        host.set_period(counter, NonZeroU64::new(20 * PERIOD));
    }
    host.resume(all);
    let mut totals = [0; 3];
    let start = Instant::now();
    while totals.contains(&0) && start.elapsed() < PATIENCE {
        let reports: Vec<(Counter, Report)> = host.take_overflows().collect();
        for (counter, _) in reports {
            totals[counter.index()] = host.read(counter);
        }
    }
    Ok(totals)
}

fn storm(backing: Backing) -> Found {
    let mut host = begun(options(Some(backing)), FIRST, 1)?;
    let (start, mut reports) = (Instant::now(), 0);
    while reports < 200 && start.elapsed() < PATIENCE {
        if host.take_overflows().next().is_some() {
            reports += 1;
            host.set_period(FIRST, NonZeroU64::new(1));
        }
    }
    let ns = start.elapsed().as_nanos() as u64;
    let seen = format!("{reports} reports in {ns} ns, {} events", host.read(FIRST));
    // Hardware events may have saved up some overflows.
    let most = ns / PerfHost::FLOOR + 40;
    holds_if(reports > 0 && reports <= most, seen)
}

/// User space's instructions, of a thread that mostly sleeps: some ten thousand in a second, and a report for each thousand.
fn rare(backing: Backing) -> Found {
    const EACH: u64 = 1000;
    const REPORTS: u64 = 60;
    hardware_only(backing)?;
    if is_virtual() {
        // As this project's PMU does on a clock, whose overflows are some time apart.
        return skipped("the hypervisor may have a bound of its own");
    }
    let mut host = host_of(PerfOptions {
        repeating: true,
        ..options(Some(backing))
    })?;
    host.create(FIRST, &event(0xc0 | RawPerfEvtSel::USR))
        .map_err(|lost| format!("instructions cannot be counted: {lost}"))?;
    host.set_period(FIRST, NonZeroU64::new(EACH));
    host.resume(FIRST.alone());
    let (start, mut reports) = (Instant::now(), 0);
    while reports < REPORTS && start.elapsed() < PATIENCE {
        // A few hundred instructions, so that no two reports come at once, which would be one.
        reports += host.take_overflows().count() as u64;
        thread::sleep(MOMENT * 5);
    }
    host.pause(FIRST.alone());
    reports += host.take_overflows().count() as u64;
    let (total, ms) = (host.read(FIRST), start.elapsed().as_millis());
    let seen = format!("{reports} reports in {total} of {EACH} each, in {ms} ms");
    holds_if(reports > 0 && reports == total / EACH, seen)
}

fn guests_only(backing: Backing) -> Found {
    hardware_only(backing)?;
    let mut host = PerfHost::new(options(Some(backing))).map_err(|error| error.to_string())?;
    create(&mut host, FIRST)?;
    count(&mut host, FIRST.alone(), MOMENT);
    let total = host.read(FIRST);
    holds_if(total == 0, format!("{total}"))
}

fn shared(backing: Backing) -> Found {
    hardware_only(backing)?;
    let mut host = host(backing)?;
    let all = CounterSet::first(24);
    for counter in all {
        create(&mut host, counter)?;
    }
    count(&mut host, all, 20 * MOMENT);
    let deficit = |counter| {
        let total = host.read(counter);
        (host.deficit(counter), total)
    };
    let found: Vec<(Option<Lost>, u64)> = all.iter().map(deficit).collect();
    let sharing = found
        .iter()
        .filter(|(lost, _)| *lost == Some(Lost::Multiplexed))
        .count();
    let counted = found.iter().filter(|(_, total)| *total > 0).count();
    holds_if(
        sharing > 0 && counted > 0,
        format!("{sharing} of 24 shared, {counted} counted"),
    )
}
