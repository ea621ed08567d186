//! The counts of the boots of one mode and workload, and the figures made of them.
//!
//! Exits are the host's counts: KVM's tracepoints count between the rings of the guest's doorbell.
//! Latencies and needless wake-ups are the module's counts, because it alone knows the deadline for
//! which an interrupt came.

use std::collections::BTreeMap;

use super::read;
use crate::bench::Row;
use vpmu_measure::Trace;

/// The published counts of exits and MSR writes by kind, without and with the shared slot.
const PUBLISHED: [(&str, f64, f64); 9] = [
    ("exits", 12_617_503.0, 5_815_737.0),
    ("exits:intr", 37_023.0, 33_002.0),
    ("exits:cpuid", 1.0, 0.0),
    ("exits:halt", 2_503_932.0, 2_780_683.0),
    ("exits:msr-write", 10_046_340.0, 2_966_824.0),
    ("exits:pause", 90.0, 84.0),
    ("exits:ept-violation", 584.0, 336.0),
    ("msr_writes:apic-icr", 2_533_498.0, 2_781_235.0),
    ("tsc_deadline_exits", 7_512_945.0, 185_629.0),
];
/// The published decrease of TSC-deadline writes and of exits, percent.
const PUBLISHED_GONE: [(&str, f64); 2] = [("tsc_deadline_exits", 97.5), ("exits", 53.9)];

/// The module's counters, in the order of their columns, behind the processor's.
const COUNTERS: &str = "asked avoided written interrupts early rearmed stray idle_due idle_extra";

/// The sum of boots.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Stats {
    /// All counts, by the names of their figures.
    counts: BTreeMap<String, u64>,
    transactions: u64,
    seconds: f64,
    /// The lowest latency of each bucket, ns, and the number of deadlines in it.
    latencies: BTreeMap<u64, u64>,
    shortest: Option<u64>,
    longest: u64,
    boots: u64,
}

impl Stats {
    /// Reads the host's counts and the guest's output. Returns `None` when a part is missing.
    pub(super) fn of(trace: &Trace, text: &str) -> Option<Self> {
        let mut stats = Self {
            counts: read::counts(trace)?,
            boots: 1,
            ..Self::default()
        };
        let guest: Vec<Vec<u64>> = read::lines(text, "counters").collect();
        let column =
            |index: usize| -> Option<u64> { guest.iter().map(|cpu| cpu.get(index).copied()).sum() };
        for (name, index) in COUNTERS.split(' ').zip(1..) {
            stats.counts.insert(format!("guest:{name}"), column(index)?);
        }
        for bucket in read::lines(text, "bucket") {
            let &[from, count] = bucket.as_slice() else {
                return None;
            };
            *stats.latencies.entry(from).or_default() += count;
        }
        // The fields are count, min, median, p99 and max.
        if let &[count, shortest, _, _, longest] = read::lines(text, "latency").next()?.as_slice()
            && count > 0
        {
            stats.shortest = Some(shortest);
            stats.longest = longest;
        }
        (stats.transactions, stats.seconds) = read::transactions(text).unwrap_or_default();
        Some(stats)
    }

    /// Adds the counts of other boots.
    pub(super) fn and(mut self, other: &Self) -> Self {
        for (name, count) in &other.counts {
            *self.counts.entry(name.clone()).or_default() += count;
        }
        for (from, count) in &other.latencies {
            *self.latencies.entry(*from).or_default() += count;
        }
        self.transactions += other.transactions;
        self.seconds += other.seconds;
        self.shortest = self.shortest.into_iter().chain(other.shortest).min();
        self.longest = self.longest.max(other.longest);
        self.boots += other.boots;
        self
    }

    /// Tells whether anything was measured.
    pub(super) fn has_boots(&self) -> bool {
        self.boots > 0
    }

    fn count(&self, name: &str) -> u64 {
        self.counts.get(name).copied().unwrap_or(0)
    }

