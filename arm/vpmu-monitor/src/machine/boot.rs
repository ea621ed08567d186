//! From the bootloader's jump to the guest's first instruction, on the first CPU.
//!
//! UNSAFETY: reads and writes memory that the bootloader described.

use alloc::{vec, vec::Vec};
use core::{convert::Infallible, mem, ops::Range, ptr, slice};

use dtoolkit::fdt::Fdt;
use smccc::{Hvc, Smc, psci::system_off};
use vpmu_monitor::{
    boot::{
        blob,
        console::consoles,
        device_tree::{self, Machine, TreeError},
        guest_image::{self, ImageError, PAYLOAD_OFFSET},
        home::{self, overlap},
        uefi::{self, Map},
        words::{Design, Interrupts, Settings},
    },
    lock::Unlocked,
    world::{
        profile::{self, Sample},
        redistributor::{self, Redistributor, View},
    },
};

use super::{
    console::{self, say},
    cpu::{self, DOORBELL_PAGE, Monitor},
    device::holes,
    el2, end,
    error::BootError,
    figures, gic, heap,
    mmio::{read_device, write_device},
    mmu::{self, copy},
    second, start,
    sysreg::read_sysreg,
};

/// The first bytes of a device tree (Devicetree Specification 0.4, 5.2).
const FDT_MAGIC: [u8; 4] = 0xd00d_feed_u32.to_be_bytes();

/// MPIDR_EL1: the affinity fields.
const AFFINITY: u64 = 0xff_00ff_ffff;

/// Memory for page tables: they take some 150 KiB where each of two guests has its own, and devices everywhere.
const TABLES: u64 = 512 << 10;
/// Times a device tree's length that it takes to read it, to change it and to write it down again.
const TREE_COPIES: u64 = 16;
/// Memory for a CPU: its stack, its figures.
const PER_CPU: u64 = 64 << 10;

unsafe extern "C" {
    static guest_length: u64;
    static bss_start: u8;
    static bss_end: u8;
    /// The lowest words of the stack that this runs on.
    static boot_cpu_stack: [u64; 64];
    /// Begins again, from the monitor's home.
    fn moved(tree: u64, loaded: u64, end: u64) -> !;
}

/// What `entry.s` knows.
struct Start {
    /// Address of the device tree.
    tree: u64,
    /// The monitor's memory, image first.
    memory: Range<u64>,
    /// Where the bootloader put the monitor, with the guest's file behind.
    loaded: u64,
}

/// Called by `entry.s` with the addresses of the device tree, of the monitor, of where the bootloader
/// put the monitor, and the end of its memory: 0 when it is still there.
#[unsafe(no_mangle)]
extern "C" fn boot_cpu(tree: u64, base: u64, loaded: u64, end: u64) -> ! {
    let end = if end == 0 { base + PAYLOAD_OFFSET } else { end };
    // SAFETY: behind the monitor's image is its own memory.
    unsafe { heap::open(&raw const bss_end as u64..end - DOORBELL_PAGE) }
    let start = Start {
        tree,
        memory: base..end,
        loaded,
    };
    let Err(error) = boot(&start);
    say!("error: {error}");
    end::power_off()
}

/// Called by `entry.s` when the bootloader entered the monitor at another exception level than EL2.
#[unsafe(no_mangle)]
extern "C" fn wrong_level(tree: u64, base: u64, level: u64) {
    // SAFETY: behind the monitor's image is its own memory.
    unsafe { heap::open(&raw const bss_end as u64..base + PAYLOAD_OFFSET) }
    let Some(tree) = tree_bytes(tree) else { return };
    console::set(&consoles(tree));
    say!(
        "error: the monitor was entered at EL{level} and needs EL2: a machine with virtualization, and a \
         bootloader that leaves it on (QEMU: -M virt,virtualization=on)"
    );
    match device_tree::conduit(tree) {
        // Firmware is at EL3 or, for a machine without EL2, in the machine itself.
        Some("hvc") if level == 1 => drop(system_off::<Hvc>()),
        Some("smc") if level == 1 => drop(system_off::<Smc>()),
        _ => {}
    }
}

