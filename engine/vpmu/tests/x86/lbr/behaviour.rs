//! Last branch records as a guest's kernel uses them. SDM vol. 3B, chapter 19; APM vol. 2, 13.1.1.

use crate::support::FakeHost;
use vpmu::counter::Policy;
use vpmu::x86::lbr::{self, Branch, Kind, Statistics};
use vpmu::x86::{ArchEvent, Capability, CounterConfig, Outcome, Pmu, PmuConfig, Ring};
use vpmu::x86::{amd, intel};

const LBR_CTL: u32 = 0x14ce;
const LBR_DEPTH: u32 = 0x14cf;
const INFO: u32 = 0x1200;
const FROM: u32 = 0x1500;
const TO: u32 = 0x1600;
const DEBUGCTL: u32 = 0x1d9;
/// Enabled, both rings, every kind.
const EVERYTHING: u64 = 0x7f_0007;
/// Enabled, calls and returns of user space in call-stack mode: what Linux asks for.
const CALLS: u64 = 0x38_000d;
const FREEZE_LBRS_ON_PMI: u64 = 1 << 11;

fn intel(lbr: lbr::intel::Capability) -> Capability {
    Capability::Intel(intel::Capability {
        lbr: Some(lbr),
        ..intel::Capability::new(intel::Version::V5)
    })
}

fn amd() -> Capability {
    Capability::Amd(amd::Capability {
        lbr: Some(lbr::amd::Capability::default()),
        ..amd::Capability::new(amd::Interface::V2)
    })
}

struct Guest {
    pmu: Pmu,
    host: FakeHost<CounterConfig>,
}

impl Guest {
    /// Returns a guest whose counter 0 counts instructions and interrupts.
    fn new(capability: Capability, follows: bool) -> Self {
        let mut host = FakeHost::new(Policy::ReusePaused);
        host.follows = follows;
        let pmu = Pmu::new(PmuConfig::new(capability)).expect("possible");
        let mut guest = Self { pmu, host };
        let [select, gate] = match capability {
            Capability::Intel(_) => [0x186, 0x38f],
            Capability::Amd(_) => [0xc001_0200, 0xc000_0301],
        };
        guest.write(select, 0x0053_00c0);
        guest.write(gate, 1);
        guest
    }

    fn write(&mut self, address: u32, value: u64) {
        let written = self.pmu.wrmsr(address, value, &mut self.host);
        assert_eq!(written, Outcome::Done, "{address:#x} = {value:#x}");
    }

    fn refused(&mut self, address: u32, value: u64) {
        let written = self.pmu.wrmsr(address, value, &mut self.host);
        assert_eq!(
            written,
            Outcome::GeneralProtection,
            "{address:#x} = {value:#x}"
        );
    }

    fn read(&mut self, address: u32) -> u64 {
        match self.pmu.rdmsr(address, &mut self.host) {
            Outcome::Value(value) => value,
            other => panic!("read of {address:#x} ended {other:?}"),
        }
    }

    fn overflow(&mut self) -> bool {
        let (event, times) = (ArchEvent::Instructions, 1 << 48);
        self.pmu.emulated(event, times, Ring::User, &mut self.host)
    }

    fn branch(&mut self, kind: Kind, from: u64, to: u64) -> bool {
        self.pmu.branch(&branch(kind, from, to), &mut self.host)
    }

    /// Returns the addresses in the records, the most recent first, up to the first that is none.
    fn froms(&mut self) -> Vec<u64> {
        let depth = self.read(LBR_DEPTH) as u32;
        let all = (0..depth).map(|n| self.read(FROM + n)).collect::<Vec<_>>();
        all.into_iter().take_while(|&from| from != 0).collect()
    }
}

fn branch(kind: Kind, from: u64, to: u64) -> Branch {
    Branch {
        from,
        to,
        kind,
        from_ring: Ring::User,
        to_ring: Ring::User,
        mispredicted: None,
        cycles: None,
    }
}

