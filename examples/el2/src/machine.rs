//! Boot, stage 2, and the exits that have nothing to do with the PMU.

use core::arch::{asm, global_asm};
use core::panic::PanicInfo;
use core::{ptr, slice};

use crate::{gic, pmu};

global_asm!(include_str!("../entry.s"));

macro_rules! read {
    ($name:expr) => {{
        let value: u64;
        // SAFETY: reading a system register changes no memory.
        unsafe { core::arch::asm!(concat!("mrs {}, ", $name), out(reg) value, options(nostack)) }
        value
    }};
}

macro_rules! write {
    ($name:expr, $value:expr) => {{
        let value: u64 = $value;
        // SAFETY: stage 2 keeps the guest from the hypervisor, whatever else is written.
        unsafe { core::arch::asm!(concat!("msr ", $name, ", {}"), "isb", in(reg) value, options(nostack)) }
    }};
}
pub(crate) use {read, write};

/// A vCPU that has left its guest, as `entry.s` stores it.
#[repr(C)]
pub(crate) struct Frame {
    pub(crate) x: [u64; 31],
    pub(crate) pc: u64,
    pub(crate) pstate: u64,
}

const RAM: u64 = 0x4000_0000;
const GIB: u64 = 1 << 30;
const BLOCK: u64 = 2 << 20;
/// The hypervisor's block, and the guest's kernel behind it.
const OWN: u64 = RAM + BLOCK;
const GUEST: u64 = RAM + 2 * BLOCK;

#[repr(C, align(4096))]
struct Table([u64; 512]);
static mut LEVEL_1: Table = Table([0; 512]);
static mut LEVEL_2: Table = Table([0; 512]);

/// Block descriptors of stage 2 (DDI 0487, D8.3): valid, accessed, readable and writable; normal write-back memory that is
/// inner shareable, or a device.
const NORMAL: u64 = 1 | 0b1111 << 2 | 0b11 << 6 | 0b11 << 8 | 1 << 10;
const DEVICE: u64 = 1 | 0b0001 << 2 | 0b11 << 6 | 1 << 10;
const TABLE: u64 = 0b11;

/// Maps every address to itself but the hypervisor's own.
fn stage_2(ram_end: u64) {
    let block = |n: u64| {
        let at = n * GIB;
        at | if (RAM..ram_end).contains(&at) {
            NORMAL
        } else {
            DEVICE
        }
    };
    // SAFETY: one CPU, at boot, and nobody else has the tables.
    unsafe {
        let (level_1, level_2) = (&raw mut LEVEL_1.0, &raw mut LEVEL_2.0);
        for n in 0..512 {
            (*level_1)[n as usize] = block(n);
            let at = RAM + n * BLOCK;
            (*level_2)[n as usize] = if at == OWN { 0 } else { at | NORMAL };
        }
        (*level_1)[(RAM / GIB) as usize] = level_2 as u64 | TABLE;
    }
    write!("vttbr_el2", &raw const LEVEL_1 as u64);
    // 39 bits from level 1, 4 KiB granule, write-back walks, 40 physical bits.
    write!(
        "vtcr_el2",
        1 << 31 | 2 << 16 | 0b11 << 12 | 0b01 << 10 | 0b01 << 8 | 1 << 6 | 25
    );
    // SAFETY: forgets translations, which costs time.
    unsafe {
        asm!(
            "dsb ish",
            "tlbi vmalls12e1",
            "dsb ish",
            "isb",
            options(nostack)
        );
    }
}

/// Takes the hypervisor's memory out of the device tree at `tree`, and returns where RAM ends. The memory's node has one range,
/// as QEMU writes it (Devicetree Specification 0.4, chapter 5).
fn take_memory(tree: u64) -> u64 {
    // SAFETY: the bootloader has put a device tree there, and no guest runs yet.
    let words = unsafe {
        let length = u32::from_be(ptr::read((tree + 4) as *const u32));
        slice::from_raw_parts_mut(tree as *mut u32, length as usize / 4)
    };
    let word = |words: &[u32], n: usize| u32::from_be(words.get(n).copied().unwrap_or(0));
    let mut n = word(words, 2) as usize / 4;
    let mut in_memory = false;
    loop {
        match word(words, n) {
            // A node begins, with its name: "memory@...".
            1 => {
                in_memory = word(words, n + 1) == u32::from_be_bytes(*b"memo");
                n += 1;
                while !word(words, n).to_be_bytes().contains(&0) {
                    n += 1;
                }
                n += 1;
            }
            // A property: its length, its name, its value.
            3 => {
                let bytes = word(words, n + 1) as usize;
                let range = (0..4).map(|i| u64::from(word(words, n + 3 + i)));
                let range = range.fold([0; 2], |[start, size], part| {
                    [start << 32 | size >> 32, size << 32 | part]
                });
                if in_memory && bytes == 16 && range[0] == RAM {
                    let (start, size) = (GUEST, range[1] - (GUEST - RAM));
                    let cells =
                        [start >> 32, start, size >> 32, size].map(|cell| (cell as u32).to_be());
                    words[n + 3..n + 7].copy_from_slice(&cells);
                    return range[0] + range[1];
                }
                n += 3 + bytes.div_ceil(4);
            }
            2 | 4 => n += 1,
            _ => panic!(),
        }
    }
}

