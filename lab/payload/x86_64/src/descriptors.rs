//! Segments, tasks and interrupt gates. SDM vol. 3A, chapters 3, 6 and 8.

// UNSAFETY: tables that the processor reads.
#![expect(unsafe_code, reason = "tables that the processor reads")]

use core::arch::asm;
use core::cell::UnsafeCell;

use crate::boot::MAX_CPUS;

/// Selectors. The order is that of [`Tables::gdt`].
pub(crate) const KERNEL_CODE: u16 = 0x08;
pub(crate) const KERNEL_DATA: u16 = 0x10;
pub(crate) const USER_DATA: u16 = 0x18 | 3;
pub(crate) const USER_CODE: u16 = 0x20 | 3;
/// Selector of CPU 0's task. Each takes 16 bytes.
pub(crate) const FIRST_TSS: u16 = 0x28;

/// Bytes of stack that a CPU has for its program, and for handlers that interrupt ring 3.
pub(crate) const STACK_SIZE: usize = 0x8000;

const CODE: u64 = 0x00af_9b00_0000_ffff;
const DATA: u64 = 0x00cf_9300_0000_ffff;
const RING_3: u64 = 3 << 45;

const TSS_SIZE: usize = 104;
const GATES: usize = 256;

#[repr(C, align(16))]
pub(crate) struct Stack([u8; STACK_SIZE]);

#[repr(C, align(16))]
struct Tables {
    gdt: [u64; 5 + 2 * MAX_CPUS],
    idt: [[u64; 2]; GATES],
    /// As 32-bit words: RSP0 is at an odd one.
    tasks: [[u32; TSS_SIZE / 4]; MAX_CPUS],
}

#[repr(transparent)]
pub(crate) struct Shared<T>(UnsafeCell<T>);

// SAFETY: the tables are written by `build` before a second CPU runs; stacks are used by their
// CPU alone.
unsafe impl<T> Sync for Shared<T> {}

static TABLES: Shared<Tables> = Shared(UnsafeCell::new(Tables {
    gdt: [0; 5 + 2 * MAX_CPUS],
    idt: [[0; 2]; GATES],
    tasks: [[0; TSS_SIZE / 4]; MAX_CPUS],
}));

/// A stack for each CPU's program, and one for handlers that interrupt ring 3.
pub(crate) static STACKS: Shared<[[Stack; 2]; MAX_CPUS]> = Shared(UnsafeCell::new(
    [const { [const { Stack([0; STACK_SIZE]) }; 2] }; MAX_CPUS],
));

/// Returns the top of CPU `cpu`'s program stack.
pub(crate) fn stack_top(cpu: usize) -> u64 {
    STACKS.0.get() as u64 + ((2 * cpu + 1) * STACK_SIZE) as u64
}

/// Fills the tables, on the boot CPU. `entry`: the address to which the gate of a vector leads.
pub(crate) fn build(entry: impl Fn(u8) -> u64) {
    // SAFETY: no other CPU runs, and no table is in use yet.
    let tables = unsafe { &mut *TABLES.0.get() };
    tables.gdt[1] = CODE;
    tables.gdt[2] = DATA;
    tables.gdt[3] = DATA | RING_3;
    tables.gdt[4] = CODE | RING_3;
    for (cpu, task) in tables.tasks.iter_mut().enumerate() {
        let interrupt_stack = stack_top(cpu) + STACK_SIZE as u64;
        task[1] = interrupt_stack as u32;
        task[2] = (interrupt_stack >> 32) as u32;
        // The I/O permission map begins at the limit: ring 3 has no ports.
        task[25] = (TSS_SIZE as u32) << 16;
        let base = task.as_ptr() as u64;
        let available_tss = 0x89_u64 << 40;
        tables.gdt[5 + 2 * cpu] = (TSS_SIZE as u64 - 1)
            | (base & 0xff_ffff) << 16
            | available_tss
            | (base >> 24 & 0xff) << 56;
        tables.gdt[6 + 2 * cpu] = base >> 32;
    }
    for (vector, gate) in (0..).zip(&mut tables.idt) {
        let entry = entry(vector);
        // A present interrupt gate: interrupts are masked in the handler.
        let kind = 0x8e_u64;
        gate[0] = entry & 0xffff
            | u64::from(KERNEL_CODE) << 16
            | kind << 40
            | (entry >> 16 & 0xffff) << 48;
        gate[1] = entry >> 32;
    }
}

/// Makes the tables CPU `cpu`'s own.
pub(crate) fn load(cpu: usize) {
    #[repr(C, packed)]
    struct Pointer {
        limit: u16,
        base: u64,
    }
    let tables = TABLES.0.get();
    let gdt = Pointer {
        limit: (size_of::<[u64; 5 + 2 * MAX_CPUS]>() - 1) as u16,
        base: tables as u64,
    };
    let idt = Pointer {
        limit: (size_of::<[[u64; 2]; GATES]>() - 1) as u16,
        base: tables as u64 + core::mem::offset_of!(Tables, idt) as u64,
    };
    let task = FIRST_TSS + 16 * cpu as u16;
    // SAFETY: this CPU's own descriptor. LTR needs a task that is not busy. The task of a CPU that is started again is
    // busy.
    unsafe {
        const BUSY: u64 = 1 << 41;
        let descriptor = (&raw mut (*tables).gdt).cast::<u64>().add(5 + 2 * cpu);
        descriptor.write_volatile(descriptor.read_volatile() & !BUSY);
    }
    // SAFETY: the tables are filled, stay where they are, and describe the flat segments in which
    // the program runs already. LTR writes to the GDT, which is nobody's Rust object.
    unsafe {
        asm!(
            "lgdt [{gdt}]",
            "lidt [{idt}]",
            "push {code}",
            "lea {scratch}, [rip + 2f]",
            "push {scratch}",
            "retfq",
            "2:",
            "mov ss, {data:x}",
            "mov ds, {data:x}",
            "mov es, {data:x}",
            "ltr {task:x}",
            gdt = in(reg) &raw const gdt,
            idt = in(reg) &raw const idt,
            code = const KERNEL_CODE,
            data = in(reg) KERNEL_DATA,
            task = in(reg) task,
            scratch = out(reg) _,
        );
    }
}
