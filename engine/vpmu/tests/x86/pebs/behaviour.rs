//! Tests of the records that a guest with PEBS finds, sample by sample. SDM vol. 3B, 20.9.

use crate::guest::FakeGuest;
use crate::support::Happening::Cycles;
use crate::support::{CYCLES, Call, END, Guest, INSTRUCTIONS, nth, set};
use vpmu::x86::RestoreError;
use vpmu::x86::intel::Msr::*;
use vpmu::x86::intel::{Capability, PmuState, Version};
use vpmu::x86::pebs::{self, Statistics};
use vpmu::x86::{CpuidLeaf, Outcome, PmuConfig, Ring};

pub(super) const BUFFER: u64 = FakeGuest::RAM + 0x100;
const OVF_BUF: u64 = 1 << 62;
/// EN, OS, USR: Linux asks for no interrupt.
pub(super) const COUNT: u64 = 0x0043_0000;
const ADAPTIVE: u64 = 1 << 34;

fn capability() -> Capability {
    Capability {
        pebs: Some(pebs::Capability::new()),
        ..Capability::new(Version::V2)
    }
}

/// Returns a guest with a DS save area in RAM, a buffer of 0x800 bytes, and a PMI once the buffer has `threshold`
/// bytes.
pub(super) fn guest(threshold: u64) -> Guest {
    guest_of(capability(), threshold)
}

/// Returns such a guest, with this PMU.
pub(super) fn guest_of(capability: Capability, threshold: u64) -> Guest {
    let mut guest = Guest::with(PmuConfig::new(capability));
    let mut memory = FakeGuest::new();
    let fields = [BUFFER, BUFFER, BUFFER + 0x800, BUFFER + threshold];
    for (offset, value) in [0x20, 0x28, 0x30, 0x38].into_iter().zip(fields) {
        memory.store(FakeGuest::RAM + offset, value);
    }
    guest.host.guest = Some(memory);
    guest.write(DsArea, FakeGuest::RAM);
    guest
}

impl Guest {
    pub(super) fn memory(&mut self) -> &mut FakeGuest {
        self.host.guest.as_mut().expect("it was given")
    }

    pub(super) fn index(&mut self) -> u64 {
        self.memory().load(FakeGuest::RAM + 0x28)
    }

    pub(super) fn set_reset(&mut self, offset: u64, period: u64) {
        let value = END - period;
        self.memory().store(FakeGuest::RAM + offset, value);
    }

    /// Makes general counter 0 write a record every `period` events.
    pub(super) fn record(&mut self, select: u64, period: u64) {
        self.set_reset(0x40, period);
        self.write(FullWidthPmc(0), END - period);
        self.write(PerfEvtSel(0), select);
        self.write(PebsEnable, 1);
        self.write(GlobalCtrl, 1);
    }
}

#[test]
fn the_processor_says_that_it_has_pebs() {
    let (with, without) = (capability(), Capability::new(Version::V2));
    assert_eq!(with.check(), Ok(()));
    assert_eq!((with.leaf_01_ecx(), with.leaf_01_edx()), (0x8004, 1 << 21));
    assert_eq!((without.leaf_01_ecx(), without.leaf_01_edx()), (0x8000, 0));
    assert_eq!((with.misc_enable(), without.misc_enable()), (0x800, 0x1800));
    assert_eq!(with.leaf_23(0), CpuidLeaf::default());
    let pdcm = Capability {
        pdcm: false,
        full_width_writes: false,
        ..with
    };
    assert!(pdcm.check().is_err(), "its format must be in it");
    let pebs = pebs::Capability {
        linear_address_bits: 52,
    };
    let odd = Capability {
        pebs: Some(pebs),
        ..with
    };
    assert!(odd.check().is_err());
}

#[test]
fn a_record_has_each_group_where_the_guest_expects_it() {
    // Each case has groups, a size, and the places of RIP, RAX and XMM1.
    for (groups, size, rip, rax, xmm1) in [
        (0, 32, None, None, None),
        (1, 64, None, None, None),
        (2, 176, Some(0x28), Some(0x30), None),
        (3, 208, Some(0x48), Some(0x50), None),
        (4, 288, None, None, Some(0x30)),
        (7, 464, Some(0x48), Some(0x50), Some(0xe0)),
    ] {
        let mut guest = guest(0x800);
        guest.write(PebsDataCfg, groups);
        guest.record(COUNT | ADAPTIVE | INSTRUCTIONS, 1000);
        guest.memory().sample.tsc = 0x1234;
        guest.execute(1000);
        guest.interrupt();
        assert_eq!(guest.index(), BUFFER + size, "{groups:#x}");
        let mut word = |offset| guest.memory().load(BUFFER + offset);
        assert_eq!(word(0), size << 48 | groups);
        assert_eq!(word(8), 0x40_1000);
        assert_eq!(word(0x10), 1);
        assert_eq!(word(0x18), 0x1234);
        for (offset, value) in [(rip, 0x40_1000), (rax, 0xa), (xmm1, 0xff01)] {
            assert_eq!(offset.map(&mut word), offset.map(|_| value), "{groups:#x}");
        }
    }
}

