//! Tests of records with the last branches of a guest that is followed for them. SDM vol. 3B, 20.9.2.2.5, and
//! chapter 19.

use super::behaviour::{BUFFER, COUNT, guest_of};
use crate::support::Happening::Instructions;
use crate::support::{Call, END, Guest, INSTRUCTIONS, set};
use vpmu::x86::Ring;
use vpmu::x86::intel::Msr::*;
use vpmu::x86::intel::{Capability, Version};
use vpmu::x86::lbr::{self, Branch, Kind};
use vpmu::x86::pebs;

const LBR_CTL: u32 = 0x14ce;
const LBR_DEPTH: u32 = 0x14cf;
const FROM: u32 = 0x1500;
const EVERYTHING: u64 = 0x7f_0007;
const FREEZE_LBRS_ON_PMI: u64 = 1 << 11;
const LBR_FRZ: u64 = 1 << 58;
const OVF_BUF: u64 = 1 << 62;
const ADAPTIVE: u64 = 1 << 34;
/// General registers and eight branches, and the size of such a record.
const GROUPS: u64 = 7 << 24 | 0b1010;
const SIZE: u64 = 32 + 144 + 8 * 24;

/// Returns a guest that records branches, and wants a record of the basic group, general registers and eight branches after
/// 1,000 instructions, in a buffer that is due after `threshold` bytes.
fn guest(threshold: u64) -> Guest {
    let capability = Capability {
        pebs: Some(pebs::Capability::new()),
        lbr: Some(lbr::intel::Capability {
            depths: 0b1011,
            ..lbr::intel::Capability::new()
        }),
        ..Capability::new(Version::V5)
    };
    let mut guest = guest_of(capability, threshold);
    guest.host.follows = true;
    guest.write_lbr(LBR_CTL, EVERYTHING);
    guest.write(PebsDataCfg, GROUPS);
    guest.record(COUNT | ADAPTIVE | INSTRUCTIONS, 1000);
    guest
}

impl Guest {
    fn write_lbr(&mut self, address: u32, value: u64) {
        let _ = self.pmu.wrmsr(address, value, &mut self.host);
    }

    /// The guest overflows, and is followed.
    fn overflow(&mut self) {
        self.execute(1000);
        assert!(!self.interrupt());
    }

    /// The guest takes a branch to `to`, and is there.
    fn branch(&mut self, to: u64) -> bool {
        let memory = self.memory();
        let from = memory.sample.ip;
        (memory.sample.ip, memory.general.rip) = (to, to);
        let branch = Branch {
            from,
            to,
            kind: Kind::Conditional,
            from_ring: Ring::User,
            to_ring: Ring::User,
            mispredicted: None,
            cycles: None,
        };
        self.pmu.branch(&branch, &mut self.host)
    }

    /// Returns RIP and the targets of the branches in the first record.
    fn first(&mut self) -> (u64, Vec<u64>) {
        let mut word = |offset| self.memory().load(BUFFER + offset);
        assert_eq!(word(0), SIZE << 48 | GROUPS);
        let ip = word(8);
        assert_eq!(word(0x28), ip, "all of it is of one moment");
        (ip, (0..8).map(|n| word(32 + 144 + 24 * n + 8)).collect())
    }
}

#[test]
fn a_record_waits_for_the_branches_that_lead_to_its_place() {
    let mut guest = guest(0x800);
    guest.overflow();
    for n in 1..=32 {
        assert_eq!(guest.index(), BUFFER, "{n}");
        assert_eq!(u64::from(guest.pmu.branches_awaited()), 33 - n);
        assert!(!guest.branch(0x50_0000 + n), "no PMI");
    }
    assert_eq!(guest.pmu.branches_awaited(), 0);
    assert_eq!(guest.index(), BUFFER + SIZE);
    let last: Vec<u64> = (25..=32).rev().map(|n| 0x50_0000 + n).collect();
    assert_eq!(guest.first(), (0x50_0020, last));
    // FROM and INFO of the last one.
    assert_eq!(guest.memory().load(BUFFER + 176), 0x50_001f);
    assert_eq!(guest.memory().load(BUFFER + 176 + 16), 0);
    assert_eq!(guest.read(GlobalStatus), 0);
}

