//! What is said of wrong options and of bad ends.

use super::*;

fn experiment() -> Experiment {
    Experiment {
        machine: Machine {
            arch: Arch::X86_64,
            vcpus: 1,
            memory: 1024,
            realtime: false,
            qemu_args: Vec::new(),
            vmm_args: Vec::new(),
        },
        host_counters: 0,
        command: Command::from_words(&["true".to_owned()]),
        runs: 1,
        kernel: None,
        initrd: None,
        append: None,
        add: Vec::new(),
        programs: Vec::new(),
        phase: 0,
        timeout: Duration::from_secs(1),
        boot_timeout: Duration::from_secs(1),
        keep: None,
        // In the lab's KVM host, whatever this machine's own KVM can do.
        marked: true,
        nested: false,
    }
}

#[test]
fn wrong_options_are_named() {
    let complaint = |pmu: Pmu, change: &dyn Fn(&mut Experiment)| {
        let mut experiment = experiment();
        change(&mut experiment);
        experiment.check(&[pmu.into()]).unwrap_err().to_string()
    };
    let complaints = [
        (
            complaint(Pmu::Emulated, &|it| it.machine.vcpus = 9),
            "--vcpus",
        ),
        (
            complaint(Pmu::Emulated, &|it| it.machine.vcpus = 0),
            "--vcpus",
        ),
        (complaint(Pmu::Emulated, &|it| it.runs = 101), "--runs"),
        (
            complaint(Pmu::Native, &|it| it.machine.vmm_args.push("-x".into())),
            "--vmm-arg",
        ),
        (
            complaint(Pmu::Emulated, &|it| it.machine.vmm_args.push("a b".into())),
            "one word",
        ),
        (
            complaint(Pmu::Emulated, &|it| it.command = None),
            "nothing to run",
        ),
        (
            complaint(Pmu::Emulated, &|it| it.initrd = Some("x".into())),
            "--initrd",
        ),
        (
            complaint(Pmu::Emulated, &|it| {
                it.command = None;
                it.kernel = Some("x".into());
                it.add.push("x".into());
            }),
            "--add",
        ),
        (complaint(Pmu::Partitioned, &|_| ()), "does not exist"),
        (
            complaint(Pmu::Emulated, &|it| it.machine.memory = 4096),
            "at most 3G",
        ),
        (
            complaint(Pmu::Emulated, &|it| {
                it.append = Some("quiet vpmu.pmu=kvm".into());
            }),
            "use those",
        ),
        (
            complaint(Pmu::Emulated, &|it| {
                it.machine.vmm_args = vec!["--save".into(), "x".into()];
            }),
            "--save=FILE",
        ),
        (
            complaint(Pmu::Emulated, &|it| it.add.push("/".into())),
            "is a folder",
        ),
    ];
    for (said, about) in complaints {
        assert!(said.contains(about), "{about}: {said}");
    }
}

fn transcript(records: Vec<Record>) -> Transcript {
    let mut transcript = Transcript::default();
    transcript.records = records;
    transcript
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
    let end = |pmu: Pmu, records: Vec<Record>| {
        let figures = experiment().figures(pmu.into(), &transcript(records));
        figures.unwrap_err()
    };
    assert!(matches!(
        end(Pmu::Emulated, vec![]),
        Error::HostReset { .. }
    ));
    assert!(matches!(
        end(Pmu::Emulated, vec![host(0, true)]),
        Error::Stuck { .. }
    ));
    let said = |pmu, records| end(pmu, records).to_string();
    let failed = said(Pmu::Emulated, vec![host(3, false)]);
    assert!(failed.contains("vpmu-vmm ended with status 3"), "{failed}");
    for records in [vec![host(0, false)], vec![]] {
        let pmu = match records.is_empty() {
            true => Pmu::Native,
            false => Pmu::Emulated,
        };
        let said = said(pmu, records);
        assert!(said.contains("powered off or was reset"), "{said}");
    }
}

#[test]
fn a_bare_kernel_ends_well_only_if_its_vmm_does() {
    let mut experiment = experiment();
    experiment.command = None;
    let end = |records| experiment.figures(Pmu::Emulated.into(), &transcript(records));
    assert!(end(vec![host(0, false)]).is_ok());
    assert!(end(vec![host(2, false)]).is_err());
    assert!(matches!(end(vec![]), Err(Error::HostReset { .. })));
}

#[test]
fn qemus_fault_is_named_where_it_can_be() {
    let panic = |line: &str| Error::Panic {
        line: line.to_owned(),
        console: Vec::new(),
    };
    let fatal = "Kernel panic - not syncing: Fatal exception in interrupt";
    let explain = |experiment: &Experiment, pmu: Pmu, line: &str| {
        let explained = experiment.explain(pmu.into(), panic(line));
        matches!(explained, Error::RepeatedInterrupt { .. })
    };
    let counted = experiment();
    assert!(explain(&counted, Pmu::Emulated, fatal));
    assert!(!explain(&counted, Pmu::Native, fatal), "nothing is nested");
    let other = "Kernel panic - not syncing: Attempted to kill init!";
    assert!(!explain(&counted, Pmu::Emulated, other));
    let mut in_time = experiment();
    in_time.machine.realtime = true;
    assert!(!explain(&in_time, Pmu::Emulated, fatal));
}
