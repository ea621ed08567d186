//! Tests of the way through KVM, with a guest of some dozen instructions and a host that counts as
//! it is told.
//!
//! Needs a /dev/kvm, any. Without it, the tests say `skipped` on standard error.

use kvm_ioctls::VcpuExit;

use super::*;
use crate::intercept::{Filter, FilterRange};
use crate::offer::Offer;
use crate::options::Options;
use crate::pmu::tests::{self as fake, Host, pmu};

#[path = "../../tests/kvm/guest.rs"]
#[expect(dead_code, reason = "the tests of the crate as a VMM uses it use more")]
mod guest;

use guest::{Code, END, HANDLED, Machine, REPORT};

/// The port by which the guest says that it has run for this many cycles.
const RUN: u8 = 0x13;

impl Code {
    fn run(self, cycles: u32) -> Self {
        self.eax(cycles).out(RUN)
    }
}

const PERFEVTSEL0: u32 = 0x186;
const PMC0: u32 = 0x4c1;
const GLOBAL_STATUS: u32 = 0x38e;
const GLOBAL_CTRL: u32 = 0x38f;
/// EN, INT, OS, USR, core cycles.
const CYCLES: u64 = 0x0053_003c;
const NMI: u32 = 0x400;
const MASKED: u32 = 1 << 16;

/// The machine, its PMU on a host that counts what a test sets, and the guest's reports.
struct Rig {
    machine: Machine,
    exits: Completer,
    pmu: Option<VcpuPmu<Host>>,
    reports: Vec<(u8, u32)>,
}

/// The end of a run.
#[derive(Debug, PartialEq, Eq)]
enum Ended {
    /// With an exit of the PMU's.
    Pmu,
    /// Without an exit, by a kick of this crate's.
    Kick,
    /// Without an exit.
    Signal,
    /// With an exit of the VMM's.
    Vmm,
    /// The guest has finished.
    End,
}

impl Rig {
    fn new(code: Code, lvtpc: u32) -> Option<Self> {
        let machine = Machine::new(code, lvtpc)?;
        let pmu = pmu();
        machine.set_cpuid(&pmu.offer().into());
        let memory = Arc::new(machine.memory.clone());
        Some(Self {
            exits: Completer {
                kvm: Kvm::new(&machine.vm, &machine.vcpu, memory).unwrap(),
                fault: None,
                rdpmc: None,
                deadline: None,
            },
            machine,
            pmu: Some(pmu),
            reports: Vec::new(),
        })
    }

    fn offer(&self) -> Offer {
        self.pmu.as_ref().unwrap().offer().into()
    }

    fn after_run(&mut self) -> AfterRun {
        self.exits.after_run(&mut self.pmu, false).unwrap()
    }

    /// Runs the guest as a VMM's loop does.
    fn run(&mut self) -> Ended {
        self.exits.before_run(&mut self.pmu).unwrap();
        let exit = match self.machine.vcpu.run() {
            Ok(VcpuExit::IoOut(port, data)) => Some((port, data.to_vec())),
            Ok(VcpuExit::X86Rdmsr(_) | VcpuExit::X86Wrmsr(_)) => None,
            Err(error) if error.errno() == libc::EINTR => {
                return match self.after_run() {
                    AfterRun::Kicked => Ended::Kick,
                    AfterRun::Vmm => Ended::Signal,
                    AfterRun::Completed => panic!("there was no exit"),
                };
            }
            exit => panic!("{exit:?} after {:?}", self.reports),
        };
        if self.after_run() == AfterRun::Completed {
            return Ended::Pmu;
        }
        let (port, data) = exit.expect("no MSR of the VMM's");
        let value = u32::from_le_bytes(data.try_into().unwrap());
        match port as u8 {
            END => return Ended::End,
            RUN => fake::run(self.pmu.as_mut().unwrap(), value.into()),
            port => self.reports.push((port, value)),
        }
        Ended::Vmm
    }
}

/// Returns the reports of a guest that executes `code` with this LVTPC. `None`: there is no KVM
/// here.
fn reports(code: Code, lvtpc: u32) -> Option<Vec<(u8, u32)>> {
    let mut rig = Rig::new(code, lvtpc)?;
    for _ in 0..1000 {
        if rig.run() == Ended::End {
            return Some(rig.reports);
        }
    }
    panic!("no end after {:?}", rig.reports);
}