/// Prepares everything, and enters the guest.
fn boot(start: &Start) -> Result<Infallible, BootError> {
    let tree = tree_bytes(start.tree).ok_or(BootError::NoTree)?;
    console::set(&consoles(tree));
    let machine = Machine::read(tree)?;
    let words = device_tree::command_line(tree)?;
    let settings = Settings::parse(words)?;
    let this = read_sysreg!("mpidr_el1") & AFFINITY;
    let number = machine.cpus.iter().position(|&cpu| cpu == this);
    let number = number.ok_or(BootError::UnknownCpu(this))?;
    let ram = machine
        .ram
        .iter()
        .find(|ram| ram.contains(&start.loaded))
        .ok_or(BootError::NotInRam)?
        .clone();
    let (runs, file) = guest(&ram, start.loaded)?;
    let mut taken = taken(&machine, tree, &runs, &file)?;
    let second = second::plan(tree, &ram, start.loaded, &taken)?;
    if let Some(second) = &second {
        settings.check_two_guests()?;
        taken.extend(second.ranges());
    }
    if start.memory.start == start.loaded {
        let home = find_home(start, &machine, tree, settings, &ram, &taken)?;
        move_to(home, start)
    }

    let memory = start.memory.clone();
    if machine.ram.iter().any(|ram| ram.end > mmu::end(&machine)) {
        return Err(BootError::RamBeyond(mmu::end(&machine)));
    }
    let redistributors = redistributors(&machine)?;
    quiet_translation_services(&machine);
    let stacks = cpu::Stacks::new(machine.cpus.len());
    let shared = second.as_ref().map(|second| second.holes(&machine));
    let holes = holes(&machine, shared.unwrap_or_default());
    let translation = mmu::build(&machine, &memory, &holes, stacks.guards())?;
    mmu::forget_cached(&memory);
    translation.enable();

    let put = second
        .as_ref()
        .map(|second| second.put(tree, &machine, this))
        .transpose()?;
    if runs.start != file.start {
        copy(file.start, runs.start, file.end - file.start);
    }
    let place = give_tree(tree, &memory, second.as_ref())?;
    mmu::forget_instructions();

    let alarm = put.as_ref().map(|second| second.alarm_intid);
    let owned = owned(&machine, settings, alarm, redistributors.len())?;
    let monitor = Monitor::install(Monitor {
        machine,
        settings,
        translation,
        memory,
        cpus: stacks.into_cpus(samples(settings)),
        redistributors: (redistributors.into_iter())
            .zip(owned.into_iter().map(View::new))
            .collect(),
        shared: put.is_some().then_some(number),
        kept_spi: second.as_ref().and_then(|second| second.serial_interrupt),
    });
    if let Some(second) = &put {
        second::install(second, number, monitor);
    }
    let unlocked = &mut Unlocked::at_exception();
    el2::init_cpu(number, monitor, true, unlocked);
    // Before the first guest's: to make a PMU stops all counters.
    second::make_pmu(unlocked)?;
    el2::start_pmu(monitor, unlocked)?;
    gic::enable_group1(monitor);
    second::begin(unlocked);
    // SAFETY: zero since the start, and nobody's but the stack's.
    let deepest = unsafe { ptr::read_volatile(&raw const boot_cpu_stack) };
    if deepest != [0; 64] {
        return Err(BootError::StackTooSmall);
    }
    heap::seal();
    figures::mark_entry();
    start::enter(runs.start, place)
}

/// Makes the guest's device tree and puts it where the machine's is, or where there is more room; returns
/// its address.
fn give_tree(
    tree: &[u8],
    memory: &Range<u64>,
    second: Option<&second::Plan>,
) -> Result<u64, BootError> {
    let mut reserved = vec![memory.clone()];
    reserved.extend(second.map(|second| second.memory.clone()));
    let serial = second.map(|second| second.serial.base);
    let doorbell = memory.end - DOORBELL_PAGE;
    let map = give_map(tree, &reserved)?;
    let changed = device_tree::for_guest(tree, &reserved, doorbell, serial, map)?;
    let place = if changed.len() <= tree.len() {
        tree.as_ptr() as u64
    } else {
        // `find_home` has left room below it.
        memory.start - device_tree::ROOM
    };
    copy(changed.as_ptr() as u64, place, changed.len() as u64);
    Ok(place)
}

