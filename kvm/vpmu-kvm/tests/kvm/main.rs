//! Tests of the crate as a VMM uses it.
//!
//! Needs a /dev/kvm that runs a few instructions, and perf events. Without them, the tests say `skipped` on standard
//! error.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod guest;
mod guide;
mod lbr;
mod limits;
mod pebs;
mod privileges;
mod rdpmc;
mod replay;
mod seccomp;
mod setup;
mod threads;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvm_ioctls::VcpuExit;
use vpmu_kvm::{AfterRun, Error, Model, Options, PerfError, Vcpu, detect};

use guest::Machine;

const PERFEVTSEL0: u32 = 0x186;
const PMC0: u32 = 0x4c1;
const GLOBAL_STATUS: u32 = 0x38e;
const GLOBAL_CTRL: u32 = 0x38f;
/// EN, INT, OS, USR, core cycles.
const CYCLES: u64 = 0x0053_003c;
/// An LVTPC.
const NMI: u32 = 0x400;

/// Returns the result, or says that no PMU is available and returns `None`.
fn possible<T>(result: Result<T, Error>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(
            error @ Error::Perf(PerfError::Forbidden(_) | PerfError::NoPerf | PerfError::NoTsc),
        ) => {
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Attaches a PMU, if one is available.
fn try_attach(machine: &Machine, model: Model, options: &Options) -> Result<Vcpu, Error> {
    let memory = Arc::new(machine.memory.clone());
    let offer = detect(model, options)?;
    Vcpu::attach(&machine.vm, &machine.vcpu, &offer, options, memory)
}

/// Attaches a PMU and tells the guest about it, if a PMU is available.
fn attach(machine: &Machine, model: Model, options: &Options) -> Option<Vcpu> {
    let pmu = possible(try_attach(machine, model, options))?;
    machine.set_cpuid(&pmu.offer());
    Some(pmu)
}

/// Ends a test that hangs: thousands of times what any takes on an idle machine.
struct Patience(Instant);

impl Patience {
    fn new() -> Self {
        Self(Instant::now())
    }

    fn check(&self) {
        assert!(self.0.elapsed() < Duration::from_secs(120), "a test hangs");
    }
}

/// Runs a guest as a VMM does. `port` gets each access to a port. It ends the run by its answer to a write, and answers
/// reads.
fn run(machine: &mut Machine, pmu: &mut Vcpu, mut port: impl FnMut(Port<'_>) -> bool) {
    let patience = Patience::new();
    loop {
        patience.check();
        pmu.before_run().unwrap();
        let exit = machine.vcpu.run();
        match pmu.after_run().unwrap() {
            AfterRun::Completed | AfterRun::Kicked => continue,
            AfterRun::Vmm => {}
        }
        let ended = match exit {
            Ok(VcpuExit::IoIn(_, data)) => port(Port::In(data)),
            Ok(VcpuExit::IoOut(number, data)) => {
                let value = u32::from_le_bytes(data.try_into().unwrap());
                port(Port::Out(number as u8, value))
            }
            Err(error) if error.errno() == libc::EINTR => {
                machine.vcpu.set_kvm_immediate_exit(0);
                false
            }
            exit => panic!("{exit:?}"),
        };
        if ended {
            return;
        }
    }
}

/// An access to a port.
enum Port<'a> {
    In(&'a mut [u8]),
    Out(u8, u32),
}
