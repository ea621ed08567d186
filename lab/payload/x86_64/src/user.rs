//! Code run in ring 3, from one page that is open to ring 3.

// UNSAFETY: changes the ring.
#![expect(unsafe_code, reason = "writes instructions and runs them in ring 3")]

use core::arch::{asm, global_asm};
use core::cell::UnsafeCell;
use core::sync::atomic::Ordering::Relaxed;

use crate::descriptors::{USER_CODE, USER_DATA};
use crate::fault::Fault;
use crate::percpu;

/// Code for ring 3: the code under test, then `ud2`, which any hypervisor hands
/// back to the guest.
#[repr(C, align(4096))]
struct Page(UnsafeCell<[u8; 4096]>);

// SAFETY: the tests run on one CPU at a time.
unsafe impl Sync for Page {}

static PAGE: Page = Page(UnsafeCell::new([0xcc; 4096]));

/// `rdpmc`, assembled at run time, so that no VMM has rewritten it.
pub(crate) const RDPMC: &[u8] = &[0x0f, 0x33];
/// `rdmsr`
pub(crate) const RDMSR: &[u8] = &[0x0f, 0x32];
/// `wrmsr`
pub(crate) const WRMSR: &[u8] = &[0x0f, 0x30];
/// `out 0xe6, al`: the instruction that replaces the kernel's RDPMC at load.
pub(crate) const OUT: &[u8] = &[0xe6, 0xe6];
/// `out 0xe7, al`: the instruction that makes the handler of #GP an exit.
pub(crate) const OUT_ENTRY: &[u8] = &[0xe6, 0xe7];
/// `dec rcx; jnz .-3`: RCX rounds.
pub(crate) const SPIN: &[u8] = &[0x48, 0xff, 0xc9, 0x75, 0xfb];
const LEAVE: [u8; 2] = [0x0f, 0x0b];

global_asm!(
    r#"
    .section .text.user, "ax"
    // rdi: code, rsi: argument, rdx: where RSP is kept
    .global enter_ring_3
enter_ring_3:
    push    rbx
    push    rbp
    push    r12
    push    r13
    push    r14
    push    r15
    mov     [rdx], rsp
    push    {user_data}
    push    0               // no stack
    push    2               // RFLAGS: interrupts masked
    push    {user_code}
    push    rdi
    mov     rcx, rsi
    xor     eax, eax
    xor     edx, edx
    iretq
    .global leave_ring_3
leave_ring_3:               // in ring 0, RSP as it was kept
    pop     r15
    pop     r14
    pop     r13
    pop     r12
    pop     rbp
    pop     rbx
    ret
    "#,
    user_data = const USER_DATA,
    user_code = const USER_CODE,
);

unsafe extern "C" {
    fn enter_ring_3(code: u64, argument: u64, stack: *mut u64);
    safe fn leave_ring_3();
}

/// Returns the address at which the handlers go on when ring 3 is left.
pub(crate) fn exit_address() -> u64 {
    leave_ring_3 as *const () as u64
}

/// Opens the page to ring 3, with the 2 MiB around it.
pub(crate) fn open_page() {
    const USER: u64 = 1 << 2;
    const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
    let page = PAGE.0.get() as u64;
    // SAFETY: the boot protocol has the page tables mapped onto themselves, three levels of them;
    // one more permission changes nothing for ring 0.
    unsafe {
        let mut table: u64;
        asm!("mov {}, cr3", out(reg) table, options(nomem, nostack));
        for shift in [39, 30, 21] {
            let entry = ((table & ADDRESS) as *mut u64).add((page >> shift & 0x1ff) as usize);
            entry.write_volatile(entry.read_volatile() | USER);
            table = entry.read_volatile();
        }
        asm!("mov {0}, cr3", "mov cr3, {0}", out(reg) _, options(nostack));
    }
}

/// Runs `code` in ring 3 with RCX = `argument`. Returns RAX and RDX at the end,
/// or the exception that ended the code.
pub(crate) fn run(code: &[u8], argument: u64) -> Result<(u64, u64), Fault> {
    let cpu = percpu::this();
    let page = PAGE.0.get();
    // SAFETY: nobody else uses the page now. Code in it has no stack and ends in an exception. The
    // handlers bring the exception back here with the registers that a C function preserves.
    unsafe {
        let bytes = &mut *page;
        bytes.fill(0xcc);
        bytes[..code.len()].copy_from_slice(code);
        bytes[code.len()..][..LEAVE.len()].copy_from_slice(&LEAVE);
        cpu.expect_fault();
        enter_ring_3(page as u64, argument, cpu.kernel_stack.as_ptr());
    }
    match cpu.fault() {
        None => Ok((
            cpu.user_result[0].load(Relaxed),
            cpu.user_result[1].load(Relaxed),
        )),
        Some(fault) => Err(fault),
    }
}
