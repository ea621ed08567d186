//! Tests that the list of system calls is complete, and has nothing superfluous: vCPUs run under a seccomp filter made
//! of the list, and of the list without one of its rules.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use seccompiler::BpfProgram;

use super::guest::{Code, END, HANDLED, MODEL, Machine};
use super::pebs::{PEBS_ENABLE, WITH_PEBS, collecting, time_on_cpu};
use super::{CYCLES, GLOBAL_CTRL, NMI, PERFEVTSEL0, PMC0, Port};
use vpmu_kvm::{Backing, Kick, Options, Pebs, SYSCALLS, Syscall, Vcpu, detect};

const VECTOR: u32 = 0xee;
/// The variable that names the rule left out, in a process of its own, which the filter may end.
const LEFT_OUT: &str = "VPMU_SECCOMP_WITHOUT";
const NOTHING: &str = "nothing";
/// Returns whether the call depends on the host, the schedule or the build.
fn depends(call: &Syscall) -> bool {
    // A host may be unable to sample, and an emulated KVM does not tell perf that a guest is at work. The test's own
    // memory is given back, too.
    matches!(call.name, "futex" | "clock_gettime" | "munmap")
        || call.why.contains("debug assertions")
        // This guest has none.
        || call.why.contains("lazy deadline")
        || call.why.contains("Pebs::Buffer") && !(call.name == "mmap" && counts_by_clock())
}

fn counts_by_clock() -> bool {
    let hardware = Options {
        backing: Some(Backing::Hardware),
        ..Options::default()
    };
    detect(MODEL, &hardware).is_err()
}

/// The calls of the test's own thread: KVM_RUN, output, memory, its end.
const OWN: &str = r#"{"syscall":"ioctl","args":[{"index":1,"type":"dword","op":"eq","val":44672}]},
{"syscall":"brk"},{"syscall":"munmap"},{"syscall":"mprotect"},{"syscall":"madvise"},
{"syscall":"exit"},{"syscall":"exit_group"},{"syscall":"sigaltstack"},
{"syscall":"rt_sigprocmask","args":[{"index":0,"type":"dword","op":"eq","val":0}]},
{"syscall":"rt_sigprocmask","args":[{"index":0,"type":"dword","op":"eq","val":2}]},
{"syscall":"set_robust_list"},{"syscall":"rseq"}"#;

/// Memory of the test's own thread is anonymous.
const OWN_MEMORY: &str = r#"
{"syscall":"mmap","args":[{"index":3,"type":"dword","op":{"masked_eq":32},"val":32}]}"#;

fn filter(left_out: Option<usize>) -> BpfProgram {
    let rules = vpmu_kvm::seccomp_rules();
    // Each rule is on a line of its own.
    let mut rules: Vec<&str> = rules
        .trim()
        .trim_matches(['[', ']'])
        .trim()
        .lines()
        .collect();
    assert_eq!(rules.len(), SYSCALLS.len());
    if let Some(n) = left_out {
        rules.remove(n);
        // seccompiler takes a condition to hold for a call that is allowed without one, too.
        if SYSCALLS[n].name == "mmap" {
            rules.push(OWN_MEMORY);
        }
    }
    let rules: Vec<&str> = rules
        .iter()
        .map(|rule| rule.trim_end_matches(','))
        .collect();
    let json = format!(
        r#"{{"vcpu":{{"mismatch_action":"kill_process","match_action":"allow","filter":[{OWN},{}]}}}}"#,
        rules.join(",")
    );
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let mut filters: HashMap<String, BpfProgram> =
        seccompiler::compile_from_json(json.as_bytes(), arch).unwrap();
    filters.remove("vcpu").unwrap()
}

impl Code {
    /// Counts down, and asks port 0x14 whether that was enough.
    pub(crate) fn spin_until_told(self) -> Self {
        // dec ecx; jnz $-2; in al, 0x14; test al, al; jz to the beginning
        self.ecx(200_000)
            .bytes(&[0xff, 0xc9, 0x75, 0xfc, 0xe4, 0x14, 0x84, 0xc0, 0x74, 0xf1])
    }
}

/// Makes a guest use every service of its PMU: records, sampling, a new period while it runs, a stop, reads, another
/// event, a fault.
fn profiling(period: u64) -> Code {
    Code::default()
        .record(period)
        .spin_until_told()
        .wrmsr(GLOBAL_CTRL, 0)
        .wrmsr(PEBS_ENABLE, 0)
        .record_places(period)
        .spin_until_told()
        .wrmsr(GLOBAL_CTRL, 0)
        .wrmsr(PEBS_ENABLE, 0)
        .wrmsr(PERFEVTSEL0, CYCLES)
        .wrmsr(PMC0, (1 << 48) - period)
        .wrmsr(GLOBAL_CTRL, 1)
        .spin_until_told()
        .wrmsr(PMC0, (1 << 48) - 2 * period)
        .wrmsr(GLOBAL_CTRL, 0)
        .rdpmc(0)
        .rdmsr(PMC0)
        .rdpmc(9)
        .wrmsr(PERFEVTSEL0, 0)
        .wrmsr(PERFEVTSEL0, CYCLES | 1 << 8)
        .wrmsr(GLOBAL_CTRL, 1)
        .stepped_rdpmc()
        .rdmsr(0x4000_0000)
        .wrmsr(PERFEVTSEL0, CYCLES & !(1 << 16))
        .wrmsr(GLOBAL_CTRL, 1)
        .wrmsr(PERFEVTSEL0, CYCLES)
}

