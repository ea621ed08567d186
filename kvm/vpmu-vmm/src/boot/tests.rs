//! Tests of the memory that a kernel finds, and of kernels that do not fit.

use std::fs;
use std::path::PathBuf;

use super::*;

const MEMORY: u64 = 64 << 20;
const KERNEL: u64 = 16 << 20;

/// Returns an ELF file with one segment, which has a byte in the file.
fn elf(address: u64, size: u64, entry: u64) -> Vec<u8> {
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    file.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    for word in [entry, 64, 0] {
        file.extend(u64::to_le_bytes(word));
    }
    file.extend(0_u32.to_le_bytes());
    for half in [64_u16, 56, 1, 64, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    file.extend([1, 0, 0, 0, 5, 0, 0, 0]);
    for word in [120, address, address, 1, size, 4096] {
        file.extend(u64::to_le_bytes(word));
    }
    file.push(0xf4);
    file
}

struct Setup {
    folder: tempfile::TempDir,
    config: Config,
}

impl Setup {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let setup = Self {
            config: Config {
                kernel: folder.path().join("kernel"),
                initrd: Vec::new(),
                command_line: String::new(),
                vcpus: 1,
                memory: MEMORY,
                pmu: None,
                lazy_deadline: false,
                save: None,
                measure: false,
                kernel_cache: false,
            },
            folder,
        };
        setup.kernel(&elf(KERNEL, 4096, KERNEL));
        setup
    }

    fn kernel(&self, elf: &[u8]) {
        fs::write(&self.config.kernel, elf).unwrap();
    }

    fn load(&self) -> Result<GuestMemoryMmap, Error> {
        let memory =
            GuestMemoryMmap::from_ranges(&[(GuestAddress(0), self.config.memory as usize)])
                .unwrap();
        load(&memory, &self.config).map(|_| memory)
    }
}

fn word(memory: &GuestMemoryMmap, at: u64) -> u64 {
    u64::from(
        memory
            .read_obj::<u32>(GuestAddress(ZERO_PAGE + at))
            .unwrap(),
    )
}

#[test]
fn the_zero_page_is_as_the_boot_protocol_has_it() {
    let mut setup = Setup::new();
    setup.config.command_line = "console=ttyS0".to_owned();
    let memory = setup.load().unwrap();
    // The rows have field and offset, from boot.rst and zero-page.rst.
    for (at, value) in [
        (0x070, ACPI), // acpi_rsdp_addr
        (0x202, u64::from(u32::from_le_bytes(*b"HdrS"))),
        (0x218, 0),            // ramdisk_image
        (0x21c, 0),            // ramdisk_size
        (0x228, COMMAND_LINE), // cmd_line_ptr
        (0x238, 13),           // cmdline_size
        (0x2d0, 0),            // e820: the first entry's address,
        (0x2d8, LOW_END),      // its size,
        (0x2e0, 1),            // its type
        (0x2e4, HIGH),
        (0x2ec, MEMORY - HIGH),
        (0x2f4, 1),
    ] {
        assert_eq!(word(&memory, at), value, "{at:#x}");
    }
    assert_eq!(word(&memory, 0x1e8) & 0xff, 2, "entries of the e820 map");
    assert_eq!(word(&memory, 0x1fe) & 0xffff, 0xaa55);
    assert_eq!(word(&memory, 0x206) & 0xffff, 0x20f);
    assert_eq!(word(&memory, 0x210) & 0xff, 0xff);
    assert_eq!(size_of::<boot_params>(), 4096);
}

