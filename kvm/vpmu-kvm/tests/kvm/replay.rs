//! Tests of what is executed for a guest with last branch records: the guest cannot tell.

use std::collections::BTreeSet;

use vm_memory::{Bytes, GuestAddress};
use vpmu_kvm::{Error, Exit, Follow, Lbr, Options, Replays};

use super::guest::{Code, END, MODEL, Machine};
use super::{NMI, Port, possible, run, try_attach};

const FROM: u32 = 0x1500;
const TO: u32 = 0x1600;
const DATA: u64 = 0xb000;

/// Reads a record, and stores it and all that a program can see of the status flags at RBX.
fn read(code: Code, msr: u32) -> Code {
    code.ecx(msr)
        // rdmsr; mov [rbx], eax; mov [rbx + 4], edx
        .bytes(&[0x0f, 0x32, 0x89, 0x03, 0x89, 0x53, 0x04])
        // pushfq; pop [rbx + 8]; add rbx, 16
        .bytes(&[0x9c, 0x8f, 0x43, 0x08, 0x48, 0x83, 0xc3, 0x10])
}

/// Two reads with `between` between them.
fn pair(code: Code, between: &[u8]) -> Code {
    let code = code.ecx(FROM).bytes(&[0x0f, 0x32]).bytes(between);
    read(code, TO)
}

/// Code around reads that is easy to execute in a wrong way.
fn hostile() -> Code {
    let mut code = Code::default();
    for n in 0..4 {
        code = code.wrmsr(FROM + n, 0x1234_5678 * u64::from(n + 1));
        code = code.wrmsr(TO + n, 0x7abc_def0_1234 + u64::from(n));
    }
    // mov ebx, DATA
    code = code.mov(0xbb, DATA as u32);
    for between in [
        &[][..],
        // add [rbx], eax; adc [rbx + 4], edx; sbb eax, eax; and eax, 0x55: AF is undefined
        &[0x01, 0x03, 0x11, 0x53, 0x04, 0x19, 0xc0, 0x83, 0xe0, 0x55],
        // lock inc dword [rbx]; xchg [rbx], eax
        &[0xf0, 0xff, 0x03, 0x87, 0x03],
        // mov edi, ebx; mov ecx, 5; rep stosb
        &[0x89, 0xdf, 0xb9, 5, 0, 0, 0, 0xf3, 0xaa],
        // mov byte [rip + 1], 0x43; mov al, 0: it becomes mov al, 0x43; mov [rbx], al; add rbx, 8
        &[
            0xc6, 0x05, 1, 0, 0, 0, 0x43, 0xb0, 0, 0x88, 0x03, 0x48, 0x83, 0xc3, 8,
        ],
        // mov eax, [0xbffe]; mov [0xbffd], eax: two pages
        &[
            0x8b, 0x04, 0x25, 0xfe, 0xbf, 0, 0, 0x89, 0x04, 0x25, 0xfd, 0xbf, 0, 0,
        ],
        // call +2; jmp +1; ret
        &[0xe8, 2, 0, 0, 0, 0xeb, 1, 0xc3],
        // shl eax, 5; cmovo edx, eax; sar edx, 3; mov [rbx], edx; add rbx, 8
        &[
            0xc1, 0xe0, 5, 0x0f, 0x40, 0xd0, 0xc1, 0xfa, 3, 0x89, 0x13, 0x48, 0x83, 0xc3, 8,
        ],
        // mov ecx, 0x1520; rdmsr: no such record
        &[0xb9, 0x20, 0x15, 0, 0, 0x0f, 0x32],
        // mov ecx, FROM + 1; pushfq; or dword [rsp], TF; popfq; rdmsr: steps
        &[
            0xb9, 1, 0x15, 0, 0, 0x9c, 0x81, 0x0c, 0x24, 0, 1, 0, 0, 0x9d, 0x0f, 0x32,
        ],
    ] {
        code = pair(code, between);
    }
    // mov esi, FROM; 0: mov ecx, esi; rdmsr; add [rbx], eax; inc esi; cmp esi, FROM + 32; jb 0
    code = code
        .mov(0xbe, FROM)
        .bytes(&[0x89, 0xf1, 0x0f, 0x32, 0x01, 0x03, 0xff, 0xc6]);
    code = code.bytes(&[0x81, 0xfe]).bytes(&(FROM + 32).to_le_bytes());
    read(code.bytes(&[0x72, 0xf0]), FROM)
}

/// What can be seen of a run: reports, memory, and which of the reads were exits.
struct Seen {
    reports: Vec<(u8, u32)>,
    memory: Vec<u8>,
    reads: u64,
    replays: Replays,
}

fn seen(follow: Follow) -> Option<Seen> {
    let mut machine = Machine::new(hostile(), NMI)?;
    // No replay without EFER.NXE. CR0.WP is as a kernel has it.
    let mut sregs = machine.vcpu.get_sregs().unwrap();
    sregs.efer |= 1 << 11;
    machine.vcpu.set_sregs(&sregs).unwrap();
    let options = Options {
        lbr: Lbr::On,
        follow,
        ..Options::default()
    };
    let mut pmu = match try_attach(&machine, MODEL, &options) {
        Err(Error::Lbr(reason)) => {
            eprintln!("skipped: {reason}");
            return None;
        }
        pmu => possible(pmu)?,
    };
    machine.set_cpuid(&pmu.offer());
    let mut reports = Vec::new();
    run(&mut machine, &mut pmu, |port| match port {
        Port::In(_) => false,
        Port::Out(port, value) => {
            reports.push((port, value));
            port == END
        }
    });
    let mut memory = vec![0; 0x1000];
    machine
        .memory
        .read_slice(&mut memory, GuestAddress(DATA))
        .unwrap();
    let statistics = pmu.statistics().lock().unwrap().clone();
    let exits = statistics.exits.iter();
    let reads = exits.filter(|(exit, _)| matches!(exit, Exit::MsrRead(FROM..0x1700)));
    Some(Seen {
        reports,
        memory,
        reads: reads.map(|(_, count)| count).sum(),
        replays: statistics.replays,
    })
}

#[test]
fn a_guest_cannot_tell_who_has_executed_its_instructions() {
    let (Some(steps), Some(ahead)) = (seen(Follow::Steps), seen(Follow::Ahead)) else {
        return;
    };
    assert_eq!(steps.replays, Replays::default());
    assert_eq!(ahead.reports, steps.reports);
    // The flags that the manual leaves undefined are the processor's in both.
    let differ: BTreeSet<usize> = (0..steps.memory.len())
        .filter(|&at| ahead.memory[at] != steps.memory[at])
        .collect();
    assert!(differ.is_empty(), "{differ:x?}");
    let replays = ahead.replays;
    assert!(replays.committed > 0 && replays.reads > 0, "{replays:?}");
    assert_eq!(ahead.reads + replays.reads, steps.reads, "{replays:?}");
}
