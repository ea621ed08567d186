//! Serving the guest's synchronous exits.
//!
//! UNSAFETY: called from assembly, reads and writes system and device registers.

use core::sync::atomic::Ordering::Relaxed;

use smccc::{
    Call as _, Smc,
    psci::{PSCI_CPU_OFF, PSCI_SYSTEM_RESET},
};
use vpmu::arm::{ExceptionLevel, Outcome, Register, partition::TrapRegisters};
use vpmu_monitor::{
    exit::{self, DataAbort, ESR_UNDEFINED, ExceptionEntry, Exit, RegisterAccess},
    psci::{self, Call},
    redistributor,
    statistics::Kind,
    vgic::{Interrupt, Source},
};

use super::{
    boot::{self, DOORBELL},
    cpu::{self, Cpu, Local, MARKS, Monitor},
    end::{guest_stopped, note_instructions, power_off, print_statistics},
    gic::{self, ListRegistersOfThisCpu},
    pmu_registers::PhysicalPmu,
    sysreg::{isb, now, read_sysreg, write_sysreg},
};

/// The guest's registers at an exit; the layout is known to `entry.s`.
#[repr(C)]
pub(crate) struct Frame {
    x: [u64; 31],
    elr: u64,
    spsr: u64,
    /// `CNTPCT_EL0` when the exit began.
    entered: u64,
}

const _: () = assert!(
    size_of::<Frame>() == 272,
    "entry.s stores pairs at fixed offsets"
);

impl Frame {
    fn register(&self, n: usize) -> u64 {
        self.x.get(n).copied().unwrap_or(0)
    }

    fn set_register(&mut self, n: usize, value: u64) {
        if let Some(register) = self.x.get_mut(n) {
            *register = value;
        }
    }

    /// Steps over the instruction that trapped, as if it had executed; all of them are 32 bits long.
    fn step(&mut self) {
        self.elr = self.elr.wrapping_add(4);
        self.spsr = exit::stepped(self.spsr);
    }

    fn exception_level(&self) -> ExceptionLevel {
        if self.spsr & 0xc == 0 {
            ExceptionLevel::El0
        } else {
            ExceptionLevel::El1
        }
    }

    /// Gives the guest an exception with syndrome `esr`.
    fn inject(&mut self, esr: u64, mte: bool) {
        let entry = ExceptionEntry::synchronous(
            self.spsr,
            read_sysreg!("vbar_el1"),
            read_sysreg!("sctlr_el1"),
            mte,
        );
        // SAFETY: EL1's own exception registers, as the processor would write them.
        unsafe {
            write_sysreg!("esr_el1", esr);
            write_sysreg!("elr_el1", self.elr);
            write_sysreg!("spsr_el1", self.spsr);
        }
        self.elr = entry.pc;
        self.spsr = entry.pstate;
    }
}

/// A synchronous exception of the guest.
#[unsafe(no_mangle)]
extern "C" fn guest_synchronous(frame: &mut Frame) {
    let Some(monitor) = Monitor::installed() else {
        power_off()
    };
    let cpu = Cpu::this();
    let esr = read_sysreg!("esr_el2");
    let kind = match Exit::decode(esr) {
        Exit::SystemRegister(access) => {
            let mut local = cpu.local.lock();
            system_register(frame, access, esr, monitor, cpu, &mut local)
        }
        Exit::Smc => {
            frame.step();
            firmware_call(frame, monitor);
            Kind::Smc
        }
        Exit::Hvc => {
            // There is no hypervisor for the guest to call.
            frame.set_register(0, psci::NOT_SUPPORTED);
            Kind::Hvc
        }
        Exit::DataAbort(abort) => data_abort(frame, abort, monitor, cpu),
        Exit::InstructionAbort => guest_stopped(format_args!(
            "it jumped to {:#x}, which is not its memory",
            fault_address()
        )),
        Exit::Other(_) => {
            frame.inject(ESR_UNDEFINED, monitor.mte);
            Kind::Other
        }
    };
    leave(cpu, frame, kind);
}

