//! A guest of some dozen instructions on this machine's own KVM, for tests: 64-bit code with handlers for NMI, #GP
//! and one vector, that reports by port writes.

use kvm_bindings::{CpuId, kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vpmu::x86::intel;
use vpmu_kvm::{Capability, CpuidEntry, Model, Offer, Rdpmc, lbr, pebs};

const IDT: u64 = 0x1000;
const PAGE_TABLES: u64 = 0x2000;
const HANDLERS: u64 = 0xc000;
/// Address of the handler of #GP.
pub(crate) const GP_HANDLER: u64 = HANDLERS + 13 * 0x20;
const GDT: u64 = 0x7000;
pub(crate) const CODE: u64 = 0x8000;
const STACK: u64 = 0xa000;
const MEMORY: usize = 0x1_0000;

/// Port to which the guest reports EAX, or in a handler its vector.
pub(crate) const REPORT: u8 = 0x10;
pub(crate) const HANDLED: u8 = 0x11;
/// Port by which the guest says that it has finished.
pub(crate) const END: u8 = 0x12;

/// 64-bit code.
#[derive(Default)]
pub(crate) struct Code(pub(crate) Vec<u8>);

impl Code {
    pub(crate) fn mov(mut self, opcode: u8, value: u32) -> Self {
        self.0.push(opcode);
        self.0.extend(value.to_le_bytes());
        self
    }
    pub(crate) fn eax(self, value: u32) -> Self {
        self.mov(0xb8, value)
    }
    pub(crate) fn ecx(self, value: u32) -> Self {
        self.mov(0xb9, value)
    }
    pub(crate) fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }
    pub(crate) fn out(self, port: u8) -> Self {
        self.bytes(&[0xe7, port])
    }
    pub(crate) fn wrmsr(self, index: u32, value: u64) -> Self {
        self.ecx(index)
            .eax(value as u32)
            .mov(0xba, (value >> 32) as u32)
            .bytes(&[0x0f, 0x30])
    }
    pub(crate) fn rdmsr(self, index: u32) -> Self {
        self.ecx(index).bytes(&[0x0f, 0x32]).out(REPORT)
    }
    /// Adds RDPMC in the form that `vpmu-kernel` leaves behind.
    pub(crate) fn rdpmc(self, index: u32) -> Self {
        self.ecx(index).bytes(&[0xe6, 0xe6]).out(REPORT)
    }
}

/// Returns a handler that reports its vector. After a fault, it steps over the instruction, all of which have two bytes
/// here. The handler of #DB reports the address at which the step has ended, and ends the stepping.
fn handler(vector: u8) -> Vec<u8> {
    const PUSH_RAX: u8 = 0x50;
    const POP_RAX: u8 = 0x58;
    const NOP: [u8; 3] = [0x0f, 0x1f, 0x00];
    if vector == 1 {
        // mov eax, [rsp + 8]
        let code = Code::default().bytes(&[PUSH_RAX, 0x8b, 0x44, 0x24, 8]);
        // and dword [rsp + 16], ~TF; iretq
        let code = code.out(REPORT).bytes(&[POP_RAX, 0x81, 0x64, 0x24, 16]);
        return code.bytes(&[0xff, 0xfe, 0xff, 0xff, 0x48, 0xcf]).0;
    }
    // Linux' handlers begin so, too.
    let code = Code::default().bytes(&NOP).bytes(&[PUSH_RAX]);
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
    // The tables map the first 2 MiB onto themselves.
    let tables = [PAGE_TABLES + 0x1003, PAGE_TABLES + 0x2003, 0x83_u64];
    for (page, entry) in (0..).zip(tables) {
        write(PAGE_TABLES + page * 0x1000, &entry.to_le_bytes());
    }
    write(GDT + 0x10, &0x00af_9b00_0000_ffff_u64.to_le_bytes());
    write(GDT + 0x18, &0x00cf_9300_0000_ffff_u64.to_le_bytes());
    for vector in [1, 2, 13, 0xee] {
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

/// Enables the APIC and sets its LVTPC.
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
    // SAFETY: it is mapped as long as `memory` lives, and the machine keeps both.
    unsafe { vm.set_user_memory_region(region) }.unwrap();
}

/// Intel's PMU, which the guests here know, whatever this machine's processor is.
pub(crate) const MODEL: Model = Model::INTEL;

fn intel_msrs() -> Vec<u32> {
    let intel = intel::Capability {
        pebs: Some(pebs::Capability::new()),
        lbr: Some(lbr::intel::Capability::new()),
        ..intel::Capability::new(intel::Version::V2)
    };
    let offer = Offer::from(Capability::from(intel));
    [offer.msrs(), Rdpmc::msrs(&offer)].concat()
}

/// A VM with one vCPU at its first instruction.
pub(crate) struct Machine {
    pub(crate) vcpu: VcpuFd,
    pub(crate) vm: VmFd,
    cpuid: CpuId,
    pub(crate) tsc_khz: u32,
    // Last: the guest's memory outlives the guest.
    pub(crate) memory: GuestMemoryMmap,
}

impl Machine {
    /// Prepares a machine that executes `code` with this LVTPC, and then writes to the port `END`. If no KVM here hands
    /// over MSRs, it says so and returns `None`.
    pub(crate) fn new(code: Code, lvtpc: u32) -> Option<Self> {
        Self::with_msrs(code, lvtpc, &intel_msrs())
    }

    /// Prepares a machine whose VMM gets the lazy deadline's MSRs.
    pub(crate) fn with_deadline(code: Code) -> Option<Self> {
        let offer = Offer {
            deadline: true,
            ..Offer::default()
        };
        Self::with_msrs(code, 0, &offer.msrs())
    }

    fn with_msrs(code: Code, lvtpc: u32, msrs: &[u32]) -> Option<Self> {
        let kvm = Kvm::new().and_then(|kvm| Ok((kvm.get_supported_cpuid(80)?, kvm.create_vm()?)));
        let (cpuid, vm) = match kvm {
            Ok(kvm) => kvm,
            Err(error) => {
                eprintln!("skipped: no KVM: {error}");
                return None;
            }
        };
        if let Err(error) = vpmu_kvm::intercept(&vm, msrs) {
            eprintln!("skipped: {error}");
            return None;
        }
        vm.create_irq_chip().unwrap();
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
        give_memory(&vm, &memory);
        fill(&memory, &code.out(END).0);
        let vcpu = vm.create_vcpu(0).unwrap();
        enter_long_mode(&vcpu);
        set_lvtpc(&vcpu, lvtpc);
        Some(Self {
            tsc_khz: vcpu.get_tsc_khz().unwrap(),
            vcpu,
            vm,
            cpuid,
            memory,
        })
    }

    /// Sets CPUID as a VMM does, after its own changes.
    pub(crate) fn set_cpuid(&self, offer: &Offer) {
        let entries = self.cpuid.as_slice().iter();
        let mut entries: Vec<CpuidEntry> = entries.map(CpuidEntry::from).collect();
        offer.set_cpuid(&mut entries, self.tsc_khz);
        let entries: Vec<_> = entries.into_iter().map(Into::into).collect();
        let cpuid = CpuId::from_entries(&entries).unwrap();
        self.vcpu.set_cpuid2(&cpuid).unwrap();
    }
}
