//! Replays of code in a memory of 64 KiB that is mapped onto itself.

use std::sync::Arc;

use kvm_bindings::{kvm_regs, kvm_sregs};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use vpmu_x86::Executed;
use vpmu_x86::replay::{Access, Start};

use super::{Gains, Host, Replays, SITES, Site, Worth};
use crate::guest::{kvm_registers, registers, system};
use crate::memory::GuestMemory;

pub(in super::super) const CODE: u64 = 0x8000;
pub(in super::super) const STACK: u64 = 0xa000;
pub(in super::super) const DATA: u64 = 0xb000;
pub(in super::super) const TABLES: u64 = 0x2000;
/// Where the number of tables is.
const USED: u64 = 0x100;
/// Present, writable, accessed, dirty.
pub(in super::super) const KERNEL: u64 = 0x63;
const FROM: u32 = 0x1500;

/// RDMSR.
const READ: [u8; 2] = [0x0f, 0x32];

/// Tables for a page at `linear`, from `TABLES` on.
pub(in super::super) fn map(ram: &GuestMemoryMmap, linear: u64, entry: u64) {
    let mut table = TABLES;
    for level in (1..4).rev() {
        let at = table + 8 * (linear >> (12 + 9 * level) & 0x1ff);
        let mut bytes = [0; 8];
        assert!(ram.read(at, &mut bytes));
        let next = match u64::from_le_bytes(bytes) {
            0 => {
                let next = TABLES + 0x1000 + 0x1000 * used(ram);
                assert!(ram.write(USED, &(used(ram) + 1).to_le_bytes()));
                assert!(ram.write(at, &(next | KERNEL).to_le_bytes()));
                next
            }
            entry => entry & !0xfff,
        };
        table = next;
    }
    let at = table + 8 * (linear >> 12 & 0x1ff);
    assert!(ram.write(at, &entry.to_le_bytes()));
}

/// Returns how many tables there are but the first.
fn used(ram: &GuestMemoryMmap) -> u64 {
    let mut bytes = [0; 8];
    assert!(ram.read(USED, &mut bytes));
    u64::from_le_bytes(bytes)
}

pub(in super::super) fn memory(code: &[u8]) -> GuestMemoryMmap {
    let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap();
    for page in 8..16 {
        map(&ram, page << 12, page << 12 | KERNEL);
    }
    assert!(ram.write(CODE, code));
    ram
}

pub(in super::super) fn sregs() -> kvm_sregs {
    let mut sregs = kvm_sregs {
        cr0: 0x8001_0001,
        cr3: TABLES,
        cr4: 0x20,
        efer: 0xd01,
        ..Default::default()
    };
    sregs.cs.l = 1;
    sregs.gs.base = DATA;
    sregs
}

pub(in super::super) fn regs() -> kvm_regs {
    kvm_regs {
        rip: CODE,
        rsp: STACK,
        rflags: 2,
        rcx: FROM.into(),
        ..Default::default()
    }
}

/// Returns the value of a register of a record; there are 32.
fn record(msr: u32) -> Option<u64> {
    (FROM..FROM + 32)
        .contains(&msr)
        .then(|| u64::from(msr) << 32 | 0x8765_4321)
}

/// Returns the registers behind an RDMSR of a record.
fn completed(regs: &kvm_regs) -> kvm_regs {
    let value = record(regs.rcx as u32).unwrap();
    kvm_regs {
        rip: regs.rip + READ.len() as u64,
        rax: value & 0xffff_ffff,
        rdx: value >> 32,
        ..*regs
    }
}

/// A PMU with a status register, a control register, and a counter by RDPMC; and branch records.
#[derive(Default)]
struct Fake {
    /// The accesses, each with the first word of data as it was then.
    accesses: Vec<(Access, u64)>,
    executed: Executed,
    /// How many records there are, and how often they were asked for.
    depth: Option<u32>,
    asked: u32,
    /// After how many accesses something is to be delivered to the guest.
    calm: Option<usize>,
    dropped: bool,
    vain: u32,
    ram: Option<GuestMemoryMmap>,
    /// What another vCPU writes at an access.
    writes: Option<(u64, u64)>,
}

const STATUS: u32 = 0x38e;
const CONTROL: u32 = 0x38f;