fn system_register(
    frame: &mut Frame,
    access: RegisterAccess,
    esr: u64,
    monitor: &Monitor,
    cpu: &Cpu,
    local: &mut Local,
) -> Kind {
    let encoding = access.encoding;
    if let Some(register) = Register::decode(encoding) {
        let level = frame.exception_level();
        let outcome = match &mut local.pmu {
            None => Outcome::NotHandled,
            Some(pmu) => {
                let line = pmu.line();
                let outcome = if access.write {
                    pmu.write(register, level, frame.register(access.rt), &mut PhysicalPmu)
                } else {
                    pmu.read(register, level, &mut PhysicalPmu)
                };
                let (lazy, line_moved) = (pmu.is_lazy(), pmu.line() != line);
                if lazy {
                    apply_traps(local, false);
                }
                if line_moved {
                    show_line(local, cpu, monitor);
                }
                outcome
            }
        };
        match outcome {
            Outcome::Value(value) => {
                frame.set_register(access.rt, value);
                frame.step();
            }
            Outcome::Done => frame.step(),
            Outcome::TrapToEl1 => frame.inject(esr, monitor.mte),
            Outcome::Undefined | Outcome::NotHandled => frame.inject(ESR_UNDEFINED, monitor.mte),
        }
        return Kind::Pmu(register, access.write);
    }
    // ICC_SGI1R_EL1, ICC_ASGI1R_EL1 and ICC_SGI0R_EL1 trap because interrupts are virtual.
    if access.write && (encoding.op0, encoding.op1, encoding.crn, encoding.crm) == (3, 0, 12, 11) {
        gic::send_sgi(encoding.op2, frame.register(access.rt));
        frame.step();
        return Kind::SendSgi;
    }
    frame.inject(ESR_UNDEFINED, monitor.mte);
    Kind::UnknownRegister
}

/// Makes the trap registers agree with the PMU's wishes; `always` writes them unseen.
pub(crate) fn apply_traps(local: &mut Local, always: bool) {
    let wanted = match &local.pmu {
        Some(pmu) => pmu.trap_registers(),
        // No PMU: MDCR_EL2.TPM and TPMCR, so that every access is undefined.
        None => TrapRegisters {
            mdcr_el2: 3 << 5,
            hdfgrtr_el2: 0,
            hdfgwtr_el2: 0,
        },
    };
    if wanted == local.traps && !always {
        return;
    }
    local.traps = wanted;
    // Trace, branch records and profiling registers whose *zero* bit means "trap".
    const READS: u64 = 0xf << 59;
    const WRITES: u64 = 0x7 << 60;
    let fine_grained = read_sysreg!("id_aa64mmfr0_el1") >> 56 & 0xf != 0;
    // SAFETY: the plan says which accesses may go untrapped.
    unsafe {
        write_sysreg!("mdcr_el2", wanted.mdcr_el2 | local.mdcr);
        if fine_grained {
            write_sysreg!("s3_4_c3_c1_4", wanted.hdfgrtr_el2 | READS); // HDFGRTR_EL2
            write_sysreg!("s3_4_c3_c1_5", wanted.hdfgwtr_el2 | WRITES); // HDFGWTR_EL2
        }
    }
    isb();
}

/// Shows the guest the emulated PMU's line.
pub(super) fn show_line(local: &mut Local, cpu: &Cpu, monitor: &Monitor) {
    let (Some(line), Some(intid)) = (
        local.pmu.as_ref().and_then(|pmu| pmu.line()),
        monitor.machine.pmu_intid,
    ) else {
        return;
    };
    let number = Cpu::number();
    let high = line && monitor.frames[number].enabled(intid);
    let priority = if high {
        let priorities = monitor.sgi_frame(number) + redistributor::IPRIORITYR0;
        read_device(priorities + u64::from(intid), 1) as u8
    } else {
        0
    };
    let interrupt = Interrupt {
        intid,
        priority,
        group1: true,
        source: Source::Line,
    };
    if local
        .interrupts
        .set_line(high, interrupt, &mut ListRegistersOfThisCpu)
    {
        cpu.statistics.pmi();
    }
}

/// The guest physical address of a stage-2 fault.
fn fault_address() -> u64 {
    (read_sysreg!("hpfar_el2") & 0xfff_ffff_fff0) << 8 | read_sysreg!("far_el2") & 0xfff
}

