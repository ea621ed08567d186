//! Translates the hypervisor's statistics into the terms of [`super::result::Run`].

use std::collections::BTreeMap;

use vpmu::x86::{amd, intel, lbr};

use super::profile::Profile;
use crate::spec::design::Pmu;
use vpmu_measure::{Kvm, Meter, Monitor, Perf, Record, Snapshot, Span, Trace, Vmm};

/// What the records of a guest have, each kind apart.
#[derive(Default)]
pub(super) struct Found<'a> {
    pub(super) guest: Option<&'a vpmu_measure::Guest>,
    pub(super) meter: Option<&'a Meter>,
    /// The sum over every perf.data.
    pub(super) perf: Option<Perf>,
    /// The sum over every perf.data.
    pub(super) profile: Option<Profile>,
    pub(super) kvm: Option<&'a Kvm>,
    pub(super) monitor: Option<&'a Monitor>,
    pub(super) vmm: Option<&'a Vmm>,
    pub(super) traces: Vec<&'a Trace>,
}

impl<'a> Found<'a> {
    pub(super) fn in_records(records: &'a [Record]) -> Self {
        let mut found = Self::default();
        for record in records {
            match record {
                Record::Guest(guest) => found.guest = Some(guest),
                Record::Meter(meter) => found.meter = Some(meter),
                Record::Perf(perf) => {
                    let sum = found.perf.get_or_insert(Perf {
                        max_sample_rate: perf.max_sample_rate,
                        ..Perf::default()
                    });
                    sum.samples += perf.samples;
                    sum.lost_records += perf.lost_records;
                    sum.lost_samples += perf.lost_samples;
                    sum.throttled += perf.throttled;
                }
                Record::Profile(profile) => {
                    let sum = found.profile.get_or_insert_default();
                    for (stack, samples) in &profile.folded {
                        let all = sum.folded.entry(stack.clone()).or_default();
                        *all = all.saturating_add(*samples);
                    }
                }
                Record::Kvm(kvm) => found.kvm = Some(kvm),
                Record::VpmuMonitor(monitor) => found.monitor = Some(monitor),
                Record::VpmuVmm(vmm) => found.vmm = Some(vmm),
                Record::Trace(trace) => found.traces.push(trace),
                Record::Vpmu(_) | Record::Host(_) | Record::HostProfile(_) => {}
            }
        }
        found
    }
}

