//! Tests with a small guest of pages.

mod guest;
mod tables;

use std::sync::Barrier;
use std::thread;

use vpmu::x86::{Ring, amd, intel};

use super::entry::Displaced;
use super::*;
use guest::*;

const KERNEL_FRAME: [u64; 6] = [0, TEXT + SITE, 0x10, 0x1_0246, STACK + 0x800, 0x18];
const USER_FRAME: [u64; 6] = [0, USER, 0x33, 0x1_0246, 0x7fff_ffff_0000, 0x2b];
const PCE: u64 = 1 << 8;

#[test]
fn a_handlers_first_instruction_is_an_exit_and_comes_back() {
    let cases: [(&[&[u8]], u64, Displaced); 4] = [
        (&[&ENDBR64, &CLAC], 4, Displaced::Clac),
        (&[&ENDBR64, &NOP], 4, Displaced::Nop),
        (&[&CLAC], 0, Displaced::Clac),
        (&[&NOP], 0, Displaced::Nop),
    ];
    for (handler, offset, displaced) in cases {
        let guest = Guest::new(handler);
        let before = guest.all();
        let rdpmc = Rdpmc::new();
        assert_eq!(guest.arm(&rdpmc), Ok(()));
        let at = TEXT_AT + HANDLER + offset;
        assert_eq!(guest.bytes(at), [0xe6, 0xe7], "{displaced:?}");
        let changed = guest.all();
        let differ = changed.iter().zip(&before).filter(|(a, b)| a != b).count();
        assert_eq!(differ, 2);

        let linear = TEXT + HANDLER + offset;
        let entry = rdpmc.entry(linear).unwrap();
        assert_eq!((entry.displaced, entry.iretq), (displaced, TEXT + IRETQ));
        assert_eq!(rdpmc.entry(linear + 2), Some(entry), "as KVM emulates OUT");
        assert_eq!(rdpmc.entry(linear + 1), None);
        // Another vCPU, and the guest's next search for a PMU.
        assert_eq!(guest.arm(&rdpmc), Ok(()));
        assert_eq!(rdpmc.places().entries.len(), 1);

        rdpmc.remove(guest.code());
        assert_eq!(guest.all(), before);
        assert_eq!(rdpmc.entry(linear), None);
    }
}

#[test]
fn guests_of_other_forms_are_refused_and_stay_as_they_are() {
    use Refusal::{Code, Gate, Memory, Mode, Return};
    type Change = fn(&mut Guest);
    let cases: &[(Refusal, Change)] = &[
        (Mode, |guest| guest.sregs.efer = 0),
        (Mode, |guest| guest.sregs.cs.l = 0),
        (Mode, |guest| guest.sregs.cr4 |= 1 << 32),
        (Gate, |guest| guest.sregs.idt.limit = 13 * 16 + 14),
        (Gate, |guest| guest.sregs.idt.base = 0x1234_5678_9abc_def0),
        (Gate, |guest| guest.sregs.idt.base = u64::MAX - 16),
        (Gate, |guest| guest.gate(TEXT + HANDLER, 0x0e)),
        // A task gate, a call gate, and a gate of 16 bits.
        (Gate, |guest| guest.gate(TEXT + HANDLER, 0x85)),
        (Gate, |guest| guest.gate(TEXT + HANDLER, 0x8c)),
        (Gate, |guest| guest.gate(TEXT + HANDLER, 0x86)),
        (Gate, |guest| guest.gate(TEXT + 0x1000, 0x8e)),
        (Gate, |guest| guest.gate(1 << 63, 0x8e)),
        (Gate, |guest| guest.gate(USER, 0x8e)),
        (Gate, |guest| guest.map(TEXT, TEXT_AT, P | NX)),
        (Gate, |guest| guest.map(TEXT, 1 << 40, P)),
        (Code, |guest| {
            guest.write(TEXT_AT + HANDLER + 4, &[0xfc, 0xe8, 0]);
        }),
        (Code, |guest| {
            guest.write(TEXT_AT + HANDLER + 4, &[0xe6, 0xe7, 0x55]);
        }),
        (Code, |guest| {
            guest.write(TEXT_AT + 0x807, &CLAC);
            guest.gate(TEXT + 0x807, 0x8e);
        }),
        (Return, |guest| guest.write(TEXT_AT + IRETQ, &[0; 2])),
        (Memory, |guest| {
            // RAM ends in the word.
            let all = guest.all();
            guest.ram = ram(0xf_fffc);
            guest.write(0, &all);
            guest.map(TEXT + 0x1000, 0xf_f000, P);
            guest.write(0xf_fff8, &CLAC);
            guest.gate(TEXT + 0x1ff8, 0x8e);
        }),
    ];
    for (n, &(refusal, change)) in cases.iter().enumerate() {
        let mut guest = Guest::linux();
        change(&mut guest);
        let (before, rdpmc) = (guest.all(), Rdpmc::new());
        assert_eq!(guest.arm(&rdpmc), Err(refusal), "{n}");
        assert_eq!(guest.all(), before, "{n}");
        assert!(rdpmc.places().entries.is_empty(), "{n}");
    }
}

