//! The models of either vendor, and what they decode.

use vpmu::counter::{Counter, CounterState, Report, Statistics};
use vpmu::x86::intel::{ConfigError, Msr, Pmu};
use vpmu::x86::{
    AnyPmu, ArchEvent, Capability, CounterConfig, CpuidLeaf, EventFilter, EventKind, MaskedEvent,
    Outcome, PmuConfig, PmuState, RestoreError, Ring, TooManyEvents, amd, intel, lbr, pebs,
};

use crate::{Host, Watch};

type Watched = AnyPmu<Watch>;

#[unsafe(no_mangle)]
pub fn x86_new(config: PmuConfig<Capability>) -> Result<Watched, ConfigError> {
    AnyPmu::with_events(config, Watch)
}

#[unsafe(no_mangle)]
pub fn x86_rdmsr(pmu: &mut Watched, address: u32, host: &mut Host) -> Outcome {
    pmu.rdmsr(address, host)
}

#[unsafe(no_mangle)]
pub fn x86_wrmsr(pmu: &mut Watched, address: u32, value: u64, host: &mut Host) -> Outcome {
    pmu.wrmsr(address, value, host)
}

#[unsafe(no_mangle)]
pub fn x86_read(pmu: &mut Pmu<Watch>, msr: Msr, host: &mut Host) -> Outcome {
    pmu.read(msr, host)
}

#[unsafe(no_mangle)]
pub fn x86_write(pmu: &mut Pmu<Watch>, msr: Msr, value: u64, host: &mut Host) -> Outcome {
    pmu.write(msr, value, host)
}

#[unsafe(no_mangle)]
pub fn amd_read(pmu: &mut amd::Pmu<Watch>, msr: amd::Msr, host: &mut Host) -> Outcome {
    pmu.read(msr, host)
}

#[unsafe(no_mangle)]
pub fn amd_write(pmu: &mut amd::Pmu<Watch>, msr: amd::Msr, value: u64, host: &mut Host) -> Outcome {
    pmu.write(msr, value, host)
}

#[unsafe(no_mangle)]
pub fn x86_rdpmc(pmu: &mut Watched, ecx: u32, ring: Ring, pce: bool, host: &mut Host) -> Outcome {
    pmu.rdpmc(ecx, ring, pce, host)
}

#[unsafe(no_mangle)]
pub fn x86_overflow(pmu: &mut Watched, counter: Counter, report: Report, host: &mut Host) -> bool {
    pmu.overflow(counter, report, host)
}

#[unsafe(no_mangle)]
pub fn x86_emulated(
    pmu: &mut Watched,
    event: ArchEvent,
    times: u64,
    ring: Ring,
    host: &mut Host,
) -> bool {
    pmu.emulated(event, times, ring, host)
}

#[unsafe(no_mangle)]
pub fn x86_take_pmi(pmu: &mut Watched) -> bool {
    pmu.pmi_due() && pmu.take_pmi()
}

#[unsafe(no_mangle)]
pub fn x86_load(pmu: &mut Watched, host: &mut Host) {
    pmu.load(host);
}

#[unsafe(no_mangle)]
pub fn x86_put(pmu: &mut Watched, host: &mut Host) {
    pmu.put(host);
}

#[unsafe(no_mangle)]
pub fn x86_hold(pmu: &mut Watched, host: &mut Host) {
    pmu.hold(host);
}

#[unsafe(no_mangle)]
pub fn x86_end_slice(pmu: &mut Watched, host: &mut Host) {
    pmu.end_slice(host);
}

#[unsafe(no_mangle)]
pub fn x86_reset(pmu: &mut Watched, host: &mut Host) {
    pmu.reset(host);
}

#[unsafe(no_mangle)]
pub fn x86_set_filter(pmu: &mut Watched, filter: EventFilter, host: &mut Host) {
    pmu.set_filter(filter, host);
}

#[unsafe(no_mangle)]
pub fn x86_save(pmu: &mut Watched, host: &mut Host) -> PmuState {
    pmu.save(host)
}

