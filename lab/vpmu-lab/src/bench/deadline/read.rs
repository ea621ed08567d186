//! Reads the host's counts and the output of the guest's shell.

use std::collections::BTreeMap;

use vpmu_measure::Trace;

/// KVM's numbers of exits (AMD's exit codes) and the published names.
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

const IA32_TSC_DEADLINE: &str = "1,1760";
const X2APIC_EOI: &str = "1,2059";
const X2APIC_ICR: &str = "1,2096";
const LOCAL_TIMER_VECTOR: &str = "236";
const LOCAL_TIMER_WOKE: &str = "0xec";
/// KVM_EXIT_X86_WRMSR.
const TO_USER_SPACE_WRMSR: &str = "30";

/// Reads the host's counts, by the names of their figures.
pub(super) fn counts(trace: &Trace) -> Option<BTreeMap<String, u64>> {
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
            // The code below counts these exits by direction.
            Some((_, "msr")) => {}
            Some((_, name)) => add(&format!("exits:{name}"), count),
            None => add(&format!("exits:{code:#x}"), count),
        }
    }
    add("exits:msr-write", to_user);
    for (key, &count) in trace.get("kvm_msr")? {
        let (direction, _) = key.split_once(',')?;
        let is_write = direction == "1";
        let name = if is_write {
            "exits:msr-write"
        } else {
            "exits:msr-read"
        };
        add(name, count);
    }
    add("msr_writes:apic-eoi", of("kvm_msr", X2APIC_EOI)?);
    add("msr_writes:apic-icr", of("kvm_msr", X2APIC_ICR)?);
    add("msr_writes:paravirtual", to_user);
    let deadlines = of("kvm_msr", IA32_TSC_DEADLINE)? + to_user;
    add("tsc_deadline_exits", deadlines);
    add("timer_interrupts", of("kvm_inj_virq", LOCAL_TIMER_VECTOR)?);
    // Where events were lost, their order tells nothing.
    if of("woken", "lost")? > 0 {
        return None;
    }
    add("woken:timer", of("woken", LOCAL_TIMER_WOKE)?);
    add("woken:nothing", of("woken", "nothing")?);
    add("woken", trace.get("woken")?.values().sum());
    Some(counts)
}

/// Returns the numbers of each line that begins with `word`.
pub(super) fn lines<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = Vec<u64>> + 'a {
    text.lines().filter_map(move |line| {
        let numbers = line.strip_prefix(word)?.strip_prefix(' ')?;
        numbers
            .split_whitespace()
            .map(|number| number.parse().ok())
            .collect()
    })
}

/// Reads the number of transactions and the time they took, from `ping_pong`'s line of
/// JSON or from the output of `perf bench`.
pub(super) fn transactions(text: &str) -> Option<(u64, f64)> {
    for line in text.lines() {
        if let Ok(said) = serde_json::from_str::<serde_json::Value>(line) {
            let count = said.get("transactions")?.as_u64()?;
            return Some((count, said.get("seconds")?.as_f64()?));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn perf_bench_says_how_many_and_how_long() {
        let said = "# Running 'sched/pipe' benchmark:\n# Executed 4000 pipe operations between two processes\n\n\
            \u{20}    Total time: 0.215 [sec]\n\n      53.750000 usecs/op\n          18604 ops/sec\n";
        assert_eq!(transactions(said), Some((4000, 0.215)));
        assert_eq!(transactions("sleep\n"), None);
    }
}