fn data_abort(frame: &mut Frame, abort: DataAbort, monitor: &Monitor, cpu: &Cpu) -> Kind {
    let address = fault_address();
    let redistributors = &monitor.machine.redistributors;
    let Some(access) = abort.access else {
        guest_stopped(format_args!(
            "it reached {address:#x} with an instruction that the processor does not describe"
        ));
    };
    if DOORBELL.contains(&address) {
        if abort.write {
            ring(address - DOORBELL.start, frame.register(access.rt));
        } else {
            let magic = if address == DOORBELL.start {
                0x564d_5056
            } else {
                0
            };
            frame.set_register(access.rt, access.extend(magic));
        }
        frame.step();
        return Kind::Doorbell;
    }
    let offset = address.wrapping_sub(redistributors.start);
    let number = (offset / redistributor::STRIDE) as usize;
    let offset = (offset % redistributor::STRIDE).wrapping_sub(redistributor::SGI_FRAME);
    if !redistributors.contains(&address)
        || number >= monitor.frames.len()
        || offset >= redistributor::SGI_FRAME
    {
        let verb = if abort.write { "wrote to" } else { "read from" };
        let what = if monitor.memory.contains(&address) {
            "the monitor's memory"
        } else {
            "no memory of its own"
        };
        guest_stopped(format_args!("it {verb} {address:#x}, which is {what}"));
    }
    let view = &monitor.frames[number];
    if abort.write {
        let value = view.write(offset, frame.register(access.rt));
        write_device(address, access.bytes, value);
    } else {
        let value = view.read(offset, read_device(address, access.bytes));
        frame.set_register(access.rt, access.extend(value));
    }
    frame.step();
    show_line(&mut cpu.local.lock(), cpu, monitor);
    Kind::Redistributor
}

fn read_device(address: u64, bytes: u8) -> u64 {
    // SAFETY: a redistributor register, mapped as a device; the guest chose an aligned address, or
    // stage 1 would have faulted on device memory.
    unsafe {
        match bytes {
            1 => (address as *const u8).read_volatile().into(),
            2 => ((address & !1) as *const u16).read_volatile().into(),
            4 => ((address & !3) as *const u32).read_volatile().into(),
            _ => ((address & !7) as *const u64).read_volatile(),
        }
    }
}

fn write_device(address: u64, bytes: u8, value: u64) {
    // SAFETY: as for `read_device`.
    unsafe {
        match bytes {
            1 => (address as *mut u8).write_volatile(value as u8),
            2 => ((address & !1) as *mut u16).write_volatile(value as u16),
            4 => ((address & !3) as *mut u32).write_volatile(value as u32),
            _ => ((address & !7) as *mut u64).write_volatile(value),
        }
    }
}

/// The guest marks the beginning (1) or the end (2) of what is measured.
fn ring(offset: u64, value: u64) {
    note_instructions(Cpu::this(), &Cpu::this().local.lock());
    let mut marks = MARKS.lock();
    match (offset, value as u32) {
        (0, 1) => {
            marks.begin = Some(cpu::snapshot());
            marks.end = None;
        }
        (0, 2) => marks.end = Some(cpu::snapshot()),
        _ => {}
    }
}

fn firmware_call(frame: &mut Frame, monitor: &Monitor) {
    let call = Call::decode([frame.x[0], frame.x[1], frame.x[2], frame.x[3]]);
    let answer = match call {
        Call::CpuOn {
            target,
            entry,
            context,
        } => match monitor.machine.cpus.iter().position(|&cpu| cpu == target) {
            Some(number) => boot::start_cpu(number, monitor, entry, context),
            None => psci::INVALID_PARAMETERS,
        },
        Call::CpuOff => {
            let cpu = Cpu::this();
            let mut local = cpu.local.lock();
            if let Some(pmu) = &mut local.pmu {
                pmu.put(&mut PhysicalPmu);
            }
            drop(local);
            cpu.on.store(false, Relaxed);
            let answer = Smc::call32(PSCI_CPU_OFF, [0; 7])[0];
            cpu.on.store(true, Relaxed);
            answer as i32 as i64 as u64
        }
        Call::CpuSuspend => {
            // SAFETY: waits; a pending interrupt wakes it even though EL2 masks interrupts.
            unsafe {
                core::arch::asm!("wfi", options(nostack));
            }
            psci::SUCCESS
        }
        Call::SystemOff => {
            print_statistics();
            power_off()
        }
        Call::SystemReset => {
            print_statistics();
            Smc::call32(PSCI_SYSTEM_RESET, [0; 7]);
            power_off()
        }
        Call::Forward => {
            let mut arguments = [0; 17];
            arguments.copy_from_slice(&frame.x[1..18]);
            let answers = Smc::call64(frame.x[0] as u32, arguments);
            frame.x[..4].copy_from_slice(&answers[..4]);
            return;
        }
        Call::Unknown => psci::NOT_SUPPORTED,
    };
    frame.set_register(0, answer);
}

/// An SError of the guest's. `HCR_EL2.AMO` is clear, so that it goes to EL1 and never here.
#[unsafe(no_mangle)]
extern "C" fn guest_serror(_: &mut Frame) {
    guest_stopped(format_args!("the machine reported an SError at EL2"));
}

/// Accounts for an exit that is about to end.
pub(super) fn leave(cpu: &Cpu, frame: &Frame, kind: Kind) {
    cpu.statistics.exit(kind, now().wrapping_sub(frame.entered));
}
