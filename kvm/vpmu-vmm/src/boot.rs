//! The memory in which a kernel begins: the 64-bit boot protocol (Documentation/arch/x86/boot.rst).

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use kvm_bindings::{kvm_segment, kvm_sregs};
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};
use vpmu_kernel::{Cache, Kernel};

use super::{Config, Error, Rdpmc, acpi};

mod bzimage;

const GDT: u64 = 0x500;
const ZERO_PAGE: u64 = 0x7000;
const STACK: u64 = 0x8ff0;
const PAGE_TABLES: u64 = 0x9000;
const COMMAND_LINE: u64 = 0x2_0000;
/// Linux on x86 keeps 2048 bytes with the NUL, and cuts off the rest without a message.
const LONGEST_COMMAND_LINE: usize = 2047;
/// The end of conventional memory.
const LOW_END: u64 = 0x9_fc00;
const ACPI: u64 = 0xe_0000;
const HIGH: u64 = 0x10_0000;
const PAGE: u64 = 4096;

/// Puts kernel, initramfs, command line and tables into `memory`. Returns the boot processor's first address.
pub(super) fn load(memory: &GuestMemoryMmap, config: &Config) -> Result<u64, Error> {
    let (entry, end, header) = load_any_kernel(memory, config)?;
    let initrd = load_initrd(memory, &config.initrd, end..config.memory)?;
    let command_line = config.command_line.as_bytes();
    if command_line.len() > LONGEST_COMMAND_LINE || command_line.contains(&0) {
        return Err(Error::Config(format!(
            "--append has {} bytes, of which Linux would keep {LONGEST_COMMAND_LINE}, or a NUL in it",
            command_line.len()
        )));
    }
    let terminated = [command_line, b"\0"].concat();
    write(memory, COMMAND_LINE, &terminated, "the command line")?;
    let params = boot_params(config, initrd, header);
    write(memory, ZERO_PAGE, params.as_slice(), "the boot parameters")?;
    write(memory, ACPI, &acpi::tables(ACPI, config.vcpus), "ACPI")?;
    write_page_tables(memory)?;
    let gdt = [0_u64, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff];
    write(memory, GDT, &gdt.map(u64::to_le_bytes).concat(), "the GDT")?;
    Ok(entry)
}

/// Loads the kernel: a bzImage as it is, unless its RDPMCs are to be rewritten. Returns its first address, the end of
/// the memory that it needs, and its header.
fn load_any_kernel(
    memory: &GuestMemoryMmap,
    config: &Config,
) -> Result<(u64, u64, setup_header), Error> {
    let refused = |error| match error {
        vpmu_kernel::Error::Read(path, error) => Error::File(path, error),
        error => Error::Kernel(config.kernel.display().to_string(), error),
    };
    let rewrite = (config.pmu.as_ref()).is_some_and(|pmu| pmu.rdpmc == Rdpmc::Load);
    let kernel = match Cache::of_user().filter(|_| rewrite && config.kernel_cache) {
        Some(cache) => cache.open(&config.kernel, rewrite),
        None => {
            let image = vpmu_kernel::read_file(&config.kernel).map_err(refused)?;
            if !rewrite && vpmu_kernel::is_bzimage(&image) {
                return bzimage::load(memory, config, image);
            }
            Kernel::from_bytes(image).and_then(|mut kernel| {
                if rewrite {
                    kernel.rewrite_rdpmc()?;
                }
                Ok(kernel)
            })
        }
    }
    .map_err(refused)?;
    let end = load_kernel(memory, config.memory, &kernel)?;
    let header = setup_header {
        boot_flag: 0xaa55,
        header: u32::from_le_bytes(*b"HdrS"),
        version: 0x20f,
        ..Default::default()
    };
    Ok((kernel.entry(), end, header))
}

/// Loads the kernel, and returns its end, with everything that it clears before it searches for
/// anything else.
fn load_kernel(memory: &GuestMemoryMmap, size: u64, kernel: &Kernel) -> Result<u64, Error> {
    let mut end = HIGH;
    for segment in kernel.segments() {
        if segment.address < HIGH || segment.end() > size {
            return Err(Error::Load(segment.address, segment.end()));
        }
        let bytes = &kernel.elf()[segment.file.clone()];
        write(memory, segment.address, bytes, "the kernel")?;
        end = segment.end();
    }
    let mut segments = kernel.segments().iter();
    match segments.any(|segment| segment.holds(kernel.entry())) {
        true => Ok(end),
        false => Err(Error::Entry(kernel.entry())),
    }
}

/// Puts the parts of the initramfs at the begin of `room`, without a copy of this process's own. Returns where they are.
fn load_initrd(
    memory: &GuestMemoryMmap,
    paths: &[PathBuf],
    room: Range<u64>,
) -> Result<Range<u64>, Error> {
    let at = room.start.next_multiple_of(PAGE);
    let mut end = at;
    for path in paths {
        // The kernel expects the next archive at a multiple of four. Between two are zeros.
        end = load_file(memory, path, end.next_multiple_of(4)..room.end)?;
    }
    Ok(if end == at { 0..0 } else { at..end })
}

/// Reads the file `path` to the begin of `room`, and returns the end of the bytes there.
fn load_file(memory: &GuestMemoryMmap, path: &Path, room: Range<u64>) -> Result<u64, Error> {
    let error = |error| Error::File(path.display().to_string(), error);
    let mut file = File::open(path).map_err(error)?;
    let mut end = room.start;
    while end < room.end {
        let most = usize::try_from(room.end - end).unwrap_or(usize::MAX);
        match memory.read_volatile_from(GuestAddress(end), &mut file, most) {
            Ok(0) => return Ok(end),
            Ok(read) => end += read as u64,
            Err(GuestMemoryError::IOError(failed)) if failed.kind() == ErrorKind::Interrupted => {}
            Err(GuestMemoryError::IOError(failed)) => return Err(error(failed)),
            Err(_) => return Err(Error::Memory("the initramfs")),
        }
    }
    // The size of a file is not asked for: a device's says nothing.
    match file.read(&mut [0]).map_err(error)? {
        0 => Ok(end),
        _ => Err(Error::Memory("the initramfs")),
    }
}

/// Returns the zero page. Memory ends below 4 GiB, so every address fits into 32 bits.
fn boot_params(config: &Config, initrd: Range<u64>, hdr: setup_header) -> boot_params {
    const USABLE: u32 = 1;
    /// The number of a boot loader without one.
    const UNKNOWN_LOADER: u8 = 0xff;
    let mut params = boot_params {
        acpi_rsdp_addr: ACPI,
        e820_entries: 2,
        hdr,
        ..Default::default()
    };
    params.hdr.type_of_loader = UNKNOWN_LOADER;
    params.hdr.ramdisk_image = initrd.start as u32;
    params.hdr.ramdisk_size = (initrd.end - initrd.start) as u32;
    params.hdr.cmd_line_ptr = COMMAND_LINE as u32;
    params.hdr.cmdline_size = config.command_line.len() as u32;
    let map = [(0, LOW_END), (HIGH, config.memory - HIGH)];
    for (entry, (addr, size)) in params.e820_table.iter_mut().zip(map) {
        *entry = boot_e820_entry {
            addr,
            size,
            r#type: USABLE,
        };
    }
    params
}

/// Writes page tables that map the first 4 GiB onto themselves, in pages of 2 MiB.
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

/// Sets the registers of the boot processor, in 64-bit mode with paging.
pub(super) fn set_registers(
    vcpu: &kvm_ioctls::VcpuFd,
    entry: u64,
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

/// Returns a flat segment of 64-bit mode.
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

#[cfg(test)]
mod tests;
