//! Accesses to any system register. The instruction is assembled where it will
//! be executed.

// UNSAFETY: writes instructions and runs them.
#![expect(unsafe_code, reason = "writes instructions and runs them")]

use core::arch::asm;
use core::cell::UnsafeCell;

use crate::encoding::Encoding;
use crate::fault::Fault;
use crate::{el0, percpu};

/// `RET`
const RET: u32 = 0xd65f_03c0;
/// `SVC #0`
const SVC: u32 = 0xd400_0001;

/// `SVC #0` in A32.
const A32_SVC: u32 = 0xef00_0000;

/// A page of its own, so that an emulator that translates code need not throw
/// away more than this.
#[repr(align(4096))]
struct Cell(UnsafeCell<[u32; 2]>);

// SAFETY: the tests run on one CPU at a time (see `tests`).
unsafe impl Sync for Cell {}

static CELL: Cell = Cell(UnsafeCell::new([0; 2]));

/// Reads a register at EL1.
pub(crate) fn read(register: Encoding) -> Result<u64, Fault> {
    at_el1(register.mrs_x0(), 0)
}

/// Writes a register at EL1; the write has taken effect on return.
pub(crate) fn write(register: Encoding, value: u64) -> Result<(), Fault> {
    at_el1(register.msr_x0(), value).map(drop)
}

/// Reads a register at EL0.
pub(crate) fn read_at_el0(register: Encoding) -> Result<u64, Fault> {
    at_el0(register.mrs_x0(), 0)
}

/// Writes a register at EL0.
pub(crate) fn write_at_el0(register: Encoding, value: u64) -> Result<(), Fault> {
    at_el0(register.msr_x0(), value).map(drop)
}

/// Reads a register at EL2, where the program has begun there: see `entry.rs`. The register must exist.
pub(crate) fn read_at_el2(register: Encoding) -> Result<u64, Fault> {
    at_el2(register.mrs_x0(), 0)
}

/// Writes a register at EL2, like [`read_at_el2`].
pub(crate) fn write_at_el2(register: Encoding, value: u64) -> Result<(), Fault> {
    at_el2(register.msr_x0(), value).map(drop)
}

/// Executes one A32 instruction at EL0 with r0 = `value`, and returns r0.
pub(crate) fn a32_at_el0(instruction: u32, value: u64) -> Result<u64, Fault> {
    let code = assemble([instruction, A32_SVC]);
    // SAFETY: the cell holds one register access and SVC; the tests have asked whether EL0 has AArch32.
    unsafe { el0::run_aarch32(code, value) }.map(|r0| r0 & 0xffff_ffff)
}

fn at_el1(instruction: u32, value: u64) -> Result<u64, Fault> {
    let code = assemble([instruction, RET]);
    let result;
    percpu::this().expect_exception();
    // SAFETY: the cell holds one register access and RET; an exception is
    // noted and skipped by the vectors.
    unsafe {
        asm!(
            "blr {code}",
            "isb",
            code = in(reg) code,
            inlateout("x0") value => result,
            out("x30") _,
        );
    }
    outcome(result)
}

fn at_el2(instruction: u32, value: u64) -> Result<u64, Fault> {
    let code = assemble([instruction, RET]);
    let result;
    percpu::this().expect_exception();
    // SAFETY: the cell holds one register access and RET, which the program's own vectors of EL2 call. Those of a
    // monitor answer in x0 to x17 or refuse.
    unsafe {
        asm!(
            "hvc #0",
            inlateout("x0") value => result,
            inlateout("x1") code => _,
            out("x30") _,
            clobber_abi("C"),
        );
    }
    outcome(result)
}

/// Returns `result`, unless there was an exception since `expect_exception`.
fn outcome(result: u64) -> Result<u64, Fault> {
    match percpu::this().exception() {
        None => Ok(result),
        Some(syndrome) => Err(Fault { syndrome }),
    }
}

fn at_el0(instruction: u32, value: u64) -> Result<u64, Fault> {
    let code = assemble([instruction, SVC]);
    // SAFETY: the cell holds one register access and SVC.
    unsafe { el0::run(code, value) }
}

/// Makes the instructions visible to execution, and returns their address.
fn assemble(code: [u32; 2]) -> usize {
    let cell = CELL.0.get();
    // SAFETY: nobody else uses the cell now.
    unsafe {
        cell.write_volatile(code);
        asm!(
            "dc cvau, {0}",
            "dsb ish",
            "ic ivau, {0}",
            "dsb ish",
            "isb",
            in(reg) cell,
        );
    }
    cell as usize
}