#[test]
fn branches_beyond_the_depth_are_zeros() {
    let mut guest = guest(0x800);
    guest.write_lbr(LBR_DEPTH, 8);
    guest.write(PebsDataCfg, 15 << 24 | 0b1000);
    guest.overflow();
    for n in 1..=8 {
        guest.branch(n);
    }
    assert_eq!(guest.index(), BUFFER + 32 + 16 * 24);
    let mut to = |n: u64| guest.memory().load(BUFFER + 32 + 24 * n + 8);
    assert!((0..8).map(&mut to).eq((1..=8).rev()));
    assert!((8..16).all(|n| to(n) == 0));
}

#[test]
fn a_record_without_branches_waits_for_none() {
    let mut guest = guest(0x800);
    guest.write(PebsDataCfg, 0b10);
    guest.overflow();
    assert_eq!(guest.index(), BUFFER + 176);
    assert_eq!(guest.pmu.branches_awaited(), 0);
}

#[test]
fn a_run_that_ends_early_leaves_a_record_of_what_there_is() {
    type End = fn(&mut Guest);
    let ends: [End; 9] = [
        |guest| {
            guest.pmu.end_following(&mut guest.host);
        },
        |guest| {
            guest.read(GlobalStatus);
        },
        |guest| {
            let _ = guest.pmu.rdmsr(FROM, &mut guest.host);
        },
        // What changes the branches, or the record, comes after it.
        |guest| guest.write_lbr(LBR_DEPTH, 32),
        |guest| guest.write_lbr(FROM, 99),
        |guest| guest.write_lbr(LBR_CTL, 0),
        |guest| guest.write(PerfEvtSel(0), 0),
        |guest| {
            guest.pmu.disable_lbr(&mut guest.host);
        },
        |guest| {
            let _ = guest.pmu.save(&mut guest.host);
        },
    ];
    for (n, end) in ends.into_iter().enumerate() {
        let mut guest = guest(0x800);
        guest.overflow();
        guest.branch(1);
        guest.branch(2);
        end(&mut guest);
        assert_eq!(guest.first(), (2, vec![2, 1, 0, 0, 0, 0, 0, 0]), "{n}");
        assert_eq!(guest.index(), BUFFER + SIZE, "{n}");
        assert_eq!(guest.pmu.branches_awaited(), 0);
    }
}

#[test]
fn branches_that_were_lost_are_in_no_record() {
    let mut guest = guest(0x800);
    guest.overflow();
    guest.branch(1);
    guest.pmu.lose_branches();
    guest.branch(3);
    guest.pmu.end_following(&mut guest.host);
    assert_eq!(guest.first().1, [3, 0, 0, 0, 0, 0, 0, 0]);
}

/// An overflow that is found by an access would be followed into the guest's own driver.
#[test]
fn an_access_that_finds_an_overflow_waits_for_nothing() {
    let mut guest = guest(0x800);
    guest.overflow();
    guest.branch(1);
    guest.pmu.end_following(&mut guest.host);
    guest.memory().store(0x1028, BUFFER);
    guest.execute(1000);
    guest.read(FullWidthPmc(0));
    // The branch before is not the guest's last one now.
    assert_eq!(guest.first(), (1, vec![0; 8]));
}

#[test]
fn a_record_and_a_pmi_wait_for_the_same_branches() {
    let mut guest = guest(1);
    guest.write(DebugCtl, FREEZE_LBRS_ON_PMI);
    guest.sample(1, INSTRUCTIONS, 1000);
    guest.write(GlobalCtrl, 0b11);
    guest.overflow();
    for n in 1..32 {
        assert!(!guest.branch(n), "{n}");
    }
    assert!(guest.branch(32));
    assert_eq!(guest.first().0, 32);
    assert!(guest.take_pmi() && !guest.take_pmi(), "one for both");
    assert_eq!(guest.read(GlobalStatus), OVF_BUF | LBR_FRZ | 0b10);
    // Frozen, they stay for the handler, and the next record has them at once.
    guest.write(GlobalOvfCtrl, OVF_BUF | 0b10);
    guest.memory().store(0x1028, BUFFER);
    guest.execute(1000);
    guest.interrupt();
    assert_eq!(guest.pmu.branches_awaited(), 0);
    assert_eq!(guest.first().1[0], 32);
}

#[test]
fn the_threshold_interrupts_when_the_record_is_written() {
    let mut guest = guest(1);
    guest.overflow();
    for n in 1..32 {
        assert!(!guest.branch(n));
    }
    assert!(guest.branch(32), "its branches are there");
    assert_eq!(guest.pmu.branches_awaited(), 0);
    assert!(guest.take_pmi());
    assert_eq!(guest.read(GlobalStatus), OVF_BUF);
}

