//! The guests of this host that have the PMU: what their VMMs publish (`vpmu_kvm::publish`), with what the kernel says of
//! their threads.

pub(crate) mod metrics;
pub(crate) mod top;

use std::collections::BTreeMap;
use std::fs;

use itertools::Itertools;
use vpmu_kvm::{Backing, Exit, PublishedVcpu};
use vpmu_lab::{Error, Result};

/// For users who see no guest.
pub(crate) const NONE: &str = "\
no guest with this PMU publishes its statistics here.
VMMs that do: vpmu-vmm, QEMU and kvmtool under `vpmu exec`, the QEMU of the package qemu-system-x86-vpmu with vpmu=on, and \
others that call vpmu_kvm::publish. Guests of other users are shown to root, and to the group of their files in /run/vpmu.";

/// One vCPU at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    /// The VMM's process.
    pub(crate) pid: u32,
    /// The guest's name, or that of the VMM's program.
    pub(crate) guest: String,
    pub(crate) vcpu: PublishedVcpu,
    /// The time of the vCPU's thread, if it has run.
    pub(crate) time: Option<Time>,
}

/// CPU time of a thread, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Time {
    /// All of it.
    pub(crate) total: f64,
    /// The part that the guest ran.
    pub(crate) guest: f64,
}

impl Row {
    pub(crate) fn backing(&self) -> &'static str {
        self.vcpu.backing.map_or("none", Backing::name)
    }

    /// Returns the exits to the VMM by kind.
    pub(crate) fn exits(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        Exit::KINDS
            .into_iter()
            .zip(self.vcpu.statistics.exits.kinds())
    }

    /// Returns what the guest's counters have lost: the reason, how often, and what that is in words.
    fn losses(&self) -> [(&'static str, u64, &'static str); 4] {
        let statistics = &self.vcpu.statistics;
        let host = &statistics.host;
        [
            ("host_refused", host.lost, "refused by the host's perf"),
            (
                "unsupported",
                host.unsupported,
                "that this host cannot count",
            ),
            ("part_time", host.part_time, "counted part of the time"),
            (
                "pebs_record",
                statistics.pebs.lost,
                "PEBS records without room",
            ),
        ]
    }

    /// Returns what the guest's counters have lost, by reason.
    pub(crate) fn lost(&self) -> [(&'static str, u64); 4] {
        self.losses().map(|(reason, count, _)| (reason, count))
    }

    /// Returns why the guest does not count all that it asks for, in words.
    pub(crate) fn why(&self) -> String {
        let refused = self.vcpu.statistics.arming.refused;
        let losses = self.losses().map(|(_, count, text)| (count, text));
        let reasons = losses
            .into_iter()
            .chain([(refused, "searches without a #GP handler: no PMU")]);
        let reasons = reasons.filter(|(count, _)| *count != 0);
        let mut words = reasons.map(|(count, text)| format!("{count} {text}"));
        match (self.vcpu.backing, words.join("; ")) {
            (None, words) if words.is_empty() => "nothing counts".to_owned(),
            (_, words) => words,
        }
    }
}

/// One vCPU over a span of time.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    pub(crate) row: Row,
    /// Per second.
    pub(crate) pmis: f64,
    pub(crate) exits: f64,
    pub(crate) samples: f64,
    /// What was lost in the whole life of the vCPU: it is the more remarkable the older it is.
    pub(crate) lost: u64,
    /// The part of one CPU that the vCPU's thread ran without the guest, and the part that the guest ran.
    pub(crate) host: Option<f64>,
    pub(crate) guest: Option<f64>,
}

impl Span {
    /// Returns the rates between two moments that are `seconds` apart. Without an earlier moment they are zero.
    fn between(before: Option<&Row>, row: Row, seconds: f64) -> Self {
        let rate = |of: fn(&Row) -> u64| {
            let grown = before.map_or(0, |old| of(&row).saturating_sub(of(old)));
            grown as f64 / seconds
        };
        let times = row.time.zip(before.and_then(|row| row.time));
        let share = |of: fn(Time) -> f64| {
            times.map(|(now, old)| ((of(now) - of(old)) / seconds).clamp(0.0, 1.0))
        };
        Self {
            pmis: rate(|row| row.vcpu.statistics.pmis),
            exits: rate(|row| row.exits().map(|(_, count)| count).sum()),
            samples: rate(|row| {
                let statistics = &row.vcpu.statistics;
                statistics.pmis.saturating_add(statistics.pebs.records)
            }),
            lost: row.lost().iter().map(|(_, count)| count).sum(),
            host: share(|time| time.total - time.guest),
            guest: share(|time| time.guest),
            row,
        }
    }