#[test]
fn eight_vcpus_arm_at_once() {
    for _ in 0..50 {
        let (guest, rdpmc, barrier) = (Guest::linux(), Rdpmc::new(), Barrier::new(8));
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    barrier.wait();
                    assert_eq!(guest.arm(&rdpmc), Ok(()));
                    // The exit can be taken from now on.
                    assert!(rdpmc.entry(TEXT + HANDLER + 4).is_some());
                });
            }
        });
        assert_eq!(rdpmc.places().entries.len(), 1);
        assert_eq!(guest.bytes(TEXT_AT + HANDLER + 4), [0xe6, 0xe7, 0xca]);
    }
}

#[test]
fn a_frame_tells_an_rdpmc() {
    let mut guest = Guest::linux();
    guest.push(KERNEL_FRAME);
    let frame = guest.frame(STACK).unwrap();
    assert_eq!((frame.rip, frame.ring), (TEXT + SITE, Ring::Kernel));
    assert_eq!(frame.flags(), 0x246, "without RF");
    guest.push(USER_FRAME);
    assert_eq!(guest.frame(STACK), None, "CR4.PCE is clear");
    guest.sregs.cr4 |= PCE;
    let frame = guest.frame(STACK).unwrap();
    assert_eq!((frame.rip, frame.ring), (USER, Ring::User));
    // IRETQ takes the frame that is left.
    assert!(frame.step_over(STACK, guest.code()));
    assert_eq!(guest.bytes(STACK_AT + 8), (USER + 2).to_le_bytes());
    assert_eq!(guest.bytes(STACK_AT + 24), 0x246_u64.to_le_bytes());
}

#[test]
fn all_else_is_the_guests_own_fault() {
    let mut guest = Guest::linux();
    guest.sregs.cr4 |= PCE;
    let kernels: [(usize, u64); 7] = [
        (0, 13 << 3 | 2),
        (1, TEXT + SITE + 1),
        (1, USER),
        (1, 0x8000_0000_0000),
        (2, 0x18),
        (2, 0x33),
        (3, 1 << 17 | 2),
    ];
    for (field, value) in kernels {
        let mut frame = KERNEL_FRAME;
        frame[field] = value;
        guest.push(frame);
        assert_eq!(guest.frame(STACK), None, "{frame:x?}");
    }
    let users: [(usize, u64); 6] = [
        (0, 2),
        (1, TEXT + SITE),
        (1, USER + 2),
        (1, USER + 0x1000),
        (2, 0x37),
        (5, 0x2f),
    ];
    for (field, value) in users {
        let mut frame = USER_FRAME;
        frame[field] = value;
        guest.push(frame);
        assert_eq!(guest.frame(STACK), None, "{frame:x?}");
    }
    // Stacks that are nowhere, end, or are a process's.
    guest.push(KERNEL_FRAME);
    for rsp in [
        0,
        STACK - 8,
        STACK + 0x2000 - 40,
        USER,
        u64::MAX - 8,
        1 << 63,
    ] {
        assert_eq!(guest.frame(rsp), None, "{rsp:#x}");
    }
    // One across two pages is read whole.
    let bytes = KERNEL_FRAME.map(u64::to_le_bytes).concat();
    guest.write(STACK_AT + 0xff0, &bytes[..16]);
    guest.write(STACK_AT + 0x2000, &bytes[16..]);
    assert!(guest.frame(STACK + 0xff0).is_some());
}

