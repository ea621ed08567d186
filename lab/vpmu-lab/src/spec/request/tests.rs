//! Tests of requests that are refused, and of the messages.

use super::*;
use crate::spec::SecondPayload;
use crate::spec::design::{Backing, Model, Policy};

fn request() -> Request {
    Request {
        command: Command::from_words(&["true".to_owned()]),
        ..Request::new(Arch::X86_64)
    }
}

type Change<'a> = &'a dyn Fn(&mut Request);

fn complaint(pmu: Pmu, change: Change<'_>) -> String {
    let mut request = request();
    change(&mut request);
    request.check(&[pmu.into()]).unwrap_err().to_string()
}

#[test]
fn wrong_numbers_and_files_are_named() {
    let cases: [(Change, &str); 9] = [
        (&|it| it.machine.vcpus = 65, "--vcpus"),
        (&|it| it.machine.vcpus = 0, "--vcpus"),
        (&|it| it.runs = 101, "--runs"),
        (&|it| it.machine.memory = 4096, "at most 3G"),
        (&|it| it.machine.memory = 100, "at least 384M"),
        (&|it| it.host_counters = 1, "--host-counters"),
        (
            &|it| it.host_profile = "1000".parse().ok(),
            "--host-profile",
        ),
        (&|it| it.add.push("/".into()), "is a folder"),
        (&|it| it.kernel = Some("/no/such".into()), "/no/such"),
    ];
    for (change, about) in cases {
        let said = complaint(Pmu::Emulated, change);
        assert!(said.contains(about), "{about}: {said}");
    }
}

#[test]
fn a_system_that_packages_do_not_fit_is_named() {
    let said = complaint(Pmu::Emulated, &|it| {
        it.kernel = Some("x".into());
        it.modules.push("loop".into());
    });
    assert!(said.contains("modules of Debian's kernel"), "{said}");
    let said = complaint(Pmu::Exec, &|it| {
        it.disk = "uefi:x".parse().ok();
        it.packages.push("rr".into());
    });
    assert!(said.contains("your disk has its own"), "{said}");
}

#[test]
fn contradictions_are_named() {
    let cases: [(Pmu, Change, &str); 16] = [
        (
            Pmu::Native,
            &|it| it.vmm_args.push("-x".into()),
            "--vmm-arg",
        ),
        (
            Pmu::Emulated,
            &|it| it.vmm_args.push("a b".into()),
            "one word",
        ),
        (Pmu::Emulated, &|it| it.command = None, "nothing to run"),
        (
            Pmu::Emulated,
            &|it| it.initrd = Some("x".into()),
            "--initrd",
        ),
        (
            Pmu::Emulated,
            &|it| {
                it.command = None;
                it.kernel = Some("x".into());
                it.add.push("x".into());
            },
            "--add",
        ),
        (
            Pmu::Kvm,
            &|it| {
                it.command = None;
                it.kernel = Some("x".into());
            },
            "kvm and mediated need a command",
        ),
        (Pmu::Partitioned, &|_| (), "does not exist"),
        (Pmu::Paravirt, &|it| it.perfmon = Some(5), "--perfmon"),
        (
            Pmu::Kvm,
            &|it| it.backing = Some(Backing::Clock),
            "--backing",
        ),
        (Pmu::Paravirt, &|it| it.lbr = Lbr::On, "--lbr"),
        (
            Pmu::Emulated,
            &|it| (it.lbr, it.model) = (Lbr::On, Model::Amd),
            "--model amd-v2",
        ),
        (
            Pmu::Emulated,
            &|it| (it.perfmon, it.model) = (Some(5), Model::Amd),
            "--model intel",
        ),
        (
            Pmu::Emulated,
            &|it| it.append = Some("quiet vpmu.pmu=kvm".into()),
            "use those",
        ),
        (
            Pmu::Emulated,
            &|it| it.vmm_args = vec!["--save".into(), "x".into()],
            "--save=FILE",
        ),
        (
            Pmu::Emulated,
            &|it| it.vmm_args.push("--disturb=loadvm:2".into()),
            "with --pmu qemu",
        ),
        (
            Pmu::Qemu,
            &|it| it.vmm_args.push("--disturb=often".into()),
            "loadvm:N",
        ),
    ];
    for (pmu, change, about) in cases {
        let said = complaint(pmu, change);
        assert!(said.contains(about), "{about}: {said}");
    }
}

