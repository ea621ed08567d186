//! A start by UEFI: makes of what the firmware offers what a bootloader leaves, ends the firmware, and starts as after one.
//!
//! The firmware loads the boot file where it likes, with everything on. What follows wants it at a boundary of 2 MiB, with
//! MMU and caches off and a device tree in x0. UEFI Specification 2.10: 7.2 (memory), 7.3 (protocols), 13.2 (Load File 2, by
//! which Linux's boot loaders offer an initrd).
//!
//! UNSAFETY: calls the firmware by its tables, and reads what they point to.

use alloc::{
    format,
    string::{String, ToString as _},
    vec::Vec,
};
use core::{convert::Infallible, ffi::c_void, ops::Range, ptr, slice};

use dtoolkit::{Node as _, model::DeviceTree};
use uefi_raw::{
    Guid, Handle, Status, guid,
    protocol::{
        device_path::{DevicePathProtocol, DeviceSubType, DeviceType},
        loaded_image::LoadedImageProtocol,
        media::LoadFile2Protocol,
    },
    table::{
        boot::{AllocateType, BootServices, MemoryDescriptor, MemoryType},
        system::SystemTable,
    },
};
use vpmu_monitor::boot::{
    acpi::{self, Tables},
    blob,
    device_tree::{self, TreeError},
    guest_image::PAYLOAD_OFFSET,
    home::ALIGNMENT,
    uefi::{self, Handover, Map},
};

use super::{heap, mmu, sysreg::read_sysreg};

/// Configuration tables with the ACPI RSDP, and with a device tree.
const ACPI: Guid = guid!("8868e871-e4f1-11d3-bc22-0080c73c8881");
const DEVICE_TREE: Guid = guid!("b1b621d5-f19c-41a5-830b-d9152c69aae0");

const PAGE: u64 = 0x1000;
/// Descriptors that the memory map may gain: by an allocation, and by what the guest does not get.
const MORE: usize = 16 + 2 * Map::MORE;
/// The memory map may change while it is read: by the firmware's own timers.
const ATTEMPTS: usize = 4;

unsafe extern "C" {
    static bss_end: u8;
    static guest_length: u64;
    /// The Linux header's word with the bytes of memory that all of the boot file takes.
    static image_size: u64;
    /// The entry of a bootloader's jump.
    fn start();
    /// Switches the MMU and the caches off, and jumps to `entry` with the tree's address in x0.
    fn leave_firmware(tree: u64, entry: u64) -> !;
}

/// Why UEFI's start failed. The firmware goes on with its next choice.
#[derive(Debug, thiserror::Error)]
enum UefiError {
    #[error("UEFI runs at EL{0}, and the monitor needs EL2: a machine with virtualization")]
    Level(u64),
    #[error("UEFI's {0} failed: {1:?}")]
    Call(&'static str, Status),
    #[error("UEFI offers neither ACPI tables nor a device tree")]
    NoTables,
    #[error(
        "UEFI has loaded {loaded} bytes, and guest and monitor have {whole}: the boot file's words for UEFI are not filled in \
         (docs/use/monitor.md)"
    )]
    NotWhole { loaded: u64, whole: u64 },
    #[error(transparent)]
    Tree(#[from] TreeError),
}

/// Called by `entry.s` as the firmware's program, relocated. Returns only an error.
#[unsafe(no_mangle)]
extern "C" fn efi_main(image: Handle, system: *const SystemTable, head: u64) -> Status {
    // SAFETY: behind the monitor's image is its own memory, which the firmware has loaded as a part of the program.
    unsafe { heap::open(&raw const bss_end as u64..head + PAYLOAD_OFFSET) }
    // SAFETY: the firmware's promise to a program: both tables stay until its end.
    let firmware = unsafe {
        Firmware {
            image,
            system: &*system,
            boot: &*(*system).boot_services,
        }
    };
    let Err(error) = firmware.start(head);
    firmware.print(&format!("vpmu-monitor: error: {error}\r\n"));
    Status::LOAD_ERROR
}

struct Firmware {
    image: Handle,
    system: &'static SystemTable,
    boot: &'static BootServices,
}