impl Host for Fake {
    fn record(&mut self, msr: u32) -> Option<u64> {
        if !vpmu::x86::lbr::is_record(msr) {
            return None;
        }
        self.asked += 1;
        record(msr).filter(|_| self.depth.is_none_or(|depth| msr < FROM + depth))
    }

    fn count(&mut self, executed: Executed) {
        self.executed.instructions += executed.instructions;
        self.executed.reads += executed.reads;
        self.executed.branches += executed.branches;
    }

    fn access(&mut self, _: u64, access: Access) -> Result<Option<u64>, ()> {
        let value = match access {
            Access::Rdmsr(STATUS) => Some(0x5_0000_0007),
            Access::Out(0xe6, 3) => Some(0x1_0000_0002),
            Access::Wrmsr(CONTROL, value) if value < 16 => None,
            _ => return Err(()),
        };
        let there = self.ram.as_ref().map_or(0, |ram| word(ram, DATA));
        self.accesses.push((access, there));
        if let (Some(ram), Some((at, value))) = (&self.ram, self.writes) {
            assert!(ram.write(at, &value.to_le_bytes()));
        }
        Ok(value)
    }

    fn is_interrupted(&mut self) -> bool {
        self.calm.is_some_and(|calm| self.accesses.len() >= calm)
    }

    fn note(&mut self, _: bool, is_dropped: bool, vain: u32) {
        self.dropped |= is_dropped;
        self.vain += vain;
    }
}

fn replays(ram: &GuestMemoryMmap) -> Replays {
    Replays::new(
        Arc::new(ram.clone()),
        Worth {
            exit: 1_000_000,
            call: 1,
        },
    )
}

/// Replays behind the first access, which KVM has completed. Returns where the guest goes on.
fn replayed_by(
    replays: &mut Replays,
    host: &mut Fake,
    before: &kvm_regs,
    sregs: &kvm_sregs,
) -> Option<kvm_regs> {
    let access = Access::Rdmsr(before.rcx as u32);
    let start = Start {
        registers: &registers(&completed(before)),
        system: &system(sregs),
        pkru: &|| None,
    };
    let after = replays.replay(&start, (before.rip, access), host);
    after.map(|registers| kvm_registers(&registers))
}

fn replayed(ram: &GuestMemoryMmap, regs: &kvm_regs, sregs: &kvm_sregs) -> Option<(kvm_regs, Fake)> {
    let mut host = Fake::default();
    let after = replayed_by(&mut replays(ram), &mut host, regs, sregs);
    after.map(|after| (after, host))
}

/// Replays a read that is followed by `code`, and returns what became of the guest.
fn behind_read(code: &[u8]) -> Option<(kvm_regs, Fake)> {
    replayed(&memory(&[&READ[..], code].concat()), &regs(), &sregs())
}

/// Returns how many reads are replayed that are followed by `code`.
fn reads(code: &[u8]) -> u32 {
    behind_read(code).map_or(0, |(_, host)| host.executed.reads)
}

pub(in super::super) fn word(ram: &GuestMemoryMmap, at: u64) -> u64 {
    let mut bytes = [0; 8];
    assert!(ram.read(at, &mut bytes));
    u64::from_le_bytes(bytes)
}

/// A loop as Linux has one, by offsets in it.
const LOOP: &[u8] = &[
    0x0f, 0x32, // 0: rdmsr
    0x48, 0x89, 0x03, // 2: mov [rbx], rax
    0x48, 0x83, 0xc3, 0x08, // 5: add rbx, 8
    0xe8, 0x0a, 0x00, 0x00, 0x00, // 9: call 24
    0x81, 0xf9, 0x20, 0x15, 0x00, 0x00, // 14: cmp ecx, 0x1520
    0x72, 0xea, // 20: jb 0
    0xf4, // 22: hlt
    0x90, // 23: nop
    0xff, 0xc1, // 24: inc ecx
    0xc3, // 26: ret
];

