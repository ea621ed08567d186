//! A whole VMM whose guest has a PMU: one vCPU, memory, a serial line to print on, and a port to switch off.
//!
//! ```sh
//! cargo run -p vpmu-example-vmm -- target/guest/x86_64/payload.elf
//! ```
//!
//! It boots a 64-bit ELF file or a bzImage by Linux's 64-bit boot protocol. There is neither a disk nor an initramfs, and
//! only as much of ACPI as the test program reads: for stock guests see `vpmu-vmm`. What is the PMU's is marked `PMU`.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::error::Error;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use kvm_bindings::{CpuId, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vpmu_kernel::Kernel; // PMU
use vpmu_kvm::{AfterRun, CpuidEntry, Model, Offer, Options, Vcpu}; // PMU

const MEMORY: usize = 128 << 20;
const GDT: u64 = 0x500;
const ZERO_PAGE: u64 = 0x7000;
const STACK: u64 = 0x8ff0;
const PAGE_TABLES: u64 = 0x9000;
const COMMAND_LINE: u64 = 0x2_0000;
const ACPI: u64 = 0xe_0000;

const SERIAL: u16 = 0x3f8;
const LINE_STATUS: u16 = SERIAL + 5;
/// Where ACPI's PM1a control register often is: any write switches off.
const POWER: u16 = 0x604;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let Some(kernel) = arguments.next() else {
        return Err("usage: vpmu-example-vmm KERNEL [WORD OF ITS COMMAND LINE...]".into());
    };
    let command_line = arguments.collect::<Vec<_>>().join(" ");

    let options = Options::default(); // PMU
    let offer = vpmu_kvm::detect(Model::Auto, &options)?; // PMU: what this host can back

    let kvm = Kvm::new()?;
    let vm = kvm.create_vm()?;
    vpmu_kvm::intercept(&vm, &offer.msrs())?; // PMU: before the first vCPU
    vm.set_tss_address(0xfffb_d000)?;
    vm.create_irq_chip()?;
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)])?;
    give_memory(&vm, &memory)?;
    let entry = load(&memory, Path::new(&kernel), &command_line)?;

    let mut vcpu = vm.create_vcpu(0)?;
    let cpuid = kvm.get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES)?;
    vcpu.set_cpuid2(&with_pmu(&cpuid, &offer, vcpu.get_tsc_khz()?)?)?;
    set_registers(&vcpu, entry)?;

    // PMU: before a seccomp filter
    let mut pmu = Vcpu::attach(&vm, &vcpu, &offer, &options, Arc::new(memory.clone()))?;
    let mut console = io::stdout().lock();
    loop {
        pmu.before_run()?; // PMU
        let exit = vcpu.run();
        if pmu.after_run()? != AfterRun::Vmm {
            continue; // PMU: the exit was its, and is completed
        }
        match exit {
            Ok(VcpuExit::IoOut(SERIAL, data)) => console.write_all(data)?,
            Ok(VcpuExit::IoOut(POWER, _)) => break,
            // The transmitter is empty.
            Ok(VcpuExit::IoIn(LINE_STATUS, data)) => data.fill(0x60),
            Ok(VcpuExit::IoIn(_, data) | VcpuExit::MmioRead(_, data)) => data.fill(0xff),
            Ok(VcpuExit::IoOut(..) | VcpuExit::MmioWrite(..)) => {}
            Ok(exit) => return Err(format!("the guest ended with {exit:?}").into()),
            // A signal. This VMM has none of its own to check for.
            Err(error) if error.errno() == libc::EINTR => vcpu.set_kvm_immediate_exit(0),
            Err(error) => return Err(error.into()),
        }
    }
    console.flush()?;
    let pmis = pmu.statistics().lock().map_or(0, |cost| cost.pmis); // PMU: what it cost
    eprintln!("{pmis} PMIs");
    Ok(())
}

/// PMU: what KVM supports, with the PMU in it.
fn with_pmu(cpuid: &CpuId, offer: &Offer, khz: u32) -> Result<CpuId, Box<dyn Error>> {
    let mut entries: Vec<CpuidEntry> = cpuid.as_slice().iter().map(CpuidEntry::from).collect();
    offer.set_cpuid(&mut entries, khz);
    let entries: Vec<_> = entries.into_iter().map(Into::into).collect();
    Ok(CpuId::from_entries(&entries)?)
}

