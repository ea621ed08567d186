//! The way through KVM: a guest of some dozen instructions, and a host that counts what it is told.
//!
//! Needs a /dev/kvm, any: says `skipped` on standard error where there is none.

use kvm_bindings::{kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use super::*;

const IDT: u64 = 0x1000;
const PAGE_TABLES: u64 = 0x2000;
const HANDLERS: u64 = 0xc000;
const GDT: u64 = 0x7000;
const CODE: u64 = 0x8000;
const STACK: u64 = 0xa000;
const MEMORY: usize = 0x1_0000;

/// The guest reports EAX, or in a handler its vector.
const REPORT: u8 = 0x10;
const HANDLED: u8 = 0x11;
/// It is through.
const END: u8 = 0x12;
/// It has run for so many cycles.
const RUN: u8 = 0x13;

/// 64-bit code.
#[derive(Default)]
struct Code(Vec<u8>);

impl Code {
    fn mov(mut self, opcode: u8, value: u32) -> Self {
        self.0.push(opcode);
        self.0.extend(value.to_le_bytes());
        self
    }
    fn eax(self, value: u32) -> Self {
        self.mov(0xb8, value)
    }
    fn ecx(self, value: u32) -> Self {
        self.mov(0xb9, value)
    }
    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }
    fn out(self, port: u8) -> Self {
        self.bytes(&[0xe7, port])
    }
    fn wrmsr(self, index: u32, value: u64) -> Self {
        self.ecx(index)
            .eax(value as u32)
            .mov(0xba, (value >> 32) as u32)
            .bytes(&[0x0f, 0x30])
    }
    fn rdmsr(self, index: u32) -> Self {
        self.ecx(index).bytes(&[0x0f, 0x32]).out(REPORT)
    }
    /// As `vpmu_kvm::kernel` leaves it behind.
    fn rdpmc(self, index: u32) -> Self {
        self.ecx(index).bytes(&[0xe6, 0xe6]).out(REPORT)
    }
    fn run(self, cycles: u32) -> Self {
        self.eax(cycles).out(RUN)
    }
}

/// Says its vector. After a fault, steps over the instruction, all of which have two bytes here.
fn handler(vector: u8) -> Vec<u8> {
    const PUSH_RAX: u8 = 0x50;
    const POP_RAX: u8 = 0x58;
    let code = Code::default().bytes(&[PUSH_RAX]);
    let code = code.eax(vector.into()).out(HANDLED).bytes(&[POP_RAX]);
    let code = match vector {
        // add rsp, 8; add qword [rsp], 2
        13 => code.bytes(&[0x48, 0x83, 0xc4, 8, 0x48, 0x83, 0x04, 0x24, 2]),
        _ => code,
    };
    code.bytes(&[0x48, 0xcf]).0 // iretq
}

fn fill(memory: &GuestMemoryMmap, code: &[u8]) {
    let write = |at: u64, bytes: &[u8]| memory.write_slice(bytes, GuestAddress(at)).unwrap();
    // The first 2 MiB onto themselves.
    let tables = [PAGE_TABLES + 0x1003, PAGE_TABLES + 0x2003, 0x83_u64];
    for (page, entry) in (0..).zip(tables) {
        write(PAGE_TABLES + page * 0x1000, &entry.to_le_bytes());
    }
    write(GDT + 0x10, &0x00af_9b00_0000_ffff_u64.to_le_bytes());
    write(GDT + 0x18, &0x00cf_9300_0000_ffff_u64.to_le_bytes());
    for vector in [2, 13, 0xee] {
        let at = HANDLERS + u64::from(vector) * 0x20;
        write(at, &handler(vector)[..]);
        let gate = at | 0x10 << 16 | 0x8e00 << 32;
        write(IDT + u64::from(vector) * 16, &gate.to_le_bytes());
    }
    write(CODE, code);
}

fn enter_long_mode(vcpu: &VcpuFd) {
    let mut sregs = vcpu.get_sregs().unwrap();
    let code = kvm_segment {
        limit: 0xffff_ffff,
        selector: 0x10,
        type_: 11,
        present: 1,
        s: 1,
        l: 1,
        g: 1,
        ..Default::default()
    };
    let data = kvm_segment {
        selector: 0x18,
        type_: 3,
        l: 0,
        db: 1,
        ..code
    };
    sregs.cs = code;
    (sregs.ds, sregs.es, sregs.ss) = (data, data, data);
    (sregs.gdt.base, sregs.gdt.limit) = (GDT, 0x1f);
    (sregs.idt.base, sregs.idt.limit) = (IDT, 0xfff);
    sregs.cr3 = PAGE_TABLES;
    sregs.cr4 |= 1 << 5;
    sregs.cr0 |= 1 << 31 | 1;
    sregs.efer |= 1 << 8 | 1 << 10;
    vcpu.set_sregs(&sregs).unwrap();
    let regs = kvm_regs {
        rip: CODE,
        rsp: STACK,
        rflags: 0x202,
        ..Default::default()
    };
    vcpu.set_regs(&regs).unwrap();
}