fn sampling() -> Code {
    Code::default()
        .wrmsr(PERFEVTSEL0, CYCLES)
        .wrmsr(PMC0, (1 << 48) - 1000)
        .wrmsr(GLOBAL_CTRL, 1)
}

#[test]
fn a_guests_accesses_come_through() {
    let code = sampling().run(300).rdmsr(PMC0).rdpmc(0).rdmsr(GLOBAL_CTRL);
    let Some(reports) = reports(code, NMI) else {
        return;
    };
    let value = (1 << 32) - 700_u64;
    let value = (REPORT, value as u32);
    assert_eq!(reports, [value, value, (REPORT, 1)]);
}

#[test]
fn a_guests_mistakes_are_faults_at_their_instruction() {
    let code = Code::default()
        .wrmsr(PERFEVTSEL0, 1 << 40)
        .eax(1)
        .rdmsr(PERFEVTSEL0 + 4)
        .eax(2)
        .rdpmc(9)
        .rdmsr(PERFEVTSEL0);
    let Some(reports) = reports(code, NMI) else {
        return;
    };
    // The handler steps over the instruction at fault, so that the following report comes.
    let fault = (HANDLED, 13);
    let expected = [fault, fault, (REPORT, 1), fault, (REPORT, 2), (REPORT, 0)];
    assert_eq!(reports, expected);
}

#[test]
fn an_overflow_interrupts_the_guest_as_lvtpc_says() {
    for (lvtpc, handled) in [(NMI, Some(2)), (0xee, Some(0xee)), (NMI | MASKED, None)] {
        let code = sampling()
            .run(999)
            .eax(7)
            .out(REPORT)
            .run(1)
            .rdmsr(GLOBAL_STATUS);
        let Some(reports) = reports(code, lvtpc) else {
            return;
        };
        let mut expected = vec![(REPORT, 7)];
        expected.extend(handled.map(|vector| (HANDLED, vector)));
        expected.push((REPORT, 1));
        assert_eq!(reports, expected, "{lvtpc:#x}");
    }
}

#[test]
fn an_access_of_another_register_is_left_to_the_vmm() {
    const OTHER: u32 = 0x4b56_4dff;
    let code = Code::default().rdmsr(OTHER).wrmsr(OTHER, 1).rdmsr(PMC0);
    let Some(mut rig) = Rig::new(code, NMI) else {
        return;
    };
    let own = Filter {
        denies_by_default: false,
        ranges: vec![FilterRange {
            base: OTHER - 1,
            count: 2,
            reads: true,
            writes: true,
            allowed: vec![0b01],
        }],
    };
    let vm = &rig.machine.vm;
    crate::intercept_beside(vm, &rig.offer().msrs(), &own).unwrap();
    let many = Filter {
        ranges: vec![own.ranges[0].clone(); 16],
        ..own
    };
    let refused = crate::intercept_beside(vm, &rig.offer().msrs(), &many);
    assert_eq!(
        refused,
        Err(Error::Kvm("KVM_X86_SET_MSR_FILTER", libc::E2BIG))
    );
    // KVM takes the access for good unless the VMM says that it is #GP.
    rig.exits.before_run(&mut rig.pmu).unwrap();
    match rig.machine.vcpu.run().unwrap() {
        VcpuExit::X86Rdmsr(exit) if exit.index == OTHER => *exit.data = 5,
        exit => panic!("{exit:?}"),
    }
    assert_eq!(rig.after_run(), AfterRun::Vmm);
    assert_eq!(rig.run(), Ended::Vmm, "the report of what was read");
    rig.exits.before_run(&mut rig.pmu).unwrap();
    let exit = rig.machine.vcpu.run().unwrap();
    assert!(matches!(exit, VcpuExit::X86Wrmsr(exit) if exit.index == OTHER));
    assert_eq!(rig.after_run(), AfterRun::Vmm);
    while rig.run() != Ended::End {}
    assert_eq!(rig.reports, [(REPORT, 5), (REPORT, 0)]);
}

