//! A processor's own PMU beside SVM: the counters of host and guest, the intercepts that a hypervisor needs which gives its
//! guest the registers, and the next RIP. The program is its own hypervisor; its guest is a few instructions in ring 0, in
//! the program's own memory. APM vol. 2, 13.2.1 and chapter 15, appendix B (the VMCB).

// UNSAFETY: runs a guest.
#![expect(unsafe_code, reason = "runs a guest")]

use core::arch::asm;
use core::cell::UnsafeCell;

use super::Test;
use super::amd::{CYCLES, ctl, ctr};
use super::native::{INEXACT, INSTRUCTIONS, ROUNDS, cycles_each, is_exact};
use crate::amd::{COUNTER, PERF_CTL, PERF_CTR};
use crate::apic::{self, LVT_NMI};
use crate::instructions::{cpuid, interruptible, rdmsr, wrmsr};
use crate::percpu;
use crate::pmu::{COUNT, INT, SOME, pass, read, write};
use crate::user;
use crate::vectors::NMI;
use vpmu_payload_harness::{Failure, Pass, Verdict, check, check_range};

pub(super) const TESTS: &[Test] = &[
    ("svm.host_and_guest_only", |_| with_svm(host_and_guest_only)),
    ("svm.next_rip", |_| with_svm(next_rip)),
    ("svm.registers_pass", |_| with_svm(registers_pass)),
    ("svm.nmi", |_| with_svm(nmi)),
];

const EFER: u32 = 0xc000_0080;
const SVME: u64 = 1 << 12;
const VM_HSAVE_PA: u32 = 0xc001_0117;
const GUEST_ONLY: u64 = 1 << 40;
const HOST_ONLY: u64 = 1 << 41;

/// Intercepts: the word at 00CH of the VMCB, and above it that at 010H.
const INTERCEPT_NMI: u64 = 1 << 1;
const INTERCEPT_RDTSC: u64 = 1 << 14;
const INTERCEPT_RDPMC: u64 = 1 << 15;
const INTERCEPT_CPUID: u64 = 1 << 18;
const INTERCEPT_MSR: u64 = 1 << 28;
const INTERCEPT_VMRUN: u64 = 1 << 32;
const INTERCEPT_VMMCALL: u64 = 1 << 33;

const EXIT_NMI: u64 = 0x61;
const EXIT_RDTSC: u64 = 0x6e;
const EXIT_RDPMC: u64 = 0x6f;
const EXIT_CPUID: u64 = 0x72;
const EXIT_MSR: u64 = 0x7c;
const EXIT_VMMCALL: u64 = 0x81;

const VMMCALL: [u8; 3] = [0x0f, 0x01, 0xd9];

#[repr(C, align(4096))]
struct Pages {
    vmcb: [u8; 4096],
    host: [u8; 4096],
    msrs: [u8; 8192],
    code: [u8; 64],
}

struct Shared(UnsafeCell<Pages>);

// SAFETY: the tests run on one CPU at a time.
unsafe impl Sync for Shared {}

static PAGES: Shared = Shared(UnsafeCell::new(Pages {
    vmcb: [0; 4096],
    host: [0; 4096],
    msrs: [0; 8192],
    code: [0; 64],
}));

/// The state in which the guest exits.
struct Exit {
    code: u64,
    /// The next RIP, from RIP.
    length: u64,
    next_rip: u64,
    /// RIP, from the beginning of the guest's code.
    at: u64,
    rax: u64,
}

fn with_svm(test: fn() -> Verdict) -> Verdict {
    let [_, _, features, _] = cpuid(0x8000_0001, 0);
    if features >> 2 & 1 == 0 {
        return Ok(Pass::Skip("no SVM"));
    }
    let efer = rdmsr(EFER)?;
    wrmsr(EFER, efer | SVME)?;
    let verdict = test();
    wrmsr(EFER, efer)?;
    verdict
}

