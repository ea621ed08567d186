//! What one boot of the deadline bench was measured to do.
//!
//! Counts are the host's: KVM's tracepoints while the guest's doorbell says so.
//! A write of the paravirtual deadline register goes to the VMM, which KVM traces
//! as an exit to user space. Wake-ups are told apart by what KVM injects next.
//! The guest says how long its deadlines took to reach the handler, and how many
//! due ones found its CPU idle.

use std::collections::BTreeMap;

use super::Row;
use crate::report::record::Trace;

/// KVM's numbers (AMD's exit codes) and the published names.
const EXITS: [(u64, &str); 10] = [
    (0x60, "intr"),
    (0x61, "nmi"),
    (0x64, "interrupt-window"),
    (0x72, "cpuid"),
    (0x74, "iret"),
    (0x77, "pause"),
    (0x78, "halt"),
    (0x7b, "io"),
    (0x7c, "msr"),
    (0x400, "ept-violation"),
];

/// Published for kinds of exit and MSR writes, without and with the shared slot.
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
/// Published: TSC-deadline writes and exits gone, percent.
const PUBLISHED_GONE: [(&str, f64); 2] = [("tsc_deadline_exits", 97.5), ("exits", 53.9)];

const IA32_TSC_DEADLINE: &str = "1,1760";
const X2APIC_EOI: &str = "1,2059";
const X2APIC_ICR: &str = "1,2096";
const LOCAL_TIMER_VECTOR: &str = "236";
const LOCAL_TIMER_WOKE: &str = "0xec";
/// KVM_EXIT_X86_WRMSR.
const TO_USER_SPACE_WRMSR: &str = "30";

/// The sum of some boots.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Account {
    /// All counts, by the names of their figures.
    counts: BTreeMap<String, u64>,
    transactions: u64,
    seconds: f64,
    /// Lowest latency of a bucket, ns, and how many there were.
    latencies: BTreeMap<u64, u64>,
    shortest: Option<u64>,
    longest: u64,
    /// Boots that QEMU has cut short, and that were made anew.
    crashes: u64,
}

impl Account {
    /// Of what the host counted and the guest said; `None` when something is
    /// missing in it.
    pub(super) fn of(trace: &Trace, text: &str) -> Option<Self> {
        let mut account = Self {
            counts: counts(trace)?,
            ..Self::default()
        };
        let guest: Vec<Vec<u64>> = lines(text, "counters").collect();
        let column =
            |index: usize| -> Option<u64> { guest.iter().map(|cpu| cpu.get(index).copied()).sum() };
        for (name, index) in [
            ("guest:asked", 1),
            ("guest:avoided", 2),
            ("guest:written", 3),
            ("guest:interrupts", 4),
            ("guest:early", 5),
            ("guest:rearmed", 6),
            ("guest:stray", 7),
            ("guest:idle_due", 8),
            ("guest:idle_extra", 9),
        ] {
            account.counts.insert(name.to_owned(), column(index)?);
        }
        for bucket in lines(text, "bucket") {
            let &[from, count] = bucket.as_slice() else {
                return None;
            };
            *account.latencies.entry(from).or_default() += count;
        }
        // count min median p99 max
        if let &[count, shortest, _, _, longest] = lines(text, "latency").next()?.as_slice()
            && count > 0
        {
            account.shortest = Some(shortest);
            account.longest = longest;
        }
        (account.transactions, account.seconds) = transactions(text).unwrap_or_default();
        Some(account)
    }

    /// It took so many boots more.
    pub(super) fn add_crashes(&mut self, crashes: u32) {
        self.crashes += u64::from(crashes);
    }