/// What the firmware says of the machine: a device tree; with ACPI's tables there is nothing but `/chosen` in it.
type Described = (DeviceTree, Option<Tables<'static>>);

fn check(what: &'static str, status: Status) -> Result<(), UefiError> {
    if status == Status::SUCCESS {
        Ok(())
    } else {
        Err(UefiError::Call(what, status))
    }
}

impl Firmware {
    fn print(&self, text: &str) {
        let text: Vec<u16> = text.encode_utf16().chain([0]).collect();
        let console = self.system.stdout;
        // SAFETY: the console's own function, with text that ends with a zero.
        let _ = unsafe { ((*console).output_string)(console, text.as_ptr()) };
    }

    fn start(&self, head: u64) -> Result<Infallible, UefiError> {
        let level = read_sysreg!("CurrentEL") >> 2 & 3;
        if level != 2 {
            return Err(UefiError::Level(level));
        }
        let loaded: &LoadedImageProtocol = self.protocol(self.image, &LoadedImageProtocol::GUID)?;
        // SAFETY: words of the monitor's own image.
        let (guest, whole) = unsafe {
            (
                (&raw const guest_length).read_volatile(),
                (&raw const image_size).read_volatile(),
            )
        };
        let file = PAYLOAD_OFFSET + guest;
        if loaded.image_size < file {
            return Err(UefiError::NotWhole {
                loaded: loaded.image_size,
                whole: file,
            });
        }
        let words = words(loaded);
        let described = self.described()?;
        let initrd = self.initrd()?;

        // The firmware has put it at a boundary of a page, and a kernel wants one of 2 MiB.
        let whole = whole.max(loaded.image_size);
        let place = self.pages(whole + ALIGNMENT)?.next_multiple_of(ALIGNMENT);
        // SAFETY: from the image to memory that has just been allocated for it.
        unsafe {
            ptr::copy_nonoverlapping(
                head as *const u8,
                place as *mut u8,
                loaded.image_size as usize,
            );
        }
        let (tree, all) = self.leave(&described, &words, initrd)?;
        if let (_, Some(Tables { madt, .. })) = described {
            // SAFETY: the firmware has gone, and nobody else reads its table yet.
            acpi::hide_its(unsafe {
                slice::from_raw_parts_mut(madt.as_ptr().cast_mut(), madt.len())
            });
        }
        // The caches go off before anything of it is read again.
        for range in [place..place + whole, all, head..head + PAYLOAD_OFFSET] {
            mmu::clean_to_memory(range);
        }
        let entry = place + (start as *const () as u64 - head);
        // SAFETY: the copy of this image, which relocates itself.
        unsafe { leave_firmware(tree, entry) }
    }

    /// The interface of a protocol that `handle` has.
    fn protocol<T>(&self, handle: Handle, guid: &Guid) -> Result<&'static T, UefiError> {
        let mut interface = ptr::null_mut();
        // SAFETY: a call of the firmware's, whose answer goes to `interface`.
        let status = unsafe { (self.boot.handle_protocol)(handle, guid, &mut interface) };
        check("HandleProtocol", status)?;
        // SAFETY: the interface of this protocol, while the firmware is there.
        Ok(unsafe { &*interface.cast() })
    }

    /// Allocates memory, which the firmware's end does not touch.
    fn pages(&self, bytes: u64) -> Result<u64, UefiError> {
        let count = bytes.div_ceil(PAGE) as usize;
        let mut address = 0;
        let kind = MemoryType::LOADER_DATA;
        // SAFETY: a call of the firmware's, whose answer goes to `address`.
        let status = unsafe {
            (self.boot.allocate_pages)(AllocateType::ANY_PAGES, kind, count, &mut address)
        };
        check("AllocatePages", status)?;
        Ok(address)
    }

    /// What the firmware's configuration tables say of the machine. A device tree wins, as in Linux, unless it has nothing
    /// but a boot loader's words.
    fn described(&self) -> Result<Described, UefiError> {
        let system = self.system;
        // SAFETY: the system table says how many there are.
        let tables = unsafe {
            slice::from_raw_parts(
                system.configuration_table,
                system.number_of_configuration_table_entries,
            )
        };
        let find = |guid| {
            let found = tables.iter().find(|table| table.vendor_guid == guid);
            found.map(|table| table.vendor_table as u64)
        };
        let tree = find(DEVICE_TREE).and_then(super::boot::tree_bytes);
        let tree = tree.and_then(blob::open);
        let tree = tree.map_or_else(DeviceTree::new, |tree| DeviceTree::from_fdt(&tree));
        if tree.root.children().any(|node| node.name() != "chosen") {
            return Ok((tree, None));
        }
        let rsdp = find(ACPI).ok_or(UefiError::NoTables)?;
        // SAFETY: the table's length, by its specification.
        let rsdp = unsafe { slice::from_raw_parts(rsdp as *const u8, acpi::RSDP) };
        Ok((tree, Some(Tables::find(rsdp, acpi_table)?)))
    }

    /// The initrd, where a boot loader offers one.
    fn initrd(&self) -> Result<Option<Range<u64>>, UefiError> {
        let mut rest = (&raw const INITRD).cast::<DevicePathProtocol>();
        let mut handle = ptr::null_mut();
        let guid = LoadFile2Protocol::GUID;
        // SAFETY: a call of the firmware's with a whole path.
        let status = unsafe { (self.boot.locate_device_path)(&guid, &mut rest, &mut handle) };
        // A boot loader may have put its initrd into the device tree, or there is none.
        if status == Status::NOT_FOUND {
            return Ok(None);
        }
        check("LocateDevicePath", status)?;
        let file: &LoadFile2Protocol = self.protocol(handle, &guid)?;
        let load = |size: &mut usize, to: *mut c_void| {
            let this = ptr::from_ref(file).cast_mut();
            // SAFETY: the protocol's own function; `to` has room for `size` bytes, or is null and then nothing is written.
            unsafe { (file.load_file)(this, rest, false.into(), size, to) }
        };
        let mut size = 0;
        match load(&mut size, ptr::null_mut()) {
            Status::BUFFER_TOO_SMALL => {}
            Status::NOT_FOUND => return Ok(None),
            status => return Err(UefiError::Call("LoadFile of the initrd", status)),
        }
        let start = self.pages(size as u64)?;
        let status = load(&mut size, start as *mut c_void);
        check("LoadFile of the initrd", status)?;
        Ok(Some(start..start + size as u64))
    }

    /// Ends the firmware; returns where the device tree is by then, and all that was written for it.
    fn leave(
        &self,
        (tree, tables): &Described,
        words: &str,
        initrd: Option<Range<u64>>,
    ) -> Result<(u64, Range<u64>), UefiError> {
        let (mut size, mut key, mut stride, mut version) = (0, 0, 0, 0);
        let mut read = |size: &mut usize, to: u64| {
            let to = to as *mut MemoryDescriptor;
            // SAFETY: `to` has room for `size` bytes; the other answers go to these variables.
            let status = unsafe {
                (self.boot.get_memory_map)(size, to, &mut key, &mut stride, &mut version)
            };
            (status, key, stride, version)
        };
        let (_, _, stride, _) = read(&mut size, 0);
        let room = (size + MORE * stride).next_multiple_of(PAGE as usize) as u64;
        let map_at = self.pages(room + device_tree::ROOM)?;
        let tree_at = map_at + room;
        let mut last = Status::ABORTED;
        // The key is of one map: nothing is allocated from the firmware until it has gone.
        for _ in 0..ATTEMPTS {
            let mut size = room as usize;
            let (status, key, stride, version) = read(&mut size, map_at);
            check("GetMemoryMap", status)?;
            // SAFETY: the firmware has written so many bytes.
            let bytes = unsafe { slice::from_raw_parts(map_at as *const u8, size) };
            let handover = Handover {
                words,
                initrd: initrd.clone(),
                system_table: ptr::from_ref(self.system) as u64,
                map: Map { bytes, stride },
                version,
                map_at: map_at..tree_at,
            };
            let machine = match tables {
                None => tree.clone(),
                Some(tables) => tables.tree(tree.root.child("chosen").cloned()),
            };
            let tree = uefi::tree(machine, &handover)?;
            // SAFETY: memory that was allocated for it.
            unsafe { ptr::copy_nonoverlapping(tree.as_ptr(), tree_at as *mut u8, tree.len()) }
            // SAFETY: nothing of the firmware's is used after it.
            last = unsafe { (self.boot.exit_boot_services)(self.image, key) };
            if last == Status::SUCCESS {
                return Ok((tree_at, map_at..tree_at + tree.len() as u64));
            }
        }
        Err(UefiError::Call("ExitBootServices", last))
    }
}