#[test]
fn each_design_has_its_way() {
    let arm = Request {
        host_counters: 2,
        ..Request {
            command: request().command,
            ..Request::new(Arch::Aarch64)
        }
    };
    let designs = Arch::Aarch64.designs();
    let of_designs: Vec<Design> = designs.iter().copied().map(Design::from).collect();
    let guests = arm.guests(&of_designs).unwrap();
    let ways: Vec<Way> = guests.into_iter().map(|guest| guest.way).collect();
    let stock = Way::Nested(Vmm::Stock);
    let [monitor, native] = [Way::Monitor, Way::Native];
    assert_eq!(ways, [native, stock, monitor, monitor, monitor, monitor]);
    let kept: Vec<_> = designs.iter().map(|&pmu| arm.kept_counters(pmu)).collect();
    assert_eq!(kept, [None, None, None, Some(2), Some(2), None]);
}

#[test]
fn this_machines_kvm_runs_all_guests_or_none() {
    let emulated = |policy| Design {
        pmu: Pmu::Emulated,
        policy: Some(policy),
    };
    let both = [emulated(Policy::Reuse), emulated(Policy::Paused)];
    let guests = |request: &Request, own_kvm, designs: &[Design]| {
        let request = request.clone();
        Request { own_kvm, ..request }.guests(designs)
    };
    let direct = guests(&request(), true, &both).unwrap();
    assert!(direct.iter().all(Guest::is_direct));
    let is_counted = |guest: &Guest| guest.is_counted(&request().machine);
    assert!(!direct.iter().any(is_counted));
    let mixed = [Pmu::Native.into(), both[0]];
    let nested = guests(&request(), true, &mixed).unwrap();
    assert!(!nested.iter().any(Guest::is_direct));
    assert!(nested.iter().all(is_counted));
    let mut wrong = request();
    wrong.vmm_args.push("--save=x".into());
    assert!(guests(&wrong, true, &both).is_err());
    assert!(guests(&wrong, false, &both).is_ok());
    let mut other = request();
    other.machine.cpu = Some("EPYC".into());
    assert!(guests(&other, true, &both).is_err());
    assert!(guests(&other, false, &both).is_ok());
}

#[test]
fn stock_kvms_shares_are_fair_in_real_time_only() {
    let fair = |realtime, arch| {
        let mut request = request();
        request.machine.realtime = realtime;
        request.machine.cpu = Some("max".to_owned());
        let machine = Machine {
            arch,
            ..request.machine.clone()
        };
        request.guests(&[Pmu::Kvm.into()]).unwrap()[0].has_fair_shares(&machine)
    };
    assert!(!fair(false, Arch::X86_64));
    assert!(fair(true, Arch::X86_64));
    assert!(fair(false, Arch::Aarch64));
}

#[test]
fn a_disk_needs_firmware_and_brings_its_kernel() {
    let disk = |it: &mut Request| it.disk = "uefi".parse().ok();
    let cases: [(Pmu, Change, &str); 7] = [
        (Pmu::Emulated, &|it| disk(it), "vpmu-vmm has not"),
        (
            Pmu::Kvm,
            &|it| it.machine.arch = Arch::Aarch64,
            "about --arch x86_64",
        ),
        (
            Pmu::Kvm,
            &|it| it.kernel = Some("/dev/null".into()),
            "leave --kernel",
        ),
        (
            Pmu::Kvm,
            &|it| it.append = Some("quiet".into()),
            "leave --kernel",
        ),
        (Pmu::Native, &|it| it.command = None, "run a command"),
        (
            Pmu::Native,
            &|it| {
                it.command = None;
                it.add = vec!["/dev/null".into()];
                it.disk = "/dev/null".parse().ok();
            },
            "beside a command",
        ),
        (
            Pmu::Native,
            &|it| it.disk = "/no/such".parse().ok(),
            "/no/such",
        ),
    ];
    for (pmu, change, about) in cases {
        let said = complaint(pmu, &|it| {
            disk(it);
            change(it);
        });
        assert!(said.contains(about), "{about}: {said}");
    }
    let mut good = request();
    disk(&mut good);
    let spec = good.check(&[Pmu::Native.into(), Pmu::Kvm.into()]).unwrap();
    assert!(spec.needs_images());
}

#[test]
fn a_second_guest_needs_the_monitor_and_turns() {
    let with_second = |arch, pmu: Pmu| {
        let mut request = Request::new(arch);
        request.command = Command::from_words(&["true".to_owned()]);
        request.second = Some(SecondRequest {
            payload: SecondPayload::Image {
                image: "/dev/null".into(),
                initrd: None,
            },
            command: None,
            append: "test=count".to_owned(),
            memory: None,
            slice: Some(100),
            eager: false,
        });
        request.check(&[pmu.into()])
    };
    for pmu in [Pmu::Partitioned, Pmu::Emulated] {
        assert!(with_second(Arch::Aarch64, pmu).is_ok(), "{pmu}");
    }
    for pmu in [Pmu::Native, Pmu::Kvm, Pmu::Direct, Pmu::Untrapped] {
        assert!(with_second(Arch::Aarch64, pmu).is_err(), "{pmu}");
    }
    assert!(with_second(Arch::X86_64, Pmu::Emulated).is_err());
}
