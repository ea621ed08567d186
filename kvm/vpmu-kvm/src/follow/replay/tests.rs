//! Replays of code in a memory of 64 KiB that is mapped onto itself.

mod branches;

use kvm_bindings::{kvm_regs, kvm_sregs};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::{Dropped, Executed, Replays, Start};
use crate::guest::{registers, system};
use crate::memory::GuestMemory;

const CODE: u64 = 0x8000;
const STACK: u64 = 0xa000;
const DATA: u64 = 0xb000;
const TABLES: u64 = 0x2000;
/// Where the number of tables is.
const USED: u64 = 0x100;
/// Present, writable, accessed, dirty.
const KERNEL: u64 = 0x63;
const FROM: u32 = 0x1500;

/// RDMSR.
const READ: [u8; 2] = [0x0f, 0x32];

/// Tables for a page at `linear`, from `TABLES` on.
fn map(ram: &GuestMemoryMmap, linear: u64, entry: u64) {
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

fn memory(code: &[u8]) -> GuestMemoryMmap {
    let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap();
    for page in 8..16 {
        map(&ram, page << 12, page << 12 | KERNEL);
    }
    assert!(ram.write(CODE, code));
    ram
}

fn sregs() -> kvm_sregs {
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

fn regs() -> kvm_regs {
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

fn plan(replays: &mut Replays, ram: &GuestMemoryMmap, regs: &kvm_regs, sregs: &kvm_sregs) -> bool {
    let value = record(regs.rcx as u32).unwrap();
    replays.plan_reads(
        &Start {
            registers: &registers(regs),
            system: &system(sregs),
            pkru: &|| None,
        },
        ram,
        value,
        record,
        None,
    )
}

/// Returns where the guest goes on, and what was executed.
fn committed_with(
    ram: &GuestMemoryMmap,
    regs: &kvm_regs,
    sregs: &kvm_sregs,
) -> Option<Result<(kvm_regs, Executed), Dropped>> {
    let mut replays = Replays::new();
    plan(&mut replays, ram, regs, sregs)
        .then(|| replays.store(&completed(regs), ram))
        .flatten()
}

/// Replays a read that is followed by `code`.
fn committed(code: &[u8]) -> Option<(kvm_regs, Executed)> {
    let code = [&READ[..], code].concat();
    committed_with(&memory(&code), &regs(), &sregs()).map(Result::unwrap)
}

/// Returns how many reads are replayed that are followed by `code`.
fn reads(code: &[u8]) -> u32 {
    committed(code).map_or(0, |(_, executed)| executed.reads)
}

fn word(ram: &GuestMemoryMmap, at: u64) -> u64 {
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
    let (after, executed) = committed_with(&ram, &regs, &sregs()).unwrap().unwrap();
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

#[test]
fn what_was_loaded_must_still_be_there() {
    // mov rbx, [rip + data]; mov [gs:8], rbx; rdmsr
    let offset = (DATA - CODE - 2 - 7) as u32;
    let code = [
        &READ[..],
        &[0x48, 0x8b, 0x1d],
        &offset.to_le_bytes(),
        &[0x65, 0x48, 0x89, 0x1c, 0x25, 8, 0, 0, 0],
        &READ,
    ]
    .concat();
    let ram = memory(&code);
    let mut replays = Replays::new();
    assert!(plan(&mut replays, &ram, &regs(), &sregs()));
    assert!(ram.write(DATA, &1_u64.to_le_bytes()));
    assert_eq!(replays.store(&completed(&regs()), &ram), Some(Err(Dropped)));
    assert_eq!(word(&ram, DATA + 8), 0);
    assert!(plan(&mut replays, &ram, &regs(), &sregs()));
    // Another word of the line is another's business.
    assert!(ram.write(DATA + 16, &2_u64.to_le_bytes()));
    let committed = replays.store(&completed(&regs()), &ram);
    assert!(committed.is_some_and(|committed| committed.is_ok()));
    assert_eq!([0, 8, 16].map(|at| word(&ram, DATA + at)), [1, 1, 2]);
}

#[test]
fn what_was_stored_must_still_lead_there() {
    // mov [gs:8], ecx; rdmsr
    let code = [&READ[..], &[0x65, 0x89, 0x0c, 0x25, 8, 0, 0, 0], &READ].concat();
    const OTHER: u64 = 0xd000;
    for (entry, what) in [
        (OTHER | KERNEL, "another page"),
        (DATA | KERNEL & !1, "none"),
        (DATA | KERNEL & !2, "read-only"),
        (DATA | KERNEL & !0x40, "clean"),
    ] {
        let ram = memory(&code);
        let mut replays = Replays::new();
        assert!(plan(&mut replays, &ram, &regs(), &sregs()));
        map(&ram, DATA, entry);
        assert_eq!(
            replays.store(&completed(&regs()), &ram),
            Some(Err(Dropped)),
            "{what}"
        );
        assert_eq!([DATA, OTHER].map(|at| word(&ram, at + 8)), [0, 0], "{what}");
    }
}

#[test]
fn a_guest_that_is_elsewhere_replays_nothing() {
    let ram = memory(&[&READ[..], &READ].concat());
    let mut replays = Replays::new();
    assert!(plan(&mut replays, &ram, &regs(), &sregs()));
    // The read was not completed.
    assert_eq!(replays.store(&regs(), &ram), Some(Err(Dropped)));
    assert_eq!(replays.store(&completed(&regs()), &ram), None);
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
        committed_with(&ram, &regs(), &sregs()).map_or(0, |committed| committed.unwrap().1.reads)
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
    let is_replayed =
        |regs: &kvm_regs, sregs: &kvm_sregs| committed_with(&ram, regs, sregs).is_some();
    assert!(is_replayed(&regs(), &sregs()));
    let rflags = |rflags| kvm_regs { rflags, ..regs() };
    assert!(!is_replayed(&rflags(0x102), &sregs()), "TF");
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
    let executed = |ram, regs| committed_with(ram, &regs, &sregs()).unwrap().unwrap().1;
    assert!(executed(&ram, open).instructions <= super::MOST_INTERRUPTIBLE);
    assert!(executed(&endless, open).instructions <= super::MOST_INTERRUPTIBLE);
    let blocked = executed(&endless, regs()).instructions;
    assert!(blocked > super::MOST_INTERRUPTIBLE && blocked <= super::MOST);
}

#[test]
fn reads_without_a_replay_are_tried_less_and_less() {
    let ram = memory(&[0x0f, 0x32, 0xf4]);
    let mut replays = Replays::new();
    let tries = (0..1000).filter(|_| {
        replays.is_due() && {
            plan(&mut replays, &ram, &regs(), &sregs());
            true
        }
    });
    assert!((10..30).contains(&tries.count()));
    // One that does is followed by the next.
    let ram = memory(LOOP);
    while !replays.is_due() {}
    assert!(plan(
        &mut replays,
        &ram,
        &kvm_regs {
            rbx: DATA,
            ..regs()
        },
        &sregs()
    ));
    assert!(replays.is_due());
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
    let mut replays = Replays::new();
    let mut reads = |first: u32, depth: u32, expected: Option<u32>| {
        let mut asked = 0;
        let start = Start {
            registers: &registers(&at(first)),
            system: &system(&sregs()),
            pkru: &|| None,
        };
        let read = |msr| {
            asked += 1;
            record(msr).filter(|_| msr < FROM + depth)
        };
        let is_planned = replays.plan_reads(&start, &ram, 0, read, expected);
        let executed = replays.store(&completed(&at(first)), &ram);
        let _ = (is_planned, executed);
        (replays.last.1, asked)
    };
    assert_eq!(reads(0, 8, None), (7, 8));
    // Nobody is asked for what was not there.
    assert_eq!(reads(0, 8, None), (7, 7));
    // The stack has grown: another exit, and then none.
    assert_eq!(reads(0, 32, None), (7, 7));
    assert_eq!(reads(8, 32, None), (23, 23));
    assert_eq!(reads(0, 32, None), (31, 31));
    // The stack is short again: there is no replay once, and then one as long as it can be.
    assert_eq!(reads(0, 8, None), (0, 8));
    assert_eq!(reads(0, 8, None), (7, 8));
    // What is expected counts more than the last time, but not behind a failure.
    assert_eq!(reads(0, 32, Some(15)), (15, 15));
    assert_eq!(reads(0, 8, Some(15)), (0, 8));
    assert_eq!(reads(0, 8, Some(15)), (7, 8));
}
