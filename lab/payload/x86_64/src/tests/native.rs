//! What only a processor's own PMU can be asked for: exact counts, rings, HLT, user space's RDPMC. QEMU's machines have one
//! (`packaging/qemu`), and count instructions exactly under `-icount`. APM vol. 2, 13.2; the PPRs' lists of events.
//!
//! With the word `busy`, the first CPU executes while another one runs these tests: no count may have any of that.

use super::amd::{CYCLES, ctl, ctr};
use super::{Context, Test};
use crate::apic;
use crate::fault::Fault;
use crate::instructions::{halt, set_pce, spin, tsc};
use crate::pmu::{EN, OS, USR, read, write};
use crate::user;
use crate::vectors::WAKE;
use vpmu_payload_harness::{Failure, Pass, Text, Verdict, check, check_range};

pub(super) const TESTS: &[Test] = &[
    ("native.instructions", instructions),
    ("native.branches", branches),
    ("native.faults", faults),
    ("native.cycles", cycles),
    ("native.rings", rings),
    ("native.rep", rep),
    ("native.threshold", threshold),
    ("native.not_modelled", not_modelled),
    ("native.halt", halted),
    ("native.rdpmc_by_ring_3", rdpmc_by_ring_3),
];

/// Retired instructions.
pub(super) const INSTRUCTIONS: u64 = 0xc0;
/// Retired branch instructions.
const BRANCHES: u64 = 0xc2;
const EDGE: u64 = 1 << 18;
const INV: u64 = 1 << 23;
/// Rounds of [`user::SPIN`], each of two instructions, one of them a branch.
pub(super) const ROUNDS: u64 = 12_345;

const fn cmask(n: u64) -> u64 {
    n << 24
}

/// Counts with control `bits` what ring 3 executes of `code`, with RCX = `argument`. The code ends in an instruction that
/// faults, and so does not retire.
fn in_ring_3(bits: u64, code: &[u8], argument: u64) -> Result<u64, Failure> {
    write(ctr(0), 0)?;
    write(ctl(0), bits | EN)?;
    let left = user::run(code, argument);
    write(ctl(0), 0)?;
    left?;
    read(ctr(0))
}

/// Reports whether the processor counts instructions. Otherwise cycles are the machine's time, in which it may do other things.
pub(super) fn is_exact() -> Result<bool, Failure> {
    Ok(in_ring_3(INSTRUCTIONS | USR, user::SPIN, 10)? != 0)
}

pub(super) const INEXACT: Pass = Pass::Skip("instructions are not counted without -icount");

fn instructions(_: &Context) -> Verdict {
    if !is_exact()? {
        return Ok(INEXACT);
    }
    for rounds in [1, 2, ROUNDS] {
        let got = in_ring_3(INSTRUCTIONS | USR, user::SPIN, rounds)?;
        check(format_args!("{rounds} rounds"), got, 2 * rounds)?;
    }
    // The kernel's part does not depend on the rounds.
    let [few, many] =
        [1, ROUNDS].map(|rounds| in_ring_3(INSTRUCTIONS | USR | OS, user::SPIN, rounds));
    check("both rings", many? - few?, 2 * (ROUNDS - 1))?;
    Ok(Pass::Ok)
}

fn branches(_: &Context) -> Verdict {
    if !is_exact()? {
        return Ok(INEXACT);
    }
    for rounds in [1, 2, ROUNDS] {
        let got = in_ring_3(BRANCHES | USR, user::SPIN, rounds)?;
        check(format_args!("{rounds} rounds"), got, rounds)?;
    }
    Ok(Pass::Ok)
}

/// Checks that an instruction that faults, however late, does not retire, nor do those behind it.
fn faults(_: &Context) -> Verdict {
    const NOP: u8 = 0x90;
    if !is_exact()? {
        return Ok(INEXACT);
    }
    for (what, code, exception) in [
        ("jmp [0]", &[0xff, 0x24, 0x25, 0, 0, 0, 0][..], 14),
        ("sysret", &[0x48, 0x0f, 0x07], 13),
        ("int 13", &[0xcd, 0x0d], 13),
        ("vmmcall", &[0x0f, 0x01, 0xd9, NOP, NOP, NOP], 6),
    ] {
        for event in [INSTRUCTIONS, BRANCHES] {
            write(ctr(0), 0)?;
            write(ctl(0), event | USR | EN)?;
            let left = user::run(code, 0);
            write(ctl(0), 0)?;
            // Code under test ends in #UD.
            let vector = left.err().map_or(6, |fault| fault.vector);
            check(
                format_args!("exception of {what}"),
                vector.into(),
                exception,
            )?;
            check(format_args!("event {event:#x}, {what}"), read(ctr(0))?, 0)?;
        }
    }
    Ok(Pass::Ok)
}

/// Returns the cycles of an instruction where QEMU counts them: the nanoseconds that `-icount shift=` gives it, as the TSC has.
pub(super) fn cycles_each() -> u64 {
    let begin = tsc();
    spin(ROUNDS);
    (tsc() - begin) / (2 * ROUNDS)
}

