//! Tests of a VMM without privileges: its rights, and the errors that explain them, in a jail too.

use std::fs;
use std::process::Command;
use std::sync::Arc;
use std::thread::spawn;

use rustix::fs::{Gid, Uid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, set_capabilities, set_keep_capabilities, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};

use super::guest::{Code, HANDLED, MODEL, Machine, REPORT};
use super::{CYCLES, GLOBAL_CTRL, NMI, PERFEVTSEL0, PMC0, Port, run};
use vpmu_kvm::{Error, Offer, Options, PerfError, Vcpu, detect};

const JAIL: &str = "VPMU_JAIL";

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: only root can become somebody else");
        return false;
    }
    // A container's root may lack the right, or perf altogether.
    let lacks = detect(MODEL, &Options::default()).err();
    if let Some(error) = &lacks {
        eprintln!("skipped: {error}");
    }
    lacks.is_none()
}

/// Makes the calling thread, and no other, a thread of user nobody with these capabilities.
fn become_nobody(capabilities: CapabilitySet) {
    let (uid, gid) = (Uid::from_raw(65534), Gid::from_raw(65534));
    set_keep_capabilities(true).unwrap();
    set_thread_groups(&[]).unwrap();
    set_thread_res_gid(gid, gid, gid).unwrap();
    set_thread_res_uid(uid, uid, uid).unwrap();
    let sets = CapabilitySets {
        effective: capabilities,
        permitted: capabilities,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets).unwrap();
}

fn paranoia() -> Option<i32> {
    let level = fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").ok()?;
    level.trim().parse().ok()
}

/// Checks the results for a user without capabilities.
fn check_nobodys(level: Option<i32>, seen: Option<i32>) {
    let found = detect(MODEL, &Options::default());
    match level {
        Some(..=1) => assert!(found.is_ok(), "{found:?}"),
        Some(_) => {
            assert_eq!(found, Err(Error::Perf(PerfError::Forbidden(seen))));
            let text = found.unwrap_err().to_string();
            assert!(text.contains("give the program CAP_PERFMON"), "{text}");
            assert_eq!(
                text.contains("perf_event_paranoid is"),
                seen.is_some(),
                "{text}"
            );
        }
        None => eprintln!("skipped: no perf_event_paranoid here"),
    }
}

#[test]
fn nobody_is_told_what_is_missing() {
    if !is_root() {
        return;
    }
    let level = paranoia();
    let nobody = move || {
        become_nobody(CapabilitySet::empty());
        check_nobodys(level, level);
    };
    spawn(nobody).join().unwrap();
}

#[test]
fn in_a_jail_without_proc_as_well() {
    // The test runs in a process of its own, because its root differs, and asks nothing before.
    if let Ok(level) = std::env::var(JAIL) {
        let empty = std::env::temp_dir().join(format!("vpmu-jail-{}", std::process::id()));
        fs::create_dir(&empty).unwrap();
        rustix::process::chroot(&empty).unwrap();
        become_nobody(CapabilitySet::empty());
        check_nobodys(level.parse().ok(), None);
        return;
    }
    if !is_root() {
        return;
    }
    let own = std::env::current_exe().unwrap();
    let mut jail = Command::new(own)
        .args(["--exact", "privileges::in_a_jail_without_proc_as_well"])
        .env(
            JAIL,
            paranoia().map_or(String::new(), |level| level.to_string()),
        )
        .spawn()
        .unwrap();
    let empty = std::env::temp_dir().join(format!("vpmu-jail-{}", jail.id()));
    let status = jail.wait().unwrap();
    fs::remove_dir(empty).unwrap();
    assert!(status.success());
}

/// A VM without a PMU asks nothing of perf, even where it has a lazy deadline.
#[test]
fn nobody_runs_a_guest_without_a_pmu() {
    if !is_root() {
        return;
    }
    let Some(mut machine) = Machine::with_deadline(Code::default().out(REPORT)) else {
        return;
    };
    let nobody = move || {
        become_nobody(CapabilitySet::empty());
        for deadline in [false, true] {
            let offer = Offer {
                deadline,
                ..Offer::default()
            };
            let memory = Arc::new(machine.memory.clone());
            let options = Options::default();
            let vcpu = Vcpu::attach(&machine.vm, &machine.vcpu, &offer, &options, memory);
            let mut vcpu = vcpu.unwrap();
            assert_eq!(vcpu.backing(), None);
            run(&mut machine, &mut vcpu, |port| {
                matches!(port, Port::Out(..))
            });
        }
    };
    spawn(nobody).join().unwrap();
}

/// Checks descriptors from a process that may open /dev/kvm, as a jailer's do.
#[test]
fn a_vmm_of_nobodys_with_one_capability_runs_its_guest() {
    if !is_root() {
        return;
    }
    // mov ecx, 20000; dec ecx; jnz $-2; out REPORT, eax; jmp to the mov
    let code = Code::default()
        .wrmsr(PERFEVTSEL0, CYCLES)
        .wrmsr(PMC0, (1 << 48) - 1_000_000)
        .wrmsr(GLOBAL_CTRL, 1)
        .ecx(20_000)
        .bytes(&[0xff, 0xc9, 0x75, 0xfc])
        .out(REPORT)
        .bytes(&[0xeb, 0xf3]);
    let Some(mut machine) = Machine::new(code, NMI) else {
        return;
    };
    let nobody = move || {
        become_nobody(CapabilitySet::PERFMON);
        let Some(mut pmu) = super::attach(&machine, MODEL, &Options::default()) else {
            return;
        };
        run(&mut machine, &mut pmu, |port| {
            matches!(port, Port::Out(HANDLED, 2))
        });
    };
    spawn(nobody).join().unwrap();
}
