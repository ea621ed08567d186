//! Interrupts and exceptions.
//!
//! From ring 0, #GP is either expected (the access under test) and skipped, or
//! the end of the program, as any other exception is. From ring 3, an exception
//! ends `user::run`. Interrupts are handled the same from both.

// UNSAFETY: interrupt entry.
#![expect(unsafe_code, reason = "interrupt entry")]

use core::arch::global_asm;
use core::sync::atomic::Ordering::Relaxed;

use crate::descriptors::{KERNEL_CODE, KERNEL_DATA};
use crate::fault::Fault;
use crate::instructions::LENGTH;
use crate::{apic, percpu, pmu, ports, user};

pub(crate) const NMI: u8 = 2;
/// The code in ring 3 is done.
const UD: u8 = 6;
const GP: u8 = 13;
/// Number of vectors that are exceptions.
const EXCEPTIONS: u8 = 32;
/// Vectors the tests use for PMIs.
pub(crate) const PMI: u8 = 0xee;
pub(crate) const OTHER_PMI: u8 = 0x31;
/// Vector by which CPUs wake each other.
pub(crate) const WAKE: u8 = 0xf0;

/// Bytes from one vector's code to the next one's.
const STRIDE: u64 = 16;

global_asm!(
    r#"
    .section .text.vectors, "ax"
    .balign 16
    .global vector_entries
vector_entries:
    .set    vector, 0
    .rept   256
    .balign 16
    .if     vector == 13
    // By this instruction a VMM knows the handler of #GP, where RDPMC comes to it by way of the handler.
    .byte   0x0f, 0x1f, 0x00
    .endif
    // These exceptions push an error code themselves.
    .if     (vector == 8) || (vector == 10) || (vector == 11) || (vector == 12) || (vector == 13) || (vector == 14) || (vector == 17) || (vector == 21) || (vector == 29) || (vector == 30)
    .else
    push    0
    .endif
    push    vector
    jmp     interrupted
    .set    vector, vector + 1
    .endr

interrupted:
    push    rax
    push    rcx
    push    rdx
    push    rsi
    push    rdi
    push    r8
    push    r9
    push    r10
    push    r11
    cld
    mov     rdi, rsp        // Frame; a multiple of 16
    call    {interrupted}
    pop     r11
    pop     r10
    pop     r9
    pop     r8
    pop     rdi
    pop     rsi
    pop     rdx
    pop     rcx
    pop     rax
    add     rsp, 16
    iretq
    "#,
    interrupted = sym interrupted,
);

unsafe extern "C" {
    /// Marks the first vector's code.
    safe fn vector_entries();
}

/// Returns the address to which the gate of `vector` leads.
pub(crate) fn entry(vector: u8) -> u64 {
    vector_entries as *const () as u64 + STRIDE * u64::from(vector)
}

/// The frame that the code above and the processor have pushed.
#[repr(C)]
struct Frame {
    r11: u64,
    r10: u64,
    r9: u64,
    r8: u64,
    rdi: u64,
    rsi: u64,
    rdx: u64,
    rcx: u64,
    rax: u64,
    vector: u64,
    error: u64,
    rip: u64,
    cs: u64,
    rflags: u64,
    rsp: u64,
    ss: u64,
}

const _: () = assert!(
    size_of::<Frame>().is_multiple_of(16),
    "the stack's alignment"
);

/// Goes on behind a HLT that has not been executed. An NMI between STI and HLT lets an interrupt in before HLT, which would then
/// sleep although what it is to wait for is there.
fn pass_halt(frame: &mut Frame) {
    const HLT: u8 = 0xf4;
    // SAFETY: the instruction at which ring 0 was interrupted is mapped, as it was about to be executed.
    if unsafe { (frame.rip as *const u8).read() } == HLT {
        frame.rip += 1;
    }
}

extern "C" fn interrupted(frame: &mut Frame) {
    let vector = frame.vector as u8;
    let from_user = frame.cs & 3 == 3;
    let cpu = percpu::this();
    if !from_user && (vector == NMI || vector >= EXCEPTIONS) {
        pass_halt(frame);
    }
    match vector {
        UD if from_user => leave_ring_3(frame, None),
        NMI => {
            cpu.count(vector);
            let expecting = cpu.suspend_faults();
            pmu::handle_pmi(cpu);
            cpu.resume_faults(expecting);
        }
        0..EXCEPTIONS => {
            let fault = Fault {
                vector,
                error: frame.error as u32,
            };
            if from_user {
                leave_ring_3(frame, Some(fault));
            } else if vector == GP && cpu.note_fault(fault) {
                frame.rip += LENGTH;
            } else {
                fatal(frame);
            }
        }
        _ => {
            cpu.count(vector);
            if matches!(vector, PMI | OTHER_PMI) {
                let expecting = cpu.suspend_faults();
                pmu::handle_pmi(cpu);
                cpu.resume_faults(expecting);
            }
            if vector != apic::SPURIOUS {
                apic::end_of_interrupt();
            }
        }
    }
}

/// Continues in `user::run`, in ring 0.
fn leave_ring_3(frame: &mut Frame, fault: Option<Fault>) {
    let cpu = percpu::this();
    match fault {
        // The fault is noted though not expected: `user::run` asks for it.
        Some(fault) => drop(cpu.note_fault(fault)),
        None => cpu.expect_fault(),
    }
    cpu.user_result[0].store(frame.rax, Relaxed);
    cpu.user_result[1].store(frame.rdx, Relaxed);
    frame.rip = user::exit_address();
    frame.cs = KERNEL_CODE.into();
    frame.ss = KERNEL_DATA.into();
    frame.rsp = cpu.kernel_stack.load(Relaxed);
    // Interrupts are masked.
    frame.rflags = 2;
}

fn fatal(frame: &Frame) -> ! {
    let address: u64;
    // SAFETY: reads a register.
    unsafe { core::arch::asm!("mov {}, cr2", out(reg) address, options(nomem, nostack)) };
    ports::print(format_args!(
        "FAIL payload: unexpected exception (vector {} error {:#x} RIP {:#x} CR2 {address:#x})\n",
        frame.vector, frame.error, frame.rip
    ));
    ports::power_off()
}