#[test]
fn a_loop_of_reads_is_one_replay() {
    let ram = memory(LOOP);
    let regs = kvm_regs {
        rbx: DATA,
        ..regs()
    };
    let (after, Fake { executed, .. }) = replayed(&ram, &regs, &sregs()).unwrap();
    assert_eq!((executed.reads, executed.branches), (31, 31 * 3));
    assert_eq!(executed.instructions, 31 * 8);
    let expected = kvm_regs {
        rip: CODE + 2,
        rax: 0x8765_4321,
        rdx: 0x151f,
        rcx: 0x151f,
        rbx: DATA + 31 * 8,
        // 0x151f - 0x1520: CF, PF, SF.
        rflags: 2 | 0x85,
        ..regs
    };
    assert_eq!(after, expected);
    for n in 0..31 {
        assert_eq!(word(&ram, DATA + 8 * n), 0x8765_4321, "{n}");
    }
    assert_eq!(word(&ram, DATA + 8 * 31), 0);
    assert_eq!(word(&ram, STACK - 8), CODE + 14);
}

/// From RBX on: stores, and accesses of a PMU, by offsets.
const HANDLER: &[u8] = &[
    0x0f, 0x32, // 0: rdmsr
    0x48, 0xff, 0x03, // 2: inc qword [rbx]
    0xb9, 0x8f, 3, 0, 0, // 5: mov ecx, CONTROL
    0x31, 0xc0, // 10: xor eax, eax
    0x31, 0xd2, // 12: xor edx, edx: AF is undefined
    0x0f, 0x30, // 14: wrmsr
    0x48, 0xff, 0x03, // 16: inc qword [rbx]
    0xb9, 3, 0, 0, 0, // 19: mov ecx, 3
    0xe6, 0xe6, // 24: out 0xe6, al: RDPMC
    0x48, 0x01, 0x03, // 26: add [rbx], rax
    0xb9, 0x8e, 3, 0, 0, // 29: mov ecx, STATUS
    0x31, 0xd2, // 34: xor edx, edx
    0x0f, 0x32, // 36: rdmsr
    0x21, 0xc0, // 38: and eax, eax
    0x39, 0xc0, // 40: cmp eax, eax
    0xf4, // 42: hlt
];

fn handler() -> (GuestMemoryMmap, kvm_regs, Fake) {
    let ram = memory(HANDLER);
    let regs = kvm_regs {
        rbx: DATA,
        ..regs()
    };
    let host = Fake {
        ram: Some(ram.clone()),
        ..Fake::default()
    };
    (ram, regs, host)
}

const WRITE: Access = Access::Wrmsr(CONTROL, 0);
const RDPMC: Access = Access::Out(0xe6, 3);

#[test]
fn each_access_comes_behind_the_stores_before_it() {
    let (ram, before, mut host) = handler();
    let after = replayed_by(&mut replays(&ram), &mut host, &before, &sregs()).unwrap();
    let expected = [(WRITE, 1), (RDPMC, 2), (Access::Rdmsr(STATUS), 4)];
    assert_eq!(host.accesses, expected);
    // Behind the comparison, where all flags are defined.
    let expected = kvm_regs {
        rip: CODE + 42,
        rax: 7,
        rdx: 5,
        rcx: STATUS.into(),
        rflags: 0x46,
        ..before
    };
    assert_eq!((after, word(&ram, DATA)), (expected, 4));
    // inc, mov, xor, xor; inc, mov; add, mov, xor; and, cmp: accesses count where they are performed.
    assert_eq!(host.executed.instructions, 11);
}

#[test]
fn what_is_to_be_delivered_ends_a_replay() {
    // Before the first one: all is the guest's.
    let (ram, before, mut host) = handler();
    host.calm = Some(0);
    let after = replayed_by(&mut replays(&ram), &mut host, &before, &sregs());
    assert_eq!((after, word(&ram, DATA)), (None, 0));
    for (calm, expected) in [
        // Behind the WRMSR, and behind the next instruction, which defines all flags.
        (1, (1, CODE + 19, 2)),
        // RDPMC changes no flag: the guest goes on right behind it.
        (2, (2, CODE + 26, 2)),
    ] {
        let (ram, before, mut host) = handler();
        host.calm = Some(calm);
        let after = replayed_by(&mut replays(&ram), &mut host, &before, &sregs()).unwrap();
        let found = (host.accesses.len(), after.rip, word(&ram, DATA));
        assert_eq!(found, expected, "{calm}");
    }
}

