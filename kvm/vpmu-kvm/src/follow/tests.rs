//! Traces of code in a memory of 64 KiB that is mapped onto itself.

use kvm_bindings::{kvm_regs, kvm_sregs};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vpmu::x86::Ring;
use vpmu::x86::lbr::{Branch, Filter, Kind, Kinds};

use vpmu_x86::predict::Predictor;

use super::trace::{Leaf, Trace};
use super::walk::{LONGEST, Resume, Start, walk};
use crate::guest::{registers, system};
use crate::memory::GuestMemory;

const CODE: u64 = 0x8000;
const STACK: u64 = 0xa000;
const IDT: u64 = 0x1000;
const TABLES: u64 = 0x2000;
const PAGE_FAULT: u64 = 0xc000;

pub(super) fn everything() -> Filter {
    let kinds = [
        Kind::Conditional,
        Kind::RelativeJump,
        Kind::IndirectJump,
        Kind::RelativeCall,
        Kind::IndirectCall,
        Kind::Return,
        Kind::Other,
    ];
    Filter {
        kernel: true,
        user: true,
        kinds: kinds
            .into_iter()
            .fold(Kinds::NONE, |kinds, kind| kinds.with(kind, true)),
        call_stack: false,
    }
}

fn memory(code: &[u8]) -> GuestMemoryMmap {
    let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap();
    let mut table = TABLES;
    for _ in 0..3 {
        assert!(ram.write(table, &(table + 0x1003).to_le_bytes()));
        table += 0x1000;
    }
    for page in 0..16_u64 {
        assert!(ram.write(table + 8 * page, &(page << 12 | 3).to_le_bytes()));
    }
    let gate = PAGE_FAULT & 0xffff | 0x10 << 16 | 0x8e00 << 32;
    assert!(ram.write(IDT + 14 * 16, &gate.to_le_bytes()));
    assert!(ram.write(CODE, code));
    ram
}

fn trace(code: &[u8], regs: kvm_regs, wanted: usize) -> Option<Trace> {
    trace_of(code, regs, wanted, LONGEST)
}

fn trace_of(code: &[u8], regs: kvm_regs, wanted: usize, longest: usize) -> Option<Trace> {
    let ram = memory(code);
    let mut sregs = kvm_sregs {
        cr0: 0x8001_0001,
        cr3: TABLES,
        cr4: 0x20,
        efer: 0x501,
        ..Default::default()
    };
    (sregs.cs.l, sregs.idt.base) = (1, IDT);
    let regs = kvm_regs {
        rip: CODE,
        rsp: STACK,
        rflags: 2,
        ..regs
    };
    let start = Start {
        registers: &registers(&regs),
        system: &system(&sregs),
        sregs: &sregs,
        ring: Ring::Kernel,
        lstar: None,
        filter: everything(),
        wanted,
        resume: Resume::Works,
        longest,
    };
    let mut trace = Trace::default();
    walk(&start, &ram, &mut Predictor::new(), &mut trace).then_some(trace)
}

/// Returns each leaf's place, with the branches that lead there, by offsets in the code.
fn leaves(trace: &Trace) -> Vec<(u64, Vec<(u64, u64)>)> {
    let offset = |at: u64| at.wrapping_sub(CODE);
    let pair = |branch: &Branch| (offset(branch.from), offset(branch.to));
    let leaf = |leaf: &Leaf| {
        let (branches, off) = (&trace.branches[..leaf.branches], leaf.off);
        branches.iter().chain(&off).map(pair).collect()
    };
    trace
        .leaves
        .iter()
        .map(|one| (offset(one.ip), leaf(one)))
        .collect()
}

#[test]
fn a_trace_goes_through_calls_and_returns() {
    // call 7; jmp 0x20; 7: ret
    let code = [0xe8, 2, 0, 0, 0, 0xeb, 0x19, 0xc3];
    let trace = trace(&code, kvm_regs::default(), 3).unwrap();
    assert_eq!(leaves(&trace), [(0x20, vec![(0, 7), (7, 5), (5, 0x20)])]);
}

#[test]
fn a_step_is_one_instruction() {
    // call 7; 7: ret; then cmp byte [rbx], 0; jne 0x10
    let step = |code: &[u8], rbx| {
        let regs = kvm_regs {
            rbx,
            ..Default::default()
        };
        trace_of(code, regs, 32, 1).unwrap()
    };
    let call = step(&[0xe8, 2, 0, 0, 0, 0xeb, 0x19, 0xc3], 0);
    assert_eq!(leaves(&call), [(7, vec![(0, 7)])]);
    let compare = step(&[0x80, 0x3b, 0, 0x75, 0x0b], 0xb000);
    assert_eq!(leaves(&compare), [(3, vec![])]);
}

