//! Accesses to addresses that have neither memory nor a device, and accesses to devices by instructions that a
//! hypervisor cannot complete. A bus answers with a synchronous external abort, and so does a hypervisor: the program
//! that made the access learns of it and goes on.

// UNSAFETY: accesses to nothing.
#![expect(unsafe_code, reason = "accesses to nothing")]

use core::arch::asm;

use super::{Context, Test};
use crate::fault::Fault;
use crate::mmio::fault_of;
use vpmu_payload_harness::{Failure, Pass, Text, Verdict, check};

pub(super) const TESTS: &[Test] = &[
    ("nothing.load_behind_ram", load_behind_ram),
    ("nothing.store_behind_ram", store_behind_ram),
    ("nothing.jump_behind_ram", jump_behind_ram),
    ("nothing.absent_redistributor", absent_redistributor),
    ("nothing.pair_of_registers", pair_of_registers),
    ("nothing.write_back", write_back),
    ("nothing.vector_register", vector_register),
];

/// Returns FAR_EL1.
fn fault_address() -> u64 {
    let address;
    // SAFETY: reads a register.
    unsafe { asm!("mrs {}, far_el1", out(reg) address, options(nomem, nostack)) }
    address
}

/// Checks that `fault` is the external abort of class `class` at `address`.
fn is_abort(fault: Option<Fault>, class: u64, address: u64) -> Result<Fault, Failure> {
    let Some(fault) = fault else {
        return Err(Failure(Text::new(format_args!(
            "no exception at {address:#x}"
        ))));
    };
    check(
        format_args!("class of {:#x}", fault.syndrome),
        fault.class(),
        class,
    )?;
    check(
        format_args!("external abort in {:#x}", fault.syndrome),
        fault.is_external().into(),
        1,
    )?;
    check("FAR_EL1", fault_address(), address)?;
    Ok(fault)
}

fn load(address: u64) -> Option<Fault> {
    fault_of(|| {
        // SAFETY: the exception is noted and skipped.
        unsafe { asm!("ldr {0}, [{1}]", "dsb sy", out(reg) _, in(reg) address, options(nostack)) }
    })
}

fn load_behind_ram(cx: &Context) -> Verdict {
    let address = cx.machine.ram.end;
    let fault = is_abort(load(address), Fault::DATA_ABORT, address)?;
    check("a store", fault.is_store().into(), 0)?;
    Ok(Pass::Ok)
}

fn store_behind_ram(cx: &Context) -> Verdict {
    let address = cx.machine.ram.end + 8;
    let fault = fault_of(|| {
        // SAFETY: as in `load`; nothing is there that could change.
        unsafe { asm!("str {0}, [{0}]", "dsb sy", in(reg) address, options(nostack)) }
    });
    let fault = is_abort(fault, Fault::DATA_ABORT, address)?;
    check("a store", fault.is_store().into(), 1)?;
    Ok(Pass::Ok)
}

fn jump_behind_ram(cx: &Context) -> Verdict {
    let address = cx.machine.ram.end;
    let fault = fault_of(|| {
        // SAFETY: the vectors return from the abort to the caller, as RET would.
        unsafe { asm!("blr {0}", in(reg) address, out("x30") _) }
    });
    is_abort(fault, Fault::INSTRUCTION_ABORT, address)?;
    Ok(Pass::Ok)
}

/// Loads GICR_TYPER of the last redistributor for which the region has room, and which no CPU has.
fn absent_redistributor(cx: &Context) -> Verdict {
    const FRAMES: u64 = 0x2_0000;
    const GICR_TYPER: u64 = 0x8;
    let address = cx.machine.redistributors.end - FRAMES + GICR_TYPER;
    is_abort(load(address), Fault::DATA_ABORT, address)?;
    Ok(Pass::Ok)
}

/// Makes an access to GICR_IIDR and GICR_TYPER that a bus may serve or refuse, and a hypervisor must refuse.
fn refused_or_served(cx: &Context, access: impl FnOnce(u64)) -> Verdict {
    const GICR_TYPER: u64 = 0x8;
    let address = cx.machine.redistributors.start + GICR_TYPER;
    if let fault @ Some(_) = fault_of(|| access(address)) {
        is_abort(fault, Fault::DATA_ABORT, address)?;
    }
    Ok(Pass::Ok)
}

fn pair_of_registers(cx: &Context) -> Verdict {
    refused_or_served(cx, |address| {
        // SAFETY: loads from registers without side effects.
        unsafe {
            asm!("ldp {0:w}, {1:w}, [{2}]", "dsb sy", out(reg) _, out(reg) _, in(reg) address);
        }
    })
}

fn write_back(cx: &Context) -> Verdict {
    refused_or_served(cx, |address| {
        // SAFETY: as above.
        unsafe { asm!("ldr {0:w}, [{1}], #4", "dsb sy", out(reg) _, inout(reg) address => _) }
    })
}

fn vector_register(cx: &Context) -> Verdict {
    refused_or_served(cx, |address| {
        // SAFETY: as above; CPACR_EL1.FPEN is set for the one instruction, and nothing else uses vectors.
        unsafe {
            asm!(
                "mrs {old}, cpacr_el1",
                "orr {new}, {old}, #(3 << 20)",
                "msr cpacr_el1, {new}",
                "isb",
                ".inst 0xbd400000", // ldr s0, [x0]
                "dsb sy",
                "msr cpacr_el1, {old}",
                "isb",
                old = out(reg) _,
                new = out(reg) _,
                in("x0") address,
            );
        }
    })
}
