//! Tests of every MSR with its reserved bits and the outcome of an access, version by version,
//! after SDM vol. 4, table 2-2, and vol. 3B, 20.2.

use crate::support::Guest;
use vpmu::x86::Outcome::{Done, GeneralProtection, NotHandled, Value};
use vpmu::x86::intel::Version::{V2, V3, V4, V5};
use vpmu::x86::intel::{Capability, Msr, Version};
use vpmu::x86::{PmuConfig, Ring, pebs};

/// The register at one address.
struct Row {
    address: u32,
    /// The value that it reads after reset; `None`: #GP.
    reads: Option<u64>,
    /// Bits that can be written; `None`: a write is #GP whatever its value.
    writable: Option<u64>,
    /// Whether a read returns what was written.
    keeps: bool,
}

const fn row(address: u32, reads: Option<u64>, writable: Option<u64>, keeps: bool) -> Row {
    Row {
        address,
        reads,
        writable,
        keeps,
    }
}

/// Returns a register that keeps what is written.
const fn kept(address: u32, reset: u64, writable: u64) -> Row {
    row(address, Some(reset), Some(writable), true)
}

/// Returns a register that acts on what is written, and reads as zero.
const fn command(address: u32, writable: u64) -> Row {
    row(address, Some(0), Some(writable), false)
}

const fn read_only(address: u32, value: u64) -> Row {
    row(address, Some(value), None, false)
}

const fn absent(address: u32) -> Row {
    row(address, None, None, false)
}

const WIDTH: u64 = (1 << 48) - 1;

/// Returns the MSRs of a PMU with 4 general counters and 3 fixed ones of 48 bits, with full-width
/// writes. In version 5, the fixed counters are 0, 2 and 3. The PMU has PEBS or not.
fn table(version: Version, pebs: bool) -> Vec<Row> {
    let select = match version {
        V2 | V5 => 0xffdf_ffff,
        V3 | V4 => 0xffff_ffff,
    };
    let (fixed, fixed_control) = match version {
        V2 => (0b0111, 0x0bbb),
        V3 | V4 => (0b0111, 0x0fff),
        V5 => (0b1101, 0xbb0b),
    };
    let counters = 0xf | fixed << 32;
    // These bits make a counter adaptive.
    let (select, fixed_control) = match (pebs, version) {
        (false, _) => (select, fixed_control),
        (true, V5) => (select | 1 << 34, fixed_control | 0x1101 << 32),
        (true, _) => (select | 1 << 34, fixed_control | 0x111 << 32),
    };
    let mut rows = Vec::new();
    for n in 0..4 {
        rows.push(kept(0x186 + n, 0, select));
        // A write ignores the high half, and the value kept depends on bit 31.
        rows.push(row(0xc1 + n, Some(0), Some(u64::MAX), false));
        rows.push(kept(0x4c1 + n, 0, WIDTH));
    }
    for n in 4..8 {
        rows.extend([absent(0x186 + n), absent(0xc1 + n), absent(0x4c1 + n)]);
    }
    for n in 0..7 {
        rows.push(if fixed >> n & 1 != 0 {
            kept(0x309 + n, 0, WIDTH)
        } else {
            absent(0x309 + n)
        });
    }
    rows.push(kept(0x38d, 0, fixed_control));
    rows.push(read_only(0x38e, 0));
    rows.push(kept(0x38f, 0xf, counters));
    // The capabilities are trap-like, with the registers, format 4, baseline.
    let capabilities = if pebs { 0x44c0 } else { 0 };
    rows.push(read_only(0x345, capabilities | 1 << 13));
    if pebs {
        rows.push(kept(0x3f1, 0, counters));
        // The groups of a record, and how many branch records the last of them has: 32 at most.
        rows.push(kept(0x3f2, 0, 0b1111 | 0x1f << 24));
        // The register takes canonical addresses only.
        rows.push(kept(0x600, 0, (1 << 47) - 1));
    } else {
        rows.extend([absent(0x3f1), absent(0x3f2), absent(0x600)]);
    }
    rows.push(kept(0x1d9, 0, 1 << 12));
    if version >= V4 {
        rows.push(command(0x390, counters | 0b11 << 58 | 0b11 << 62));
        rows.push(command(0x391, counters | 1 << 59 | 1 << 62));
        rows.push(read_only(0x392, 0));
    } else {
        rows.push(command(0x390, counters | 0b11 << 62));
        rows.extend([absent(0x391), absent(0x392)]);
    }
    rows
}