#[test]
fn a_kernels_rdpmc_becomes_rdmsr_by_one_byte_and_comes_back() {
    let mut guest = Guest::linux();
    let (before, rdpmc) = (guest.all(), Rdpmc::new());
    rdpmc.rewrite(TEXT + SITE, guest.code());
    assert!(rdpmc.is_site(TEXT + SITE));
    assert_eq!(guest.bytes(TEXT_AT + SITE), [0x0f, 0x32]);
    let changed = guest.all();
    let differ = changed.iter().zip(&before).filter(|(a, b)| a != b).count();
    assert_eq!(differ, 1);
    // Another vCPU that had faulted, too.
    rdpmc.rewrite(TEXT + SITE, guest.code());
    let state = rdpmc.save();

    // Another process goes on with the machine.
    let bytes = postcard::to_stdvec(&state).unwrap();
    let other = Rdpmc::new();
    other.restore(&postcard::from_bytes(&bytes).unwrap());
    assert_eq!(other.save(), state);
    assert!(other.is_site(TEXT + SITE));
    other.remove(guest.code());
    assert_eq!(guest.all(), before);

    // Across two words, where Debian's 6.12 has it, and across two pages, which need not be neighbours.
    guest.map(TEXT + 0x1000, TEXT_AT + 0x4000, P);
    for (at, bytes) in [(0x407, [0x407, 0x408]), (0xfff, [0xfff, 0x4000])] {
        for (byte, at) in frame::RDPMC.into_iter().zip(bytes) {
            guest.write(TEXT_AT + at, &[byte]);
        }
        rdpmc.rewrite(TEXT + at, guest.code());
        assert!(rdpmc.is_site(TEXT + at));
        assert_eq!(bytes.map(|at| guest.bytes(TEXT_AT + at)), [[0x0f], [0x32]]);
    }
    // Not in a process's memory.
    rdpmc.rewrite(USER, guest.code());
    assert!(!rdpmc.is_site(USER));
    assert_eq!(guest.bytes(USER_AT), frame::RDPMC);
    // A process's tables lack the kernel: its bytes come back even so.
    rdpmc.rewrite(TEXT + SITE, guest.code());
    guest.map(TEXT, 0, 0);
    rdpmc.remove(guest.code());
    assert_eq!(guest.bytes(TEXT_AT + SITE), frame::RDPMC);
    // Memory of a kernel that is elsewhere now is left alone.
    guest.map(TEXT, TEXT_AT, P);
    rdpmc.rewrite(TEXT + SITE, guest.code());
    guest.write(TEXT_AT + 0x1000 + SITE, &frame::RDPMC);
    guest.map(TEXT, TEXT_AT + 0x1000, P);
    rdpmc.remove(guest.code());
    assert_eq!(guest.bytes(TEXT_AT + SITE), [0x0f, 0x32]);
}

#[test]
fn another_kernel_has_an_entry_of_its_own() {
    let mut guest = Guest::linux();
    let rdpmc = Rdpmc::new();
    for n in 0..2 * MOST_ENTRIES as u64 {
        let at = 0x100 + n * 0x20;
        guest.write(TEXT_AT + at, &CLAC);
        guest.gate(TEXT + at, 0x8f);
        assert_eq!(guest.arm(&rdpmc), Ok(()));
        assert!(rdpmc.entry(TEXT + at).is_some());
    }
    assert_eq!(rdpmc.places().entries.len(), MOST_ENTRIES);
    rdpmc.rewrite(TEXT + SITE, guest.code());
    assert!(rdpmc.is_site(TEXT + SITE));
    // The same kernel, loaded again to the same place.
    guest.write(TEXT_AT + 0x100, &CLAC);
    guest.gate(TEXT + 0x100, 0x8e);
    assert_eq!(guest.arm(&rdpmc), Ok(()));
    assert_eq!(guest.bytes(TEXT_AT + 0x100), [0xe6, 0xe7]);
    // A kernel at another place: the first one's places are forgotten, and its memory stays as it is.
    guest.map(TEXT, 0, 0);
    guest.map(TEXT + 0x5000, TEXT_AT + 0x5000, P);
    guest.write(TEXT_AT + 0x5000, &CLAC);
    guest.write(TEXT_AT + 0x5100, &[0x48, 0xcf]);
    guest.gate(TEXT + 0x5000, 0x8e);
    let before: [u8; 0x1000] = guest.bytes(TEXT_AT);
    assert_eq!(guest.arm(&rdpmc), Ok(()));
    assert_eq!(rdpmc.places().entries.len(), 1);
    assert!(!rdpmc.is_site(TEXT + SITE));
    assert_eq!(guest.bytes(TEXT_AT), before);
}

