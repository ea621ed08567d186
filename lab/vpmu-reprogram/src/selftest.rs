//! What `vpmu selftest` asks of perf on this machine: the promises with each backing, and what no promise of a host says.

use std::hint::black_box;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use serde_json::{Value, json};
use vpmu::counter::{Counter, CounterHost, CounterSet, Lost};
use vpmu::x86::intel::RawPerfEvtSel;
use vpmu_perf::{Backing, PerfError, PerfHost, Support, support};

use crate::check::{CHECKS, Found, Unseen, count, event, holds_if, host, is_virtual, skipped};
use crate::options;

/// Descriptors of a vCPU whose guest uses all that it is offered: general and fixed counters, a group's leader and two
/// samplers of perf, and what KVM and the VMM have for it.
const DESCRIPTORS: u64 = 8 + 3 + 3 + 4;
const NO_HARDWARE: &str = "this machine has no hardware counters for perf events";

type Check = (&'static str, fn(&Support) -> Found);

/// What a host of hardware counters is asked beyond its promises.
const HARDWARE: [Check; 5] = [
    (
        "as many counters as are promised count all the time",
        promised,
    ),
    ("events count what a loop does", events),
    ("no other VM has the PMU for itself", mediated),
    (
        "a guest's event counts guests, and guests alone",
        guests_only,
    ),
    ("records of PEBS are precise", precise),
];

/// Checks everything, and returns what was found as `{"machine":{..},"checks":[..]}`.
pub(crate) fn selftest() -> Result<Value, String> {
    let support = support(&options(None)).map_err(|error| error.to_string())?;
    let mut rows = Vec::new();
    for backing in Backing::ALL {
        let refused = PerfHost::of_thread(options(Some(backing))).err();
        for (promise, check) in CHECKS {
            let found = match &refused {
                Some(error) => absent(backing, error),
                None => check(backing),
            };
            rows.push(row(&format!("{}: {promise}", backing.name()), found));
        }
    }
    for (promise, check) in HARDWARE {
        let found = match support.backing {
            Backing::Hardware => check(&support),
            Backing::Clock => skipped(NO_HARDWARE),
        };
        rows.push(row(&format!("hardware: {promise}"), found));
    }
    rows.push(row(
        "descriptors are enough for a vCPU on each processor",
        descriptors(),
    ));
    Ok(json!({"machine": machine(&support), "checks": rows}))
}

fn row(name: &str, found: Found) -> Value {
    let (result, why) = match found {
        Ok(seen) => ("holds", seen),
        Err(Unseen::Skipped(why)) => ("cannot", why),
        Err(Unseen::Broken(seen)) => ("fails", seen),
    };
    json!({"name": name, "result": result, "why": why})
}

/// Says why nothing can be checked with `backing`. Only an absent PMU is no failure.
fn absent(backing: Backing, error: &PerfError) -> Found {
    match (backing, error) {
        (Backing::Hardware, PerfError::NoHardware) => skipped(NO_HARDWARE),
        (Backing::Hardware, PerfError::Open(errno))
            if [Errno::NODEV, Errno::INVAL].contains(&Errno::from_raw_os_error(*errno)) =>
        {
            skipped(NO_HARDWARE)
        }
        _ => Err(error.to_string().into()),
    }
}

/// Returns the facts that distinguish the reports of machines.
fn machine(support: &Support) -> Value {
    let file = |path: &str| {
        let text = std::fs::read_to_string(path).ok()?;
        Some(text.trim().to_owned())
    };
    let cpuinfo = file("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    json!({
        "arch": std::env::consts::ARCH,
        "vendor": field("vendor_id"),
        "processor": field("model name"),
        "family": field("cpu family"),
        "model": field("model\t"),
        "processors": std::thread::available_parallelism().map_or(1, usize::from),
        "virtual": is_virtual(),
        "kernel": file("/proc/sys/kernel/osrelease"),
        "pmu": file("/sys/bus/event_source/devices/cpu/caps/pmu_name"),
        "e_cores": std::path::Path::new("/sys/bus/event_source/devices/cpu_atom").exists(),
        "perf_event_paranoid": file("/proc/sys/kernel/perf_event_paranoid"),
        "backing": support.backing.name(),
        "events": support.events,
        "counters": support.counters,
        "mediated": support.mediated,
    })
}