/// Runs `code` as a guest with RCX = `rcx` until it exits by an intercept. `map`: whether the guest's accesses to MSRs are
/// intercepted where [`INTERCEPT_MSR`] is set.
fn run(intercepts: u64, map: bool, code: &[u8], rcx: u64) -> Result<Exit, Failure> {
    let pages = PAGES.0.get();
    let (cr0, cr3, cr4): (u64, u64, u64);
    // SAFETY: reads registers.
    unsafe {
        asm!("mov {}, cr0", "mov {}, cr3", "mov {}, cr4", out(reg) cr0, out(reg) cr3, out(reg) cr4, options(nomem, nostack));
    }
    // SAFETY: nobody else uses the pages now.
    let Pages {
        vmcb,
        host,
        msrs,
        code: place,
    } = unsafe { &mut *pages };
    vmcb.fill(0);
    msrs.fill(if map { 0xff } else { 0 });
    place.fill(0xcc);
    place[..code.len()].copy_from_slice(code);
    place[code.len()..][..VMMCALL.len()].copy_from_slice(&VMMCALL);
    let begin = place.as_ptr() as u64;
    let mut put = |at: usize, value: u64| vmcb[at..at + 8].copy_from_slice(&value.to_le_bytes());
    put(0x00c, intercepts | INTERCEPT_VMRUN | INTERCEPT_VMMCALL);
    put(0x048, msrs.as_ptr() as u64);
    put(0x058, 1); // the guest's ASID
    // Attributes and limit of segments: 64-bit code, and data.
    put(0x410, 0xffff_ffff_0a9b_0008);
    for segment in [0x400, 0x420, 0x430] {
        put(segment, 0xffff_ffff_0c93_0010);
    }
    put(0x4d0, rdmsr(EFER)?);
    put(0x548, cr4);
    put(0x550, cr3);
    put(0x558, cr0);
    put(0x560, 0x400); // DR7
    put(0x568, 0xffff_0ff0); // DR6
    put(0x570, 2); // RFLAGS: interrupts masked
    put(0x578, begin);
    wrmsr(VM_HSAVE_PA, host.as_ptr() as u64)?;
    // SAFETY: the guest has no stack, stores nothing, and changes RAX, RCX, RDX and RBX at most; its FS, GS and task are the
    // host's. VMRUN restores RAX; the host's interrupts stay masked.
    unsafe {
        asm!(
            "mov {rbx}, rbx",
            ".byte 0x0f, 0x01, 0xd8", // vmrun rax
            ".byte 0x0f, 0x01, 0xdc", // stgi
            "mov rbx, {rbx}",
            rbx = out(reg) _,
            in("rax") pages as u64,
            inout("rcx") rcx => _,
            out("rdx") _,
        );
    }
    // SAFETY: the guest has ended.
    let vmcb = unsafe { &(*pages).vmcb };
    let get = |at: usize| u64::from_le_bytes(vmcb[at..at + 8].try_into().unwrap_or_default());
    let rip = get(0x578);
    Ok(Exit {
        code: get(0x070),
        length: get(0x0c8).wrapping_sub(rip),
        next_rip: get(0x0c8),
        at: rip - begin,
        rax: get(0x5f8),
    })
}

/// Counts with control `bits` around a guest of [`user::SPIN`].
fn around(bits: u64, rounds: u64) -> Result<u64, Failure> {
    write(ctr(0), 0)?;
    write(ctl(0), COUNT | bits)?;
    let exit = run(0, false, user::SPIN, rounds);
    write(ctl(0), 0)?;
    check("exit", exit?.code, EXIT_VMMCALL)?;
    read(ctr(0))
}

fn host_and_guest_only() -> Verdict {
    let count =
        |bits| -> Result<[u64; 2], Failure> { Ok([around(bits, 1)?, around(bits, ROUNDS)?]) };
    if !is_exact()? {
        return Ok(INEXACT);
    }
    let more = 2 * (ROUNDS - 1) * cycles_each();
    let [few, many] = count(CYCLES)?;
    check_range("in both", many - few, more, u64::MAX)?;
    let [few, many] = count(CYCLES | HOST_ONLY | GUEST_ONLY)?;
    check_range("by both bits", many - few, more, u64::MAX)?;
    let [few, many] = count(CYCLES | GUEST_ONLY)?;
    check_range("in the guest", few, 2, many)?;
    check("more in the guest", many - few, more)?;
    let [few, many] = count(CYCLES | HOST_ONLY)?;
    check_range("in the host", few, 1, u64::MAX)?;
    check("more in the host", many, few)?;
    let guest = around(INSTRUCTIONS | GUEST_ONLY, ROUNDS)?;
    check("the guest's instructions", guest, 2 * ROUNDS)?;
    Ok(Pass::Ok)
}