/// HCR_EL2: stage 2; AArch64; physical interrupts come here and virtual ones go to the guest; SMC traps; cache operations by set
/// and way clean, too; pointer authentication and tags do not trap.
const HCR: u64 = 1 | 1 << 1 | 0b11 << 3 | 1 << 19 | RW | 0b11 << 40 | 1 << 56;
const RW: u64 = 1 << 31;
/// HCR_EL2.E2H, without which newer cores do not run: SCTLR_EL1 and others of EL1's have other names then, and CPTR_EL2 and
/// CNTHCTL_EL2 other fields.
const E2H: u64 = 1 << 34;

/// SCTLR_EL1 with its RES1 bits alone.
const SCTLR_EL1: u64 = 0x30d0_0800;

/// Called by `entry.s`; returns where the guest begins.
#[unsafe(no_mangle)]
extern "C" fn boot(tree: u64) -> u64 {
    stage_2(take_memory(tree));
    // Floating point and SVE do not trap, the physical counter and timer neither.
    let e2h = match read!("id_aa64mmfr1_el1") >> 8 & 0xf {
        0 => 0,
        _ => E2H,
    };
    write!("hcr_el2", RW | e2h);
    if e2h != 0 {
        write!("cptr_el2", 0b11 << 20 | 0b11 << 16);
        write!("cnthctl_el2", 0b11 << 10);
        write!("s3_5_c1_c0_0", SCTLR_EL1);
    } else {
        write!("cptr_el2", 0x22ff);
        write!("cnthctl_el2", 0b11);
        write!("sctlr_el1", SCTLR_EL1);
    }
    if read!("id_aa64pfr0_el1") >> 32 & 0xf != 0 {
        write!("s3_4_c1_c2_0", 0xf); // ZCR_EL2.LEN
    }
    if read!("id_aa64mmfr1_el1") >> 40 & 0xf != 0 {
        // HCRX_EL2: MSCEn, TCR2En, SCTLR2En.
        write!("s3_4_c1_c2_2", 1 << 11 | 1 << 14 | 1 << 15);
    }
    if read!("id_aa64mmfr0_el1") >> 56 & 0xf != 0 {
        // HFGRTR_EL2 and HFGWTR_EL2: those bits that trap when they are zero.
        write!("s3_4_c1_c1_4", 0x3ff << 54 | 1 << 50);
        write!("s3_4_c1_c1_5", 0x3ff << 54 | 1 << 50);
    }
    write!("cntvoff_el2", 0);
    write!("vpidr_el2", read!("midr_el1"));
    write!("vmpidr_el2", read!("mpidr_el1"));
    // The probe needs HCR_EL2 without stage 2, and puts it back.
    pmu::init();
    gic::init();
    write!("hcr_el2", HCR | e2h);
    GUEST
}

/// ESR_EL2.EC.
const HVC: u64 = 0x16;
const SMC: u64 = 0x17;
const SYSTEM_REGISTER: u64 = 0x18;
/// ISS of a write of ICC_SGI1R_EL1 (S3_0_C12_C11_5), but for Rt.
const SGI1R: u64 = 3 << 20 | 5 << 17 | 12 << 10 | 11 << 1;
const RT: u64 = 0x1f << 5;
/// The PSCI functions that a guest with one CPU needs (Arm DEN 0022): version, affinity information, migration, off, reset,
/// features.
const PSCI: [u64; 5] = [
    0x8400_0000,
    0x8400_0006,
    0x8400_0008,
    0x8400_0009,
    0x8400_000a,
];

const SYSTEM_OFF: u64 = 0x8400_0008;

/// Says what the PMU has cost, on the serial port (PL011) of QEMU's virt machine.
fn report() {
    struct Port;
    impl core::fmt::Write for Port {
        fn write_str(&mut self, text: &str) -> core::fmt::Result {
            for byte in text.bytes() {
                // SAFETY: the data register of the port. No MMU is on here, and QEMU's port is never full.
                unsafe { ptr::write_volatile(0x0900_0000 as *mut u32, byte.into()) }
            }
            Ok(())
        }
    }
    let (exits, pmis) = pmu::statistics();
    let _ = core::fmt::Write::write_fmt(
        &mut Port,
        format_args!("el2: {exits} exits by the PMU, {pmis} PMIs\r\n"),
    );
}

#[unsafe(no_mangle)]
extern "C" fn synchronous(frame: &mut Frame) {
    pmu::exited();
    let esr = read!("esr_el2");
    match esr >> 26 {
        HVC => frame.x[0] = u64::MAX,
        SMC => {
            if frame.x[0] == SYSTEM_OFF {
                report();
            }
            frame.x[0] = if PSCI.contains(&frame.x[0]) {
                firmware(&frame.x)
            } else {
                u64::MAX
            };
            frame.pc += 4;
        }
        SYSTEM_REGISTER if esr & 0x01ff_ffff & !RT == SGI1R => {
            let rt = (esr >> 5 & 0x1f) as usize;
            write!("icc_sgi1r_el1", frame.x.get(rt).copied().unwrap_or(0));
            frame.pc += 4;
        }
        _ if pmu::access(esr, frame) => {}
        // Nothing there: an undefined instruction, whatever it was.
        _ => pmu::undefined(frame),
    }
}

#[unsafe(no_mangle)]
extern "C" fn interrupt(_: &mut Frame) {
    pmu::exited();
    gic::interrupts();
}

/// Calls the firmware for the guest.
fn firmware(x: &[u64; 31]) -> u64 {
    let answer;
    // SAFETY: PSCI as the guest asks, of functions that start no other CPU.
    unsafe {
        asm!("smc #0", inout("x0") x[0] => answer, inout("x1") x[1] => _, inout("x2") x[2] => _,
            inout("x3") x[3] => _, options(nostack));
    }
    answer
}

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    loop {
        core::hint::spin_loop();
    }
}
