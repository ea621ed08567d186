//! Branches that are taken for the guest.

use kvm_bindings::{kvm_regs, kvm_sregs};
use vpmu::x86::lbr::Kind;

use super::super::super::tests::{CUT, everything};
use super::super::{Replays, Start};
use super::{CODE, DATA, KERNEL, STACK, TABLES, map, memory, regs, sregs, word};
use crate::guest::{registers, ring, system};
use crate::memory::GuestMemory;

/// Branches by offsets in the code.
type Taken = Vec<(u64, u64, Kind)>;

/// Takes branches of `code`; returns them, and the registers thereafter.
fn taken(
    code: &[u8],
    regs: &kvm_regs,
    sregs: &kvm_sregs,
    wanted: usize,
) -> Option<(Taken, kvm_regs)> {
    let ram = memory(code);
    let mut replays = Replays::new();
    let start = Start {
        registers: &registers(regs),
        system: &system(sregs),
        pkru: &|| None,
    };
    if !replays.plan_branches(&start, &ram, ring(sregs, regs), everything(), wanted) {
        return None;
    }
    let (after, executed) = replays.store(regs, &ram)?.unwrap();
    let branches = replays.taken(executed.taken).iter();
    let offset = |at: u64| at - CODE;
    let branches = branches.map(|branch| (offset(branch.from), offset(branch.to), branch.kind));
    Some((branches.collect(), after))
}

#[test]
fn branches_are_taken_for_the_guest() {
    // dec ecx; jne 0: 68 has two bits, so PF is set.
    let loop_ = (2, 0, Kind::Conditional);
    let regs = kvm_regs { rcx: 100, ..regs() };
    let (branches, after) = taken(&[0xff, 0xc9, 0x75, 0xfc], &regs, &sregs(), 32).unwrap();
    assert_eq!(branches, [loop_; 32]);
    assert_eq!((after.rcx, after.rip, after.rflags), (68, CODE, 6));
    // call 7; jmp 8; ret; call rax
    let code = [0xe8, 2, 0, 0, 0, 0xeb, 1, 0xc3, 0xff, 0xd0];
    let regs = kvm_regs { rax: CODE, ..regs };
    let (branches, after) = taken(&code, &regs, &sregs(), 6).unwrap();
    let round = [
        (0, 7, Kind::RelativeCall),
        (7, 5, Kind::Return),
        (5, 8, Kind::RelativeJump),
        (8, 0, Kind::IndirectCall),
    ];
    assert_eq!(branches, [&round[..], &round[..2]].concat());
    assert_eq!((after.rip, after.rsp), (CODE + 5, STACK - 8));
}

#[test]
fn a_frame_is_left() {
    // mov ebp, STACK - 16; push 5 twice, at STACK - 16 the last; leave; jmp to itself
    let code = [
        0xbd, 0xf0, 0x9f, 0, 0, 0x6a, 7, 0x6a, 5, 0x6a, 6, 0xc9, 0xeb, 0xfe,
    ];
    let (_, after) = taken(&code, &regs(), &sregs(), 1).unwrap();
    assert_eq!((after.rbp, after.rsp), (5, STACK - 8));
}

#[test]
fn branches_end_where_all_flags_are_defined_and_before_the_next() {
    // 0: test al, 1; 2: je 6; 4: ud2; 6: cmp eax, eax; 8: ud2. AF is undefined at the branch, and defined behind it.
    let code = [0xa8, 1, 0x74, 2, 0x0f, 0x0b, 0x39, 0xc0, 0x0f, 0x0b];
    let (branches, after) = taken(&code, &regs(), &sregs(), 1).unwrap();
    assert_eq!(branches, [(2, 6, Kind::Conditional)]);
    assert_eq!(after.rip, CODE + 8);
    // jmp 4 there: one branch too many.
    let code = [0xa8, 1, 0x74, 2, 0x0f, 0x0b, 0xeb, 0xfc];
    assert_eq!(taken(&code, &regs(), &sregs(), 1), None);
    // jne to the next instruction: nobody can tell whether it is taken.
    let code = [0x39, 0xc0, 0x75, 0, 0xeb, 0xfa];
    assert_eq!(taken(&code, &regs(), &sregs(), 1), None);
}

