//! CPUID's description of the PMU. SDM vol. 2A, CPUID leaves 01H and 0AH; vol.
//! 3B, 20.2.

use super::{Context, Test};
use crate::apic;
use crate::instructions::cpuid;
use crate::msr::{GENERAL_ADDRESSES, PERF_CAPABILITIES};
use crate::pmu::read;
use vpmu_payload_harness::{Pass, Verdict, check, check_range};

pub(super) const TESTS: &[Test] = &[
    ("cpuid.vendor", vendor),
    ("cpuid.x2apic_id", x2apic_id),
    ("cpuid.leaf_0a", leaf_0a),
    ("cpuid.pdcm", pdcm),
];

/// Checks the vendor: kernels drive an architectural PMU on Intel's processors only.
fn vendor(_: &Context) -> Verdict {
    let [eax, ebx, ecx, edx] = cpuid(0, 0);
    check("EBX", ebx.into(), 0x756e_6547)?;
    check("EDX", edx.into(), 0x4965_6e69)?;
    check("ECX", ecx.into(), 0x6c65_746e)?;
    check_range("highest leaf", eax.into(), 0x0a, 0xff)?;
    Ok(Pass::Ok)
}

/// Checks that leaves 0BH and 1FH, where they are there, have this CPU's APIC ID.
fn x2apic_id(_: &Context) -> Verdict {
    let [highest, ..] = cpuid(0, 0);
    let mut pass = Pass::Skip("no leaf 0BH");
    for leaf in [0x0b, 0x1f] {
        let [_, processors, _, _] = cpuid(leaf, 0);
        if leaf <= highest && processors != 0 {
            for subleaf in 0..3 {
                let [_, _, _, id] = cpuid(leaf, subleaf);
                check(
                    format_args!("{leaf:#x}.{subleaf}"),
                    id.into(),
                    apic::id().into(),
                )?;
            }
            pass = Pass::Ok;
        }
    }
    Ok(pass)
}

fn leaf_0a(cx: &Context) -> Verdict {
    let c = cx.pmu.0;
    check_range("version", c.version.into(), 2, 5)?;
    let most = GENERAL_ADDRESSES.into();
    check_range("general counters", c.general.into(), 1, most)?;
    // At least 32 bits, which can be written by any means; less than 64, where no bit could be
    // reserved.
    check_range("width", c.general_width.into(), 32, 63)?;
    check_range("fixed width", c.fixed_width.into(), 32, 63)?;
    check("cycles are offered", u64::from(c.events) & 1, 1)?;
    let [eax, _, ecx, edx] = cpuid(0x0a, 0);
    check_range("known events", (eax >> 24).into(), 7, 31)?;
    check("reserved bits of EDX", u64::from(edx >> 20), 0)?;
    if c.version < 5 {
        check("ECX", ecx.into(), 0)?;
        check("EDX.AnyThread", u64::from(edx >> 13 & 7), 0)?;
    }
    Ok(Pass::Ok)
}

fn pdcm(cx: &Context) -> Verdict {
    if !cx.pmu.0.pdcm {
        return Ok(Pass::Skip("no IA32_PERF_CAPABILITIES"));
    }
    // Only a PMU that has LBR and the like may offer them. It offers all of PEBS or nothing.
    let pebs = if cx.pmu.0.has_pebs() { 0x44c0 } else { 0 };
    let value = read(PERF_CAPABILITIES)?;
    check("PERF_CAPABILITIES", value & !(0b11 << 12), pebs)?;
    Ok(Pass::Ok)
}
