//! The other processors: their start, and their jobs. SDM vol. 3A, 9.4.4 (INIT
//! and SIPI).
//!
//! One CPU works at a time, unless a job says otherwise. The boot CPU hands out
//! jobs and halts until they are done. The others halt until there is a job.
//! They wake each other by an interrupt, which waits until HLT if it comes
//! early.

// UNSAFETY: code for real mode is put where it is run.
#![expect(unsafe_code, reason = "code for real mode is put where it is run")]

use core::arch::{asm, global_asm};
use core::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use vpmu_payload_harness::{Failure, Text};

use crate::boot::{Boot, MAX_CPUS};
use crate::instructions::{halt, tsc};
use crate::pmu::PATIENCE;
use crate::vectors::WAKE;
use crate::{apic, descriptors, tests};

/// The address at which other processors begin: an unused page of conventional
/// memory, above the boot protocol's page tables.
const TRAMPOLINE: u64 = 0x1_0000;

global_asm!(
    r#"
    .section .rodata.trampoline, "a"
    .balign 8
    .global trampoline, trampoline_end, trampoline_cr3, trampoline_stack, trampoline_cpu, trampoline_entry
    .code16
trampoline:
    cli
    cld
    movw    %cs, %ax
    movw    %ax, %ds
    lgdt    trampoline_gdt_pointer - trampoline
    movl    %cr4, %eax
    orl     $0x20, %eax             // PAE
    movl    %eax, %cr4
    movl    trampoline_cr3 - trampoline, %eax
    movl    %eax, %cr3
    movl    $0xc0000080, %ecx       // EFER.LME
    rdmsr
    orl     $0x100, %eax
    wrmsr
    movl    %cr0, %eax
    orl     $0x80000001, %eax       // PG, PE
    movl    %eax, %cr0
    ljmpl   $0x8, $({base} + trampoline_long - trampoline)
    .code64
trampoline_long:
    movl    $0x10, %eax
    movl    %eax, %ss
    movl    %eax, %ds
    movl    %eax, %es
    movq    trampoline_stack(%rip), %rsp
    movq    trampoline_cpu(%rip), %rdi
    xorl    %ebp, %ebp
    callq   *trampoline_entry(%rip)
    ud2

    .balign 8
trampoline_gdt:
    .quad   0
    .quad   0x00af9b000000ffff
    .quad   0x00cf93000000ffff
trampoline_gdt_pointer:
    .word   23
    .long   {base} + trampoline_gdt - trampoline
    .balign 8
trampoline_cr3:
    .quad   0
trampoline_stack:
    .quad   0
trampoline_cpu:
    .quad   0
trampoline_entry:
    .quad   0
trampoline_end:
    "#,
    base = const TRAMPOLINE,
    options(att_syntax),
);

unsafe extern "C" {
    static trampoline: u8;
    static trampoline_end: u8;
    static trampoline_cr3: u8;
    static trampoline_stack: u8;
    static trampoline_cpu: u8;
    static trampoline_entry: u8;
}

/// A job for another CPU.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Job {
    /// No job: the last one is done.
    None,
    /// Start. The job is done when the CPU runs.
    Start,
    /// The tests that run on every CPU.
    Tests,
    /// Hostile writes, counting and PMIs.
    Disturb,
    /// A storm of PMIs.
    Storm,
    /// Work for some ten million cycles.
    Work,
    /// Write a value to every MSR.
    Fill,
    /// Check that these values are still there.
    CheckFilled,
}

impl Job {
    fn from_number(number: u8) -> Self {
        match number {
            1 => Self::Start,
            2 => Self::Tests,
            3 => Self::Disturb,
            4 => Self::Storm,
            5 => Self::Work,
            6 => Self::Fill,
            7 => Self::CheckFilled,
            _ => Self::None,
        }
    }
}

static JOBS: [AtomicU8; MAX_CPUS] = [const { AtomicU8::new(Job::None as u8) }; MAX_CPUS];

static RUNS: [AtomicBool; MAX_CPUS] = [const { AtomicBool::new(false) }; MAX_CPUS];

fn job(cpu: usize) -> Job {
    Job::from_number(JOBS[cpu].load(Ordering::Acquire))
}

/// Starts CPU `cpu`, also one that runs, and waits until it runs.
pub(crate) fn start(boot: &Boot, cpu: usize) -> Result<(), Failure> {
    let id = boot.apic_ids[cpu];
    // SAFETY: the page is conventional memory that nobody uses, mapped onto itself; the symbols delimit the code above.
    // The CPU that runs this code has been started before, or is this CPU's to start.
    unsafe {
        let code = &raw const trampoline;
        let place = |field: *const u8| (TRAMPOLINE + (field as u64 - code as u64)) as *mut u64;
        let length = (&raw const trampoline_end) as usize - code as usize;
        core::ptr::copy_nonoverlapping(code, TRAMPOLINE as *mut u8, length);
        let tables: u64;
        asm!("mov {}, cr3", out(reg) tables, options(nomem, nostack));
        place(&raw const trampoline_cr3).write_volatile(tables);
        place(&raw const trampoline_stack).write_volatile(descriptors::stack_top(cpu));
        place(&raw const trampoline_cpu).write_volatile(cpu as u64);
        place(&raw const trampoline_entry).write_volatile(secondary as *const () as u64);
    }
    JOBS[cpu].store(Job::Start as u8, Ordering::Release);
    const INIT: u32 = 0b101 << 8 | 1 << 14;
    const START_UP: u32 = 0b110 << 8 | 1 << 14;
    apic::send(id, INIT);
    apic::send(id, START_UP | (TRAMPOLINE >> 12) as u32);
    let begin = tsc();
    while job(cpu) != Job::None {
        if tsc() - begin > PATIENCE {
            return Err(Failure(Text::new(format_args!("CPU {cpu} does not start"))));
        }
        core::hint::spin_loop();
    }
    Ok(())
}

/// Hands `work` to CPU `cpu`, which must be running.
pub(crate) fn hand_out(boot: &Boot, cpu: usize, work: Job) {
    JOBS[cpu].store(work as u8, Ordering::Release);
    apic::send(boot.apic_ids[cpu], WAKE.into());
}

/// Returns whether CPU `cpu` has been started.
pub(crate) fn runs(cpu: usize) -> bool {
    RUNS[cpu].load(Ordering::Acquire)
}

/// Returns whether CPU `cpu` has done its job.
pub(crate) fn is_done(cpu: usize) -> bool {
    job(cpu) == Job::None
}

/// Halts until CPU `cpu` has done its job.
pub(crate) fn wait_for(cpu: usize) {
    while !is_done(cpu) {
        halt();
    }
}

extern "C" fn secondary(cpu: usize) -> ! {
    descriptors::load(cpu);
    apic::enable();
    RUNS[cpu].store(true, Ordering::Release);
    JOBS[cpu].store(Job::None as u8, Ordering::Release);
    loop {
        let work = job(cpu);
        // A CPU that is started anew may see its start before INIT comes. The start is over when the CPU runs again.
        if matches!(work, Job::None | Job::Start) {
            halt();
            continue;
        }
        tests::on_other_cpu(cpu, work);
        JOBS[cpu].store(Job::None as u8, Ordering::Release);
        apic::send(tests::boot_cpu_id(), WAKE.into());
    }
}