/// Rounds to six digits behind the point: more would be noise of the division.
pub(super) fn round(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

/// The hypervisor's work during the command.
#[derive(Default)]
pub(super) struct Stats {
    /// Exits by kind.
    pub(super) exits: Option<BTreeMap<String, u64>>,
    /// The part of the machine's time that the hypervisor took.
    pub(super) host_share: Option<f64>,
    /// The part that each kind of exit took.
    pub(super) exit_share: Option<BTreeMap<String, f64>>,
    /// Operations on host events, by kind.
    pub(super) host_operations: Option<BTreeMap<String, u64>>,
    /// Exits that serve the guest's PMU, where they are not counted by kind.
    pub(super) pmu_exits: Option<u64>,
}

impl Stats {
    /// Takes the statistics of the hypervisor below `pmu`, which has `vcpus` processors.
    pub(super) fn of(pmu: Pmu, vcpus: u32, found: &Found<'_>) -> Self {
        match pmu {
            Pmu::Native => Self::default(),
            Pmu::Kvm | Pmu::Mediated | Pmu::Qemu | Pmu::Vmm => {
                found.kvm.map(Self::of_kvm).unwrap_or_default()
            }
            _ => {
                let monitor = found.monitor.and_then(|monitor| monitor.measured.as_ref());
                let monitor = monitor.map(|span| Self::of_monitor(span, vcpus));
                monitor
                    .or_else(|| found.vmm.map(Self::of_vmm))
                    .unwrap_or_default()
            }
        }
    }

    fn of_monitor(span: &Span, vcpus: u32) -> Self {
        let all = span.ticks as f64 * f64::from(vcpus);
        let share = |ticks: u64| round(ticks as f64 / all);
        let known = span.ticks > 0;
        Self {
            exits: Some(span.exits.clone()),
            host_share: known.then(|| share(span.el2_ticks)),
            exit_share: known.then(|| {
                span.exit_ticks
                    .iter()
                    .map(|(kind, &ticks)| (kind.clone(), share(ticks)))
                    .collect()
            }),
            ..Self::default()
        }
    }

    /// Returns the VMM's statistics. The VMM counts the exits that reach it. KVM handles other
    /// exits by itself, and only the host's own statistics know them.
    fn of_vmm(vmm: &Vmm) -> Self {
        let Some(span) = &vmm.measured else {
            return Self::default();
        };
        let mut exits = span.exits.clone();
        let host = vmm.host.as_ref();
        if let Some(all) = host.and_then(Kvm::exits) {
            let ours = exits.values().sum();
            exits.insert("kvm".to_owned(), all.saturating_sub(ours));
        }
        Self {
            exits: Some(exits),
            host_share: host.and_then(|host| kvm_host_share(&host.begin, &host.end)),
            host_operations: Some(span.host_operations.clone()),
            ..Self::default()
        }
    }

    fn of_kvm(kvm: &Kvm) -> Self {
        let mut exits = BTreeMap::new();
        let mut named = 0;
        let mut all = 0;
        for (name, &end) in &kvm.end.exits {
            let begin = kvm.begin.exits.get(name).copied().unwrap_or(0);
            let count = end.saturating_sub(begin);
            match name.as_str() {
                "exits" => all = count,
                // A signal ends a run of the vCPU from outside. It is no exit of the guest's, and
                // is not counted in `exits`.
                "signal_exits" => {}
                _ => {
                    named += count;
                    let kind = name.replace("_exit_stat", "").replace("_exit", "");
                    if count > 0 {
                        exits.insert(kind, count);
                    }
                }
            }
        }
        // KVM counts system register traps, interrupts and page faults in `exits` only.
        exits.insert("other".to_owned(), all.saturating_sub(named));
        Self {
            exits: Some(exits),
            host_share: kvm_host_share(&kvm.begin, &kvm.end),
            pmu_exits: pmu_exits(kvm),
            ..Self::default()
        }
    }
}

/// Returns the exits that the PMU of a patched QEMU has counted.
fn pmu_exits(kvm: &Kvm) -> Option<u64> {
    let count = |kind| {
        let end = kvm.end.pmu.get(kind)?;
        Some(end.saturating_sub(*kvm.begin.pmu.get(kind)?))
    };
    Some(count("msr-exits")? + count("rdpmc-exits")? + count("kicks")?)
}

/// Returns the part of processor time that is neither the guest's nor idle, by the
/// host's own statistics (proc_stat(5): user time includes guest time).
fn kvm_host_share(begin: &Snapshot, end: &Snapshot) -> Option<f64> {
    let fields = |snapshot: &Snapshot| -> Option<Vec<u64>> {
        let words = snapshot.cpu.split_whitespace().skip(1);
        words.map(|word| word.parse().ok()).collect()
    };
    let (begin, end) = (fields(begin)?, fields(end)?);
    let grown: Vec<u64> = end
        .iter()
        .zip(&begin)
        .map(|(end, begin)| end.saturating_sub(*begin))
        .collect();
    let [_, _, _, idle, iowait, _, _, _, guest, guest_nice, ..] = grown[..] else {
        return None;
    };
    let all: u64 = grown[..8].iter().sum();
    let host = all.saturating_sub(idle + iowait + guest + guest_nice);
    (all > 0).then(|| round(host as f64 / all as f64))
}

/// Page and doorbell of the paravirtual PMU (docs/how/paravirtual-pmu.md).
const PARAVIRTUAL: [u32; 2] = [0x4b56_4d58, 0x4b56_4d59];

/// Tells whether an exit of this kind, as the monitor and vpmu-vmm name it, serves the guest's PMU.
/// An overflow of a counter does, and so does an access to the PMU's registers. Timers, other
/// devices and the command's own begin and end do not.
pub(super) fn serves_pmu(kind: &str) -> bool {
    match kind.split(':').collect::<Vec<_>>()[..] {
        // Arm: the interrupt; registers by their architectural names.
        ["irq", "pmu"] => true,
        ["sysreg", register, _] => register.starts_with("PM"),
        // x86: the signal of a host event; RDPMC; a breakpoint for branch records; MSRs by their addresses.
        ["kick" | "rdpmc" | "follow"] => true,
        ["msr", _, address] => address
            .strip_prefix("0x")
            .and_then(|digits| u32::from_str_radix(digits, 16).ok())
            .is_some_and(|address| {
                PARAVIRTUAL.contains(&address)
                    || intel::Msr::decode(address).is_some()
                    || amd::Msr::decode(address).is_some()
                    || lbr::intel::msrs().any(|msr| msr == address)
                    || lbr::amd::msrs().any(|msr| msr == address)
            }),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_that_serve_the_pmu() {
        for kind in [
            "irq:pmu",
            "sysreg:PMCR_EL0:w",
            "sysreg:PMEVTYPERn_EL0:r",
            "kick",
            "rdpmc",
            "follow",
            "msr:read:0x1500",
            "msr:read:0xc0010301",
            "msr:read:0x38e",
            "msr:write:0x4c1",
            "msr:write:0xc0010201",
            "msr:read:0xc0000300",
        ] {
            assert!(serves_pmu(kind), "{kind}");
        }
        for kind in [
            "irq:timer",
            "sysreg:unknown",
            "sysreg:ICC_SGI1R_EL1:w",
            "msr:write:0x6e0",
            "io:0x3f8",
            "kvm",
            "mmio",
        ] {
            assert!(!serves_pmu(kind), "{kind}");
        }
    }
}