/// A guest that has slept on a disk (hibernation) comes back with the changed bytes, in a VMM that has not made them.
#[test]
fn a_guest_whose_memory_comes_from_elsewhere_is_known_by_its_bytes() {
    let guest = Guest::linux();
    let rdpmc = Rdpmc::new();
    let is_foreign = |guest: &Guest| rdpmc.is_foreign(&guest.sregs, guest.code());
    assert!(!is_foreign(&guest));
    assert!(rdpmc.places().entries.is_empty());
    assert_eq!(guest.arm(&Rdpmc::new()), Ok(()));
    let found = rdpmc.find(&guest.sregs, guest.code()).unwrap();
    assert_eq!(rdpmc.entry(TEXT + HANDLER + 4), Some(found));
    assert!(is_foreign(&guest));
    // The next kernel is this VMM's.
    guest.write(TEXT_AT + 0x800, &CLAC);
    guest.gate(TEXT + 0x800, 0x8e);
    assert_eq!(guest.arm(&rdpmc), Ok(()));
    assert!(!is_foreign(&guest));
    // Of a state that is saved, too.
    let bytes = postcard::to_stdvec(&rdpmc.save()).unwrap();
    rdpmc.restore(&postcard::from_bytes(&bytes).unwrap());
    assert!(!is_foreign(&guest));
}

#[test]
fn the_filter_hands_over_the_indices_of_the_guests_counters() {
    let intel: Capability = intel::Capability::new(intel::Version::V5).into();
    let amd: Capability = amd::Capability::new(amd::Interface::Core).into();
    let (intel, amd) = (Offer::from(intel), Offer::from(amd));
    assert_eq!(Rdpmc::msrs(&amd), (0..8).collect::<Vec<_>>());
    let msrs = Rdpmc::msrs(&intel);
    assert_eq!(msrs.len(), 16);
    assert!(msrs.into_iter().all(is_index));
    let mut of_pmus = intel.msrs().into_iter().chain(amd.msrs());
    assert!(of_pmus.all(|msr| !is_index(msr)));
    assert!(Rdpmc::msrs(&Offer::default()).is_empty());
}

/// Whatever registers, tables and frames there are: a guest's accesses end, in its own RAM.
#[test]
fn hostile_guests_harm_themselves_only() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut guest = Guest::linux();
    let rdpmc = Rdpmc::new();
    let pages = [TEXT, IDT, STACK, USER, 0, 1 << 63, u64::MAX - 0xfff];
    for round in 0..20_000 {
        let pick = |random: u64| pages[(random % 7) as usize].wrapping_add(random >> 8 & 0xfff);
        match round % 5 {
            0 => guest.sregs.idt.base = pick(random()),
            1 => guest.write(random() % 0xf_fff8, &random().to_le_bytes()),
            2 => guest.gate(pick(random()), random() as u8),
            3 => guest.sregs.cr4 = random() & 0x30_1120,
            _ => guest.sregs.cr3 = (random() % 0x12) << 12,
        }
        let _ = guest.arm(&rdpmc);
        let rsp = pick(random());
        if let Some(frame) = guest.frame(rsp) {
            rdpmc.rewrite(frame.rip, guest.code());
            let _ = frame.step_over(rsp, guest.code());
        }
        if round % 100 == 0 {
            rdpmc.remove(guest.code());
            guest = Guest::linux();
        }
    }
}