#[test]
fn user_space_reaches_its_own_pages() {
    // mov eax, [rbx]; jmp 0, or jmp 0 alone
    let ram = memory(&[0x8b, 0x03, 0xeb, 0xfc]);
    let user = 1 << 2;
    for at in [TABLES, TABLES + 0x1000, TABLES + 0x2000] {
        assert!(ram.write(at, &(word(&ram, at) | user).to_le_bytes()));
    }
    map(&ram, CODE, CODE | KERNEL | user);
    let mut sregs = sregs();
    sregs.ss.dpl = 3;
    let try_with = |data: u64, sregs: &kvm_sregs, rip: u64, pkru| {
        map(&ram, DATA, data);
        let regs = kvm_regs {
            rip,
            rbx: DATA,
            ..regs()
        };
        let start = Start {
            registers: &registers(&regs),
            system: &system(sregs),
            pkru: &|| pkru,
        };
        Replays::new().plan_branches(&start, &ram, ring(sregs, &regs), everything(), 4)
    };
    let is_taken = |data, sregs: &kvm_sregs, rip| try_with(data, sregs, rip, None);
    assert!(is_taken(DATA | KERNEL | user, &sregs, CODE));
    assert!(!is_taken(DATA | KERNEL, &sregs, CODE), "the kernel's page");
    // CR4.PKE: no memory without PKRU; jumps that need none go on.
    let keys = kvm_sregs {
        cr4: sregs.cr4 | 1 << 22,
        ..sregs
    };
    let with = |code: &[u8], pkru| {
        assert!(ram.write(CODE, code));
        try_with(DATA | KERNEL | user | 3 << 59, &keys, CODE, pkru)
    };
    let (load, store) = (&[0x8b, 0x03, 0xeb, 0xfc], &[0x89, 0x03, 0xeb, 0xfc]);
    assert!(!with(load, None));
    // Key 3 forbids nothing, writes, and all; others do not matter.
    for (pkru, may) in [
        (0xffff_ff3f, (true, true)),
        (0x80, (true, false)),
        (0x40, (false, false)),
    ] {
        let may_now = (with(load, Some(pkru)), with(store, Some(pkru)));
        assert_eq!(may_now, may, "{pkru:#x}");
    }
    assert!(ram.write(CODE, &[0xeb, 0xfe]));
    assert!(is_taken(DATA | KERNEL | user, &keys, CODE));
    // Without CR0.WP the kernel writes what is read-only, and user space does not.
    let no_wp = kvm_sregs {
        cr0: sregs.cr0 & !(1 << 16),
        ..sregs
    };
    for (code, may) in [
        (&[0x89, 0x03, 0xeb, 0xfc][..], false),
        (&[0x01, 0x03, 0xeb, 0xfc], false),
        (&[0x8b, 0x03, 0xeb, 0xfc], true),
    ] {
        assert!(ram.write(CODE, code));
        let read_only = DATA | user | KERNEL & !2;
        assert_eq!(is_taken(read_only, &no_wp, CODE), may, "{code:x?}");
    }
    // The kernel in user space: SMEP forbids the code, and SMAP the data unless AC is set.
    sregs.ss.dpl = 0;
    let supervisor = |cr4| kvm_sregs {
        cr4: sregs.cr4 | cr4,
        ..sregs
    };
    let (smep, smap) = (1 << 20, 1 << 21);
    let is_executed = |cr4| is_taken(DATA | KERNEL | user, &supervisor(cr4), CODE);
    assert!(ram.write(CODE, &[0x8b, 0x03, 0xeb, 0xfc]));
    assert_eq!([0, smep, smap].map(is_executed), [true, false, false]);
    // CPL 1 is the supervisor's for the tables, and no kernel's that is executed here.
    sregs.ss.dpl = 1;
    assert!(!is_taken(DATA | KERNEL | user, &sregs, CODE));
}

#[test]
fn branches_that_vendors_cut_differently_are_not_executed() {
    for code in CUT {
        // ZF is set; RCX is 0; RAX and the stack lead to the code.
        let code = [code, &[0; 4][..]].concat();
        let regs = kvm_regs {
            rax: CODE + 2,
            rflags: 0x42,
            rcx: 0,
            ..regs()
        };
        assert_eq!(taken(&code, &regs, &sregs(), 1), None, "{code:x?}");
    }
}

#[test]
fn loops_and_returns_of_other_forms_are_executed() {
    // 0: loop 0; 2: jrcxz 6; 4: ud2; 6: call rax (8); 8: ret 8
    let code = [0xe2, 0xfe, 0xe3, 0x02, 0x0f, 0x0b, 0xff, 0xd0, 0xc2, 8, 0];
    let ret = [&code[..], &[0x90; 64]].concat();
    let regs = kvm_regs {
        rcx: 3,
        rax: CODE + 8,
        ..regs()
    };
    let (branches, after) = taken(&ret, &regs, &sregs(), 5).unwrap();
    let expected = [
        (0, 0, Kind::Conditional),
        (0, 0, Kind::Conditional),
        (2, 6, Kind::Conditional),
        (6, 8, Kind::IndirectCall),
        (8, 8, Kind::Return),
    ];
    assert_eq!(branches, expected);
    // The return address, and 8 bytes more.
    assert_eq!((after.rcx, after.rsp, after.rip), (0, STACK + 8, CODE + 8));
}