fn capability(version: Version, pebs: bool) -> Capability {
    Capability {
        pebs: pebs.then(pebs::Capability::new),
        general: 4,
        fixed: if version == V5 { 0b1101 } else { 0b0111 },
        ..Capability::new(version)
    }
}

fn guest((version, pebs): (Version, bool)) -> Guest {
    Guest::with(PmuConfig::new(capability(version, pebs)))
}

/// Returns each version, without PEBS and with it.
fn offers() -> impl Iterator<Item = (Version, bool)> {
    [V2, V3, V4, V5]
        .into_iter()
        .flat_map(|version| [(version, false), (version, true)])
}

#[test]
fn the_table_names_every_msr() {
    for offer in offers() {
        let mut named: Vec<u32> = table(offer.0, offer.1)
            .iter()
            .map(|row| row.address)
            .collect();
        let mut all: Vec<u32> = Msr::all().map(Msr::address).collect();
        named.sort_unstable();
        all.sort_unstable();
        assert_eq!(named, all);
    }
}

#[test]
fn every_msr_reads_and_refuses_as_the_table_says() {
    for offer in offers() {
        for row in table(offer.0, offer.1) {
            let mut guest = guest(offer);
            let context = format!("{offer:?} {:#x}", row.address);
            let expected = row.reads.map_or(GeneralProtection, Value);
            let read = guest.pmu.rdmsr(row.address, &mut guest.host);
            assert_eq!(read, expected, "{context}");
        }
    }
}

#[test]
fn every_bit_of_every_msr_is_kept_or_refused() {
    for offer in offers() {
        for row in table(offer.0, offer.1) {
            for bit in 0..64 {
                let mut guest = guest(offer);
                let value = 1 << bit;
                let context = format!("{offer:?} {:#x} bit {bit}", row.address);
                let before = guest.pmu.save(&mut guest.host);
                let written = guest.pmu.wrmsr(row.address, value, &mut guest.host);
                let writable = row.writable.is_some_and(|bits| value & bits != 0);
                let expected = if writable { Done } else { GeneralProtection };
                assert_eq!(written, expected, "{context}");
                if !writable {
                    let after = guest.pmu.save(&mut guest.host);
                    assert_eq!(after, before, "{context}: a refused write changes nothing");
                } else if row.keeps {
                    let read = guest.pmu.rdmsr(row.address, &mut guest.host);
                    assert_eq!(read, Value(value), "{context}");
                }
            }
            if let (Some(writable), true) = (row.writable, row.keeps) {
                let mut guest = guest(offer);
                let written = guest.pmu.wrmsr(row.address, writable, &mut guest.host);
                assert_eq!(written, Done);
                let read = guest.pmu.rdmsr(row.address, &mut guest.host);
                assert_eq!(read, Value(writable), "all of it: {:#x}", row.address);
            }
        }
    }
}

#[test]
fn an_msr_of_someone_else_is_not_handled() {
    let mut guest = guest((V5, true));
    for address in [
        0x10,
        0x1b,
        0x198,
        0x1c9,
        0x1d8,
        0x3f0,
        0x3f3,
        0x3f6,
        0x601,
        0x6e0,
        0x834,
        0xc001_0000,
    ] {
        assert_eq!(guest.pmu.rdmsr(address, &mut guest.host), NotHandled);
        assert_eq!(guest.pmu.wrmsr(address, 0, &mut guest.host), NotHandled);
    }
}

#[test]
fn a_legacy_write_extends_bit_31() {
    let mut guest = guest((V2, false));
    for (written, read) in [
        (0x7fff_ffff, 0x7fff_ffff),
        (0x8000_0000, 0xffff_8000_0000),
        (0xffff_ffff_ffff_fc18, 0xffff_ffff_fc18),
        (0x1234_5678_0000_0001, 1),
    ] {
        guest.write(Msr::Pmc(1), written);
        assert_eq!(guest.read(Msr::Pmc(1)), read, "{written:#x}");
        assert_eq!(guest.read(Msr::FullWidthPmc(1)), read);
    }
    guest.write(Msr::FullWidthPmc(1), 0x1234_5678_9abc);
    assert_eq!(guest.read(Msr::Pmc(1)), 0x1234_5678_9abc);
}

