//! Accesses to the redistributor that try to switch off the interrupts that a monitor below needs
//! there: its maintenance interrupt, and the PMU's interrupt when the monitor emulates a PMU. After
//! each access, more interrupts than list registers and the PMU's must still arrive.
//!
//! On a machine without a monitor, the GIC answers the same accesses with nothing or an abort. The
//! tests then enable the interrupts that they use, as the architecture allows.

use super::{Context, Test, interrupt, sgi};
use crate::gic::PRIORITY;
use crate::normal;
use vpmu_payload_harness::Verdict;

pub(super) const TESTS: &[Test] = &[
    ("gic.frame_unaligned", unaligned),
    ("gic.frame_widths", widths),
    ("gic.frame_priorities", priorities),
    ("gic.frame_configuration", configuration),
];

const IGROUPR0: u64 = 0x080;
const ICENABLER0: u64 = 0x180;
const ICPENDR0: u64 = 0x280;
const ICACTIVER0: u64 = 0x380;
const IPRIORITYR: u64 = 0x400;
const ICFGR1: u64 = 0xc04;
const INMIR0: u64 = 0xf80;

/// The maintenance interrupt that Arm's Base System Architecture recommends, on every machine tried.
const MAINTENANCE: u32 = 25;

/// Checks that interrupts still come: sixteen at once, and the PMU's.
fn alive(cx: &Context) -> Verdict {
    sgi::many(cx)?;
    crate::percpu::this().reset();
    interrupt::delivered(cx)
}

/// Stores to addresses within and before the register, each store touching some of its bytes.
fn unaligned(cx: &Context) -> Verdict {
    normal::mapped(|| {
        for register in [ICENABLER0, ICPENDR0, ICACTIVER0] {
            for bytes in [2, 4, 8] {
                for first in 1 - i64::from(bytes)..4 {
                    let address = cx
                        .gic
                        .private()
                        .wrapping_add_signed(register as i64 + first);
                    // A fault is as good an answer as any.
                    if !address.is_multiple_of(bytes.into()) {
                        normal::store_ones(address, bytes);
                    }
                }
            }
        }
    })?;
    alive(cx)
}

/// Stores of widths that the registers do not have.
fn widths(cx: &Context) -> Verdict {
    for register in [ICENABLER0, ICPENDR0, ICACTIVER0] {
        for bytes in [1, 2, 8] {
            for part in (0..4).step_by(bytes.into()) {
                normal::store_ones(cx.gic.private() + register + part, bytes);
            }
        }
        // This doubleword has the previous register as its upper half.
        normal::store_ones(cx.gic.private() + register - 8, 8);
    }
    alive(cx)
}

/// Writes the least urgent priority for every PPI, byte by byte and word by word.
fn priorities(cx: &Context) -> Verdict {
    for bytes in [1, 4, 8] {
        for intid in (16..32).step_by(bytes.into()) {
            normal::store_ones(cx.gic.private() + IPRIORITYR + intid, bytes);
        }
    }
    normal::mapped(|| {
        normal::store_ones(
            cx.gic.private() + IPRIORITYR + u64::from(MAINTENANCE) - 2,
            4,
        );
    })?;
    // The guest sets its own priorities as it pleases.
    for intid in 16..32 {
        if intid != MAINTENANCE {
            cx.gic.set_priority(intid, PRIORITY);
        }
    }
    alive(cx)
}

/// Makes the maintenance interrupt an edge, a group 0 interrupt and a non-maskable one.
fn configuration(cx: &Context) -> Verdict {
    let bit = 1 << MAINTENANCE;
    cx.gic
        .change_private(ICFGR1, |config| config | 2 << ((MAINTENANCE - 16) * 2));
    cx.gic.change_private(IGROUPR0, |groups| groups & !bit);
    cx.gic.change_private(INMIR0, |interrupts| interrupts | bit);
    let verdict = alive(cx);
    cx.gic
        .change_private(INMIR0, |interrupts| interrupts & !bit);
    cx.gic.change_private(IGROUPR0, |groups| groups | bit);
    verdict
}