#[test]
fn cpuid_says_what_is_there() {
    let lbr = lbr::intel::Capability {
        depths: 0b1010,
        mispredict: true,
        ..lbr::intel::Capability::new()
    };
    let Capability::Intel(with) = intel(lbr) else {
        panic!("Intel's");
    };
    assert_eq!(with.check(), Ok(()));
    assert_eq!(with.leaf_07_edx(), 1 << 19);
    let leaf = with.leaf_1c();
    assert_eq!((leaf.eax, leaf.ebx, leaf.ecx), (0x8000_000a, 0b11, 0b101));
    assert_eq!(with.perf_capabilities() & 0x3f, 0x3f);

    let without = intel::Capability::new(intel::Version::V5);
    assert_eq!((without.leaf_07_edx(), without.leaf_1c().eax), (0, 0));
    assert_eq!(without.perf_capabilities() & 0x3f, 0);

    let Capability::Amd(with) = amd() else {
        panic!("AMD's");
    };
    let leaf = with.leaf_8000_0022();
    assert_eq!((leaf.eax, leaf.ebx), (0b111, 16 << 4 | 6));
    let older = amd::Capability {
        interface: amd::Interface::Core,
        ..with
    };
    assert_eq!(older.offered_lbr(), None, "nothing would freeze them");
}

#[test]
fn what_cannot_be_is_refused() {
    let good = lbr::intel::Capability::new();
    let of = |lbr, version| intel::Capability {
        lbr: Some(lbr),
        ..intel::Capability::new(version)
    };
    let depths = |depths| lbr::intel::Capability { depths, ..good };
    let wide = lbr::intel::Capability {
        linear_address_bits: 52,
        ..good
    };
    for capability in [
        of(depths(0), intel::Version::V5),
        of(depths(0b1_0000), intel::Version::V5),
        of(wide, intel::Version::V5),
        of(good, intel::Version::V3),
    ] {
        assert_eq!(capability.check(), Err(intel::ConfigError::Lbr));
    }
    assert_eq!(of(good, intel::Version::V4).check(), Ok(()));
}

#[test]
fn a_guest_that_is_not_offered_them_does_not_have_the_registers() {
    let intel = Capability::Intel(intel::Capability::new(intel::Version::V5));
    let amd = Capability::Amd(amd::Capability::new(amd::Interface::V2));
    for capability in [intel, amd] {
        let mut guest = Guest::new(capability, false);
        let own: Vec<u32> = capability.msrs().collect();
        for address in lbr::intel::msrs().chain(lbr::amd::msrs()) {
            if own.contains(&address) {
                // Intel's IA32_DEBUGCTL is there without LBR.
                assert_eq!(address, DEBUGCTL);
                guest.refused(DEBUGCTL, FREEZE_LBRS_ON_PMI);
                continue;
            }
            let read = guest.pmu.rdmsr(address, &mut guest.host);
            assert_eq!(read, Outcome::NotHandled, "{address:#x}");
        }
        assert_eq!(guest.pmu.branch_filter(), None);
        assert!(!guest.branch(Kind::Return, 1, 2));
        assert_eq!(guest.pmu.lbr_statistics(), Statistics::default());
    }
}

#[test]
fn every_reserved_bit_is_a_fault() {
    let mut guest = Guest::new(intel(lbr::intel::Capability::new()), false);
    for bit in 0..64 {
        let value = 1 << bit;
        // Call-stack mode is not offered.
        match EVERYTHING & value {
            0 => guest.refused(LBR_CTL, value),
            _ => guest.write(LBR_CTL, value),
        }
        guest.refused(LBR_DEPTH, if value == 32 { 24 } else { value });
    }
    guest.write(LBR_DEPTH, 32);
    // Addresses are made canonical, and information without a meaning is dropped.
    guest.write(FROM + 31, 0x1234_8000_0000_0000);
    assert_eq!(guest.read(FROM + 31), 0xffff_8000_0000_0000);
    guest.write(INFO, u64::MAX);
    assert_eq!(guest.read(INFO), 0xf << 56);
}

#[test]
fn records_beyond_the_depth_do_not_exist_and_a_write_of_the_depth_clears_all() {
    let lbr = lbr::intel::Capability {
        depths: 0b1111,
        ..lbr::intel::Capability::new()
    };
    let mut guest = Guest::new(intel(lbr), false);
    guest.write(LBR_CTL, EVERYTHING);
    for n in 1..=40 {
        guest.branch(Kind::Conditional, n, n + 0x100);
    }
    assert_eq!(guest.froms(), (9..=40).rev().collect::<Vec<_>>());
    guest.write(LBR_DEPTH, 32);
    assert_eq!(guest.froms(), [], "the same depth clears, too");
    guest.write(LBR_DEPTH, 8);
    for first in [FROM, TO, INFO] {
        assert_eq!(guest.read(first + 7), 0);
        guest.refused(first + 8, 0);
        let read = guest.pmu.rdmsr(first + 8, &mut guest.host);
        assert_eq!(read, Outcome::GeneralProtection);
    }
}