#[expect(unsafe_code, reason = "KVM maps this memory by its address")]
fn give_memory(vm: &VmFd, memory: &GuestMemoryMmap) -> Result<(), Box<dyn Error>> {
    let region = kvm_userspace_memory_region {
        memory_size: MEMORY as u64,
        userspace_addr: memory.get_host_address(GuestAddress(0))? as u64,
        ..Default::default()
    };
    // SAFETY: `main` keeps the memory mapped until its guest has stopped.
    Ok(unsafe { vm.set_user_memory_region(region) }?)
}

/// Puts the kernel and what it wants to find into memory. Answers where it begins.
fn load(memory: &GuestMemoryMmap, path: &Path, line: &str) -> Result<u64, Box<dyn Error>> {
    let mut kernel = Kernel::open(path)?;
    kernel.rewrite_rdpmc()?; // PMU: KVM never hands RDPMC over. For a Linux, `Vcpu::set_rdpmc` does without
    for segment in kernel.segments() {
        let bytes = &kernel.elf()[segment.file.clone()];
        memory.write_slice(bytes, GuestAddress(segment.address))?;
    }
    let put = |at: u64, bytes: &[u8]| memory.write_slice(bytes, GuestAddress(at));
    put(COMMAND_LINE, line.as_bytes())?;
    put(ZERO_PAGE + 0x1fe, &0xaa55_u16.to_le_bytes())?;
    put(ZERO_PAGE + 0x202, b"HdrS\x0f\x02")?;
    put(ZERO_PAGE + 0x210, &[0xff])?; // a loader without a number
    put(ZERO_PAGE + 0x228, &(COMMAND_LINE as u32).to_le_bytes())?;
    put(ZERO_PAGE + 0x238, &(line.len() as u32).to_le_bytes())?;
    put(ZERO_PAGE + 0x1e8, &[2])?; // pieces of memory
    let map = [(0, 0x9_fc00), (0x10_0000, MEMORY as u64 - 0x10_0000)];
    for (at, (start, size)) in (ZERO_PAGE + 0x2d0..).step_by(20).zip(map) {
        put(at, &[start, size, 1].map(u64::to_le_bytes).concat()[..20])?;
    }
    // ACPI as far as the test program reads it: RSDP of revision 2, XSDT, MADT with one processor, no checksums.
    put(ACPI, b"RSD PTR \0\0\0\0\0\0\0\x02")?;
    put(ACPI + 24, &(ACPI + 64).to_le_bytes())?;
    put(ACPI + 64, b"XSDT\x2c")?;
    put(ACPI + 64 + 36, &(ACPI + 128).to_le_bytes())?;
    put(ACPI + 128, b"APIC\x34")?;
    put(ACPI + 128 + 44, &[0, 8, 0, 0, 1])?;
    put(ZERO_PAGE + 0x070, &ACPI.to_le_bytes())?;
    let gdt = [0, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff_u64];
    put(GDT, &gdt.map(u64::to_le_bytes).concat())?;
    // The first 4 GiB onto themselves, in pages of 2 MiB.
    put(PAGE_TABLES, &(PAGE_TABLES + 0x1003).to_le_bytes())?;
    for gib in 0..4 {
        let directory = PAGE_TABLES + 0x2000 + gib * 0x1000;
        put(
            PAGE_TABLES + 0x1000 + gib * 8,
            &(directory + 3).to_le_bytes(),
        )?;
        for n in 0..512 {
            put(
                directory + n * 8,
                &(gib << 30 | n << 21 | 0x83).to_le_bytes(),
            )?;
        }
    }
    Ok(kernel.entry())
}

/// 64-bit mode, RSI at the zero page.
fn set_registers(vcpu: &VcpuFd, entry: u64) -> Result<(), kvm_ioctls::Error> {
    let mut regs = vcpu.get_regs()?;
    (regs.rip, regs.rsi, regs.rsp, regs.rflags) = (entry, ZERO_PAGE, STACK, 2);
    vcpu.set_regs(&regs)?;
    let mut sregs = vcpu.get_sregs()?;
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
    (sregs.cs, sregs.ds, sregs.es, sregs.ss) = (code, data, data, data);
    (sregs.gdt.base, sregs.gdt.limit) = (GDT, 31);
    sregs.cr3 = PAGE_TABLES;
    sregs.cr4 |= 1 << 5; // PAE
    sregs.cr0 |= 1 << 31 | 1; // PG, PE
    sregs.efer |= 1 << 8 | 1 << 10; // LME, LMA
    vcpu.set_sregs(&sregs)
}
