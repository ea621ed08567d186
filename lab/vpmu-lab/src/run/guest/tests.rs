use super::*;
use crate::spec::arch::Arch;
use crate::spec::command::Command;
use vpmu_measure::Host;

fn request() -> Request {
    Request {
        command: Command::from_words(&["true".to_owned()]),
        // This runs in the lab's KVM host, whatever this machine's own KVM can do.
        marked: true,
        ..Request::new(Arch::X86_64)
    }
}

fn judge(request: Request, pmu: Pmu, records: Vec<Record>) -> Result<Option<Run>> {
    let spec = request.check(&[pmu.into()]).unwrap();
    judge_spec(&spec, records)
}

fn judge_spec(spec: &Spec, records: Vec<Record>) -> Result<Option<Run>> {
    let guest = &spec.guests[0];
    let mut transcript = Transcript::default();
    transcript.records = records;
    figures(
        None,
        spec,
        guest,
        &*backend::of(&spec.request, guest),
        &transcript,
    )
}

fn host(status: i32, stuck: bool) -> Record {
    Record::Host(Host {
        vmm: "vpmu-vmm".to_owned(),
        status,
        stuck,
    })
}

#[test]
fn a_silent_end_is_said_to_be_what_it_was() {
    let end = |pmu: Pmu, records: Vec<Record>| judge(request(), pmu, records).unwrap_err();
    assert!(matches!(
        end(Pmu::Emulated, vec![]).failure(),
        Some(Failure::HostReset)
    ));
    assert!(matches!(
        end(Pmu::Emulated, vec![host(0, true)]).failure(),
        Some(Failure::Stuck)
    ));
    let said = |pmu, records| end(pmu, records).to_string();
    let failed = said(Pmu::Emulated, vec![host(3, false)]);
    assert!(failed.contains("vpmu-vmm ended with status 3"), "{failed}");
    for (pmu, records) in [
        (Pmu::Emulated, vec![host(0, false)]),
        (Pmu::Native, Vec::new()),
    ] {
        let said = said(pmu, records);
        assert!(said.contains("powered off or was reset"), "{said}");
    }
}

#[test]
fn a_bare_kernel_ends_well_only_if_its_vmm_does() {
    let mut spec = request().check(&[Pmu::Emulated.into()]).unwrap();
    spec.request.command = None;
    assert!(judge_spec(&spec, vec![host(0, false)]).is_ok());
    assert!(judge_spec(&spec, vec![host(2, false)]).is_err());
    assert!(matches!(
        judge_spec(&spec, vec![]).unwrap_err().failure(),
        Some(Failure::HostReset)
    ));
}

#[test]
fn qemus_fault_is_named_where_it_can_be() {
    let explain = |request: Request, pmu: Pmu, line: &str| {
        let spec = request.check(&[pmu.into()]).unwrap();
        let backend = backend::of(&spec.request, &spec.guests[0]);
        let explained = backend.explain(Failure::Panic(line.to_owned()));
        matches!(explained, Failure::RepeatedInterrupt(_))
    };
    let fatal = "Kernel panic - not syncing: Fatal exception in interrupt";
    assert!(explain(request(), Pmu::Emulated, fatal));
    let mut appended = request();
    appended.append = Some("maxcpus=1".to_owned());
    assert!(
        explain(appended, Pmu::Emulated, fatal),
        "the words do not matter"
    );
    assert!(!explain(request(), Pmu::Native, fatal), "nothing is nested");
    let other = "Kernel panic - not syncing: Attempted to kill init!";
    assert!(!explain(request(), Pmu::Emulated, other));
    let mut in_time = request();
    in_time.machine.realtime = true;
    assert!(!explain(in_time, Pmu::Emulated, fatal));
}

#[test]
fn a_boot_that_hangs_is_tried_again_where_qemu_may_be_the_cause() {
    let try_again = |request: Request, pmu: Pmu, phase| {
        let spec = request.check(&[pmu.into()]).unwrap();
        let error = Failure::Boot(Duration::from_secs(240)).with(Vec::new());
        again(TRIES, &spec, &spec.guests[0], phase, error).is_ok()
    };
    assert!(try_again(request(), Pmu::Emulated, 0));
    assert!(!try_again(request(), Pmu::Emulated, TRIES - 1));
    assert!(!try_again(request(), Pmu::Native, 0), "nothing is nested");
    let mut own = request();
    let kernel = tempfile::NamedTempFile::new().unwrap();
    own.kernel = Some(kernel.path().to_owned());
    assert!(
        !try_again(own, Pmu::Emulated, 0),
        "the kernel may be the cause"
    );
}