#[test]
fn only_the_ring_where_a_branch_ends_decides_and_the_other_rings_address_is_hidden() {
    let mut guest = Guest::new(intel(lbr::intel::Capability::new()), false);
    guest.write(LBR_CTL, EVERYTHING & !0b010);
    let mut system = branch(Kind::Other, 0x40_0000, 0xffff_ffff_8100_0000);
    system.to_ring = Ring::Kernel;
    guest.pmu.branch(&system, &mut guest.host);
    assert_eq!(guest.froms(), [], "the call ends in the kernel");
    let mut back = branch(Kind::Other, 0xffff_ffff_8100_0040, 0x40_0002);
    back.from_ring = Ring::Kernel;
    guest.pmu.branch(&back, &mut guest.host);
    assert_eq!(guest.froms(), [u64::MAX]);
    assert_eq!(guest.read(TO), 0x40_0002);
    assert_eq!(guest.read(INFO), 8 << 56);
}

#[test]
fn call_stack_mode_keeps_the_calls_that_have_not_returned() {
    let lbr = lbr::intel::Capability {
        call_stack: true,
        ..lbr::intel::Capability::new()
    };
    let mut guest = Guest::new(intel(lbr), false);
    guest.write(LBR_CTL, CALLS);
    guest.branch(Kind::RelativeCall, 0x10, 0x100);
    guest.branch(Kind::IndirectCall, 0x110, 0x200);
    guest.branch(Kind::NextCall, 0x210, 0x215);
    guest.branch(Kind::Conditional, 0x220, 0x230);
    assert_eq!(guest.froms(), [0x110, 0x10]);
    guest.branch(Kind::Return, 0x240, 0x112);
    assert_eq!(guest.froms(), [0x10]);
    for _ in 0..3 {
        guest.branch(Kind::Return, 0x130, 0x15);
    }
    assert_eq!(guest.froms(), []);
    assert!(guest.overflow(), "no PMI waits where every call is seen");
}

#[test]
fn a_pmi_waits_for_the_calls_that_are_open() {
    let lbr = lbr::intel::Capability {
        call_stack: true,
        ..lbr::intel::Capability::new()
    };
    assert_eq!(lbr.leaf_1c().ebx, 0b111);
    let mut guest = Guest::new(intel(lbr), true);
    guest.write(LBR_CTL, CALLS);
    // Open calls that fill the stack, then fewer, then none.
    for open in [32, 40, 3, 0] {
        assert!(!guest.overflow());
        let filter = guest.pmu.branch_filter().expect("enabled");
        assert!(filter.call_stack && filter.user && !filter.kernel);
        for n in 1..=open {
            let due = guest.branch(Kind::RelativeCall, n, 0x100 + n);
            assert_eq!(due, n >= 32, "call {n} of {open}");
        }
        guest.pmu.end_following(&mut guest.host);
        assert_eq!(guest.pmu.branches_awaited(), 0);
        assert!(guest.pmu.take_pmi() && !guest.pmu.take_pmi());
        let expected: Vec<u64> = (1..=open).rev().take(32).collect();
        assert_eq!(guest.froms(), expected);
        guest.write(0x390, 1);
    }
    let statistics = guest.pmu.lbr_statistics();
    assert_eq!((statistics.full, statistics.short), (2, 2));
}

#[test]
fn a_switch_of_tasks_saves_and_brings_back_the_open_calls() {
    let lbr = lbr::intel::Capability {
        call_stack: true,
        ..lbr::intel::Capability::new()
    };
    let mut guest = Guest::new(intel(lbr), true);
    guest.write(LBR_CTL, CALLS);
    guest.overflow();
    guest.branch(Kind::RelativeCall, 0x10, 0x100);
    guest.branch(Kind::IndirectCall, 0x110, 0x200);
    guest.pmu.end_following(&mut guest.host);
    assert!(guest.pmu.take_pmi());
    // As Linux does: it stops the records, reads up to the first that is none, and clears what the next task would find.
    guest.write(LBR_CTL, 0);
    let saved: Vec<[u64; 3]> = (0..3)
        .map(|n| [FROM + n, TO + n, INFO + n].map(|msr| guest.read(msr)))
        .collect();
    assert_eq!(saved[0], [0x110, 0x200, 3 << 56]);
    assert_eq!(saved[1], [0x10, 0x100, 4 << 56]);
    assert_eq!(saved[2], [0; 3]);
    guest.write(LBR_DEPTH, 32);
    assert_eq!(guest.froms(), [], "another task's");
    // The first task goes on.
    for (n, record) in (0..).zip(&saved[..2]) {
        for (msr, value) in [FROM, TO, INFO].into_iter().zip(record) {
            guest.write(msr + n, *value);
        }
    }
    assert_eq!(guest.froms(), [0x110, 0x10]);
    // It will have called and returned when its records are wanted next: its calls are found anew then.
    guest.write(LBR_CTL, CALLS);
    guest.overflow();
    guest.branch(Kind::RelativeCall, 0x30, 0x300);
    guest.pmu.end_following(&mut guest.host);
    assert_eq!(guest.froms(), [0x30]);
}

