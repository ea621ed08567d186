//! Tests of the figures of given records.

use insta::assert_snapshot;

use super::*;
use crate::spec::Way;
use crate::spec::command::Command;

fn records(lines: &[&str]) -> Vec<Record> {
    lines
        .iter()
        .map(|line| Record::parse(line.as_bytes()).unwrap())
        .collect()
}

const METER: &str = r#"{"meter":{"status":0,"signal":null,"real_ns":2500000000,"user_us":700000,"sys_us":500000,"pmis":100}}"#;
const GUEST: &str = r#"{"guest":{"kernel":"6.12","counters":"7 (0,8000003f)"}}"#;

fn guest_under(pmu: Pmu) -> Guest {
    Guest {
        design: pmu.into(),
        way: Way::Native,
    }
}

fn run_on(request: Request, guest: &Guest, lines: &[&str]) -> Run {
    let request = Request {
        command: Command::from_words(&["true".to_owned()]),
        ..request
    };
    Run::from_records(None, &request, guest, &records(lines)).unwrap()
}

fn run(pmu: Pmu, lines: &[&str]) -> Run {
    run_of(1, pmu, lines)
}

/// Returns the file that `--json` writes of `run`.
fn json(run: Run) -> String {
    serde_json::to_string_pretty(&Results::new(vec![run])).unwrap()
}

fn run_of(runs: u32, pmu: Pmu, lines: &[&str]) -> Run {
    let request = Request {
        runs,
        ..Request::new(Arch::Aarch64)
    };
    run_on(request, &guest_under(pmu), lines)
}

#[test]
fn native_knows_no_exits() {
    let run = run(Pmu::Native, &[GUEST, METER]);
    assert_snapshot!(json(run));
}

#[test]
fn kvm_accounts() {
    let kvm = r#"{"kvm":{
        "begin":{"cpu":"cpu  100 0 50 10 0 0 0 0 90 0","exits":{"exits":1000,"hvc_exit_stat":1,"signal_exits":5}},
        "end":{"cpu":"cpu  200 0 100 60 0 0 0 0 140 0","exits":{"exits":1860,"hvc_exit_stat":11,"signal_exits":9}}}}"#;
    let run = run(Pmu::Kvm, &[GUEST, METER, kvm]);
    // KVM does not count the PMU's exits apart. The host has 200 ticks in all: 50 idle, 50 in the guest.
    assert_snapshot!(json(run));
}

#[test]
fn monitor_accounts() {
    let monitor = r#"{"vpmu-monitor":{"guest_counters":4,"host_counters":2,
        "measured":{"ticks":1000,"el2_ticks":100,"pmis":100,"exits":{"irq:pmu":100,"hvc":20},"exit_ticks":{"irq:pmu":90}},
        "total":{"ticks":9000,"el2_ticks":900,"pmis":100,"exits":{}}}}"#;
    let run = run(Pmu::Partitioned, &[GUEST, METER, monitor]);
    assert_snapshot!(json(run));
}

#[test]
fn vmm_accounts() {
    let vmm = r#"{"vpmu-vmm":{"policy":"reuse","backing":"clock","pmu_version":2,"general":4,"fixed":3,
        "measured":{"pmis":10,"exits":{"msr:write:0x38f":20,"kick":10},"host_operations":{"pause":10,"set_period":10}},
        "total":{"pmis":12,"exits":{},"host_operations":{}},
        "host":{"begin":{"cpu":"cpu  100 0 50 10 0 0 0 0 90 0","exits":{"exits":100}},
                "end":{"cpu":"cpu  200 0 100 60 0 0 0 0 140 0","exits":{"exits":200}}}}}"#;
    let guest = r#"{"guest":{"kernel":"6.12","counters":"","general":"4"}}"#;
    let meter = METER.replace(r#""pmis":100"#, r#""pmis":10"#);
    let run = run(Pmu::Emulated, &[guest, &meter, vmm]);
    assert_snapshot!(json(run));

    // Beside other guests, the host's statistics are not this guest's alone.
    let direct = Guest {
        way: Way::Direct,
        ..guest_under(Pmu::Emulated)
    };
    let run = run_on(Request::new(Arch::X86_64), &direct, &[guest, &meter, vmm]);
    assert_eq!(
        (run.exits.unwrap().get("kvm"), run.host_share),
        (None, None)
    );
    assert_eq!(
        (run.exits_per_pmi, run.pmu_exits_per_pmi),
        (None, Some(3.0))
    );
}

#[test]
fn unfair_shares_are_not_told() {
    let kvm = r#"{"kvm":{
        "begin":{"cpu":"cpu  100 0 50 10 0 0 0 0 90 0","exits":{"exits":1}},
        "end":{"cpu":"cpu  200 0 100 60 0 0 0 0 140 0","exits":{"exits":2}}}}"#;
    let share = |arch, realtime| {
        let mut request = Request::new(arch);
        request.machine.realtime = realtime;
        run_on(request, &guest_under(Pmu::Kvm), &[METER, kvm]).host_share
    };
    assert_eq!(share(Arch::X86_64, false), None);
    assert_eq!(share(Arch::X86_64, true), Some(0.5));
    assert_eq!(share(Arch::Aarch64, false), Some(0.5));
}

#[test]
fn no_pmu_no_interrupts() {
    let run = run(Pmu::Native, &[METER]);
    assert_eq!((run.guest_counters, run.pmis), (None, None));
}

#[test]
fn lost_samples_are_known_or_not() {
    let perf = |lost_records, lost_samples| {
        super::lost_samples(&Perf {
            samples: 1,
            lost_records,
            lost_samples,
            throttled: 0,
            max_sample_rate: 100_000,
        })
    };
    assert_eq!(perf(0, 0), Some(0));
    assert_eq!(perf(2, 7), Some(7));
    assert_eq!(perf(2, 0), None);
}

#[test]
fn the_profiles_of_several_runs_are_summed() {
    let profile = r#"{"profile":{"folded":{"gzip;deflate":3,"gzip;[kernel];read":1}}}"#;
    let run = run_of(2, Pmu::Native, &[GUEST, METER, profile, profile]);
    let folded = run.guest_profile.unwrap().folded;
    assert_eq!(
        (folded["gzip;deflate"], folded["gzip;[kernel];read"]),
        (6, 2)
    );
}

#[test]
fn several_runs_are_means() {
    let perf = r#"{"perf":{"samples":50,"lost_records":0,"lost_samples":0,"throttled":0,"max_sample_rate":100000}}"#;
    let run = run_of(2, Pmu::Native, &[GUEST, METER, perf, perf]);
    assert_eq!((run.real_s, run.user_s), (1.25, 0.35));
    assert_eq!((run.samples, run.pmis), (Some(50), Some(50)));
}
