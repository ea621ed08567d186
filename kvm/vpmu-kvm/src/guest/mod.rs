//! The guest of a vCPU, as perf's host needs it: its ring; and for PEBS records its registers, and its memory by linear
//! address.
//!
//! KVM is asked while the vCPU does not run, at most once between two runs. The answers are forgotten before the next
//! run, because the guest may change its page tables whenever it runs. Until then a page stays where it was found, as in
//! a processor's TLB: the guest that changes its tables meanwhile, from another vCPU, has to interrupt this vCPU before
//! it can rely on the change.

use kvm_bindings::{kvm_regs, kvm_sregs, kvm_xsave};
use vpmu::x86::Ring;
use vpmu::x86::pebs::{Fault, GeneralRegisters, Guest, Sample};
use vpmu_perf::SampledGuest;
use vpmu_x86::cpu::{Registers, System};
use vpmu_x86::paging::{Access, Mode, PAGE, Page, Paging, each_page};

use crate::run::Kvm;
use crate::{deadline, sys};

const IA32_TIME_STAMP_COUNTER: u32 = 0x10;

/// A vCPU of KVM's that does not run.
#[derive(Debug)]
pub(crate) struct VcpuGuest {
    kvm: Kvm,
    sregs: Option<Box<kvm_sregs>>,
    regs: Option<kvm_regs>,
    tsc_offset: Option<u64>,
    /// The pages last found, by the addresses that lead there: those of a DS area and of its buffer.
    pages: [Option<(u64, Page)>; 2],
}

impl VcpuGuest {
    pub(crate) fn new(kvm: Kvm) -> Self {
        Self {
            kvm,
            sregs: None,
            regs: None,
            tsc_offset: None,
            pages: [None; 2],
        }
    }

    fn sregs(&mut self) -> Result<&kvm_sregs, Fault> {
        if self.sregs.is_none() {
            let sregs = sys::GET_SREGS.get(&self.kvm.vcpu).map_err(|_| Fault)?;
            self.sregs = Some(Box::new(sregs));
        }
        self.sregs.as_deref().ok_or(Fault)
    }

    fn regs(&mut self) -> Result<kvm_regs, Fault> {
        // KVM_SYNC_X86_REGS has brought them with the exit, which saves a system call for each record. They are not kept:
        // what is executed for the guest since then changes them there.
        if let Some(regs) = self.kvm.run.regs() {
            return Ok(regs);
        }
        if self.regs.is_none() {
            self.regs = Some(sys::GET_REGS.get(&self.kvm.vcpu).map_err(|_| Fault)?);
        }
        self.regs.ok_or(Fault)
    }

    /// Returns the physical address behind `address`, where the processor may access it so: by an implicit access of the
    /// supervisor (SDM vol. 3A, 4.6), which never reaches user space with CR4.SMAP.
    fn place(&mut self, address: u64, access: Access) -> Option<u64> {
        let linear = address & !(PAGE - 1);
        let paging = Paging::of(&system(self.sregs().ok()?));
        let known = self.pages.iter().flatten().find(|&&(at, _)| at == linear);
        let page = match known {
            Some(&(_, page)) => page,
            None => {
                let page = paging.translate(&*self.kvm.memory, address)?;
                // Two are enough: the DS area's page, and that of the buffer's present end.
                self.pages.rotate_right(1);
                self.pages[0] = Some((linear, page));
                page
            }
        };
        let is_permitted = paging.permits(address, &page, access, Mode::Implicit, || None);
        is_permitted.then_some(page.physical + address % PAGE)
    }
}

impl SampledGuest for VcpuGuest {
    fn forget(&mut self) {
        // A VMM may set the TSC between two runs, as a restore does.
        (self.sregs, self.regs, self.tsc_offset) = (None, None, None);
        self.pages = [None; 2];
    }

    /// The guest's TSC is taken to be as fast as the host's.
    fn tsc_offset(&mut self) -> Result<u64, Fault> {
        if self.tsc_offset.is_none() {
            self.tsc_offset = Some(deadline::tsc_offset(&self.kvm.vcpu).map_err(|_| Fault)?);
        }
        self.tsc_offset.ok_or(Fault)
    }