#[test]
fn a_pmi_waits_for_the_branches_that_come_next() {
    let mut guest = Guest::new(intel(lbr::intel::Capability::new()), true);
    guest.write(DEBUGCTL, FREEZE_LBRS_ON_PMI);
    guest.write(LBR_CTL, EVERYTHING);
    assert_eq!(guest.pmu.branches_awaited(), 0);
    assert!(!guest.overflow());
    assert!(!guest.overflow(), "a second overflow is the same PMI");
    for n in 1..32 {
        assert_eq!(u64::from(guest.pmu.branches_awaited()), 33 - n);
        assert!(!guest.branch(Kind::Conditional, n, n));
    }
    assert!(guest.branch(Kind::Return, 32, 32));
    assert_eq!(guest.pmu.branches_awaited(), 0);
    assert!(guest.pmu.take_pmi() && !guest.pmu.take_pmi());

    // Frozen, the records stay until the handler has read them.
    assert_eq!(guest.pmu.branch_filter(), None);
    guest.branch(Kind::Return, 99, 99);
    assert_eq!(guest.froms(), (1..=32).rev().collect::<Vec<_>>());
    assert_eq!(guest.read(0x38e), 1 << 58 | 1);
    guest.write(0x390, 1 << 58 | 1);
    assert_eq!(
        guest.froms(),
        [],
        "an older branch is none of the last ones"
    );
    let statistics = Statistics {
        recorded: 32,
        filtered: 1,
        full: 1,
        short: 0,
    };
    assert_eq!(guest.pmu.lbr_statistics(), statistics);
}

#[test]
fn a_run_that_ends_early_leaves_what_there_is() {
    type End = fn(&mut Guest);
    let ends: [End; 4] = [
        |guest| {
            guest.pmu.end_following(&mut guest.host);
        },
        |guest| {
            guest.read(0x38e);
        },
        |guest| guest.refused(0x38e, 0),
        |guest| {
            guest.pmu.disable_lbr(&mut guest.host);
        },
    ];
    for end in ends {
        let mut guest = Guest::new(intel(lbr::intel::Capability::new()), true);
        guest.write(LBR_CTL, EVERYTHING);
        assert!(!guest.overflow());
        guest.branch(Kind::Conditional, 1, 2);
        guest.branch(Kind::Conditional, 3, 4);
        end(&mut guest);
        assert!(guest.pmu.take_pmi(), "each overflow is a PMI");
        assert_eq!(guest.froms(), [3, 1]);
        assert_eq!(guest.pmu.lbr_statistics().short, 1);
    }
}

#[test]
fn branches_before_a_gap_are_not_the_last_ones() {
    let mut guest = Guest::new(intel(lbr::intel::Capability::new()), true);
    guest.write(LBR_CTL, EVERYTHING);
    assert!(!guest.overflow());
    guest.branch(Kind::Conditional, 1, 2);
    guest.pmu.lose_branches();
    assert_eq!(guest.pmu.branches_awaited(), 32);
    guest.branch(Kind::Conditional, 3, 4);
    guest.pmu.end_following(&mut guest.host);
    assert!(guest.pmu.take_pmi());
    assert_eq!(guest.froms(), [3]);
    // Without a run, what was recorded is what there is.
    guest.pmu.lose_branches();
    assert_eq!(guest.froms(), [3]);
}