    /// Returns the transactions in a second of the guest's time.
    fn rate(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.transactions as f64 / self.seconds)
    }

    /// Returns the latency below which `percent` of all latencies are, to the width of a bucket (3
    /// %).
    fn percentile(&self, percent: u64) -> Option<u64> {
        let all: u64 = self.latencies.values().sum();
        let mut left = (all * percent).div_ceil(100);
        for (&from, &count) in &self.latencies {
            if left <= count {
                return Some(from.clamp(self.shortest?, self.longest));
            }
            left -= count;
        }
        None
    }

    /// Returns the figures, with `suffix` at the end of their names.
    pub(super) fn rows(&self, mode: &'static str, suffix: &str) -> Vec<Row> {
        let row = |figure: &str, measured: Option<f64>, unit| {
            let published = PUBLISHED
                .iter()
                .find(|(name, ..)| *name == figure && suffix.is_empty())
                .and_then(|&(_, plain, paravirtual)| match mode {
                    "plain" => Some(plain),
                    "paravirtual" => Some(paravirtual),
                    _ => None,
                });
            Row::new(format!("{figure}{suffix}"), mode, measured, unit).beside(published)
        };
        let number = |count: u64| Some(count as f64);
        let of = |name: &str, unit| row(name, number(self.count(name)), unit);
        let needless = number(self.count("guest:idle_extra"));
        let mut rows = vec![
            of("tsc_deadline_exits", "exits"),
            of("exits", "exits"),
            of("timer_interrupts", "interrupts"),
            // These are timer interrupts that found their CPU idle and no deadline due. KVM's
            // wake-ups do not show them, because KVM also wakes vCPUs for other reasons.
            row("halted_wakeups", needless, "wake-ups"),
        ];
        if let Some(rate) = self.rate() {
            let tenths = (rate * 10.0).round() / 10.0;
            rows.push(row("transactions_per_s", Some(tenths), "1/s"));
        }
        let samples: u64 = self.latencies.values().sum();
        rows.push(row("latency_samples", number(samples), "interrupts"));
        for (name, value) in [
            ("latency_min_ns", self.shortest),
            ("latency_median_ns", self.percentile(50)),
            ("latency_p99_ns", self.percentile(99)),
            ("latency_max_ns", self.shortest.map(|_| self.longest)),
        ] {
            rows.push(row(name, value.map(|ns| ns as f64), "ns"));
        }
        let mut octaves = BTreeMap::new();
        for (&from, &count) in &self.latencies {
            *octaves.entry(octave(from)).or_insert(0) += count;
        }
        for (from, count) in octaves {
            let name = format!("latency_ns:{from}");
            rows.push(row(&name, number(count), "interrupts"));
        }
        for name in self.counts.keys() {
            let shown = ["exits:", "msr_writes:", "woken:", "guest:"];
            if shown.iter().any(|kind| name.starts_with(kind)) {
                let unit = match name.split(':').next() {
                    Some("woken") => "wake-ups",
                    Some("guest") => "times",
                    _ => "exits",
                };
                rows.push(of(name, unit));
            }
        }
        rows.push(row("boots", number(self.boots), "boots"));
        rows
    }

    /// Returns this mode's figures in relation to mode plain's.
    pub(super) fn against(&self, plain: &Self, mode: &'static str, suffix: &str) -> Vec<Row> {
        let row = |figure: &str, measured: Option<f64>, published, unit| {
            let measured = measured.map(|value| (value * 1000.0).round() / 1000.0);
            Row::new(format!("{figure}{suffix}"), mode, measured, unit).beside(published)
        };
        let mut rows: Vec<Row> = PUBLISHED_GONE
            .iter()
            .map(|&(name, published)| {
                let (before, after) = (plain.count(name) as f64, self.count(name) as f64);
                let gone = (before > 0.0).then(|| 100.0 * (before - after) / before);
                let is_published = mode == "paravirtual" && suffix.is_empty();
                let published = is_published.then_some(published);
                row(&format!("{name}_gone"), gone, published, "percent")
            })
            .collect();
        if let Some((before, after)) = plain.rate().zip(self.rate()) {
            let ratio = Some(after / before);
            rows.push(row("transactions_per_s_ratio", ratio, None, ""));
        }
        if let Some((before, after)) = plain.percentile(99).zip(self.percentile(99)) {
            let ratio = after as f64 / before as f64;
            rows.push(row("latency_p99_ratio", Some(ratio), None, ""));
        }
        rows
    }
}