#[test]
fn what_the_capability_leaves_out_is_not_there() {
    let bare = Capability {
        pdcm: false,
        full_width_writes: false,
        ..Capability::new(V2)
    };
    let mut guest = Guest::with(PmuConfig::new(bare));
    for address in [0x345, 0x4c1, 0x4c8] {
        let read = guest.pmu.rdmsr(address, &mut guest.host);
        assert_eq!(read, GeneralProtection, "{address:#x}");
        let written = guest.pmu.wrmsr(address, 0, &mut guest.host);
        assert_eq!(written, GeneralProtection, "{address:#x}");
    }
    assert_eq!(bare.leaf_01_ecx(), 0);

    let more = Capability {
        freeze_while_smm: true,
        other_debugctl: 1 << 1,
        ..Capability::new(V2)
    };
    let mut guest = Guest::with(PmuConfig::new(more));
    assert_eq!(guest.read(Msr::PerfCapabilities), 1 << 12 | 1 << 13);
    guest.write(Msr::DebugCtl, 1 << 14 | 1 << 12 | 1 << 1);
    assert_eq!(guest.read(Msr::DebugCtl), 0x5002);
    for refused in [1 << 0, 1 << 11, 1 << 13, 1 << 15, 1 << 63] {
        let written = guest
            .pmu
            .wrmsr(Msr::DebugCtl.address(), refused, &mut guest.host);
        assert_eq!(written, GeneralProtection, "{refused:#x}");
    }
}

#[test]
fn rdpmc_takes_each_form_of_its_index() {
    let mut guest = guest((V5, false));
    for n in 0..4 {
        guest.write(Msr::FullWidthPmc(n), 0x10 + u64::from(n));
    }
    for n in [0, 2, 3] {
        guest.write(Msr::FixedCtr(n), 0x20 + u64::from(n));
    }
    let mut rdpmc = |ecx| guest.pmu.rdpmc(ecx, Ring::Kernel, false, &mut guest.host);
    for n in 0..4 {
        assert_eq!(rdpmc(n), Value(0x10 + u64::from(n)));
    }
    for n in [0, 2, 3] {
        assert_eq!(rdpmc(0x4000_0000 + n), Value(0x20 + u64::from(n)));
    }
    for ecx in [
        4,
        31,
        0x100,       // bits 15:8 are part of the index
        0x1_0000,    // an unknown type
        0x2000_0000, // performance metrics
        0x4000_0001, // a gap in the fixed counters
        0x4000_0004,
        0x4000_0100,
        0x8000_0000, // a fast read
        0xc000_0000,
        u32::MAX,
    ] {
        assert_eq!(rdpmc(ecx), GeneralProtection, "{ecx:#x}");
    }
}

#[test]
fn user_space_needs_cr4_pce() {
    let mut guest = guest((V2, false));
    for (ring, pce, allowed) in [
        (Ring::Kernel, false, true),
        (Ring::Kernel, true, true),
        (Ring::User, false, false),
        (Ring::User, true, true),
    ] {
        for ecx in [0, 0x4000_0002] {
            let read = guest.pmu.rdpmc(ecx, ring, pce, &mut guest.host);
            assert_eq!(read == Value(0), allowed, "{ring:?} {pce}");
        }
        let absent = guest.pmu.rdpmc(9, ring, pce, &mut guest.host);
        assert_eq!(absent, GeneralProtection);
    }
}

#[test]
fn in_use_tells_who_is_configured() {
    let mut guest = guest((V4, true));
    guest.write(Msr::PerfEvtSel(1), 0x3c);
    guest.write(Msr::PerfEvtSel(2), 0x4f00);
    guest.write(Msr::FixedCtrCtrl, 0x210);
    assert_eq!(guest.read(Msr::GlobalInuse), 1 << 1 | 1 << 33 | 1 << 34);
    guest.write(Msr::FixedCtrCtrl, 0x800);
    assert_eq!(guest.read(Msr::GlobalInuse), 1 << 1 | 1 << 63);
    guest.write(Msr::FixedCtrCtrl, 0);
    guest.write(Msr::PebsEnable, 1);
    assert_eq!(guest.read(Msr::GlobalInuse), 1 << 1 | 1 << 63);
}