/// Checks the next RIP of instructions with and without prefixes, and that it is 0 where none is intercepted.
fn next_rip() -> Verdict {
    let [_, _, _, features] = cpuid(0x8000_000a, 0);
    if features >> 3 & 1 == 0 {
        return Ok(Pass::Skip("the next RIP is not saved"));
    }
    let msr = PERF_CTR.into();
    for (what, code, rcx, want) in [
        ("RDPMC", &[0x0f, 0x33][..], 0, EXIT_RDPMC),
        ("RDPMC with a prefix", &[0x48, 0x0f, 0x33], 0, EXIT_RDPMC),
        ("RDMSR", &[0x0f, 0x32], msr, EXIT_MSR),
        ("WRMSR", &[0x0f, 0x30], msr, EXIT_MSR),
        ("CPUID", &[0x2e, 0x0f, 0xa2], 0, EXIT_CPUID),
        ("RDTSC", &[0x0f, 0x31], 0, EXIT_RDTSC),
        ("VMMCALL", &[], 0, EXIT_VMMCALL),
    ] {
        let all = INTERCEPT_RDPMC | INTERCEPT_MSR | INTERCEPT_CPUID | INTERCEPT_RDTSC;
        let exit = run(all, true, code, rcx)?;
        let length = if code.is_empty() {
            VMMCALL.len()
        } else {
            code.len()
        };
        check(format_args!("exit of {what}"), exit.code, want)?;
        check(format_args!("RIP at {what}"), exit.at, 0)?;
        check(format_args!("length of {what}"), exit.length, length as u64)?;
    }
    Ok(Pass::Ok)
}

/// Checks that a guest reaches the registers where nothing is intercepted.
fn registers_pass() -> Verdict {
    const VALUE: u64 = 0x4321_8765;
    let (ctl, ctr) = (PERF_CTL + 2, PERF_CTR + 2);
    write(ctr, VALUE)?;
    let exit = run(INTERCEPT_MSR, false, &[0x0f, 0x32], ctr.into())?;
    check("exit of RDMSR", exit.code, EXIT_VMMCALL)?;
    check("EAX of RDMSR", exit.rax, VALUE)?;
    let exit = run(INTERCEPT_MSR, false, &[0x0f, 0x33], 1)?;
    check("exit of RDPMC", exit.code, EXIT_VMMCALL)?;
    check("EAX of RDPMC", exit.rax, VALUE)?;
    // `mov eax, 0x3_0076; xor edx, edx; wrmsr`
    let code = [0xb8, 0x76, 0, 3, 0, 0x31, 0xd2, 0x0f, 0x30];
    let exit = run(INTERCEPT_MSR, false, &code, ctl.into())?;
    check("exit of WRMSR", exit.code, EXIT_VMMCALL)?;
    check("what the guest wrote", read(ctl)?, 0x3_0076)?;
    Ok(Pass::Ok)
}

/// Checks that a PMI in a guest is an exit that is no instruction's, and that the host's NMI waits for STGI.
fn nmi() -> Verdict {
    let cpu = percpu::this();
    apic::set_lvtpc(LVT_NMI);
    write(ctr(0), COUNTER + 1 - SOME)?;
    write(ctl(0), COUNT | CYCLES | INT | GUEST_ONLY)?;
    let exit = run(INTERCEPT_NMI, false, user::SPIN, 1 << 40);
    write(ctl(0), 0)?;
    let (exit, since) = (exit?, read(ctr(0))?);
    check("exit", exit.code, EXIT_NMI)?;
    check("next RIP", exit.next_rip, 0)?;
    interruptible(|| pass(1_000));
    check("NMIs", cpu.taken(NMI), 1)?;
    if is_exact()? {
        check("counted since", since, 0)?;
    }
    Ok(Pass::Ok)
}