#[test]
fn an_access_that_is_not_the_pmus_is_the_guests() {
    let (ram, before, mut host) = handler();
    // mov ecx, another register
    assert!(ram.write(CODE + 6, &[0x8e]));
    let after = replayed_by(&mut replays(&ram), &mut host, &before, &sregs()).unwrap();
    assert_eq!((host.accesses.len(), after.rip), (0, CODE + 14));
    assert_eq!(word(&ram, DATA), 1);
}

#[test]
fn a_place_to_end_that_is_not_reached_leaves_the_guest_behind_the_access() {
    let (ram, before, mut host) = handler();
    // hlt behind the WRMSR
    assert!(ram.write(CODE + 16, &[0xf4]));
    let after = replayed_by(&mut replays(&ram), &mut host, &before, &sregs()).unwrap();
    assert_eq!((host.accesses.len(), after.rip), (1, CODE + 16));
    // ZF and PF; AF, which the manual leaves undefined, is as good as any other.
    assert_eq!(after.rflags & !0x10, 0x46);
}

#[test]
fn what_was_loaded_must_still_be_there() {
    // Another vCPU writes what has been loaded before the access: nothing is lost. A store that is under way is not made.
    let (ram, before, mut host) = handler();
    host.writes = Some((DATA, 40));
    let after = replayed_by(&mut replays(&ram), &mut host, &before, &sregs()).unwrap();
    assert!(host.dropped && host.accesses.len() == 1);
    assert_eq!((after.rip, word(&ram, DATA)), (CODE + 16, 40));
    // Another word of the line is another's business.
    let (ram, before, mut host) = handler();
    host.writes = Some((DATA + 8, 40));
    replayed_by(&mut replays(&ram), &mut host, &before, &sregs()).unwrap();
    assert!(!host.dropped && host.accesses.len() == 3);
    assert_eq!([0, 8].map(|at| word(&ram, DATA + at)), [4, 40]);
}

#[test]
fn what_was_stored_must_still_lead_there() {
    const OTHER: u64 = 0xd000;
    // The entry of DATA's page, in the last of the tables.
    let entry = |ram: &GuestMemoryMmap| TABLES + 0x1000 * used(ram) + 8 * (DATA >> 12);
    for (to, what) in [
        (OTHER | KERNEL, "another page"),
        (DATA | KERNEL & !1, "none"),
        (DATA | KERNEL & !2, "read-only"),
        (DATA | KERNEL & !0x40, "clean"),
    ] {
        let (ram, before, mut host) = handler();
        host.writes = Some((entry(&ram), to));
        replayed_by(&mut replays(&ram), &mut host, &before, &sregs()).unwrap();
        assert!(host.dropped, "{what}");
        let words = [DATA, OTHER].map(|at| word(&ram, at));
        assert_eq!((host.accesses.len(), words), (1, [1, 0]), "{what}");
    }
}

#[test]
fn a_guest_that_never_comes_to_an_access_waits_for_none() {
    // Accesses one after the other, for ever, with flags that are never defined: and eax, 0; wrmsr; jmp back
    let ram = memory(&[
        0x0f, 0x32, 0xb9, 0x8f, 3, 0, 0, 0x31, 0xd2, 0x83, 0xe0, 0, 0x0f, 0x30, 0xeb, 0xf9,
    ]);
    let mut host = Fake::default();
    assert!(replayed_by(&mut replays(&ram), &mut host, &regs(), &sregs()).is_some());
    let all = host.executed.instructions as usize + host.accesses.len();
    assert!(
        (super::MOST as usize - 10..=super::MOST as usize + 100).contains(&all),
        "{all}"
    );
}

#[test]
fn a_site_that_does_not_pay_is_left_alone() {
    let mut gains = Gains(Box::new([None; SITES]));
    let [long, short] = [0, 15].map(|value| Site::of(CODE, Access::Wrmsr(CONTROL, value), false));
    let mut tries = |site, gained| {
        let tries = (0..100_000).filter(|_| {
            let is_due = gains.is_due(site);
            if is_due {
                gains.note(site, gained, 100);
            }
            is_due
        });
        tries.count()
    };
    assert_eq!(tries(short, 50), 100_000);
    let of_long = tries(long, -100);
    assert!((80..=120).contains(&of_long), "{of_long}");
    assert_eq!(tries(short, 50), 100_000, "another site");
    // One that pays again is tried at once, after some tries.
    let again = tries(long, 80);
    assert!(again > 90_000, "{again}");
}

