//! Runs in both of two guests on a CPU: each keeps its registers over the other's turns (`switch.registers`).
//!
//! No list says which registers there are. The test tries every encoding, and takes those that can be read and written.

use super::neighbour::Random;
use crate::cell;
use crate::encoding::Encoding;
use crate::gic::Gic;
use crate::loops::spin;
use crate::machine::Machine;
use crate::pmu::Pmu;
use crate::{entry, uart};
use vpmu_payload_harness::{Failure, Pass, Text, Verdict, check_range};

/// More registers than a CPU of today has that count.
const MOST: usize = 512;
const ROUNDS: u64 = 60;
/// So many rounds of [`spin`] that the other guest has had a turn (`--slice 100`).
const TURNS: u64 = 150_000;

/// Why a register is not written: the program itself needs it, or a write or a read does something, or the value changes by
/// itself.
fn is_left_out(register: Encoding) -> bool {
    match (
        register.op1(),
        register.crn(),
        register.crm(),
        register.op2(),
    ) {
        // SCTLR_EL1, VBAR_EL1, TPIDR_EL1, PSTATE's fields.
        (0, 1, 0, 0) | (0, 12, 0, 0) | (0, 13, 0, 4) | (0, 4, 2 | 3, _) | (3, 4, 2, _) => true,
        // Interrupts are acknowledged, ended, deactivated and sent.
        (0, 12, 8 | 12, 0 | 1) | (0, 12, 9, 5) | (0, 12, 11, _) => true,
        // The timers' TVAL; the PMU but for its event types.
        (3, 14, 2 | 3, 0) | (_, 9, _, _) | (3, 14, 8..12, _) => true,
        // The implementer's own.
        (_, 11 | 15, _, _) => true,
        _ => false,
    }
}

/// The bits of a register that stay as they were written. A timer's ISTATUS follows the time.
fn kept(register: Encoding) -> u64 {
    match (
        register.op1(),
        register.crn(),
        register.crm(),
        register.op2(),
    ) {
        (3, 14, 2 | 3, 1) => !(1 << 2),
        _ => !0,
    }
}

/// The bits of a register that each value has. A binary point below the least that a machine has may read as it was written,
/// until it is.
fn set(register: Encoding) -> u64 {
    match (
        register.op1(),
        register.crn(),
        register.crm(),
        register.op2(),
    ) {
        (0, 12, 8 | 12, 3) => 0b110,
        _ => 0,
    }
}

pub(super) fn keep(machine: &Machine<'_>) -> Verdict {
    let _ = Gic::for_this_cpu(machine);
    Pmu::identify()?.reset()?;
    let mut registers = [(crate::encoding::CURRENT_EL, 0); MOST];
    let mut count = 0;
    let all = (0..2 * Encoding::OP0_3).map(Encoding::nth);
    for register in all.filter(|&register| !is_left_out(register)) {
        let Ok(value) = cell::read(register) else {
            continue;
        };
        if cell::write(register, value).is_ok() && count < MOST {
            registers[count] = (register, value);
            count += 1;
        }
    }
    check_range("registers", count as u64, 40, MOST as u64 - 1)?;
    let registers = &registers[..count];
    let mut random = Random(entry::image_address() ^ 0x9e37_79b9_7f4a_7c15);
    let mut verdict = Ok(Pass::Ok);
    for round in 0..ROUNDS {
        let mut written = [0; MOST];
        for &(register, _) in registers {
            cell::write(register, random.next() | set(register))?;
        }
        // Some show what others say.
        for (&(register, _), written) in registers.iter().zip(&mut written) {
            *written = cell::read(register)? & kept(register);
        }
        spin(TURNS);
        for (&(register, _), &written) in registers.iter().zip(&written) {
            let read = cell::read(register)? & kept(register);
            if read != written {
                uart::print(format_args!(
                    "payload: {register} was {written:#x} and is {read:#x} in round {round}\n"
                ));
                verdict = Err(Failure(Text::new(format_args!(
                    "{register} has changed (got {read:#x} want {written:#x})"
                ))));
            }
        }
        if verdict.is_err() {
            break;
        }
    }
    for &(register, value) in registers {
        let _ = cell::write(register, value);
    }
    uart::print(format_args!("payload: {count} registers kept\n"));
    verdict
}
