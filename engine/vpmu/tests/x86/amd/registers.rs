//! Tests of every MSR with its bits and the outcome of an access, interface by interface, after the PPRs' pages of the
//! registers.

use super::behaviour::Guest;
use vpmu::x86::Outcome::{Done, GeneralProtection, NotHandled, Value};
use vpmu::x86::Ring;
use vpmu::x86::amd::Interface::{self, Core, Legacy, V2};
use vpmu::x86::amd::Msr;

const ALL: [Interface; 3] = [Legacy, Core, V2];

/// The register at one address: the value it reads after reset, and the bits that keep what is written.
struct Row(u32, u64, u64);

const CONTROL: u64 = 0x0000_030f_ffd7_ffff;
const COUNTER: u64 = 0x0000_ffff_ffff_ffff;

/// Returns the registers that exist. All other registers of the PMU are #GP.
fn table(interface: Interface) -> Vec<Row> {
    let mut rows = Vec::new();
    for n in 0..4 {
        rows.push(Row(0xc001_0000 + n, 0, CONTROL));
        rows.push(Row(0xc001_0004 + n, 0, COUNTER));
    }
    if interface >= Core {
        for n in 0..6 {
            rows.push(Row(0xc001_0200 + 2 * n, 0, CONTROL));
            rows.push(Row(0xc001_0201 + 2 * n, 0, COUNTER));
        }
    }
    if interface >= V2 {
        rows.push(Row(0xc000_0300, 0, 0));
        rows.push(Row(0xc000_0301, 0x3f, 0x3f));
        rows.push(Row(0xc000_0302, 0, 0));
        rows.push(Row(0xc000_0303, 0, 0));
    }
    rows
}

#[test]
fn what_exists_reads_and_keeps_its_bits_and_ignores_the_others() {
    for interface in ALL {
        for Row(address, reset, kept) in table(interface) {
            for bit in 0..64 {
                let mut guest = Guest::new(interface);
                assert_eq!(guest.rdmsr(address), Value(reset), "{address:#x}");
                let value = 1_u64 << bit;
                assert_eq!(guest.wrmsr(address, value), Done, "{address:#x} {value:#x}");
                assert_eq!(guest.rdmsr(address), Value(value & kept), "{address:#x}");
                assert_eq!(guest.wrmsr(address, u64::MAX), Done);
                assert_eq!(guest.rdmsr(address), Value(kept), "{address:#x}");
            }
        }
    }
}

#[test]
fn what_does_not_exist_is_a_fault_and_what_is_nobodys_is_left_alone() {
    for interface in ALL {
        let mut guest = Guest::new(interface);
        let exists = |address| table(interface).iter().any(|row| row.0 == address);
        for address in Msr::all().map(Msr::address).filter(|&it| !exists(it)) {
            assert_eq!(guest.rdmsr(address), GeneralProtection, "{address:#x}");
            assert_eq!(guest.wrmsr(address, 0), GeneralProtection, "{address:#x}");
        }
        for address in [
            0xc1,
            0x186,
            0x38f,
            0xc000_02ff,
            0xc000_0304,
            0xc001_0008,
            0xc001_020c,
            0xc001_0230,
            0xc001_1030,
        ] {
            assert_eq!(guest.rdmsr(address), NotHandled, "{address:#x}");
            assert_eq!(guest.wrmsr(address, 0), NotHandled, "{address:#x}");
        }
    }
}

#[test]
fn the_first_four_counters_have_two_names_each() {
    let mut guest = Guest::new(Core);
    for n in 0..4 {
        guest.write(Msr::LegacyCtl(n), 0x0053_0076);
        assert_eq!(guest.read(Msr::Ctl(n)), 0x0053_0076);
        guest.write(Msr::Ctr(n), 77);
        assert_eq!(guest.read(Msr::LegacyCtr(n)), 77);
    }
    assert_eq!(guest.read(Msr::Ctl(4)), 0);
}

#[test]
fn rdpmc_takes_the_number_of_a_counter() {
    for (interface, count) in [(Legacy, 4), (Core, 6), (V2, 6)] {
        let mut guest = Guest::new(interface);
        for n in 0..count {
            let ctr = match interface {
                Legacy => Msr::LegacyCtr(n),
                Core | V2 => Msr::Ctr(n),
            };
            guest.write(ctr, 0xabcd_0000_0000 + u64::from(n));
            let want = Value(0xabcd_0000_0000 + u64::from(n));
            for (ring, pce, outcome) in [
                (Ring::Kernel, false, want),
                (Ring::User, true, want),
                (Ring::User, false, GeneralProtection),
            ] {
                assert_eq!(guest.rdpmc(n.into(), ring, pce), outcome);
            }
        }
        for ecx in [count.into(), 10, 0x100, 0x4000_0000, 1 << 31, u32::MAX] {
            assert_eq!(
                guest.rdpmc(ecx, Ring::Kernel, true),
                GeneralProtection,
                "{ecx:#x}"
            );
        }
    }
}
