//! The instructions under test, with the #GP they may raise, and a few others.
//!
//! Each of the first three is two bytes long, even in the form to which the VMM
//! rewrites RDPMC (`out 0xe6, al`). So the #GP handler knows where the program
//! continues.

// UNSAFETY: privileged instructions.
#![expect(unsafe_code, reason = "privileged instructions")]

use core::arch::asm;
use core::arch::x86_64::_rdtsc;

use crate::fault::Fault;
use crate::percpu;

/// Length of the instructions that may raise #GP.
pub(crate) const LENGTH: u64 = 2;

/// Runs `body`, one of the instructions above, and returns the exception that it raised.
fn caught<T>(body: impl FnOnce() -> T) -> Result<T, Fault> {
    let cpu = percpu::this();
    cpu.expect_fault();
    let value = body();
    match cpu.fault() {
        None => Ok(value),
        Some(fault) => Err(fault),
    }
}

/// Executes RDMSR.
pub(crate) fn rdmsr(address: u32) -> Result<u64, Fault> {
    rdmsr_rcx(address.into())
}

/// Executes RDMSR with all of RCX, whose upper half the processor must ignore.
pub(crate) fn rdmsr_rcx(rcx: u64) -> Result<u64, Fault> {
    caught(|| {
        let (low, high): (u64, u64);
        // SAFETY: an MSR's value goes into registers; #GP is noted and skipped. The upper halves
        // of RAX and RDX are cleared by the instruction.
        unsafe {
            asm!("rdmsr", in("rcx") rcx, inlateout("rax") 0_u64 => low, inlateout("rdx") 0_u64 => high, options(nostack));
        }
        high << 32 | low
    })
}

/// Executes WRMSR of a PMU's MSR.
pub(crate) fn wrmsr(address: u32, value: u64) -> Result<(), Fault> {
    // The code sets all of RCX, because the upper half of "ecx" is the compiler's, and QEMU
    // looks at it: see `access.upper_half_of_rcx`.
    wrmsr_rcx(address.into(), value)
}

/// Executes WRMSR with all of RCX, whose upper half the processor must ignore.
pub(crate) fn wrmsr_rcx(rcx: u64, value: u64) -> Result<(), Fault> {
    caught(|| {
        // SAFETY: callers write MSRs of the PMU or the APIC, which change no memory; #GP is noted
        // and skipped.
        unsafe {
            asm!("wrmsr", in("rcx") rcx, in("eax") value as u32, in("edx") (value >> 32) as u32, options(nostack));
        }
    })
}

/// Executes RDPMC, and returns RAX and RDX. Their upper halves must be clear.
pub(crate) fn rdpmc(index: u64) -> Result<(u64, u64), Fault> {
    caught(|| {
        let (low, high): (u64, u64);
        // SAFETY: a counter's value goes into registers; #GP is noted and skipped.
        unsafe {
            asm!("rdpmc", in("rcx") index, inlateout("rax") !0_u64 => low, inlateout("rdx") !0_u64 => high, options(nostack));
        }
        (low, high)
    })
}

/// Executes CPUID, and returns EAX, EBX, ECX and EDX.
pub(crate) fn cpuid(leaf: u32, subleaf: u32) -> [u32; 4] {
    let (eax, rbx, ecx, edx): (u32, u64, u32, u32);
    // SAFETY: gives registers only. RBX is the compiler's.
    unsafe {
        asm!(
            "mov {rbx}, rbx",
            "cpuid",
            "xchg {rbx}, rbx",
            rbx = out(reg) rbx,
            inlateout("eax") leaf => eax,
            inlateout("ecx") subleaf => ecx,
            lateout("edx") edx,
            options(nostack),
        );
    }
    [eax, rbx as u32, ecx, edx]
}

/// Returns the time-stamp counter.
pub(crate) fn tsc() -> u64 {
    // SAFETY: nobody has set CR4.TSD.
    unsafe { _rdtsc() }
}

/// Runs `rounds` (at least one) rounds of two instructions, one of them a
/// branch.
pub(crate) fn spin(rounds: u64) {
    // SAFETY: touches one register.
    unsafe {
        asm!("2: dec {0}", "jnz 2b", inout(reg) rounds => _, options(nomem, nostack));
    }
}

/// Runs `body` with interrupts enabled.
pub(crate) fn interruptible(body: impl FnOnce()) {
    // SAFETY: the interrupt descriptor table has a handler for each vector. STI lets one more
    // instruction pass first, so that a pending interrupt is taken before the CLI even if `body` is
    // empty.
    unsafe { asm!("sti", "nop", options(nostack)) }
    body();
    // SAFETY: as it was before.
    unsafe { asm!("cli", options(nostack)) }
}

/// Halts until an interrupt or NMI comes; interrupts are enabled meanwhile.
pub(crate) fn halt() {
    // SAFETY: as in `interruptible`; what comes between STI and HLT, an NMI and interrupts behind it, skips HLT
    // (`vectors::pass_halt`).
    unsafe { asm!("sti", "hlt", "cli", options(nostack)) }
}

/// Sets CR4.PCE to `on`: whether ring 3 may execute RDPMC.
pub(crate) fn set_pce(on: bool) {
    const PCE: u64 = 1 << 8;
    // SAFETY: changes nothing else.
    unsafe {
        let mut cr4: u64;
        asm!("mov {}, cr4", out(reg) cr4, options(nomem, nostack));
        cr4 = if on { cr4 | PCE } else { cr4 & !PCE };
        asm!("mov cr4, {}", in(reg) cr4, options(nostack));
    }
}