#[unsafe(no_mangle)]
pub fn x86_restore(
    pmu: &mut Watched,
    state: &PmuState,
    host: &mut Host,
) -> Result<(), RestoreError> {
    pmu.restore(state, host)
}

#[unsafe(no_mangle)]
pub fn x86_state(
    pmu: &Watched,
    counter: Counter,
) -> (Option<CounterState>, Capability, Statistics) {
    (
        pmu.counter_state(counter),
        pmu.capability(),
        pmu.statistics(),
    )
}

#[unsafe(no_mangle)]
pub fn x86_pebs(pmu: &Watched, capability: &intel::Capability) -> (pebs::Statistics, u64) {
    (pmu.pebs_statistics(), capability.misc_enable())
}

#[unsafe(no_mangle)]
pub fn x86_branch(pmu: &mut Watched, branch: &lbr::Branch, host: &mut Host) -> bool {
    pmu.branch(branch, host)
}

#[unsafe(no_mangle)]
pub fn x86_end_following(pmu: &mut Watched, host: &mut Host) -> (bool, bool) {
    (pmu.disable_lbr(host), pmu.end_following(host))
}

#[unsafe(no_mangle)]
pub fn x86_branches(pmu: &Watched) -> (Option<lbr::Filter>, u8, lbr::Statistics) {
    (
        pmu.branch_filter(),
        pmu.branches_awaited(),
        pmu.lbr_statistics(),
    )
}

#[unsafe(no_mangle)]
pub fn x86_wants(filter: &lbr::Filter, branch: &lbr::Branch) -> bool {
    filter.passes(branch)
}

#[unsafe(no_mangle)]
pub fn x86_lbr_cpuid(capability: &intel::Capability) -> (CpuidLeaf, u32) {
    (capability.leaf_1c(), capability.leaf_07_edx())
}

#[unsafe(no_mangle)]
pub fn x86_lbr_record(stack: &lbr::Stack, n: Counter) -> Option<(u64, u64)> {
    stack.record(n.number())
}

#[unsafe(no_mangle)]
pub fn x86_cpuid(capability: &intel::Capability, subleaf: u32) -> [CpuidLeaf; 2] {
    [capability.leaf_0a(), capability.leaf_23(subleaf)]
}

#[unsafe(no_mangle)]
pub fn amd_cpuid(capability: &amd::Capability, event: ArchEvent) -> (CpuidLeaf, u32, bool) {
    (
        capability.leaf_8000_0022(),
        capability.leaf_8000_0001_ecx(),
        capability.has_event(event),
    )
}

#[unsafe(no_mangle)]
pub fn x86_capability(capability: &intel::Capability, n: Counter) -> [u64; 9] {
    let reserved = capability.reserved();
    [
        capability.perf_capabilities(),
        capability.counter_mask(n),
        reserved.perfevtsel,
        reserved.fixed_ctrl,
        reserved.global_ctrl,
        reserved.ovf_ctrl,
        reserved.status_set,
        reserved.debugctl,
        u64::from(capability.leaf_01_ecx() | capability.leaf_01_edx() | capability.leaf_07_1_eax()),
    ]
}

#[unsafe(no_mangle)]
pub fn x86_filter(filter: EventFilter, entry: u64) -> Result<EventFilter, TooManyEvents> {
    match MaskedEvent::from_kvm(entry) {
        Some(event) => filter.with(event),
        None => Ok(filter),
    }
}

#[unsafe(no_mangle)]
pub fn x86_allows(filter: &EventFilter, event: EventKind) -> bool {
    filter.allows(event)
}

#[unsafe(no_mangle)]
pub fn x86_config(config: &CounterConfig) -> (Option<u64>, Option<ArchEvent>) {
    (config.raw(), config.architectural())
}

#[unsafe(no_mangle)]
pub fn x86_msr(address: u32) -> Option<u32> {
    Msr::decode(address).map(Msr::address)
}

#[unsafe(no_mangle)]
pub fn amd_msr(address: u32) -> Option<u32> {
    amd::Msr::decode(address).map(amd::Msr::address)
}