#[test]
fn an_initramfs_of_any_size_is_whole_or_refused() {
    let room = MEMORY - (KERNEL + 4096);
    let mut setup = Setup::new();
    let path = setup.folder.path().join("initrd");
    setup.config.initrd = vec![path.clone()];
    for size in [1, 4095, 4096, 4097, room - 4096, room - 1, room] {
        let bytes: Vec<u8> = (0..size).map(|n| (n % 251) as u8 + 1).collect();
        fs::write(&path, &bytes).unwrap();
        let memory = setup
            .load()
            .unwrap_or_else(|error| panic!("{size}: {error}"));
        let at = word(&memory, 0x218);
        assert_eq!(word(&memory, 0x21c), size);
        assert_eq!(at % PAGE, 0);
        assert!(KERNEL + 4096 <= at && at + size <= MEMORY, "{size}");
        let mut found = vec![0; bytes.len()];
        memory.read_slice(&mut found, GuestAddress(at)).unwrap();
        assert!(found == bytes, "{size}");
        // The kernel is still there.
        assert_eq!(memory.read_obj::<u8>(GuestAddress(KERNEL)).unwrap(), 0xf4);
    }
    fs::write(&path, []).unwrap();
    let memory = setup.load().unwrap();
    assert_eq!((word(&memory, 0x218), word(&memory, 0x21c)), (0, 0), "none");
    for size in [room + 1, MEMORY, MEMORY + 1, 1 << 40] {
        File::create(&path).unwrap().set_len(size).unwrap();
        let error = setup.load().unwrap_err();
        assert!(matches!(error, Error::Memory(_)), "{size}: {error}");
    }
    setup.config.initrd = vec![PathBuf::from("/dev/zero")];
    assert!(
        matches!(setup.load(), Err(Error::Memory(_))),
        "a file without an end"
    );
    // This kernel leaves no room at all.
    setup.kernel(&elf(KERNEL, MEMORY - KERNEL, KERNEL));
    assert!(matches!(setup.load(), Err(Error::Memory(_))));
}

#[test]
fn the_parts_of_an_initramfs_follow_each_other() {
    let mut setup = Setup::new();
    for (name, bytes) in [("a", b"12345".as_slice()), ("none", b""), ("b", b"678")] {
        let path = setup.folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        setup.config.initrd.push(path);
    }
    let memory = setup.load().unwrap();
    let [at, size] = [0x218, 0x21c].map(|field| word(&memory, field));
    let mut found = vec![0xff; size as usize];
    memory.read_slice(&mut found, GuestAddress(at)).unwrap();
    assert_eq!(found, b"12345\0\0\x00678");
    // The parts fit each by itself, and not together.
    let half = (MEMORY - KERNEL) / 2;
    for path in &setup.config.initrd {
        File::create(path).unwrap().set_len(half).unwrap();
    }
    assert!(matches!(setup.load(), Err(Error::Memory(_))));
}

#[test]
fn a_kernel_fits_to_the_last_byte() {
    let setup = Setup::new();
    setup.kernel(&elf(KERNEL, MEMORY - KERNEL, KERNEL));
    setup.load().unwrap();
    for (address, size) in [
        (KERNEL, MEMORY - KERNEL + 1),
        (MEMORY, 1),
        (MEMORY - 1, 2),
        (1 << 40, 1),
        (u64::MAX - 4096, 4096),
        (HIGH - 1, 2),
        (ZERO_PAGE, 1),
    ] {
        setup.kernel(&elf(address, size, address));
        let error = setup.load().unwrap_err();
        assert!(
            matches!(error, Error::Load(..)),
            "{address:#x} {size:#x}: {error}"
        );
    }
    for entry in [0, KERNEL - 1, KERNEL + 1, u64::MAX] {
        setup.kernel(&elf(KERNEL, 4096, entry));
        assert!(matches!(setup.load(), Err(Error::Entry(_))), "{entry:#x}");
    }
}

#[test]
fn a_command_line_is_whole_or_refused() {
    let mut setup = Setup::new();
    for length in [0, 1, LONGEST_COMMAND_LINE] {
        setup.config.command_line = "x".repeat(length);
        let memory = setup.load().unwrap();
        assert_eq!(word(&memory, 0x238), length as u64);
        let mut found = vec![0xff; length + 1];
        memory
            .read_slice(&mut found, GuestAddress(COMMAND_LINE))
            .unwrap();
        assert_eq!(found, ["x".repeat(length).as_bytes(), b"\0"].concat());
    }
    for line in ["x".repeat(LONGEST_COMMAND_LINE + 1), "a\0b".to_owned()] {
        setup.config.command_line = line;
        assert!(matches!(setup.load(), Err(Error::Config(_))));
    }
}
