//! Memory as a kernel wants to find it: the 64-bit boot protocol (Documentation/arch/x86/boot.rst).

use std::fs;

use kvm_bindings::{kvm_segment, kvm_sregs};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::{Config, Error, acpi};
use vpmu_kernel::Kernel;

const GDT: u64 = 0x500;
const ZERO_PAGE: u64 = 0x7000;
const STACK: u64 = 0x8ff0;
const PAGE_TABLES: u64 = 0x9000;
const COMMAND_LINE: u64 = 0x2_0000;
const LONGEST_COMMAND_LINE: usize = 0x1_0000;
/// The end of conventional memory.
const LOW_END: u64 = 0x9_fc00;
const ACPI: u64 = 0xe_0000;
const HIGH: u64 = 0x10_0000;
/// Where the initramfs must not reach down to; the kernel, with what it clears, lies below.
const KERNEL_ROOM: u64 = 160 << 20;

/// Where the boot processor begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry(u64);

/// Puts kernel, initramfs, command line and tables into `memory`.
pub(super) fn load(memory: &GuestMemoryMmap, config: &Config) -> Result<Entry, Error> {
    let name = || config.kernel.display().to_string();
    let kernel_error = |error| match error {
        vpmu_kernel::Error::Read(path, error) => Error::File(path, error),
        error => Error::Kernel(name(), error),
    };
    let mut kernel = Kernel::open(&config.kernel).map_err(kernel_error)?;
    if config.pmu.is_some() {
        kernel.rewrite_rdpmc().map_err(kernel_error)?;
    }
    for segment in kernel.segments() {
        let fits = HIGH <= segment.address && segment.end() <= config.memory;
        if !fits {
            return Err(Error::Load(segment.address, segment.end()));
        }
        let bytes = &kernel.elf()[segment.file.clone()];
        write(memory, segment.address, bytes, "the kernel")?;
    }
    if !kernel
        .segments()
        .iter()
        .any(|segment| segment.holds(kernel.entry()))
    {
        return Err(Error::Entry(kernel.entry()));
    }

    let mut zero_page = vec![0_u8; 4096];
    let mut put = |at: usize, bytes: &[u8]| zero_page[at..at + bytes.len()].copy_from_slice(bytes);
    if let Some(path) = &config.initrd {
        let initrd = fs::read(path).map_err(|e| Error::File(path.display().to_string(), e))?;
        let room = config.memory.saturating_sub(KERNEL_ROOM);
        if initrd.len() as u64 > room {
            return Err(Error::Memory("the initramfs"));
        }
        let at = config.memory - (initrd.len() as u64).next_multiple_of(4096);
        write(memory, at, &initrd, "the initramfs")?;
        put(0x218, &(at as u32).to_le_bytes());
        put(0x21c, &(initrd.len() as u32).to_le_bytes());
    }
    if config.command_line.len() >= LONGEST_COMMAND_LINE || config.command_line.contains('\0') {
        return Err(Error::Config(
            "--append is too long, or has a NUL in it".to_owned(),
        ));
    }
    write(
        memory,
        COMMAND_LINE,
        config.command_line.as_bytes(),
        "the command line",
    )?;
    put(0x228, &(COMMAND_LINE as u32).to_le_bytes());
    put(0x238, &(config.command_line.len() as u32).to_le_bytes());
    put(0x070, &ACPI.to_le_bytes());
    put(0x1fe, &0xaa55_u16.to_le_bytes());
    put(0x202, b"HdrS");
    put(0x206, &0x20f_u16.to_le_bytes());
    put(0x210, &[0xff]); // a loader without a number
    let map = [(0, LOW_END), (HIGH, config.memory - HIGH)];
    put(0x1e8, &[map.len() as u8]);
    for (n, (start, size)) in map.into_iter().enumerate() {
        let at = 0x2d0 + 20 * n;
        put(at, &start.to_le_bytes());
        put(at + 8, &size.to_le_bytes());
        put(at + 16, &1_u32.to_le_bytes());
    }
    write(memory, ZERO_PAGE, &zero_page, "the boot parameters")?;
    write(memory, ACPI, &acpi::tables(ACPI, config.vcpus), "ACPI")?;
    write_page_tables(memory)?;
    let gdt = [0_u64, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff];
    write(memory, GDT, &gdt.map(u64::to_le_bytes).concat(), "the GDT")?;
    Ok(Entry(kernel.entry()))
}

/// The first 4 GiB onto themselves, in pages of 2 MiB.
fn write_page_tables(memory: &GuestMemoryMmap) -> Result<(), Error> {
    const TABLE: u64 = 0x3; // present, writable
    const LARGE: u64 = 0x83;
    let page = |n: u64| PAGE_TABLES + n * 4096;
    let entry = |at: u64, value: u64| write(memory, at, &value.to_le_bytes(), "page tables");
    entry(page(0), page(1) | TABLE)?;
    for gib in 0..4 {
        entry(page(1) + 8 * gib, page(2 + gib) | TABLE)?;
        for n in 0..512 {
            entry(page(2 + gib) + 8 * n, gib << 30 | n << 21 | LARGE)?;
        }
    }
    Ok(())
}

fn write(memory: &GuestMemoryMmap, at: u64, bytes: &[u8], what: &'static str) -> Result<(), Error> {
    memory
        .write_slice(bytes, GuestAddress(at))
        .map_err(|_| Error::Memory(what))
}

/// The registers of the boot processor, in 64-bit mode with paging.
pub(super) fn set_registers(
    vcpu: &kvm_ioctls::VcpuFd,
    Entry(entry): Entry,
) -> Result<(), kvm_ioctls::Error> {
    const PE: u64 = 1 << 0;
    const PG: u64 = 1 << 31;
    const PAE: u64 = 1 << 5;
    const LME_LMA: u64 = 1 << 8 | 1 << 10;
    let mut regs = vcpu.get_regs()?;
    regs.rip = entry;
    regs.rsi = ZERO_PAGE;
    regs.rsp = STACK;
    regs.rflags = 2;
    vcpu.set_regs(&regs)?;
    let mut sregs: kvm_sregs = vcpu.get_sregs()?;
    sregs.gdt.base = GDT;
    sregs.gdt.limit = 31;
    sregs.cs = flat_segment(0x10, true);
    let data = flat_segment(0x18, false);
    (sregs.ds, sregs.es, sregs.ss, sregs.fs, sregs.gs) = (data, data, data, data, data);
    sregs.cr3 = PAGE_TABLES;
    sregs.cr4 |= PAE;
    sregs.cr0 |= PE | PG;
    sregs.efer |= LME_LMA;
    vcpu.set_sregs(&sregs)
}

/// A flat segment of 64-bit mode.
fn flat_segment(selector: u16, code: bool) -> kvm_segment {
    kvm_segment {
        limit: 0xffff_ffff,
        selector,
        type_: if code { 0b1011 } else { 0b0011 },
        present: 1,
        s: 1,
        l: u8::from(code),
        db: u8::from(!code),
        g: 1,
        ..Default::default()
    }
}