#[test]
fn only_an_adaptive_counter_has_more_than_the_basic_group() {
    let mut guest = guest(0x800);
    guest.write(PebsDataCfg, 7);
    guest.record(COUNT | INSTRUCTIONS, 1000);
    guest.set_reset(0x88, 1000);
    guest.write(FixedCtr(1), END - 1000);
    guest.write(FixedCtrCtrl, 0x10_0000_0030);
    guest.write(PebsEnable, 1 << 33 | 1);
    guest.write(GlobalCtrl, 1 << 33 | 1);
    guest.execute(1000);
    guest.interrupt();
    assert_eq!(guest.index(), BUFFER + 32);
    guest.happen(Cycles, Ring::User, 1000);
    guest.interrupt();
    assert_eq!(guest.index(), BUFFER + 32 + 464);
    assert_eq!(guest.memory().load(BUFFER + 32 + 0x10), 1 << 33);
}

#[test]
fn the_threshold_interrupts_and_the_counter_does_not() {
    let mut guest = guest(4 * 32);
    guest.record(COUNT | INSTRUCTIONS, 1000);
    for n in 1..4 {
        guest.execute(1000);
        assert!(!guest.take_pmi(), "{n}");
        assert_eq!(guest.read(GlobalStatus), 0);
        assert_eq!(guest.read(FullWidthPmc(0)), END - 1000);
    }
    guest.execute(1000);
    assert!(guest.take_pmi());
    assert_eq!(guest.read(GlobalStatus), OVF_BUF);
    guest.write(GlobalOvfCtrl, OVF_BUF);
    assert_eq!(guest.read(GlobalStatus), 0);

    // A guest that has not read its buffer gets another PMI.
    guest.execute(1000);
    assert!(guest.take_pmi());
    let statistics = guest.pmu.pebs_statistics();
    assert_eq!((statistics.records, statistics.lost), (5, 0));
}

#[test]
fn the_request_of_an_interrupt_freezes() {
    let mut guest = guest(32);
    guest.write(DebugCtl, 1 << 12);
    guest.record(COUNT | INSTRUCTIONS, 1000);
    guest.execute(1000);
    assert!(guest.take_pmi());
    assert_eq!(guest.read(GlobalCtrl), 0);
    assert!(guest.host.running().is_empty());
}

#[test]
fn a_late_overflow_keeps_what_is_beyond_its_period() {
    let mut guest = guest(0x800);
    guest.record(COUNT | INSTRUCTIONS, 1000);
    guest.execute(3400);
    // Nobody reports the overflow, but the counter's read finds it.
    assert_eq!(guest.read(FullWidthPmc(0)), END - 600);
    assert_eq!(
        guest.index(),
        BUFFER + 32,
        "one record, as there is one place"
    );
    guest.execute(599);
    guest.interrupt();
    assert_eq!(guest.index(), BUFFER + 32);
    guest.execute(1);
    guest.interrupt();
    assert_eq!(guest.index(), BUFFER + 64);
    assert_eq!(guest.pmu.pebs_statistics().skipped, 2);
}

#[test]
fn without_a_reset_value_the_counter_goes_on_from_zero() {
    let mut guest = guest(32);
    guest.record(COUNT | INSTRUCTIONS, 1000);
    guest.memory().store(FakeGuest::RAM + 0x40, 0);
    guest.execute(1007);
    assert_eq!(guest.read(FullWidthPmc(0)), 7);
    assert!(guest.take_pmi());
}

/// Returns a guest whose counter records after 1,000 instructions and has no reset value, on a host that repeats.
fn without_reset(threshold: u64) -> Guest {
    let mut guest = guest(threshold);
    (guest.host.prompt, guest.host.atomic, guest.host.repeats) = (true, true, true);
    guest.record(COUNT | INSTRUCTIONS, 1000);
    guest.memory().store(FakeGuest::RAM + 0x40, 0);
    guest
}