    /// Returns the spans of all vCPUs that are there now.
    pub(crate) fn all(before: &[Row], now: Vec<Row>, seconds: f64) -> Vec<Self> {
        let key = |row: &Row| (row.pid, row.vcpu.number, row.vcpu.thread);
        let old: BTreeMap<_, _> = before.iter().map(|row| (key(row), row)).collect();
        now.into_iter()
            .map(|row| Self::between(old.get(&key(&row)).copied(), row, seconds))
            .collect()
    }
}

/// Returns the vCPUs of all guests that this process may see.
///
/// # Errors
///
/// When no guest can be seen, and there are files that cannot be read.
pub(crate) fn rows() -> Result<Vec<Row>> {
    let (processes, mut refused) = vpmu_kvm::published();
    if processes.is_empty()
        && let Some((path, source)) = refused.pop()
    {
        return Err(Error::file("read", path)(source));
    }
    let rows = processes.into_iter().flat_map(|process| {
        let (pid, guest) = (process.id, name(process.id));
        process.vcpus.into_iter().map(move |vcpu| Row {
            pid,
            guest: guest.clone(),
            time: vcpu.thread.and_then(|thread| time(pid, thread)),
            vcpu,
        })
    });
    Ok(rows.collect())
}

/// Returns the name of a VMM's guest: QEMU's -name, else the program's name.
fn name(pid: u32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let line = String::from_utf8_lossy(&line);
    let words: Vec<&str> = line.split('\0').collect();
    let named = words.windows(2).find_map(|pair| match pair {
        ["-name" | "--name", name] => Some(name.split(',').next().unwrap_or(name)),
        _ => None,
    });
    let named = named.map(|name| name.strip_prefix("guest=").unwrap_or(name));
    let program = words
        .first()
        .map(|path| path.rsplit('/').next().unwrap_or(path));
    let name = named.or(program).filter(|name| !name.is_empty());
    // The words are the VMM's own: none may steer the reader's terminal.
    let name = name.unwrap_or("?").chars();
    name.map(|it| if it.is_control() { '?' } else { it })
        .collect()
}

fn time(pid: u32, thread: u32) -> Option<Time> {
    parse_time(&fs::read_to_string(format!("/proc/{pid}/task/{thread}/stat")).ok()?)
}

/// Reads utime, stime and guest_time of proc_pid_stat(5), whose second field is a name in parentheses.
fn parse_time(stat: &str) -> Option<Time> {
    let (_, rest) = stat.rsplit_once(')')?;
    // The state is the third field.
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let hz = rustix::param::clock_ticks_per_second() as f64;
    let seconds = |number: usize| Some(fields.get(number - 3)?.parse::<u64>().ok()? as f64 / hz);
    Some(Time {
        // utime has guest_time in it.
        total: seconds(14)? + seconds(15)?,
        guest: seconds(43)?,
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns a vCPU whose every count is `count`.
    pub(crate) fn row(pid: u32, count: u64) -> Row {
        let mut statistics = vpmu_kvm::Statistics::new();
        for exit in [Exit::Rdpmc, Exit::MsrWrite(0x38f)] {
            (0..count).for_each(|_| statistics.count(exit));
        }
        statistics.pmis = count;
        (statistics.host.lost, statistics.pebs.records) = (count, count);
        Row {
            pid,
            guest: format!("web\"{pid}"),
            vcpu: PublishedVcpu {
                number: 0,
                thread: Some(pid),
                backing: Some(Backing::Clock),
                pmu: "intel",
                statistics,
            },
            time: Some(Time {
                total: count as f64,
                guest: 0.25 * count as f64,
            }),
        }
    }

    #[test]
    fn rates_are_those_of_the_time_between() {
        let spans = Span::all(&[row(1, 2), row(2, 5)], vec![row(1, 3), row(3, 9)], 2.0);
        assert_eq!(spans.len(), 2);
        assert_eq!(
            (spans[0].pmis, spans[0].exits, spans[0].samples),
            (0.5, 1.0, 1.0)
        );
        assert_eq!((spans[0].host, spans[0].guest), (Some(0.375), Some(0.125)));
        assert_eq!(spans[0].lost, 3);
        assert_eq!(spans[1].pmis, 0.0, "nobody knows the rate of a new vCPU");
        assert_eq!(spans[1].host, None);
    }

    #[test]
    fn times_of_a_thread_whose_name_has_parentheses() {
        let mut fields = vec!["0"; 50];
        (fields[11], fields[12], fields[40]) = ("300", "200", "100");
        let hz = rustix::param::clock_ticks_per_second() as f64;
        let time = parse_time(&format!("7 (a) (b) {}", fields.join(" ")));
        let (total, guest) = (500.0 / hz, 100.0 / hz);
        assert_eq!(time, Some(Time { total, guest }));
        assert_eq!(parse_time("7 (a) R 1"), None);
    }
}