#[test]
fn init_clears_the_enable_bit_alone() {
    let mut guest = Guest::new(intel(lbr::intel::Capability::new()), false);
    guest.write(LBR_CTL, EVERYTHING);
    guest.branch(Kind::Return, 1, 2);
    assert!(guest.pmu.disable_lbr(&mut guest.host));
    assert!(!guest.pmu.disable_lbr(&mut guest.host));
    assert_eq!(guest.read(LBR_CTL), EVERYTHING & !1);
    guest.branch(Kind::Return, 3, 4);
    assert_eq!(guest.froms(), [1]);
    guest.pmu.reset(&mut guest.host);
    assert_eq!((guest.read(LBR_CTL), guest.read(FROM)), (0, 0));
}

#[test]
fn amds_records_are_valid_or_not() {
    let mut guest = Guest::new(amd(), false);
    let (select, extension, from, to) = (0xc000_010e, 0xc000_010f, 0xc001_0300, 0xc001_0301);
    guest.write(extension, u64::MAX);
    assert_eq!(guest.read(extension), 1 << 6, "reserved bits are ignored");
    guest.write(select, !0x1ff);
    guest.write(DEBUGCTL, FREEZE_LBRS_ON_PMI);
    guest.refused(DEBUGCTL, 1);
    assert_eq!(guest.read(to), 0, "no record");
    let mut kernel = branch(
        Kind::Conditional,
        0xffff_ffff_8100_0000,
        0xffff_ffff_8100_0020,
    );
    kernel.mispredicted = Some(true);
    guest.pmu.branch(&kernel, &mut guest.host);
    assert_eq!(guest.read(from), 0xffff_ffff_8100_0000);
    assert_eq!(
        guest.read(to),
        0x9fff_ffff_8100_0020,
        "valid, not speculative"
    );

    assert!(guest.overflow());
    assert_eq!(guest.read(0xc000_0300), 1 << 58 | 1);
    guest.branch(Kind::Conditional, 1, 2);
    assert_eq!(guest.read(from), 0xffff_ffff_8100_0000, "frozen");
    guest.write(0xc000_0302, 1 << 58);
    guest.write(select, 1 << 2);
    guest.branch(Kind::Conditional, 1, 2);
    assert_eq!(guest.read(from), 0xffff_ffff_8100_0000, "kept out");
    guest.branch(Kind::Return, 3, 4);
    assert_eq!((guest.read(from), guest.read(to)), (3, 1 << 63 | 4));
    assert_eq!(guest.read(from + 2), 0xffff_ffff_8100_0000);
}

#[test]
fn a_saved_state_is_of_the_same_records() {
    let capability = intel(lbr::intel::Capability::new());
    let mut guest = Guest::new(capability, false);
    guest.write(LBR_CTL, EVERYTHING);
    guest.branch(Kind::Return, 1, 2);
    let good = guest.pmu.save(&mut guest.host);
    assert_eq!(guest.pmu.restore(&good, &mut guest.host), Ok(()));
    assert_eq!(guest.froms(), [1]);

    let vpmu::x86::PmuState::Intel(state) = &good else {
        panic!("Intel's");
    };
    let mut control = state.clone();
    control.lbr.as_mut().expect("offered").control |= 1 << 3;
    let mut none = state.clone();
    none.lbr = None;
    for damaged in [control, none] {
        let damaged = vpmu::x86::PmuState::Intel(damaged);
        assert!(guest.pmu.restore(&damaged, &mut guest.host).is_err());
        assert_eq!(guest.pmu.save(&mut guest.host), good, "as it was");
    }
    let other = lbr::intel::Capability {
        depths: 0b0001,
        ..lbr::intel::Capability::new()
    };
    let mut other = Guest::new(intel(other), false);
    assert!(other.pmu.restore(&good, &mut other.host).is_err(), "depth");
}

/// As when a vCPU gets another thread.
#[test]
fn records_stay_while_there_is_no_host() {
    let mut guest = Guest::new(intel(lbr::intel::Capability::new()), true);
    guest.write(LBR_CTL, EVERYTHING);
    guest.branch(Kind::Return, 1, 2);
    guest.pmu.put(&mut guest.host);
    let saved = guest.pmu.save(&mut guest.host);
    guest.pmu.reset(&mut guest.host);
    let mut none = None::<FakeHost<CounterConfig>>;
    assert_eq!(guest.pmu.restore(&saved, &mut none), Ok(()));
    guest.pmu.load(&mut guest.host);
    // The access finds out whether a PMI has to wait for branches.
    guest.read(DEBUGCTL);
    assert_eq!(guest.froms(), [1]);
}