#[test]
fn an_undefined_flag_is_seen_by_nobody() {
    // and eax, eax; rdmsr: AF is undefined behind it, and so the replay ends before.
    assert_eq!(reads(&[0x21, 0xc0, 0x0f, 0x32]), 0);
    // cmp eax, eax behind it, or before it.
    assert_eq!(reads(&[0x21, 0xc0, 0x0f, 0x32, 0x39, 0xc0]), 1);
    assert_eq!(reads(&[0x21, 0xc0, 0x39, 0xc0, 0x0f, 0x32]), 1);
    // shl eax, 5; seto bl; cmp eax, eax; rdmsr, and with shl eax, 1
    assert_eq!(
        reads(&[0xc1, 0xe0, 5, 0x0f, 0x90, 0xc3, 0x39, 0xc0, 0x0f, 0x32]),
        0
    );
    assert_eq!(
        reads(&[0xd1, 0xe0, 0x0f, 0x90, 0xc3, 0x39, 0xc0, 0x0f, 0x32]),
        1
    );
}

/// Each would be replayed but for one thing.
#[test]
fn what_is_not_exact_ends_the_replay() {
    let data = |code: &[u8]| {
        // mov ebx, DATA
        let code = [&[0xbb, 0, 0xb0, 0, 0], code, &READ].concat();
        reads(&code)
    };
    assert_eq!(data(&[0x48, 0xff, 0x03]), 1, "inc qword [rbx]");
    for (code, what) in [
        (&[0xf0, 0x48, 0xff, 0x03][..], "LOCK"),
        (&[0x48, 0x87, 0x03], "XCHG with memory, which locks"),
        (&[0xf3, 0x48, 0xab], "REP"),
        (&[0x48, 0x8b, 0x43, 0x04], "a word that is not aligned"),
        (&[0x0f, 0xa2], "CPUID"),
        (&[0x0f, 0x31], "RDTSC"),
        (&[0x0f, 0xae, 0xf0], "MFENCE"),
        (&[0xfa], "CLI"),
        (&[0xfb], "STI"),
        (&[0x9c], "PUSHF"),
        (&[0x0f, 0x30], "WRMSR"),
        (&[0x0f, 0x01, 0xf8], "SWAPGS"),
        (&[0x66, 0x6a, 0x01], "a push of 16 bits"),
        (&[0x66, 0x53], "a push of 16 bits"),
        (&[0x0f, 0x6e, 0xc0], "MMX"),
        (&[0x8c, 0xd8], "a segment's selector"),
        (&[0x67, 0x8b, 0x03], "an address of 32 bits"),
        (&[0x0f, 0x0b], "UD2"),
        (&[0xcc], "INT3"),
        (&[0xc6, 0x05, 0, 0, 0, 0, 0], "a store into the code"),
        (
            &[0xa1, 0, 0, 0x20, 0, 0, 0, 0, 0],
            "a page that is not there",
        ),
        (
            &[0xa1, 0, 0, 0, 0, 0, 0, 0, 0x80],
            "an address that is not canonical",
        ),
    ] {
        assert_eq!(data(code), 0, "{what}");
    }
    // ecx, for a register that is no record.
    assert_eq!(reads(&[0xb9, 0x8e, 0x03, 0, 0, 0x0f, 0x32]), 0);
    // jmp to itself; a return to what is not canonical
    assert_eq!(reads(&[0xeb, 0xfe]), 0);
    assert_eq!(reads(&[0x6a, 0x01, 0x48, 0xc1, 0x24, 0x24, 0x3f, 0xc3]), 0);
}

#[test]
fn only_what_the_processor_would_reach_without_a_trace_is_reached() {
    // mov ebx, DATA; mov eax, [rbx] or mov [rbx], eax; rdmsr
    let reads = |code: [u8; 2], entry: u64| {
        let code = [&READ[..], &[0xbb, 0, 0xb0, 0, 0], &code, &READ].concat();
        let ram = memory(&code);
        map(&ram, DATA, entry);
        replayed(&ram, &regs(), &sregs()).map_or(0, |(_, host)| host.executed.reads)
    };
    let (load, store) = ([0x8b, 0x03], [0x89, 0x03]);
    for (without, what, expected) in [
        (0, "all is there", (1, 1)),
        (1 << 0, "present", (0, 0)),
        (1 << 1, "writable", (1, 0)),
        (1 << 5, "accessed", (0, 0)),
        (1 << 6, "dirty", (1, 0)),
    ] {
        let entry = DATA | KERNEL & !without;
        assert_eq!(
            (reads(load, entry), reads(store, entry)),
            expected,
            "{what}"
        );
    }
    let user = DATA | KERNEL | 1 << 2;
    // All tables above are the kernel's, so that the page is.
    assert_eq!((reads(load, user), reads(store, user)), (1, 1));
    let device = 0x10_0000 | KERNEL;
    assert_eq!((reads(load, device), reads(store, device)), (0, 0));
}