/// One counter more than is promised may share: what is promised may not.
fn promised(support: &Support) -> Found {
    let free = match support.counters {
        None => return skipped(NO_HARDWARE),
        Some(0) => return skipped("others have all counters of this host's at the moment"),
        Some(free) => free,
    };
    let mut host = host(Backing::Hardware)?;
    let all = CounterSet::first(free);
    for counter in all {
        // Branches: on Intel's processors these have no counter of their own beside the general ones.
        host.create(counter, &event(0xc4 | RawPerfEvtSel::USR))
            .map_err(|lost| format!("counter {counter} of {free}: {lost}"))?;
    }
    count(&mut host, all, Duration::from_millis(20));
    let totals: Vec<(u64, Option<Lost>)> = all
        .iter()
        .map(|counter| (host.read(counter), host.deficit(counter)))
        .collect();
    let whole = totals
        .iter()
        .all(|&(total, lost)| total > 0 && lost.is_none());
    let seen = format!("{free} counters: {totals:?}");
    holds_if(whole, seen)
}

/// A loop of twice as many rounds has twice as many events.
fn events(_: &Support) -> Found {
    const ROUNDS: u64 = 2_000_000;
    let mut host = host(Backing::Hardware)?;
    let mut seen = Vec::new();
    let mut good = true;
    for (name, select) in [("cycles", 0x3c), ("instructions", 0xc0), ("branches", 0xc4)] {
        let counter = Counter::at::<0>();
        host.create(counter, &event(select | RawPerfEvtSel::USR))
            .map_err(|lost| format!("{name}: {lost}"))?;
        let [once, twice] = [ROUNDS, 2 * ROUNDS].map(|rounds| {
            let before = host.read(counter);
            host.resume(counter.alone());
            for n in 0..rounds {
                black_box(n);
            }
            host.pause(counter.alone());
            host.read(counter) - before
        });
        host.release(counter);
        // Each round is a branch at least. Frequencies change meanwhile, so that cycles are not exact.
        let least = if name == "cycles" { 1 } else { ROUNDS };
        let percent = 100 * twice / once.max(1);
        good &= once >= least && (150..=250).contains(&percent);
        seen.push(format!("{name} {once}, then {twice}"));
    }
    holds_if(good, seen.join("; "))
}

fn mediated(support: &Support) -> Found {
    match support.mediated {
        false => Ok("events that count guests can be opened".to_owned()),
        true => skipped(
            "another VM has it now: counters are lost until it ends. Start vpmu again without that VM",
        ),
    }
}

#[cfg(target_arch = "x86_64")]
fn guests_only(_: &Support) -> Found {
    match vpmu_kvm::guests_only() {
        Ok(found) => {
            let (host, guest) = (found.host, found.guest);
            let seen = format!("{host} cycles of the host, {guest} of a guest");
            holds_if(found.holds(), seen)
        }
        Err(error) => skipped(format!("no guest can be run here: {error}")),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn guests_only(_: &Support) -> Found {
    skipped("there is a guest for x86-64 only")
}

/// A report comes some instructions late: no precise host event counts a guest. Tries none, because Linux could not keep its
/// records out of the guest's memory. So PEBS must not be offered to a guest whose VMM does not accept that.
#[cfg(target_arch = "x86_64")]
fn precise(_: &Support) -> Found {
    let with_pebs = vpmu_kvm::Model::Intel {
        version: vpmu::x86::intel::Version::V5,
        pebs: true,
    };
    match vpmu_kvm::detect(with_pebs, &vpmu_kvm::Options::default()) {
        Err(vpmu_kvm::Error::PebsSkid) => skipped(
            "no precise host event counts a guest, so that records would be some instructions late: PEBS is \
             offered only where a VMM accepts that (--pebs-skid)",
        ),
        Err(error) => skipped(error.to_string()),
        // The trial has found hardware counters broken, so that a clock counts.
        Ok(_) if !vpmu_kvm::guests_only().is_ok_and(|found| found.holds()) => {
            Ok("a clock counts, whose records have no skid".to_owned())
        }
        Ok(_) => Err("PEBS is offered, and its records are late"
            .to_owned()
            .into()),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn precise(_: &Support) -> Found {
    skipped("PEBS is for x86-64 only")
}

fn descriptors() -> Found {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let processors = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let vcpus = limit / DESCRIPTORS;
    let seen = format!("a limit of {limit}, which is {vcpus} vCPUs, on {processors} processors");
    match vcpus >= processors {
        true => Ok(seen),
        false => Err(format!("{seen}: raise it (ulimit -n)").into()),
    }
}
