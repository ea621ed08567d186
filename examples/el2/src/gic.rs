//! Physical interrupts (GICv3): each is taken here and goes on into a list register. Distributor and redistributor are the guest's.

use core::cell::Cell;
use core::ptr;

use crate::machine::{read, write};
use crate::pmu;

/// The redistributor's frame of SGIs and PPIs on QEMU's virt machine, and the maintenance interrupt's PPI.
const SGI_FRAME: u64 = 0x080b_0000;
const ISENABLER0: u64 = SGI_FRAME + 0x100;
const MAINTENANCE: u64 = 25;
/// INTIDs from here on say that there is none.
const SPECIAL: u64 = 1020;
/// SGIs have nothing to deactivate.
const SGIS: u64 = 16;

/// List registers (ICH_LR<n>_EL2): pending; group 1; its deactivation deactivates the physical interrupt.
const PENDING: u64 = 1 << 62;
const GROUP_1: u64 = 1 << 60;
const HARDWARE: u64 = 1 << 61;

/// ICH_HCR_EL2: on, and the maintenance interrupt where nothing is pending any more.
const ON: u64 = 1;
const NO_PENDING: u64 = 1 << 3;

/// Interrupts that wait for a list register, by INTID.
struct Waiting([Cell<u32>; 32]);
// SAFETY: one CPU, on which no exit interrupts another.
unsafe impl Sync for Waiting {}
static WAITING: Waiting = Waiting([const { Cell::new(0) }; 32]);

pub(crate) fn init() {
    write!("icc_sre_el2", 0xf);
    write!("icc_pmr_el1", 0xff);
    // EOImode: an end of interrupt drops the priority, and the guest deactivates.
    write!("icc_ctlr_el1", 1 << 1);
    write!("icc_igrpen1_el1", 1);
    write!("ich_vmcr_el2", 0);
    write!("ich_hcr_el2", ON);
}

/// Takes what is pending.
pub(crate) fn interrupts() {
    // Each that is taken is active then, and comes no second time: the loop ends.
    loop {
        let intid = read!("icc_iar1_el1") & 0xff_ffff;
        if intid >= SPECIAL {
            break;
        }
        write!("icc_eoir1_el1", intid);
        let is_guests = match intid {
            MAINTENANCE => false,
            pmu::PPI => pmu::interrupt(),
            _ => true,
        };
        if intid < SGIS || !is_guests {
            write!("icc_dir_el1", intid);
        }
        if is_guests {
            inject(intid, intid >= SGIS);
        }
    }
    refill();
}

/// Gives the guest interrupt `intid`; with `hardware` the guest's deactivation is the physical one's.
fn inject(intid: u64, hardware: bool) {
    let empty = (read!("ich_elrsr_el2") as u32).trailing_zeros();
    if empty == 32 {
        let word = &WAITING.0[(intid / 32) as usize % 32];
        word.set(word.get() | 1 << (intid % 32));
        return;
    }
    let physical = if hardware { HARDWARE | intid << 32 } else { 0 };
    let priority = 0x80 << 48;
    lr(empty, Some(PENDING | GROUP_1 | priority | physical | intid));
}

/// Moves interrupts that wait into list registers, as long as there are any.
fn refill() {
    let mut full = false;
    for (n, word) in (0..).zip(&WAITING.0) {
        while word.get() != 0 && !full {
            full = read!("ich_elrsr_el2") == 0;
            if !full {
                let bit = word.get().trailing_zeros();
                word.set(word.get() & !(1 << bit));
                let intid = 32 * n + u64::from(bit);
                inject(
                    intid,
                    intid >= SGIS && intid != pmu::PPI || pmu::IS_WIRED && intid == pmu::PPI,
                );
            }
        }
    }
    if full {
        // The guest has disabled the maintenance interrupt with all others.
        // SAFETY: a register of the redistributor's.
        unsafe { ptr::write_volatile(ISENABLER0 as *mut u32, 1 << MAINTENANCE) }
    }
    write!("ich_hcr_el2", if full { ON | NO_PENDING } else { ON });
}

/// Makes the virtual interrupt of the guest's PMU agree with a computed level.
#[cfg(feature = "emulated")]
pub(crate) fn set_level(level: bool) {
    let held = (0..16).find(|&n| {
        let value = lr(n, None);
        value >> 62 != 0 && value & 0xffff_ffff == pmu::PPI
    });
    match (held, level) {
        (None, true) => inject(pmu::PPI, false),
        // Pending again, behind the one that the guest handles.
        (Some(n), true) => {
            lr(n, Some(lr(n, None) | PENDING));
        }
        (Some(n), false) => {
            lr(n, Some(lr(n, None) & !PENDING));
        }
        (None, false) => {
            let word = &WAITING.0[0];
            word.set(word.get() & !(1 << pmu::PPI));
        }
    }
}

/// Reads list register `n`, or writes it.
fn lr(n: u32, value: Option<u64>) -> u64 {
    macro_rules! by_number {
        ($($number:literal)*) => {
            match (n, value) {
                $(
                    ($number, None) => read!(concat!("ich_lr", $number, "_el2")),
                    ($number, Some(value)) => {
                        write!(concat!("ich_lr", $number, "_el2"), value);
                        value
                    }
                )*
                _ => 0,
            }
        };
    }
    // Those beyond ICH_VTR_EL2.ListRegs do not exist.
    if u64::from(n) > read!("ich_vtr_el2") & 0x1f {
        return 0;
    }
    by_number!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
}
