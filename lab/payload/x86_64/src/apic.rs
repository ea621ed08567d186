//! The local APIC. SDM vol. 3A, chapter 11.

// UNSAFETY: device registers.
#![expect(unsafe_code, reason = "device registers")]

use core::arch::asm;

use crate::fault::Fault;
use crate::instructions::{rdmsr, wrmsr};

const BASE: u64 = 0xfee0_0000;
/// The MSR of x2APIC register n * 16 is this and n.
const X2APIC: u32 = 0x800;
const IA32_APIC_BASE: u32 = 0x1b;
const APIC_ENABLE: u64 = 1 << 11;
const X2APIC_ENABLE: u64 = 1 << 10;

const ID: u32 = 0x20;
const END_OF_INTERRUPT: u32 = 0xb0;
const SPURIOUS_VECTOR: u32 = 0xf0;
/// The APIC's spurious vector, which needs no end of interrupt.
pub(crate) const SPURIOUS: u8 = 0xff;
const IN_SERVICE: u32 = 0x100;
const REQUEST: u32 = 0x200;
const COMMAND: u32 = 0x300;
const COMMAND_HIGH: u32 = 0x310;
const LVT_TIMER: u32 = 0x320;
const LVT_PMC: u32 = 0x340;
const INITIAL_COUNT: u32 = 0x380;
const DIVIDE: u32 = 0x3e0;

const SOFTWARE_ENABLE: u32 = 1 << 8;
const PENDING: u32 = 1 << 12;

/// LVTPC: an NMI.
pub(crate) const LVT_NMI: u32 = 0b100 << 8;
/// LVTPC, the LVT timer register: nothing is delivered.
pub(crate) const LVT_MASKED: u32 = 1 << 16;

fn is_x2apic() -> bool {
    rdmsr(IA32_APIC_BASE).is_ok_and(|base| base & X2APIC_ENABLE != 0)
}

fn read(register: u32) -> u32 {
    let value: u32;
    // SAFETY: a load from the APIC changes no memory of the program. A plain MOV, which any
    // hypervisor can emulate.
    unsafe {
        asm!("mov {0:e}, [{1}]", out(reg) value, in(reg) BASE + u64::from(register), options(nostack));
    }
    value
}

fn write(register: u32, value: u32) {
    // SAFETY: a store to the APIC changes no memory of the program.
    unsafe {
        asm!("mov [{1}], {0:e}", in(reg) value, in(reg) BASE + u64::from(register), options(nostack));
    }
}

/// Enables the APIC. LVTPC delivers nothing.
pub(crate) fn enable() {
    write(SPURIOUS_VECTOR, SOFTWARE_ENABLE | u32::from(SPURIOUS));
    set_lvtpc(LVT_MASKED);
}

/// Returns the value of LVTPC.
pub(crate) fn lvtpc() -> u32 {
    if is_x2apic() {
        rdmsr(X2APIC + LVT_PMC / 16).map_or(!0, |value| value as u32)
    } else {
        read(LVT_PMC)
    }
}

/// Sets the APIC's reaction to a PMI.
pub(crate) fn set_lvtpc(value: u32) {
    if is_x2apic() {
        // The MSR exists, and takes any legal value.
        let _ = wrmsr(X2APIC + LVT_PMC / 16, value.into());
    } else {
        write(LVT_PMC, value);
    }
}

/// Sets the timer's action when it is due.
pub(crate) fn set_lvt_timer(value: u32) {
    write(LVT_TIMER, value);
}

/// Starts the timer, which is due in `count` ticks of the APIC's clock. 0 stops it.
pub(crate) fn start_timer(count: u32) {
    const BY_ONE: u32 = 0b1011;
    write(DIVIDE, BY_ONE);
    write(INITIAL_COUNT, count);
}

/// Tells the APIC that an interrupt has been handled.
pub(crate) fn end_of_interrupt() {
    if is_x2apic() {
        let _ = wrmsr(X2APIC + END_OF_INTERRUPT / 16, 0);
    } else {
        write(END_OF_INTERRUPT, 0);
    }
}

/// Returns whether `vector` waits to be taken, or is being handled.
pub(crate) fn is_pending(vector: u8) -> bool {
    let word = u32::from(vector) / 32 * 0x10;
    let bit = 1 << (vector % 32);
    (read(REQUEST + word) | read(IN_SERVICE + word)) & bit != 0
}

/// Returns this CPU's identifier, without x2APIC.
pub(crate) fn id() -> u8 {
    (read(ID) >> 24) as u8
}

/// Sends `command` (delivery mode and vector) to the CPU with this identifier.
pub(crate) fn send(id: u8, command: u32) {
    write(COMMAND_HIGH, u32::from(id) << 24);
    write(COMMAND, command);
    while read(COMMAND) & PENDING != 0 {}
}

/// Switches to x2APIC mode.
pub(crate) fn enter_x2apic() -> Result<(), Fault> {
    wrmsr(IA32_APIC_BASE, rdmsr(IA32_APIC_BASE)? | X2APIC_ENABLE)
}

/// Leaves x2APIC mode through a disabled APIC, which forgets its state (SDM
/// vol. 3A, 11.12.5).
pub(crate) fn leave_x2apic() -> Result<(), Fault> {
    let base = rdmsr(IA32_APIC_BASE)? & !(APIC_ENABLE | X2APIC_ENABLE);
    wrmsr(IA32_APIC_BASE, base)?;
    wrmsr(IA32_APIC_BASE, base | APIC_ENABLE)?;
    enable();
    Ok(())
}