    /// Both together.
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
        self.crashes += other.crashes;
        self
    }

    fn count(&self, name: &str) -> u64 {
        self.counts.get(name).copied().unwrap_or(0)
    }

    /// Transactions in a second of the guest's time.
    fn rate(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.transactions as f64 / self.seconds)
    }

    /// The latency that `percent` of all are below, to a bucket (3 %).
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

    /// Wake-ups of a halted vCPU that no due deadline needed: those with the
    /// timer's interrupt, or with none, without those in which the guest found
    /// a deadline due on an idle CPU.
    fn extra_wakeups(&self) -> u64 {
        (self.count("woken:timer") + self.count("woken:nothing"))
            .saturating_sub(self.count("guest:idle_due"))
    }

    /// The figures, with `suffix` behind their names.
    pub(super) fn rows(&self, mode: &'static str, suffix: &str) -> Vec<Row> {
        let row = |figure: &str, measured: Option<f64>, unit| Row {
            figure: format!("{figure}{suffix}"),
            mode,
            measured,
            published: PUBLISHED
                .iter()
                .find(|(name, ..)| *name == figure && suffix.is_empty())
                .and_then(|&(_, plain, paravirtual)| match mode {
                    "plain" => Some(plain),
                    "paravirtual" => Some(paravirtual),
                    _ => None,
                }),
            unit,
        };
        let number = |count: u64| Some(count as f64);
        let of = |name: &str, unit| row(name, number(self.count(name)), unit);
        let mut rows = vec![
            of("tsc_deadline_exits", "exits"),
            of("exits", "exits"),
            of("timer_interrupts", "interrupts"),
            row("halted_wakeups", number(self.extra_wakeups()), "wake-ups"),
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
            rows.push(row(
                &format!("latency_ns:{from}"),
                number(count),
                "interrupts",
            ));
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
        rows.push(row("crashed_boots", number(self.crashes), "boots"));
        rows
    }

    /// This mode's figures in relation to mode plain's.
    pub(super) fn against(&self, plain: &Self, mode: &'static str, suffix: &str) -> Vec<Row> {
        let row = |figure: &str, measured: Option<f64>, published, unit| Row {
            figure: format!("{figure}{suffix}"),
            mode,
            measured: measured.map(|value| (value * 1000.0).round() / 1000.0),
            published,
            unit,
        };
        let mut rows: Vec<Row> = PUBLISHED_GONE
            .iter()
            .map(|&(name, published)| {
                let (before, after) = (plain.count(name) as f64, self.count(name) as f64);
                let gone = (before > 0.0).then(|| 100.0 * (before - after) / before);
                let published = published_for(mode, suffix, published);
                row(&format!("{name}_gone"), gone, published, "percent")
            })
            .collect();
        if let Some((before, after)) = plain.rate().zip(self.rate()) {
            rows.push(row(
                "transactions_per_s_ratio",
                Some(after / before),
                None,
                "",
            ));
        }
        if let Some((before, after)) = plain.percentile(99).zip(self.percentile(99)) {
            let ratio = after as f64 / before as f64;
            rows.push(row("latency_p99_ratio", Some(ratio), None, ""));
        }
        rows
    }
}

fn published_for(mode: &str, suffix: &str, value: f64) -> Option<f64> {
    (mode == "paravirtual" && suffix.is_empty()).then_some(value)
}

/// What the host counted.
fn counts(trace: &Trace) -> Option<BTreeMap<String, u64>> {
    let of = |event: &str, key: &str| -> Option<u64> {
        Some(trace.get(event)?.get(key).copied().unwrap_or(0))
    };
    let mut counts = BTreeMap::new();
    let mut add = |name: &str, count: u64| *counts.entry(name.to_owned()).or_insert(0) += count;
    let to_user = of("kvm_userspace_exit", TO_USER_SPACE_WRMSR)?;
    for (key, &count) in trace.get("kvm_exit")? {
        let code: u64 = key.parse().ok()?;
        add("exits", count);
        match EXITS.iter().find(|(known, _)| *known == code) {
            // By direction below.
            Some((_, "msr")) => {}
            Some((_, name)) => add(&format!("exits:{name}"), count),
            None => add(&format!("exits:{code:#x}"), count),
        }
    }
    add("exits:msr-write", to_user);
    for (key, &count) in trace.get("kvm_msr")? {
        let (direction, _) = key.split_once(',')?;
        add(
            if direction == "1" {
                "exits:msr-write"
            } else {
                "exits:msr-read"
            },
            count,
        );
    }
    add("msr_writes:apic-eoi", of("kvm_msr", X2APIC_EOI)?);
    add("msr_writes:apic-icr", of("kvm_msr", X2APIC_ICR)?);
    add("msr_writes:paravirtual", to_user);
    add(
        "tsc_deadline_exits",
        of("kvm_msr", IA32_TSC_DEADLINE)? + to_user,
    );
    add("timer_interrupts", of("kvm_inj_virq", LOCAL_TIMER_VECTOR)?);
    // Without the order of the events there is nothing to be said.
    if of("woken", "lost")? > 0 {
        return None;
    }
    add("woken:timer", of("woken", LOCAL_TIMER_WOKE)?);
    add("woken:nothing", of("woken", "nothing")?);
    add("woken", trace.get("woken")?.values().sum());
    Some(counts)
}