/// Linux samples by a frequency so: it gives each period, and the reset value is 0.
#[test]
fn a_guest_that_gives_each_period_costs_three_operations() {
    let mut guest = without_reset(32);
    let only = set([0]);
    for period in [1000, 900, 800] {
        guest.host.calls();
        guest.execute(period);
        assert!(guest.take_pmi());
        guest.write(GlobalCtrl, 0);
        assert_eq!(guest.read(FullWidthPmc(0)), 0);
        guest.write(FullWidthPmc(0), END - (period - 100));
        guest.memory().store(FakeGuest::RAM + 0x28, BUFFER);
        guest.write(GlobalOvfCtrl, OVF_BUF);
        guest.write(GlobalCtrl, 1);
        let calls = [
            Call::Pause(only),
            Call::SetPeriod(0, Some(period - 100)),
            Call::Resume(only),
        ];
        assert_eq!(guest.host.calls(), calls);
    }
}

#[test]
fn a_guest_that_gives_no_period_is_asked_for_one_report_more() {
    let mut guest = without_reset(0x800);
    guest.host.calls();
    guest.execute(1000);
    guest.interrupt();
    assert_eq!(guest.host.calls(), []);
    guest.execute(1000);
    guest.interrupt();
    assert_eq!(guest.host.calls(), [Call::SetPeriod(0, None)]);
    guest.execute(5000);
    assert!(guest.host.reports.is_empty());
    assert_eq!(guest.read(FullWidthPmc(0)), 6000);
}

#[test]
fn a_counter_of_one_ring_has_no_address_of_the_other() {
    const USER: u64 = 0x0041_0000;
    const KERNEL: u64 = 0x0042_0000;
    for (rings, now, records) in [
        (USER, Ring::User, 1),
        (USER, Ring::Kernel, 0),
        (KERNEL, Ring::Kernel, 1),
        (KERNEL, Ring::User, 0),
        (COUNT, Ring::User, 1),
        (COUNT, Ring::Kernel, 1),
    ] {
        let mut guest = guest(0x800);
        guest.record(rings | INSTRUCTIONS, 1000);
        let counted = if rings == KERNEL {
            Ring::Kernel
        } else {
            Ring::User
        };
        guest.happen(crate::support::Happening::Instructions, counted, 1000);
        guest.memory().go_on(now, 0);
        guest.interrupt();
        let expected = Statistics {
            records,
            filtered: 1 - records,
            ..Statistics::default()
        };
        assert_eq!(guest.pmu.pebs_statistics(), expected, "{rings:#x} {now:?}");
        assert_eq!(guest.index(), BUFFER + 32 * records);
        assert_eq!(guest.read(FullWidthPmc(0)), END - 1000, "reloaded");
    }
}

#[test]
fn linuxs_other_name_for_cycles_counts_cycles() {
    let clock = Capability {
        events: 1,
        ..capability()
    };
    let mut guest = Guest::with(PmuConfig::new(clock));
    guest.write(FullWidthPmc(0), END - 1000);
    guest.write(PerfEvtSel(0), 0x4_10c3_00c0);
    guest.write(PerfEvtSel(1), COUNT | CYCLES);
    guest.write(GlobalCtrl, 3);
    guest.happen(Cycles, Ring::User, 10);
    assert_eq!(guest.read(FullWidthPmc(0)), END - 990);
    assert_eq!(guest.read(FullWidthPmc(1)), 10);
    // With a mask below 16 the host would have to count instructions, and this host has none.
    guest.write(PerfEvtSel(0), 0x0fc3_00c0);
    assert_eq!(guest.pmu.statistics().lost, 0, "the host is not asked");
    assert!(!guest.host.running().contains(nth(0)));
}