/// A guest with last branch records, which is followed. Returns `false` where this machine cannot.
fn run_followed(filter: BpfProgram) -> bool {
    let Some(machine) = Machine::new(super::lbr::recording().spin_until_told(), NMI) else {
        return false;
    };
    let Some(pmu) = super::lbr::attach(&machine) else {
        return false;
    };
    let thread = std::thread::spawn(move || {
        time_on_cpu();
        seccompiler::apply_filter(&filter).unwrap();
        guests_life(machine, pmu)
    });
    assert!(thread.join().unwrap().contains(&(HANDLED, 2)));
    true
}

/// Runs the guest to its end on a thread under `filter`. Returns `false` where this machine cannot.
fn run(lvtpc: u32, kick: Option<Kick>, filter: BpfProgram) -> bool {
    let Some(machine) = Machine::new(profiling(5_000_000), lvtpc) else {
        return false;
    };
    let Some(mut pmu) = super::attach(&machine, WITH_PEBS, &collecting(Pebs::Auto)) else {
        return false;
    };
    if let Some(kick) = kick {
        pmu.set_kick(kick);
    }
    pmu.set_rdpmc(Arc::default());
    machine.describe_buffer(5_000_000);
    let thread = std::thread::spawn(move || {
        // The first call finds the vDSO, by a system call of its own.
        time_on_cpu();
        seccompiler::apply_filter(&filter).unwrap();
        guests_life(machine, pmu)
    });
    let reports = thread.join().unwrap();
    let pmi = if lvtpc == NMI { 2 } else { VECTOR };
    assert!(reports.contains(&(HANDLED, pmi)), "{reports:?}");
    assert!(reports.contains(&(HANDLED, 13)), "{reports:?}");
    true
}

fn guests_life(mut machine: Machine, mut pmu: Vcpu) -> Vec<(u8, u32)> {
    // Some periods.
    const LEAST: Duration = Duration::from_millis(10);
    let mut begun = time_on_cpu();
    let mut reports = Vec::with_capacity(4096);
    super::run(&mut machine, &mut pmu, |port| match port {
        Port::In(data) => {
            let is_handled = reports.iter().any(|(port, _)| *port == HANDLED);
            let is_enough = time_on_cpu() >= begun + LEAST;
            data[0] = u8::from(is_handled && is_enough);
            if data[0] != 0 {
                begun = time_on_cpu();
            }
            false
        }
        Port::Out(END, _) => true,
        Port::Out(port, value) => {
            reports.push((port, value));
            false
        }
    });
    reports
}

fn eventfd() -> Arc<OwnedFd> {
    let fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK);
    Arc::new(fd.unwrap())
}

fn under_the_filter(left_out: Option<usize>) {
    let filter = filter(left_out);
    // The VMM's own signal has a handler that does nothing.
    let signal = libc::SIGRTMIN() + 2;
    let handled = Arc::default();
    signal_hook::flag::register(signal, Arc::clone(&handled)).unwrap();
    for (lvtpc, kick) in [
        (NMI, None),
        (VECTOR, None),
        (NMI, Some(Kick::Signal(signal))),
        (NMI, Some(Kick::EventFd(eventfd()))),
    ] {
        if !run(lvtpc, kick, filter.clone()) {
            return;
        }
    }
    if !run_followed(filter) {
        return;
    }
    assert!(handled.load(std::sync::atomic::Ordering::Relaxed));
}

fn in_a_process(left_out: &str) -> Output {
    let own = std::env::current_exe().unwrap();
    Command::new(own)
        .args([
            "--exact",
            "seccomp::every_rule_is_needed_and_none_is_missing",
            "--nocapture",
        ])
        .env(LEFT_OUT, left_out)
        // Before glibc gives a thread's memory back, it opens /proc/sys/vm/overcommit_memory: a call of the allocator's.
        .env("MALLOC_TRIM_THRESHOLD_", "1073741824")
        .output()
        .unwrap()
}

#[test]
fn every_rule_is_needed_and_none_is_missing() {
    if let Ok(left_out) = std::env::var(LEFT_OUT) {
        under_the_filter(left_out.parse().ok());
        return;
    }
    let output = in_a_process(NOTHING);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "a rule is missing (strace -f shows the last call): {:?}\n{said}",
        output.status
    );
    if said.contains("skipped: ") {
        eprint!("{said}");
        return;
    }
    for (n, call) in SYSCALLS.iter().enumerate() {
        if depends(call) {
            continue;
        }
        let status = in_a_process(&n.to_string()).status;
        assert_eq!(
            status.signal(),
            Some(libc::SIGSYS),
            "without {call:?}: {status:?}"
        );
    }
}