/// Checks that each instruction takes the same cycles, in QEMU; the one that faults takes them, too.
fn cycles(_: &Context) -> Verdict {
    if !is_exact()? {
        return Ok(INEXACT);
    }
    let each = cycles_each();
    let got = in_ring_3(CYCLES | USR, user::SPIN, ROUNDS)?;
    check_range("cycles", got, 2 * ROUNDS * each, (2 * ROUNDS + 1) * each)?;
    Ok(Pass::Ok)
}

/// Checks USR and OS.
fn rings(_: &Context) -> Verdict {
    if !is_exact()? {
        return Ok(INEXACT);
    }
    let count = |bits| in_ring_3(CYCLES | bits, user::SPIN, ROUNDS);
    check("in no ring", count(0)?, 0)?;
    let [user, kernel, both] = [count(USR)?, count(OS)?, count(USR | OS)?];
    check_range("in ring 3", user, 2 * ROUNDS, both)?;
    check_range("in ring 0", kernel, 1, both)?;
    write(ctr(0), 0)?;
    write(ctl(0), CYCLES | USR | EN)?;
    spin(ROUNDS);
    check("of ring 0 in ring 3", read(ctr(0))?, 0)?;
    Ok(Pass::Ok)
}

/// Checks that a repeated instruction is one.
fn rep(_: &Context) -> Verdict {
    if !is_exact()? {
        return Ok(INEXACT);
    }
    // `lea rdi, [rip + 0x200]; rep stosb`
    let code = [0x48, 0x8d, 0x3d, 0, 2, 0, 0, 0xf3, 0xaa];
    for length in [0, 1, 100] {
        let got = in_ring_3(INSTRUCTIONS | USR, &code, length)?;
        check(format_args!("{length} bytes"), got, 2)?;
    }
    Ok(Pass::Ok)
}

/// Checks CMASK, INV and EDGE: no event happens more than once in a cycle, and no more often than its cycles.
fn threshold(_: &Context) -> Verdict {
    if !is_exact()? {
        return Ok(INEXACT);
    }
    let count = |bits| in_ring_3(USR | bits, user::SPIN, ROUNDS);
    let cycles = count(CYCLES)?;
    for (what, bits, want) in [
        ("a branch at least", BRANCHES | cmask(1), ROUNDS),
        (
            "less than a branch",
            BRANCHES | cmask(1) | INV,
            cycles - ROUNDS,
        ),
        ("two branches", BRANCHES | cmask(2), 0),
        // Linux's alias of cycles that are counted precisely.
        ("less than 16", INSTRUCTIONS | cmask(16) | INV, cycles),
        ("no cycle", CYCLES | cmask(1) | INV, 0),
        ("without a threshold", BRANCHES | INV, ROUNDS),
        ("edges", CYCLES | cmask(1) | EDGE, 0),
    ] {
        check(what, count(bits)?, want)?;
    }
    Ok(Pass::Ok)
}

/// Checks that events that a machine does not have count 0: mispredicted branches, accesses and misses of caches.
fn not_modelled(_: &Context) -> Verdict {
    for event in [
        0xc3,
        0xc1,
        0x64,
        0x60,
        0x7d,
        0x7e,
        0xd0,
        0xff,
        0x1_0000_0076,
    ] {
        let got = in_ring_3(event | USR | OS, user::SPIN, ROUNDS)?;
        check(format_args!("event {event:#x}"), got, 0)?;
    }
    Ok(Pass::Ok)
}

/// Checks that cycles stand still in HLT.
fn halted(_: &Context) -> Verdict {
    const SLEEP: u64 = 10_000_000;
    if !is_exact()? {
        return Ok(INEXACT);
    }
    apic::set_lvt_timer(WAKE.into());
    write(ctl(0), CYCLES | USR | OS | EN)?;
    let begin = tsc();
    apic::start_timer(SLEEP as u32 / 10);
    halt();
    let passed = tsc() - begin;
    write(ctl(0), 0)?;
    apic::start_timer(0);
    check_range("TSC", passed, SLEEP / 100, u64::MAX)?;
    check_range("cycles", read(ctr(0))?, 1, passed / 10)?;
    Ok(Pass::Ok)
}

/// Checks that CR4.PCE opens RDPMC to ring 3.
fn rdpmc_by_ring_3(_: &Context) -> Verdict {
    const VALUE: u64 = 0x1234_8765_4321;
    write(ctr(5), VALUE)?;
    set_pce(false);
    let closed = user::run(user::RDPMC, 5);
    set_pce(true);
    let open = user::run(user::RDPMC, 5);
    let absent = user::run(user::RDPMC, 6);
    set_pce(false);
    if (closed, absent) != (Err(Fault::GP), Err(Fault::GP)) {
        return Err(Failure(Text::new(format_args!(
            "no #GP: {closed:?}, {absent:?}"
        ))));
    }
    let (low, high) = open?;
    check("RAX", low, VALUE & 0xffff_ffff)?;
    check("RDX", high, VALUE >> 32)?;
    Ok(Pass::Ok)
}