/// Takes `reserved` out of UEFI's memory map, where it is; returns its bytes then. `None`: UEFI has not started the monitor.
fn give_map(tree: &[u8], reserved: &[Range<u64>]) -> Result<Option<u32>, BootError> {
    let tree = blob::open(tree).ok_or(TreeError::Invalid)?;
    let Some((place, stride)) = uefi::map(tree) else {
        return Ok(None);
    };
    let length = (place.end - place.start) as usize;
    // SAFETY: `uefi.rs` has put it there, with room for what is added, and the tree reserves it.
    let bytes = unsafe { slice::from_raw_parts(place.start as *const u8, length) };
    let map = Map { bytes, stride }.without(reserved);
    copy(map.as_ptr() as u64, place.start, map.len() as u64);
    Ok(Some(map.len() as u32))
}

/// Every redistributor: first the CPUs', by number.
fn redistributors(machine: &Machine) -> Result<Vec<Redistributor>, BootError> {
    let mut found = redistributor::find(
        &machine.redistributors,
        machine.redistributor_stride,
        |typer| read_device(typer, 8),
    );
    for (number, &cpu) in machine.cpus.iter().enumerate() {
        let mut rest = found.iter().skip(number);
        let own = rest.position(|place| place.affinity == cpu);
        found.swap(number, number + own.ok_or(BootError::NoRedistributor(cpu))?);
    }
    Ok(found)
}

/// The monitor's INTIDs in each redistributor, bit n = INTID n.
fn owned(
    machine: &Machine,
    settings: Settings,
    alarm: Option<u32>,
    redistributors: usize,
) -> Result<Vec<u32>, BootError> {
    let maintenance = match settings.interrupts {
        Interrupts::Virtual => 1 << (machine.maintenance_intid & 31),
        Interrupts::Direct => 0,
    };
    let alarm = alarm.map_or(0, |intid| 1 << (intid & 31));
    let mut owned = vec![maintenance | alarm; redistributors];
    let computed = settings.design == Design::Emulated;
    // The host's samples come whether or not the guest wants its PMU's interrupts. Two guests hand that interrupt over at a
    // switch, as the first guest has left it.
    let sampled = settings.profile.is_some() && alarm == 0;
    if !computed && !sampled {
        return Ok(owned);
    }
    for (owned, pmi) in owned.iter_mut().zip(&machine.pmu_intids) {
        match *pmi {
            Some(pmi @ 0..32) => *owned |= 1 << pmi,
            Some(pmi) if computed => return Err(BootError::PmiIsNoPpi(pmi)),
            Some(_) | None => {}
        }
    }
    Ok(owned)
}

/// Stops what a bootloader may have left running: an interrupt translation service writes memory.
fn quiet_translation_services(machine: &Machine) {
    const GITS_CTLR: u64 = 0;
    for its in &machine.its {
        write_device(its.start + GITS_CTLR, 4, 0);
    }
}

/// The device tree's bytes, when there is one at `at`.
pub(super) fn tree_bytes(at: u64) -> Option<&'static [u8]> {
    if at == 0 || !at.is_multiple_of(8) {
        return None;
    }
    // SAFETY: the boot protocol says that x0 holds the address of a device tree; nothing else uses
    // that memory until the guest gets it. The header says how long it is.
    let tree = unsafe {
        if *(at as *const [u8; 4]) != FDT_MAGIC {
            return None;
        }
        Fdt::from_raw_unchecked(at as *const u8).data()
    };
    blob::open(tree)?;
    Some(tree)
}

