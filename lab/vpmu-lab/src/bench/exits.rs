//! Counts the exits of a guest's profiling session by kind and by register, in
//! the layout published in 2021 for KVM on Intel.
//!
//! vpmu-vmm counts the exits that reach it. The host's KVM counts the exits that it handles itself.
//! The figures have KVM's names for those exits.
//!
//! A second run, with one event and a fixed period, gives the exits of a single
//! PMI by kind: four events share interrupts, and perf adjusts their periods.

use std::collections::BTreeMap;

use vpmu_measure::Kvm;

use super::{Bench, Context, Row, emulated, for_each_pmi, hundredths, mode};
use crate::Result;
use crate::report::result::Run;
use crate::spec::design::{Model, Policy};

pub(super) const BENCH: Bench = Bench {
    name: "exits",
    page: include_str!("exits.md"),
    has_models: true,
    has_counters: true,
    rows,
};

/// The four published events, as in `bench paused`, sampled by frequency. perf then adjusts their
/// periods, which is part of the published mix.
const COMMAND: &str = "perf record --no-bpf-event -q -F 1000 -e cpu-cycles -e instructions \
-e branch-instructions -e ref-cycles -o perf.data -- workload --scale 3000";

const ONE_EVENT: &str = "perf record --no-bpf-event -q -c 1000000 -e cpu-cycles \
-o perf.data -- workload --scale 10000";

/// The published trace of exits.
const PUBLISHED_EXITS: [(&str, u64); 11] = [
    ("EXTERNAL_INTERRUPT", 146_820),
    ("MSR_WRITE", 126_301),
    ("MSR_READ", 17_009),
    ("RDPMC", 9710),
    ("EXCEPTION_NMI", 7295),
    ("EPT_VIOLATION", 2493),
    ("EPT_MISCONFIG", 1357),
    ("CPUID", 567),
    ("NMI_WINDOW", 107),
    ("IO_INSTRUCTION", 59),
    ("VMCALL", 2),
];

/// The published trace of MSRs, by number.
const PUBLISHED_MSRS: [(&str, u64); 13] = [
    ("msr:write:0x38f", 15_822),
    ("msr:read:0x38e", 14_558),
    ("msr:write:0x834", 7315),
    ("msr:write:0x390", 7250),
    ("msr:write:0xc1", 2922),
    ("msr:write:0x309", 2912),
    ("msr:write:0x30a", 2904),
    ("msr:write:0x38d", 2390),
    ("msr:read:0x38d", 2390),
    ("msr:write:0x187", 1195),
    ("msr:write:0x186", 1195),
    ("msr:write:0xc2", 976),
    ("msr:write:0x830", 618),
];

/// KVM's own counts in the host's debugfs, and the published name of each.
const KVM_NAMES: [(&str, &str); 6] = [
    ("irq_exits", "EXTERNAL_INTERRUPT"),
    ("nmi_window_exits", "NMI_WINDOW"),
    ("halt_exits", "HLT"),
    ("mmio_exits", "EPT_MISCONFIG"),
    ("irq_window_exits", "IRQ_WINDOW"),
    ("hypercalls", "VMCALL"),
];

fn rows(context: &Context<'_>) -> Result<Vec<Row>> {
    let designs = emulated(&[Policy::Paused]);
    let runs = context.compare(
        context.request(&["--approximate-instructions"]),
        "1",
        &designs,
        &context.with_events(COMMAND),
    )?;
    let one_event = context.compare(context.request(&[]), "2", &designs, ONE_EVENT)?;
    // AMD has other registers.
    let registers = match context.model {
        Model::Auto | Model::Intel => &PUBLISHED_MSRS[..],
        Model::Amd | Model::AmdV2 => &[],
    };
    let published = runs
        .iter()
        .flat_map(|row| published_layout(&row.run, registers));
    let each = one_event.iter().flat_map(|row| per_pmi(&row.run));
    Ok(published.chain(each).collect())
}

/// Returns the published count of exits of `kind`.
fn published_exits(kind: &str) -> u64 {
    let found = PUBLISHED_EXITS.iter().find(|(name, _)| *name == kind);
    found.map_or(0, |(_, count)| *count)
}

/// Returns each published exit and register for one PMI, measured beside published.
fn shares(rows: &[Row], pmis: Option<u64>) -> Vec<Row> {
    let each = |count: Option<f64>, pmis| for_each_pmi(count?, pmis);
    rows.iter()
        .filter(|row| row.published.is_some())
        .map(|row| Row {
            figure: format!("four_events_per_pmi:{}", row.figure),
            measured: each(row.measured, pmis),
            published: each(row.published, Some(published_exits("EXCEPTION_NMI"))),
            ..row.clone()
        })
        .collect()
}

/// Returns the published exits for each PMI, without exits for the local APIC's registers, which
/// KVM handles without telling.
fn published_per_pmi() -> f64 {
    let pmis = published_exits("EXCEPTION_NMI");
    let registers = PUBLISHED_MSRS.iter().filter(|(name, _)| !is_kept(name));
    let registers = registers.map(|(_, count)| count).sum::<u64>();
    let all = pmis + published_exits("RDPMC") + registers;
    hundredths(all as f64 / pmis as f64)
}

