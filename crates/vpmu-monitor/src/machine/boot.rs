//! From the bootloader's jump to the guest's first instruction, on the first CPU.
//!
//! UNSAFETY: reads and writes memory that the bootloader described.

use alloc::{format, string::String, vec::Vec};
use core::{ptr, slice};

use dtoolkit::fdt::Fdt;
use vpmu_monitor::{
    boot::{
        device_tree::{self, Machine},
        guest_image::{PAYLOAD_OFFSET, Placement},
        words::{Design, Settings},
    },
    world::redistributor::{self, SgiFrame},
};

use super::{
    console::{self, say},
    cpu::{self, MARKS, MAX_CPUS, Monitor},
    device::DOORBELL,
    el2, end, gic, heap, mmu, start,
    sysreg::read_sysreg,
};

/// Bytes of a device tree's header, which says how long the tree is.
const FDT_HEADER: usize = 40;

unsafe extern "C" {
    static guest_length: u64;
}

/// Called by `entry.s` with the device tree's address and the monitor's own.
#[unsafe(no_mangle)]
extern "C" fn boot_cpu(tree: u64, base: u64) -> ! {
    match boot(tree, base) {
        Ok(entry) => start::enter(0, entry, tree),
        Err(error) => {
            say!("error: {error}");
            end::power_off()
        }
    }
}

/// Prepares everything and returns the guest's entry point.
fn boot(tree_at: u64, base: u64) -> Result<u64, String> {
    let tree = tree_bytes(tree_at).ok_or("the bootloader passed no device tree")?;
    let machine = Machine::read(tree).map_err(|error| format!("{error}"))?;
    if let Some(uart) = machine.uart {
        console::set(uart);
    }
    let words = device_tree::command_line(tree).map_err(|error| format!("{error}"))?;
    let settings = Settings::parse(words).map_err(|error| format!("{error}"))?;
    if machine.cpus.len() > MAX_CPUS {
        return Err(format!(
            "the machine has {} CPUs, and at most {MAX_CPUS} can be used",
            machine.cpus.len()
        ));
    }

    let memory = base..base + PAYLOAD_OFFSET;
    let mut holes: Vec<_> = (0..machine.cpus.len())
        .map(|number| cpu::sgi_frame(&machine, number))
        .map(|frame| frame..frame + redistributor::SGI_FRAME)
        .collect();
    holes.push(DOORBELL);
    let translation = mmu::build(&machine, &memory, &holes)
        .map_err(|error| format!("cannot map memory: {error}"))?;
    mmu::forget_cached(&memory);
    translation.enable();

    let entry = place_guest(&machine, base)?;
    let changed = device_tree::for_guest(tree, &memory).map_err(|error| format!("{error}"))?;
    if changed.len() > tree.len() {
        return Err(format!(
            "the guest's device tree needs {} bytes and the bootloader left {}",
            changed.len(),
            tree.len()
        ));
    }
    copy(changed.as_ptr() as u64, tree_at, changed.len() as u64);

    let mut owned = 1 << (machine.maintenance_intid & 31);
    if settings.design == Design::Emulated
        && let Some(pmi) = machine.pmu_intid
    {
        owned |= 1 << (pmi & 31);
    }
    let frames = machine.cpus.iter().map(|_| SgiFrame::new(owned)).collect();
    let mte = read_sysreg!("id_aa64pfr1_el1") >> 8 & 0xf != 0;
    let monitor = Monitor::install(Monitor {
        machine,
        settings,
        translation,
        memory,
        frames,
        group0: gic::owns_group0(),
        mte,
    });
    el2::init_cpu(0, monitor).map_err(|error| format!("{error}"))?;
    heap::seal();
    MARKS.lock().entered = cpu::snapshot();
    Ok(entry)
}

/// The device tree's bytes, when there is one at `at`.
fn tree_bytes(at: u64) -> Option<&'static [u8]> {
    if at == 0 || !at.is_multiple_of(8) {
        return None;
    }
    // SAFETY: the boot protocol says that x0 holds the address of a device tree; nothing else uses
    // that memory until the guest gets it. The header says how long it is.
    unsafe {
        let header: &[u8] = slice::from_raw_parts(at as *const u8, FDT_HEADER);
        if header[..4] != [0xd0, 0x0d, 0xfe, 0xed] {
            return None;
        }
        let len = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
        let tree = slice::from_raw_parts(at as *const u8, len as usize);
        Fdt::new(tree).ok()?;
        Some(tree)
    }
}

/// Puts the appended guest where it is to run, and returns its entry point.
fn place_guest(machine: &Machine, base: u64) -> Result<u64, String> {
    let loaded_at = base + PAYLOAD_OFFSET;
    let ram = machine
        .ram
        .iter()
        .find(|ram| ram.contains(&base))
        .ok_or("the monitor was not loaded into RAM")?;
    // SAFETY: a word of the monitor's own image, which the lab fills in.
    let len = unsafe { ptr::read_volatile(&raw const guest_length) };
    if loaded_at.checked_add(len).is_none_or(|end| end > ram.end) {
        return Err(format!(
            "the appended guest of {len} bytes does not fit into RAM"
        ));
    }
    // SAFETY: in RAM, as checked, and used by nobody else yet.
    let head = unsafe { slice::from_raw_parts(loaded_at as *const u8, len.min(64) as usize) };
    let placement = Placement::decide(head, len, loaded_at, ram.start, base)
        .map_err(|error| format!("{error}"))?;
    if placement.entry + placement.memory > ram.end {
        return Err(format!(
            "the guest needs {} MiB of memory and the machine has too little",
            placement.memory >> 20
        ));
    }
    copy(loaded_at, placement.entry, placement.copy);
    Ok(placement.entry)
}

/// Copies to where the guest will read with its caches off.
fn copy(from: u64, to: u64, len: u64) {
    // SAFETY: callers have checked both ranges to be RAM outside the monitor's own data.
    unsafe {
        ptr::copy(from as *const u8, to as *mut u8, len as usize);
    }
    mmu::clean_to_memory(to..to + len);
}