/// Where the appended guest is to run, and its file.
fn guest(ram: &Range<u64>, loaded: u64) -> Result<(Range<u64>, Range<u64>), BootError> {
    // SAFETY: a word of the monitor's own image, which the lab fills in.
    let length = unsafe { ptr::read_volatile(&raw const guest_length) };
    let file = part(ram, loaded, PAYLOAD_OFFSET, length)?;
    Ok((place(&file, file.start, ram)?, file))
}

/// The `length` bytes at a `distance` in the boot file at `loaded`, which may be none.
pub(super) fn part(
    ram: &Range<u64>,
    loaded: u64,
    distance: u64,
    length: u64,
) -> Result<Range<u64>, BootError> {
    let start = loaded.saturating_add(distance);
    let part = start..start.saturating_add(length);
    if part.end > ram.end {
        return Err(BootError::GuestTooLong(length));
    }
    Ok(part)
}

/// Where the guest of this `file`, a [`part`], is to run in `ram`, as if loaded at `loaded_at`.
pub(super) fn place(
    file: &Range<u64>,
    loaded_at: u64,
    ram: &Range<u64>,
) -> Result<Range<u64>, ImageError> {
    let length = file.end - file.start;
    // SAFETY: in RAM, as checked, and used by nobody else yet.
    let head = unsafe { slice::from_raw_parts(file.start as *const u8, length.min(64) as usize) };
    guest_image::place(head, length, loaded_at, ram)
}

/// How many samples of the guest each CPU keeps for the host.
fn samples(settings: Settings) -> usize {
    settings.profile.map_or(0, |_| profile::CAPACITY)
}

/// What is in RAM and must stay: the guest where it `runs` and its `file`, the tree, the initrd, what the tree reserves.
fn taken(
    machine: &Machine,
    tree: &[u8],
    runs: &Range<u64>,
    file: &Range<u64>,
) -> Result<Vec<Range<u64>>, BootError> {
    let tree_at = tree.as_ptr() as u64;
    let tree_range = tree_at..tree_at + tree.len() as u64;
    let loaded = [&tree_range].into_iter().chain(&machine.initrd);
    if let Some(other) = loaded.clone().find(|other| overlap(runs, other)) {
        return Err(BootError::GuestsPlaceTaken {
            guest: runs.clone(),
            other: other.clone(),
        });
    }
    let taken = loaded.chain([runs, file]).chain(&machine.reserved);
    Ok(taken.cloned().collect())
}

/// The monitor's home: room for its image and for what it makes of the device tree.
fn find_home(
    start: &Start,
    machine: &Machine,
    tree: &[u8],
    settings: Settings,
    ram: &Range<u64>,
    taken: &[Range<u64>],
) -> Result<Range<u64>, BootError> {
    let per_cpu = PER_CPU + (samples(settings) * size_of::<Sample>()) as u64;
    let image = &raw const bss_end as u64 - start.memory.start;
    // A word of stage 2 for each block of 1 GiB, beside the tables of what is no whole one.
    let tables = TABLES + mmu::end(machine) / (1 << 30) * size_of::<u64>() as u64;
    let heap = tables + TREE_COPIES * blob::used(tree) + machine.cpus.len() as u64 * per_cpu;
    let size = image + heap + DOORBELL_PAGE + device_tree::ROOM;
    let mut home =
        home::choose(ram, taken, size, home::ALIGNMENT).ok_or(BootError::NoHome(size))?;
    // For a guest's tree that has become longer than the machine's.
    home.start += device_tree::ROOM;
    Ok(home)
}

/// Copies the monitor's image to `home`, where it begins again.
fn move_to(home: Range<u64>, start: &Start) -> ! {
    let image = start.memory.start;
    let length = &raw const bss_start as u64 - image;
    let entry = home.start + (moved as *const () as u64 - image);
    // Dirty lines that a bootloader has left must not come down upon what is written now.
    mmu::clean_to_memory(home.clone());
    copy(image, home.start, length);
    mmu::forget_instructions();
    // SAFETY: the same code at another place; its first instructions relocate it.
    unsafe {
        let again: unsafe extern "C" fn(u64, u64, u64) -> ! = mem::transmute(entry as *const ());
        again(start.tree, start.loaded, home.end)
    }
}