/// Returns the greatest power of two at or below a number.
fn octave(ns: u64) -> u64 {
    if ns == 0 { 0 } else { 1 << ns.ilog2() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vpmu_measure::Record;

    /// The KVM host's output.
    const TRACE: &[u8] = br#"{"trace":{
        "kvm_exit":{"123":1,"120":100,"124":90,"1024":3,"9":1},
        "kvm_msr":{"1,1760":40,"1,2096":30,"0,59":2},
        "kvm_inj_virq":{"236":12,"251":31},
        "kvm_userspace_exit":{"2":1,"30":18},
        "woken":{"0xec":7,"0xfb":30,"nothing":1,"lost":0}}}"#;

    /// The guest's output.
    const GUEST: &str = "\n{\"transactions\":1000,\"seconds\":0.25,\"transactions_per_s\":4000.0}\n\
        counters 0 50 40 10 6 2 1 1 3 2\ncounters 1 50 42 8 6 1 1 0 2 1\n\
        latency 4 900 1000 3000 3100\nbucket 992 2\nbucket 1024 1\nbucket 3072 1\n";

    fn stats() -> Stats {
        let Some(Record::Trace(trace)) = Record::parse(TRACE) else {
            panic!("not a record of the host's");
        };
        Stats::of(&trace, GUEST).unwrap()
    }

    fn value(rows: &[Row], figure: &str) -> Option<f64> {
        rows.iter()
            .find(|row| row.figure == figure)
            .unwrap_or_else(|| panic!("no {figure} in {rows:?}"))
            .measured
    }

    #[test]
    fn a_write_of_either_deadline_register_counts() {
        let rows = stats().rows("paravirtual", "");
        assert_eq!(value(&rows, "tsc_deadline_exits"), Some(58.0));
        assert_eq!(value(&rows, "exits"), Some(195.0));
        assert_eq!(value(&rows, "exits:msr-write"), Some(88.0));
        assert_eq!(value(&rows, "exits:msr-read"), Some(2.0));
        assert_eq!(value(&rows, "exits:halt"), Some(100.0));
        assert_eq!(value(&rows, "exits:0x9"), Some(1.0));
        assert_eq!(value(&rows, "timer_interrupts"), Some(12.0));
        assert_eq!(value(&rows, "transactions_per_s"), Some(4000.0));
        let deadline = rows.iter().find(|row| row.figure == "tsc_deadline_exits");
        assert_eq!(deadline.unwrap().published, Some(185_629.0));
    }

    /// Checks that a CPU counts 2 and the other 1, whatever KVM counts as woken.
    #[test]
    fn needless_wakeups_are_what_the_module_counts() {
        let mut stats = stats();
        for _ in 0..2 {
            assert_eq!(value(&stats.rows("plain", ""), "halted_wakeups"), Some(3.0));
            stats.counts.insert("woken:nothing".to_owned(), 46);
            stats.counts.insert("guest:idle_due".to_owned(), 0);
        }
    }

    #[test]
    fn latencies() {
        let rows = stats().rows("plain", ":idle");
        assert_eq!(value(&rows, "latency_samples:idle"), Some(4.0));
        assert_eq!(value(&rows, "latency_min_ns:idle"), Some(900.0));
        assert_eq!(value(&rows, "latency_median_ns:idle"), Some(992.0));
        assert_eq!(value(&rows, "latency_p99_ns:idle"), Some(3072.0));
        assert_eq!(value(&rows, "latency_max_ns:idle"), Some(3100.0));
        assert_eq!(value(&rows, "latency_ns:512:idle"), Some(2.0));
        assert_eq!(value(&rows, "latency_ns:1024:idle"), Some(1.0));
        assert_eq!(value(&rows, "latency_ns:2048:idle"), Some(1.0));
        assert!(rows.iter().all(|row| row.published.is_none()));
    }

    #[test]
    fn sums_and_relations() {
        let (one, two) = (stats(), stats().and(&stats()));
        assert_eq!(two.count("tsc_deadline_exits"), 116);
        assert_eq!(two.rate(), one.rate());
        assert_eq!(two.percentile(50), one.percentile(50));
        assert_eq!(
            (two.shortest, two.longest, two.latencies[&3072]),
            (Some(900), 3100, 2)
        );
        let rows = one.against(&two, "guest-only", "");
        assert_eq!(value(&rows, "tsc_deadline_exits_gone"), Some(50.0));
        assert_eq!(value(&rows, "transactions_per_s_ratio"), Some(1.0));
        assert_eq!(value(&rows, "latency_p99_ratio"), Some(1.0));
        assert_eq!(Stats::default().and(&one), one);
    }

    #[test]
    fn what_is_missing_is_no_zero() {
        let Some(Record::Trace(trace)) = Record::parse(TRACE) else {
            panic!("not a record of the host's");
        };
        assert_eq!(Stats::of(&trace, "counters 0 1\n"), None);
        let mut lost = trace.clone();
        lost.get_mut("woken").unwrap().insert("lost".to_owned(), 1);
        assert_eq!(Stats::of(&lost, GUEST), None);
        let mut less = trace;
        less.remove("kvm_msr");
        assert_eq!(Stats::of(&less, GUEST), None);
        // An idle guest has no transactions, and may have no interrupt.
        assert_eq!(Stats::default().rate(), None);
        assert_eq!(Stats::default().percentile(99), None);
    }
}