/// The command line, which UEFI has in UTF-16.
fn words(loaded: &LoadedImageProtocol) -> String {
    let units = loaded.load_options_size as usize / size_of::<u16>();
    if loaded.load_options.is_null() {
        return String::new();
    }
    // SAFETY: the firmware's promise: so many bytes.
    let units = unsafe { slice::from_raw_parts(loaded.load_options.cast::<u16>(), units) };
    // Some boot loaders end it with a zero, and count that.
    let end = units.iter().position(|&unit| unit == 0);
    let text = String::from_utf16_lossy(&units[..end.unwrap_or(units.len())]);
    text.trim().to_string()
}

/// The ACPI table at `address`.
fn acpi_table(address: u64) -> Option<&'static [u8]> {
    if address == 0 {
        return None;
    }
    // SAFETY: the firmware's tables say that one is here; its header says how long it is.
    unsafe {
        let header = slice::from_raw_parts(address as *const u8, acpi::HEADER);
        let length = u32::from_le_bytes(*header[acpi::LENGTH..].first_chunk()?);
        Some(slice::from_raw_parts(
            address as *const u8,
            (length as usize).max(acpi::HEADER),
        ))
    }
}

/// The device path of an initrd: one vendor's medium, and the end.
#[repr(C, packed)]
struct InitrdPath {
    medium: DevicePathProtocol,
    guid: Guid,
    end: DevicePathProtocol,
}

/// The initrd's (Linux, `LINUX_EFI_INITRD_MEDIA_GUID`).
static INITRD: InitrdPath = InitrdPath {
    medium: DevicePathProtocol {
        major_type: DeviceType::MEDIA,
        sub_type: DeviceSubType::MEDIA_VENDOR,
        length: [20, 0],
    },
    guid: guid!("5568e427-68fc-4f3d-ac74-ca555231cc68"),
    end: DevicePathProtocol {
        major_type: DeviceType::END,
        sub_type: DeviceSubType::END_ENTIRE,
        length: [4, 0],
    },
};