/// The PMI of a buffer that another record has filled finds the branches before it, as any PMI.
#[test]
fn the_pmi_of_a_record_without_branches_waits() {
    let mut guest = guest(1);
    guest.write(PebsDataCfg, 0);
    guest.overflow();
    assert_eq!(guest.index(), BUFFER + 32);
    assert_eq!(guest.pmu.branches_awaited(), 32);
    assert!(guest.pmu.end_following(&mut guest.host));
}

#[test]
fn a_reset_and_another_state_forget_a_record_that_waits() {
    type End = fn(&mut Guest);
    let ends: [End; 2] = [
        |guest| guest.pmu.reset(&mut guest.host),
        |guest| {
            let state = super::branches::guest(0x800);
            let state = state.clone().pmu.save(&mut state.clone().host);
            assert_eq!(guest.pmu.restore(&state, &mut guest.host), Ok(()));
        },
    ];
    for end in ends {
        let mut guest = guest(0x800);
        guest.overflow();
        guest.branch(1);
        end(&mut guest);
        assert_eq!(guest.pmu.branches_awaited(), 0);
        guest.pmu.end_following(&mut guest.host);
        guest.read(GlobalStatus);
        assert_eq!(guest.index(), BUFFER);
        assert_eq!(guest.pmu.pebs_statistics(), pebs::Statistics::default());
    }
}

#[test]
fn the_counter_goes_on_and_its_next_period_is_asked_for() {
    let mut guest = guest(0x800);
    guest.overflow();
    guest.execute(70);
    guest.pmu.hold(&mut guest.host);
    assert!(guest.host.running().is_empty());
    // What the host does for the guest is not counted.
    guest.execute(500);
    guest.branch(1);
    guest.pmu.end_following(&mut guest.host);
    guest.pmu.load(&mut guest.host);
    assert_eq!(guest.host.due(0), Some(930));
    assert_eq!(guest.read(FullWidthPmc(0)), END - 930);
    // Without a pause, too.
    let mut guest = super::branches::guest(0x800);
    guest.overflow();
    guest.execute(70);
    guest.pmu.end_following(&mut guest.host);
    guest.execute(929);
    assert!(guest.host.reports.is_empty());
    guest.execute(1);
    guest.interrupt();
    assert_eq!(guest.pmu.branches_awaited(), 32);
}

#[test]
fn a_run_costs_a_host_that_repeats_two_operations() {
    let mut guest = guest(0x800);
    (guest.host.prompt, guest.host.atomic, guest.host.repeats) = (true, true, true);
    // Another period, so that this host is asked for it.
    guest.record(COUNT | ADAPTIVE | INSTRUCTIONS, 1100);
    guest.host.calls();
    let mut left = 1100;
    for n in 1..=4 {
        guest.execute(left);
        guest.interrupt();
        assert_eq!(guest.pmu.branches_awaited(), 32);
        guest.execute(30);
        guest.pmu.hold(&mut guest.host);
        guest.branch(n);
        guest.pmu.end_following(&mut guest.host);
        guest.pmu.load(&mut guest.host);
        let calls = [Call::Pause(set([0])), Call::Resume(set([0]))];
        assert_eq!(guest.host.calls(), calls);
        assert_eq!(guest.index(), BUFFER + n * SIZE);
        left = 1070;
    }
}

#[test]
fn the_ring_at_the_end_of_the_run_decides() {
    let mut guest = guest(0x800);
    guest.record(0x0041_0000 | ADAPTIVE | INSTRUCTIONS, 1000);
    guest.happen(Instructions, Ring::User, 1000);
    guest.interrupt();
    guest.memory().go_on(Ring::Kernel, 1);
    guest.pmu.end_following(&mut guest.host);
    assert_eq!(guest.index(), BUFFER);
    assert_eq!(guest.pmu.pebs_statistics().filtered, 1);
}

#[test]
fn without_a_follower_or_records_nothing_waits() {
    let mut guest = guest(0x800);
    guest.host.follows = false;
    guest.read(GlobalStatus);
    guest.branch(1);
    guest.overflow();
    assert_eq!(guest.first().1[..2], [1, 0], "all branches are handed over");
    // Disabled, the registers have what they have.
    guest.host.follows = true;
    guest.write_lbr(LBR_CTL, 0);
    guest.write_lbr(FROM + 0x100, 7);
    guest.memory().store(0x1028, BUFFER);
    guest.overflow();
    assert_eq!(guest.first().1[..2], [7, 0]);
}
