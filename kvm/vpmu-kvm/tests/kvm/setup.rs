//! Tests that the list of system calls of the thread that makes VMs is complete, function by function, and has nothing
//! superfluous.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};
use std::sync::Arc;

use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use seccompiler::BpfProgram;
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vpmu_kvm::{Offer, Pebs, SETUP_SYSCALLS, State, Syscall, Vcpu, detect};

use super::pebs::{WITH_PEBS, collecting};

/// The variables that name the function, and the rule left out, in a process of its own, which the filter may end.
const FUNCTION: &str = "VPMU_SETUP_FUNCTION";
const LEFT_OUT: &str = "VPMU_SETUP_WITHOUT";
const SKIPPED: i32 = 77;

/// A VM, and what has been made for it.
#[derive(Default)]
struct Made {
    vm: Option<VmFd>,
    fd: Option<VcpuFd>,
    offer: Option<Offer>,
    vcpu: Option<Vcpu>,
    state: Option<State>,
}

/// Does what comes before `function`, and then `function` itself, behind `filter`, and ends the process. Returns where
/// this machine cannot.
fn perform(function: &str, mut filter: impl FnMut()) {
    let mut made = Made::default();
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
    let memory = Arc::new(memory);
    for step in ["detect", "intercept", "attach", "save", "restore", "drop"] {
        if step == "intercept" {
            let Ok(vm) = Kvm::new().and_then(|kvm| kvm.create_vm()) else {
                return;
            };
            made.vm = Some(vm);
        }
        if step == "attach" {
            let vm = made.vm.as_ref().unwrap();
            vm.create_irq_chip().unwrap();
            made.fd = Some(vm.create_vcpu(0).unwrap());
        }
        if step == function {
            filter();
        }
        let options = collecting(Pebs::Auto);
        match step {
            "detect" => {
                let Some(offer) = super::possible(detect(WITH_PEBS, &options)) else {
                    return;
                };
                made.offer = Some(Offer {
                    deadline: true,
                    ..offer
                });
            }
            "intercept" => {
                let msrs = made.offer.as_ref().unwrap().msrs();
                if super::possible(vpmu_kvm::intercept(made.vm.as_ref().unwrap(), &msrs)).is_none()
                {
                    return;
                }
            }
            "attach" => {
                let (vm, fd) = (made.vm.as_ref().unwrap(), made.fd.as_ref().unwrap());
                let offer = made.offer.as_ref().unwrap();
                made.vcpu = Some(Vcpu::attach(vm, fd, offer, &options, memory.clone()).unwrap());
            }
            "save" => made.state = Some(made.vcpu.as_mut().unwrap().save()),
            "restore" => {
                let state = made.state.as_ref().unwrap();
                made.vcpu.as_mut().unwrap().restore(state).unwrap();
            }
            _ => drop(made.vcpu.take()),
        }
        if step == function {
            end(0);
        }
    }
}

/// Ends the process, before anything that is dropped makes further calls.
#[expect(unsafe_code, reason = "std has no _exit, and exit makes further calls")]
fn end(code: i32) -> ! {
    // SAFETY: the process is the test's own, and nothing of it is used any more.
    unsafe { libc::_exit(code) }
}

/// Returns a filter of the calls of `function`, but for one of them.
fn filter(function: &str, left_out: Option<usize>) -> BpfProgram {
    let (_, calls) = SETUP_SYSCALLS
        .iter()
        .find(|(name, _)| *name == function)
        .unwrap();
    let mut calls = calls.to_vec();
    if let Some(n) = left_out {
        calls.remove(n);
    }
    let rules = calls.iter().map(|call| {
        let arguments = call.arguments.iter().map(|argument| {
            serde_json::json!({"index": argument.index, "type": "dword", "op": "eq", "val": argument.value})
        });
        match call.arguments {
            [] => serde_json::json!({"syscall": call.name}),
            _ => serde_json::json!({"syscall": call.name, "args": arguments.collect::<Vec<_>>()}),
        }
    });
    // The test's own: output, memory, its end.
    let own = [
        "write",
        "brk",
        "mprotect",
        "madvise",
        "exit",
        "exit_group",
        "sigaltstack",
        "futex",
    ];
    let own = own.map(|name| serde_json::json!({"syscall": name}));
    let rules: Vec<_> = own.into_iter().chain(rules).collect();
    let json = serde_json::json!({"setup": {
        "mismatch_action": "kill_process", "match_action": "allow", "filter": rules,
    }});
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let mut filters = seccompiler::compile_from_json(json.to_string().as_bytes(), arch).unwrap();
    filters.remove("setup").unwrap()
}

fn in_a_process(function: &str, left_out: &str) -> Output {
    let own = std::env::current_exe().unwrap();
    Command::new(own)
        .args([
            "--exact",
            "setup::each_function_has_its_calls",
            "--nocapture",
        ])
        .env(FUNCTION, function)
        .env(LEFT_OUT, left_out)
        .output()
        .unwrap()
}

/// Returns whether a call depends on the host, on the state or on the build.
fn depends(call: &Syscall) -> bool {
    if let Some((_, library)) = call.why.split_once("where the C library is ") {
        let own = if cfg!(target_env = "musl") {
            "musl"
        } else {
            "glibc"
        };
        return library != own;
    }
    call.why.contains("where ") || call.why.contains("debug assertions")
}

#[test]
fn each_function_has_its_calls() {
    if let Ok(function) = std::env::var(FUNCTION) {
        let left_out = std::env::var(LEFT_OUT).unwrap().parse().ok();
        let filter = filter(&function, left_out);
        perform(&function, || seccompiler::apply_filter(&filter).unwrap());
        end(SKIPPED);
    }
    for (function, calls) in SETUP_SYSCALLS {
        let output = in_a_process(function, "nothing");
        let said = String::from_utf8_lossy(&output.stderr);
        if output.status.code() == Some(SKIPPED) {
            eprint!("{said}");
            return;
        }
        assert!(
            output.status.success(),
            "{function}: {:?}\n{said}",
            output.status
        );
        for (n, call) in calls.iter().enumerate().filter(|(_, call)| !depends(call)) {
            let status = in_a_process(function, &n.to_string()).status;
            assert_eq!(
                status.signal(),
                Some(libc::SIGSYS),
                "{function} without {call:?}"
            );
        }
    }
}