#[test]
fn a_guest_in_another_mode_replays_nothing() {
    let ram = memory(&[&READ[..], &READ].concat());
    let is_replayed = |regs: &kvm_regs, sregs: &kvm_sregs| replayed(&ram, regs, sregs).is_some();
    assert!(is_replayed(&regs(), &sregs()));
    let rflags = |rflags| kvm_regs { rflags, ..regs() };
    assert!(!is_replayed(&rflags(0x102), &sregs()), "TF");
    assert!(!is_replayed(&rflags(0x402), &sregs()), "DF");
    let efer = |efer| kvm_sregs { efer, ..sregs() };
    assert!(!is_replayed(&regs(), &efer(0x501)), "no NXE");
    assert!(!is_replayed(&regs(), &efer(0x1d01)), "SVME");
    let cr4 = |cr4| kvm_sregs { cr4, ..sregs() };
    assert!(!is_replayed(&regs(), &cr4(0x2020)), "VMXE");
    assert!(!is_replayed(&regs(), &cr4(0x80_0020)), "CET");
    assert!(!is_replayed(&regs(), &cr4(0x100_0020)), "PKS");
    let mut user = sregs();
    user.ss.dpl = 3;
    assert!(!is_replayed(&regs(), &user), "user space");
    let mut short = sregs();
    short.cs.l = 0;
    assert!(!is_replayed(&regs(), &short), "32-bit code");
}

#[test]
fn a_guest_waits_for_its_interrupts_not_long() {
    // add ebx, 1; jmp back; 300 times would be a replay to nowhere.
    let long = [&[0x83, 0xc3, 1][..]; 300].concat();
    assert_eq!(reads(&[&long[..], &READ].concat()), 0);
    let ram = memory(LOOP);
    let open = kvm_regs {
        rbx: DATA,
        rflags: 0x202,
        ..regs()
    };
    // A guest whose interrupts are not blocked may read for ever: rdmsr; jmp back
    let endless = memory(&[0x0f, 0x32, 0xeb, 0xfc]);
    let executed = |ram, regs| replayed(ram, &regs, &sregs()).unwrap().1.executed;
    assert!(executed(&ram, open).instructions <= super::MOST_INTERRUPTIBLE);
    assert!(executed(&endless, open).instructions <= super::MOST_INTERRUPTIBLE);
    let blocked = executed(&endless, regs()).instructions;
    assert!(blocked > super::MOST_INTERRUPTIBLE && blocked <= super::MOST);
}

#[test]
fn a_replay_is_as_long_as_the_last_one_from_there_and_grows() {
    let ram = memory(LOOP);
    let at = |n: u32| kvm_regs {
        rbx: DATA,
        rcx: (FROM + n).into(),
        ..regs()
    };
    // The guest has a shorter stack for a while.
    let mut replays = replays(&ram);
    let mut reads = |first: u32, depth: u32| {
        let mut host = Fake {
            depth: Some(depth),
            ..Fake::default()
        };
        replayed_by(&mut replays, &mut host, &at(first), &sregs());
        (replays.last.1, host.asked)
    };
    assert_eq!(reads(0, 8), (7, 8));
    // Nobody is asked for what was not there.
    assert_eq!(reads(0, 8), (7, 7));
    // The stack has grown: another exit, and then none.
    assert_eq!(reads(0, 32), (7, 7));
    assert_eq!(reads(8, 32), (23, 23));
    assert_eq!(reads(0, 32), (31, 31));
    // The stack is short again.
    assert_eq!(reads(0, 8), (7, 8));
    assert_eq!(reads(0, 8), (7, 7));
}