/// The APIC enabled, and what its LVTPC says.
fn set_lvtpc(vcpu: &VcpuFd, lvtpc: u32) {
    let mut lapic = vcpu.get_lapic().unwrap();
    for (offset, value) in [(0xf0, 0x1ff_u32), (0x340, lvtpc)] {
        for (byte, value) in lapic.regs[offset..].iter_mut().zip(value.to_le_bytes()) {
            *byte = value.cast_signed();
        }
    }
    vcpu.set_lapic(&lapic).unwrap();
}

#[expect(unsafe_code, reason = "KVM maps memory by its address")]
fn give_memory(vm: &VmFd, memory: &GuestMemoryMmap) {
    let region = kvm_userspace_memory_region {
        slot: 0,
        guest_phys_addr: 0,
        memory_size: MEMORY as u64,
        userspace_addr: memory.get_host_address(GuestAddress(0)).unwrap() as u64,
        flags: 0,
    };
    // SAFETY: it is mapped as long as `memory` lives, and the guest runs in `reports` only.
    unsafe { vm.set_user_memory_region(region) }.unwrap();
}

/// What a guest reports that executes `code` with this LVTPC; `None`: no KVM here.
fn reports(code: Code, lvtpc: u32) -> Option<Vec<(u8, u32)>> {
    let vm = match Kvm::new().and_then(|kvm| Ok((kvm.get_supported_cpuid(80)?, kvm.create_vm()?))) {
        Ok(vm) => vm,
        Err(error) => {
            eprintln!("skipped: no KVM: {error}");
            return None;
        }
    };
    let (mut cpuid, vm) = vm;
    vm.create_irq_chip().unwrap();
    if let Err(error) = crate::intercept(&vm, crate::pmu_msrs()) {
        eprintln!("skipped: {error}");
        return None;
    }
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
    give_memory(&vm, &memory);
    fill(&memory, &code.out(END).0);
    let mut vcpu = vm.create_vcpu(0).unwrap();
    let mut pmu = pmu();
    crate::set_cpuid(&mut cpuid, pmu.pmu().0.capability());
    vcpu.set_cpuid2(&cpuid).unwrap();
    enter_long_mode(&vcpu);
    set_lvtpc(&vcpu, lvtpc);
    prepare(&mut vcpu);

    let mut reports = Vec::new();
    for _ in 0..1000 {
        pmu.before_run(&vm, &vcpu).unwrap();
        match vcpu.run().unwrap() {
            VcpuExit::X86Rdmsr(mut exit) => assert!(pmu.rdmsr(&mut exit)),
            VcpuExit::X86Wrmsr(mut exit) => assert!(pmu.wrmsr(&mut exit)),
            VcpuExit::IoOut(RDPMC_PORT, _) => pmu.rdpmc(&mut vcpu).unwrap(),
            VcpuExit::IoOut(port, data) => {
                let value = u32::from_le_bytes(data.try_into().unwrap());
                match port as u8 {
                    END => return Some(reports),
                    RUN => run(&mut pmu, value.into()),
                    port => reports.push((port, value)),
                }
            }
            exit => panic!("{exit:?} after {reports:?}"),
        }
    }
    panic!("no end after {reports:?}");
}

fn sampling() -> Code {
    Code::default()
        .wrmsr(PERFEVTSEL0, CYCLES)
        .wrmsr(PMC0, (1 << 48) - 1000)
        .wrmsr(GLOBAL_CTRL, 1)
}

#[test]
fn a_guests_accesses_come_through() {
    let code = sampling().run(300).rdmsr(PMC0).rdpmc(0).rdmsr(GLOBAL_CTRL);
    let Some(reports) = reports(code, NMI) else {
        return;
    };
    let value = (1 << 32) - 700_u64;
    let value = (REPORT, value as u32);
    assert_eq!(reports, [value, value, (REPORT, 1)]);
}

#[test]
fn a_guests_mistakes_are_faults() {
    let code = Code::default()
        .wrmsr(PERFEVTSEL0, 1 << 40)
        .rdmsr(PERFEVTSEL0 + 4)
        .rdpmc(9)
        .rdmsr(PERFEVTSEL0);
    let Some(reports) = reports(code, NMI) else {
        return;
    };
    let faults: Vec<_> = reports
        .iter()
        .filter(|(port, _)| *port == HANDLED)
        .collect();
    assert_eq!(faults, [&(HANDLED, 13); 3], "{reports:?}");
    assert_eq!(reports.last(), Some(&(REPORT, 0)));
}

#[test]
fn an_overflow_interrupts_the_guest_as_lvtpc_says() {
    for (lvtpc, handled) in [(NMI, Some(2)), (0xee, Some(0xee)), (NMI | MASKED, None)] {
        let code = sampling()
            .run(999)
            .eax(7)
            .out(REPORT)
            .run(1)
            .rdmsr(GLOBAL_STATUS);
        let Some(reports) = reports(code, lvtpc) else {
            return;
        };
        let mut expected = vec![(REPORT, 7)];
        expected.extend(handled.map(|vector| (HANDLED, vector)));
        expected.push((REPORT, 1));
        assert_eq!(reports, expected, "{lvtpc:#x}");
    }
}