#[test]
fn a_record_that_cannot_be_written_is_lost_and_hurts_nobody() {
    type Hurt = fn(&mut Guest);
    let hurts: [(&str, Hurt); 9] = [
        ("full", |g| {
            g.memory().store(FakeGuest::RAM + 0x30, BUFFER + 31);
        }),
        ("index before the buffer", |g| {
            g.memory().store(FakeGuest::RAM + 0x28, BUFFER - 8);
        }),
        ("a buffer of nothing", |g| {
            for offset in [0x20, 0x28] {
                g.memory().store(FakeGuest::RAM + offset, 0x10_0000);
            }
            g.memory().store(FakeGuest::RAM + 0x30, u64::MAX);
        }),
        ("a buffer in ROM", |g| {
            for offset in [0x20, 0x28] {
                g.memory().store(FakeGuest::RAM + offset, FakeGuest::ROM);
            }
            g.memory().store(FakeGuest::RAM + 0x30, u64::MAX);
        }),
        ("the end of all addresses", |g| {
            for offset in [0x20, 0x28] {
                g.memory().store(FakeGuest::RAM + offset, u64::MAX - 15);
            }
            g.memory().store(FakeGuest::RAM + 0x30, u64::MAX);
        }),
        ("an area in ROM", |g| g.write(DsArea, FakeGuest::ROM)),
        ("no area", |g| g.write(DsArea, 0x70_0000)),
        ("an area beyond all addresses", |g| {
            g.write(DsArea, u64::MAX);
        }),
        ("no registers", |g| g.memory().is_mute = true),
    ];
    for (name, hurt) in hurts {
        let mut guest = guest(0x800);
        guest.record(COUNT | INSTRUCTIONS, 1000);
        hurt(&mut guest);
        let index = guest.index();
        guest.execute(1000);
        guest.interrupt();
        let statistics = guest.pmu.pebs_statistics();
        assert_eq!((statistics.records, statistics.lost), (0, 1), "{name}");
        assert_eq!(guest.index(), index, "{name}");
    }
    let mut guest = guest(0x800);
    guest.record(COUNT | INSTRUCTIONS, 1000);
    guest.host.guest = None;
    guest.execute(1000);
    assert!(!guest.interrupt());
    assert_eq!(guest.pmu.pebs_statistics().lost, 1, "a host without PEBS");
}

#[test]
fn a_full_buffer_asks_again_and_the_counter_goes_on() {
    let mut guest = guest(32);
    guest.record(COUNT | INSTRUCTIONS, 1000);
    guest.memory().store(FakeGuest::RAM + 0x30, BUFFER + 32);
    for (records, lost) in [(1, 0), (1, 1), (1, 2)] {
        guest.execute(1000);
        assert!(guest.take_pmi());
        let statistics = guest.pmu.pebs_statistics();
        assert_eq!((statistics.records, statistics.lost), (records, lost));
    }
    guest.memory().store(FakeGuest::RAM + 0x28, BUFFER);
    guest.execute(1000);
    assert!(guest.take_pmi());
    assert_eq!(guest.pmu.pebs_statistics().records, 2);
}

#[test]
fn a_guest_with_pebs_goes_on_elsewhere() {
    let mut first = guest(0x800);
    first.write(PebsDataCfg, 2);
    first.record(COUNT | ADAPTIVE | INSTRUCTIONS, 1000);
    first.execute(1400);
    let state = first.save();
    assert_eq!(first.index(), BUFFER + 176, "saving finds the overflow");
    assert_eq!((state.pebs_enable, state.pebs_data_cfg), (1, 2));

    let mut second = guest(0x800);
    second.host.guest = first.host.guest.take();
    let restored = second.restore(&state);
    assert_eq!(restored, Ok(()));
    assert_eq!(second.save(), state);
    second.execute(600);
    second.interrupt();
    assert_eq!(second.index(), BUFFER + 2 * 176);

    let refused = |change: fn(&mut PmuState)| {
        let mut state = state.clone();
        change(&mut state);
        let mut guest = guest(0x800);
        guest.restore(&state)
    };
    let changes: [fn(&mut PmuState); 3] = [
        |state| state.pebs_enable = 1 << 4,
        |state| state.pebs_data_cfg = 1 << 4,
        |state| state.ds_area = 1 << 47,
    ];
    for change in changes {
        let error = refused(change).expect_err("no such bit");
        assert!(matches!(error, RestoreError::Reserved { .. }), "{error:?}");
    }
    let saved = PmuState::LAYOUT - 1;
    let error = refused(|state| state.layout -= 1).expect_err("another layout");
    let reads = PmuState::LAYOUT;
    assert_eq!(error, RestoreError::Layout { saved, reads });
}

#[test]
fn a_guest_without_pebs_does_not_have_its_registers() {
    let mut guest = Guest::new(Version::V5);
    for msr in [PebsEnable, PebsDataCfg, DsArea] {
        let read = guest.pmu.rdmsr(msr.address(), &mut guest.host);
        assert_eq!(read, Outcome::GeneralProtection, "{msr}");
        let written = guest.pmu.wrmsr(msr.address(), 0, &mut guest.host);
        assert_eq!(written, Outcome::GeneralProtection, "{msr}");
    }
}