    fn ring(&mut self) -> Result<Ring, Fault> {
        let regs = self.regs()?;
        Ok(ring(self.sregs()?, &regs))
    }
}

impl Guest for VcpuGuest {
    fn read(&mut self, address: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        let read = each_page(address, bytes.len(), |at, part| {
            let place = self.place(at, Access::Load);
            place.is_some_and(|place| self.kvm.memory.read(place, &mut bytes[part]))
        });
        read.then_some(()).ok_or(Fault)
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        let written = each_page(address, bytes.len(), |at, part| {
            let place = self.place(at, Access::Store);
            place.is_some_and(|place| self.kvm.memory.write(place, &bytes[part]))
        });
        written.then_some(()).ok_or(Fault)
    }

    fn sample(&mut self) -> Result<Sample, Fault> {
        // The host's TSC and an offset would be wrong where KVM scales the guest's.
        let tsc = sys::msr(&self.kvm.vcpu, IA32_TIME_STAMP_COUNTER).map_err(|_| Fault)?;
        Ok(Sample {
            ip: self.regs()?.rip,
            ring: self.ring()?,
            tsc,
        })
    }

    fn general(&mut self) -> Result<GeneralRegisters, Fault> {
        let registers = registers(&self.regs()?);
        Ok(GeneralRegisters {
            rflags: registers.rflags,
            rip: registers.rip,
            general: registers.general,
        })
    }

    fn xmm(&mut self) -> Result<[u128; 16], Fault> {
        // The legacy region has XMM0 at byte 160 (SDM vol. 1, 10.5.1).
        const XMM: usize = 160 / 4;
        let mut xsave = kvm_xsave::default();
        sys::GET_XSAVE
            .fill(&self.kvm.vcpu, &mut xsave)
            .map_err(|_| Fault)?;
        let (words, _) = xsave.region[XMM..].as_chunks::<4>();
        let mut registers = [0; 16];
        for (register, words) in registers.iter_mut().zip(words) {
            *register = words
                .iter()
                .rev()
                .fold(0, |value, &word| value << 32 | u128::from(word));
        }
        Ok(registers)
    }
}

/// Returns the general registers as `vpmu-x86` has them.
pub(crate) const fn registers(regs: &kvm_regs) -> Registers {
    Registers {
        general: [
            regs.rax, regs.rcx, regs.rdx, regs.rbx, regs.rsp, regs.rbp, regs.rsi, regs.rdi,
            regs.r8, regs.r9, regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15,
        ],
        rip: regs.rip,
        rflags: regs.rflags,
    }
}

/// Returns the general registers as KVM has them.
#[cfg(feature = "lbr")]
pub(crate) const fn kvm_registers(registers: &Registers) -> kvm_regs {
    let general = &registers.general;
    kvm_regs {
        rax: general[0],
        rcx: general[1],
        rdx: general[2],
        rbx: general[3],
        rsp: general[4],
        rbp: general[5],
        rsi: general[6],
        rdi: general[7],
        r8: general[8],
        r9: general[9],
        r10: general[10],
        r11: general[11],
        r12: general[12],
        r13: general[13],
        r14: general[14],
        r15: general[15],
        rip: registers.rip,
        rflags: registers.rflags,
    }
}

/// Returns what decides what a vCPU's code does.
pub(crate) const fn system(sregs: &kvm_sregs) -> System {
    System {
        cr0: sregs.cr0,
        cr3: sregs.cr3,
        cr4: sregs.cr4,
        efer: sregs.efer,
        cpl: sregs.ss.dpl,
        is_long: sregs.cs.l != 0,
        fs_base: sregs.fs.base,
        gs_base: sregs.gs.base,
    }
}

/// Returns the CPL, which is the privilege level of SS (SDM vol. 3A, 5.5).
pub(crate) fn ring(sregs: &kvm_sregs, regs: &kvm_regs) -> Ring {
    const PE: u64 = 1 << 0;
    const VM: u64 = 1 << 17;
    let is_virtual_8086 = regs.rflags & VM != 0;
    match sregs.cr0 & PE != 0 && (is_virtual_8086 || sregs.ss.dpl != 0) {
        true => Ring::User,
        false => Ring::Kernel,
    }
}