/// Returns the exits that serve the PMU of one event alone, all and by kind.
fn per_pmi(run: &Run) -> Vec<Row> {
    let mode = mode(run.design());
    let row = |figure: &str, measured| Row::new(figure, mode, measured, "exits");
    let mut rows = vec![row("pmu_exits_per_pmi:one_event", run.pmu_exits_per_pmi)];
    for (kind, &count) in run.exits.iter().flatten() {
        let each = for_each_pmi(count as f64, run.pmis);
        if each.is_some_and(|each| each > 0.0) {
            rows.push(row(&format!("per_pmi:{kind}"), each));
        }
    }
    rows
}

/// Returns the exits of a session, `registers` with their published counts first.
fn published_layout(run: &Run, registers: &[(&str, u64)]) -> Vec<Row> {
    let mode = mode(run.design());
    let float = |count: Option<u64>| count.map(|count| count as f64);
    let row = |figure: String, measured, published| {
        Row::new(figure, mode, float(measured), "exits").beside(float(published))
    };
    let none = BTreeMap::new();
    let trapped = run.exits.as_ref().unwrap_or(&none);
    let host = run.vmm.as_ref().and_then(|vmm| vmm.host.as_ref());
    let kinds = kinds(trapped, host);
    let mut rows = Vec::new();
    for (kind, published) in PUBLISHED_EXITS {
        let count = kinds.get(kind).copied();
        rows.push(row(format!("exits:{kind}"), count, Some(published)));
    }
    for (kind, &count) in &kinds {
        if !PUBLISHED_EXITS.iter().any(|(name, _)| name == kind) {
            rows.push(row(format!("exits:{kind}"), Some(count), None));
        }
    }
    for &(register, published) in registers {
        let count = trapped.get(register).copied().unwrap_or(0);
        let measured = (!is_kept(register)).then_some(count);
        rows.push(row(register.to_owned(), measured, Some(published)));
    }
    for (register, &count) in trapped.iter().filter(|(kind, _)| kind.starts_with("msr:")) {
        if !registers.iter().any(|(name, _)| name == register) {
            rows.push(row(register.clone(), Some(count), None));
        }
    }
    rows.extend(shares(&rows, run.pmis));
    rows.push(Row::new("pmis", mode, float(run.pmis), "interrupts"));
    let all = Row::new("pmu_exits_per_pmi", mode, run.pmu_exits_per_pmi, "exits");
    rows.push(all.beside(Some(published_per_pmi())));
    rows
}

/// Tells whether a register is the local APIC's, whose exits KVM does not show.
fn is_kept(register: &str) -> bool {
    register.contains(":0x8")
}

/// Counts exits by their published names.
fn kinds(trapped: &BTreeMap<String, u64>, host: Option<&Kvm>) -> BTreeMap<&'static str, u64> {
    let mut kinds = BTreeMap::new();
    for (kind, count) in trapped {
        let name = match kind.split(':').next().unwrap_or_default() {
            "msr" if kind.starts_with("msr:write") => "MSR_WRITE",
            "msr" => "MSR_READ",
            "rdpmc" => "RDPMC",
            "io" => "IO_INSTRUCTION",
            "mmio" => "EPT_VIOLATION",
            "kick" => "KICK",
            _ => continue,
        };
        *kinds.entry(name).or_default() += count;
    }
    for (file, name) in KVM_NAMES {
        let Some(host) = host else { continue };
        let count = |counts: &BTreeMap<String, u64>| counts.get(file).copied();
        if let (Some(begin), Some(end)) = (count(&host.begin.exits), count(&host.end.exits)) {
            kinds.insert(name, end.saturating_sub(begin));
        }
    }
    kinds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_interrupts_cost_ten_exits() {
        assert_eq!(published_per_pmi(), 9.80);
    }

    #[test]
    fn shares_are_of_each_run_s_own_interrupts() {
        let row = Row::new("msr:read:0x38e", "paused", Some(20.0), "exits");
        let row = row.beside(Some(14_558.0));
        let of = |pmis| shares(std::slice::from_ref(&row), pmis).remove(0);
        assert_eq!(of(Some(10)).measured, Some(2.0));
        assert_eq!(of(Some(10)).published, Some(2.0));
        assert_eq!(of(Some(0)).measured, None);
        assert_eq!(of(None).figure, "four_events_per_pmi:msr:read:0x38e");
    }

    #[test]
    fn sums_by_published_name() {
        let trapped = [
            ("msr:write:0x38f", 20),
            ("msr:write:0x390", 5),
            ("msr:read:0x38e", 7),
            ("rdpmc", 3),
            ("kick", 4),
            ("kvm", 100),
        ];
        let trapped = trapped.map(|(kind, count)| (kind.to_owned(), count));
        let kinds = kinds(&BTreeMap::from(trapped), None);
        assert_eq!(kinds["MSR_WRITE"], 25);
        assert_eq!((kinds["MSR_READ"], kinds["RDPMC"]), (7, 3));
        assert!(!kinds.contains_key("EXTERNAL_INTERRUPT"));
    }
}