/// Checks that a pause that comes while an RDPMC faults is the VMM's, and stays until the VMM takes
/// it back.
#[test]
fn a_pause_that_comes_with_a_fault_is_not_lost() {
    // The pause comes before the exit is completed, or after.
    for early in [true, false] {
        let code = Code::default().eax(5).rdpmc(9).eax(7).out(REPORT);
        let Some(mut rig) = Rig::new(code, NMI) else {
            return;
        };
        let page = Arc::clone(&rig.exits.kvm.run);
        let pause = move || {
            let page = Arc::clone(&page);
            // As a binding's set_kvm_immediate_exit does, on another thread.
            let thread = std::thread::spawn(move || page.flag().store(1, Ordering::SeqCst));
            thread.join().unwrap();
        };
        let flag = |rig: &Rig| rig.exits.kvm.run.flag().load(Ordering::SeqCst);
        assert_eq!(rig.run(), Ended::Pmu, "the RDPMC");
        if early {
            pause();
        }
        let ended = if early { Ended::Signal } else { Ended::Kick };
        assert_eq!(rig.run(), ended, "the port write is completed");
        assert_eq!(flag(&rig), u8::from(early));
        if !early {
            pause();
        }
        for _ in 0..3 {
            assert_eq!(rig.run(), Ended::Signal, "the guest does not run");
            assert!(rig.reports.is_empty());
        }
        assert_eq!(flag(&rig), 1, "the VMM's wish");
        rig.machine.vcpu.set_kvm_immediate_exit(0);
        while rig.run() != Ended::End {}
        assert_eq!(rig.reports, [(HANDLED, 13), (REPORT, 5), (REPORT, 7)]);
    }
}

#[test]
fn the_fault_of_an_exit_is_none_after_a_reset() {
    let code = Code::default().eax(5).rdpmc(9).eax(7).out(REPORT);
    let Some(mut rig) = Rig::new(code, NMI) else {
        return;
    };
    assert_eq!(rig.run(), Ended::Pmu, "the RDPMC");
    rig.exits.before_run(&mut rig.pmu).unwrap();
    rig.exits.reset();
    assert_eq!(rig.exits.kvm.run.flag().load(Ordering::SeqCst), 0);
    while rig.run() != Ended::End {}
    assert_eq!(rig.reports, [(REPORT, 5), (REPORT, 7)]);
}

#[test]
fn a_kick_of_the_vmms_is_left_to_the_vmm() {
    let Some(mut rig) = Rig::new(sampling().run(1000), NMI | MASKED) else {
        return;
    };
    rig.machine.vcpu.set_kvm_immediate_exit(1);
    for _ in 0..3 {
        assert_eq!(rig.run(), Ended::Signal);
    }
    rig.machine.vcpu.set_kvm_immediate_exit(0);
    while rig.run() != Ended::End {}
}

#[test]
fn what_is_no_vcpu_is_refused() {
    let Some(machine) = Machine::new(Code::default(), NMI) else {
        return;
    };
    let null = std::fs::File::open("/dev/null").unwrap();
    fn attach(machine: &Machine, vcpu: &impl AsRawFd) -> Result<Vcpu, Error> {
        let memory = Arc::new(machine.memory.clone());
        Vcpu::attach(
            &machine.vm,
            vcpu,
            &Offer::default(),
            &Options::default(),
            memory,
        )
    }
    for error in [
        attach(&machine, &machine.vm).unwrap_err(),
        attach(&machine, &null).unwrap_err(),
    ] {
        assert!(matches!(error, Error::NoLapic(_)), "{error}");
        assert!(
            error.to_string().contains("pass the vCPU's descriptor"),
            "{error}"
        );
    }
}

#[test]
fn a_process_that_writes_to_the_port_reads_no_counter() {
    for dpl in [0, 1, 3] {
        let Some(mut rig) = Rig::new(Code::default().rdpmc(0), NMI) else {
            return;
        };
        rig.exits.before_run(&mut rig.pmu).unwrap();
        assert!(matches!(rig.machine.vcpu.run(), Ok(VcpuExit::IoOut(..))));
        let mut sregs = rig.machine.vcpu.get_sregs().unwrap();
        (sregs.cs.dpl, sregs.ss.dpl) = (dpl, dpl);
        rig.machine.vcpu.set_sregs(&sregs).unwrap();
        let expected = match dpl {
            0 => AfterRun::Completed,
            // CR4.PCE is 0.
            _ => AfterRun::Vmm,
        };
        assert_eq!(rig.after_run(), expected, "CPL {dpl}");
    }
}