#[test]
fn a_changed_return_address_is_the_target() {
    // A retpoline: call 7; pause; jmp 5; 7: mov [rsp], rax; ret
    let code = [0xe8, 2, 0, 0, 0, 0xf3, 0x90, 0x48, 0x89, 0x04, 0x24, 0xc3];
    let rax = CODE + 0x40;
    let trace = trace(
        &code,
        kvm_regs {
            rax,
            ..Default::default()
        },
        2,
    )
    .unwrap();
    assert_eq!(leaves(&trace), [(0x40, vec![(0, 7), (11, 0x40)])]);
}

#[test]
fn a_condition_of_registers_needs_no_second_leaf() {
    // cmp eax, 5; je 0x10
    let code = [0x83, 0xf8, 5, 0x74, 0x0b];
    let taken = trace(
        &code,
        kvm_regs {
            rax: 5,
            ..Default::default()
        },
        1,
    )
    .unwrap();
    assert_eq!(leaves(&taken), [(0x10, vec![(3, 0x10)])]);
}

#[test]
fn a_condition_of_memory_has_a_leaf_for_each_way() {
    // cmp byte [rbx], 0; jne 0x10; jmp 0x20
    let code = [0x80, 0x3b, 0, 0x75, 0x0b, 0xeb, 0x19];
    let rbx = 0xb000;
    let trace = trace(
        &code,
        kvm_regs {
            rbx,
            ..Default::default()
        },
        1,
    )
    .unwrap();
    let expected = [(0x10, vec![(3, 0x10)]), (0x20, vec![(5, 0x20)])];
    assert_eq!(leaves(&trace), expected);
}

#[test]
fn a_loop_ends_where_it_begins() {
    // inc eax; jmp 0
    let trace = trace(&[0xff, 0xc0, 0xeb, 0xfc], kvm_regs::default(), 32).unwrap();
    assert_eq!(leaves(&trace), [(0, vec![(2, 0)])]);
}

#[test]
fn an_instruction_that_may_fault_is_alone() {
    // mov eax, [rbx], of a page that is missing
    let rbx = 0x20_0000;
    let regs = kvm_regs {
        rbx,
        ..Default::default()
    };
    let alone = trace(&[0x8b, 0x03, 0x90], regs, 1).unwrap();
    let fault = PAGE_FAULT - CODE;
    assert_eq!(leaves(&alone), [(fault, vec![(0, fault)]), (2, vec![])]);
    // nop; mov eax, [rbx]: the trace before it
    let before = trace(&[0x90, 0x8b, 0x03], regs, 1).unwrap();
    assert_eq!(leaves(&before), [(1, vec![])]);
}

#[test]
fn repeated_instructions_run_at_full_speed() {
    // rep stosb
    let alone = trace(&[0xf3, 0xaa], kvm_regs::default(), 1).unwrap();
    assert!(leaves(&alone).contains(&(2, vec![])));
}

#[test]
fn what_cannot_be_followed_has_no_trace() {
    // hlt; int 0x80; int3; mov eax, ...; far jump by memory; a page that is missing has its handler
    for code in [
        &[0xf4][..],
        &[0xcd, 0x80],
        &[0xcc],
        &[0x0f, 0x0b],
        &[0xff, 0x2b],
    ] {
        assert!(trace(code, kvm_regs::default(), 1).is_none(), "{code:x?}");
    }
}

#[test]
fn a_branch_that_vendors_cut_differently_is_not_followed() {
    for code in CUT {
        let code = [code, &[0; 4][..]].concat();
        assert!(trace(&code, kvm_regs::default(), 1).is_none(), "{code:x?}");
    }
}

/// Near branches with a prefix 66, which cuts the target to 16 bits on AMD's processors alone: CALL, JMP (both), JE (both),
/// RET (both), JRCXZ, LOOP. APM vol. 3, 1.2.2; SDM vol. 2A, "CALL".
pub(super) const CUT: &[&[u8]] = &[
    &[0x66, 0xe8, 2, 0],
    &[0x66, 0xe9, 2, 0],
    &[0x66, 0xeb, 2],
    &[0x66, 0x0f, 0x84, 2, 0],
    &[0x66, 0x74, 2],
    &[0x66, 0xc3],
    &[0x66, 0xc2, 8, 0],
    &[0x66, 0xe3, 2],
    &[0x66, 0xe2, 2],
    &[0x66, 0xff, 0xe0],
    &[0x66, 0xff, 0xd0],
];