/// The numbers of each line that begins with `word`.
fn lines<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = Vec<u64>> + 'a {
    text.lines().filter_map(move |line| {
        let numbers = line.strip_prefix(word)?.strip_prefix(' ')?;
        numbers
            .split_whitespace()
            .map(|number| number.parse().ok())
            .collect()
    })
}

/// How many and in how long: `ping_pong`'s line of JSON, or what `perf bench`
/// says.
fn transactions(text: &str) -> Option<(u64, f64)> {
    for line in text.lines() {
        if let Ok(said) = serde_json::from_str::<serde_json::Value>(line) {
            return Some((
                said.get("transactions")?.as_u64()?,
                said.get("seconds")?.as_f64()?,
            ));
        }
    }
    let executed = text
        .lines()
        .find_map(|line| line.strip_prefix("# Executed ")?.split(' ').next())?;
    let time = text
        .lines()
        .find_map(|line| line.trim_start().strip_prefix("Total time: "))?;
    let seconds = time.split_whitespace().next()?;
    Some((executed.parse().ok()?, seconds.parse().ok()?))
}

/// The power of two at or below.
fn octave(ns: u64) -> u64 {
    if ns == 0 { 0 } else { 1 << ns.ilog2() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::record::Record;

    /// What the KVM host prints.
    const TRACE: &[u8] = br#"{"trace":{
        "kvm_exit":{"123":1,"120":100,"124":90,"1024":3,"9":1},
        "kvm_msr":{"1,1760":40,"1,2096":30,"0,59":2},
        "kvm_inj_virq":{"236":12,"251":31},
        "kvm_userspace_exit":{"2":1,"30":18},
        "woken":{"0xec":7,"0xfb":30,"nothing":1,"lost":0}}}"#;

    /// What the guest prints.
    const GUEST: &str = "\n{\"transactions\":1000,\"seconds\":0.25,\"transactions_per_s\":4000.0}\n\
        counters 0 50 40 10 6 2 1 1 3 2\ncounters 1 50 42 8 6 1 1 0 2 1\n\
        latency 4 900 1000 3000 3100\nbucket 992 2\nbucket 1024 1\nbucket 3072 1\n";

    fn account() -> Account {
        let Some(Record::Trace(trace)) = Record::parse(TRACE) else {
            panic!("not a record of the host's");
        };
        Account::of(&trace, GUEST).unwrap()
    }

    fn value(rows: &[Row], figure: &str) -> Option<f64> {
        rows.iter()
            .find(|row| row.figure == figure)
            .unwrap_or_else(|| panic!("no {figure} in {rows:?}"))
            .measured
    }

    #[test]
    fn a_write_of_either_deadline_register_counts() {
        let rows = account().rows("paravirtual", "");
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

    #[test]
    fn wakeups_that_no_deadline_needed() {
        // Seven by the timer and one by nothing; five found a deadline due.
        assert_eq!(account().extra_wakeups(), 3);
    }

    #[test]
    fn latencies() {
        let rows = account().rows("plain", ":idle");
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
        let (one, two) = (account(), account().and(&account()));
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
        assert_eq!(Account::default().and(&one), one);
    }

    #[test]
    fn what_is_missing_is_no_zero() {
        let Some(Record::Trace(trace)) = Record::parse(TRACE) else {
            panic!("not a record of the host's");
        };
        assert_eq!(Account::of(&trace, "counters 0 1\n"), None);
        let mut lost = trace.clone();
        lost.get_mut("woken").unwrap().insert("lost".to_owned(), 1);
        assert_eq!(Account::of(&lost, GUEST), None);
        let mut less = trace;
        less.remove("kvm_msr");
        assert_eq!(Account::of(&less, GUEST), None);
        // An idle guest has no transactions, and may have no interrupt.
        assert_eq!(Account::default().rate(), None);
        assert_eq!(Account::default().percentile(99), None);
    }

    #[test]
    fn perf_bench_says_how_many_and_how_long() {
        let said = "# Running 'sched/pipe' benchmark:\n# Executed 4000 pipe operations between two processes\n\n\
            \u{20}    Total time: 0.215 [sec]\n\n      53.750000 usecs/op\n          18604 ops/sec\n";
        assert_eq!(transactions(said), Some((4000, 0.215)));
        assert_eq!(transactions("sleep\n"), None);
    }
}
