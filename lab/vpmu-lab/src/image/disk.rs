//! A disk that boots by itself, as the disks of real guests do.
//!
//! GRUB is on it for a BIOS and for UEFI. It starts a Debian kernel as Debian packs it, at an address that the kernel
//! chooses (KASLR), with an initrd that searches for the disk's ext4. There is the lab's small system, to which the initrd
//! adds the run's job from a second disk. The guest's writes last until the machine ends: a guest may boot again, and
//! the next run begins with the same disk.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::archive::{self, Archive};
use super::fat::Volume;
use super::images::Images;
use super::kernel_module::{ModuleFiles, file_name};
use crate::host::cancel::Cancel;
use crate::host::tool::Tool;
use crate::image::cache::Session;
use crate::image::debian::{Pool, Selection};
use crate::spec::arch::Arch;
use crate::spec::disk::{Disk, Firmware};
use crate::{Error, Result};

/// The version of the disk's contents. It changes with any code below that changes them.
const LAYOUT: &str = "layout 3";

/// Drivers of the disk and of its file system, in the order in which they need each other. What is part of a kernel is
/// not among its modules.
const MODULES: [&str; 10] = [
    "virtio",
    "virtio_ring",
    "virtio_pci_modern_dev",
    "virtio_pci_legacy_dev",
    "virtio_pci",
    VIRTIO_BLK,
    "crc16",
    "mbcache",
    "jbd2",
    "ext4",
];
const VIRTIO_BLK: &str = "virtio_blk";

/// What GRUB's first part needs to find the second: the disk, its partitions, ext4; and to boot Linux.
const GRUB_MODULES: [&str; 7] = [
    "boot",
    "ext2",
    "linux",
    "normal",
    "part_msdos",
    "serial",
    "terminal",
];
/// GRUB's folder, on the second partition of whatever disk the firmware booted.
const GRUB_PREFIX: &str = "(,msdos2)/boot/grub";
const GRUB_CONFIG: &str = "serial --unit=0\n\
    terminal_output serial\n\
    linux /boot/vmlinuz root=/dev/vda2 rw console=ttyS0 quiet oops=panic resume=/dev/vda3\n\
    initrd /boot/initrd.img\n\
    boot\n";

const SECTOR: u64 = 512;
/// The partition of UEFI's boot files begins behind the first MiB, which is GRUB's for a BIOS.
const EFI: Partition = Partition {
    kind: 0xef,
    start: 1 << 20,
    size: 16 << 20,
};
/// The partition of the system. Most of it is a hole in the image's file.
const SYSTEM: Partition = Partition {
    kind: 0x83,
    start: 17 << 20,
    size: 1007 << 20,
};
/// Room for a guest that sleeps on the disk, to be made swap space by the guest. It is a hole, too.
const SWAP: Partition = Partition {
    kind: 0x82,
    start: 1 << 30,
    size: 1 << 30,
};

/// Fixed, so that the same packages make the same disk.
const UUID: &str = "76706d75-0000-4000-8000-646973690000";

/// The machine's mke2fs, which fills a file system from a folder without root.
const MKE2FS: Tool = Tool {
    program: "mke2fs",
    fix: "apt-get install e2fsprogs",
    hint: "",
};

/// GRUB's program from the guest's own packages, started by their own loader.
const GRUB_MKIMAGE: Tool = Tool {
    program: "grub-mkimage",
    fix: "",
    hint: "the packages may be damaged: delete the cache folder and try again",
};

/// A disk to boot from, and what the machine needs to do so.
#[derive(Debug, Clone)]
pub struct BootDisk {
    /// The disk's image.
    pub image: PathBuf,
    /// The image's format, by QEMU's name.
    pub format: &'static str,
    /// UEFI's firmware: code, and the variables that it begins with. Without it, the machine has a BIOS.
    pub uefi: Option<[PathBuf; 2]>,
    /// The module by which the KVM host reads disks.
    pub driver: PathBuf,
    /// The kernel on the disk, where the lab has put it there.
    pub kernel: Option<PathBuf>,
}

struct Partition {
    kind: u8,
    start: u64,
    size: u64,
}

const IMAGE: &str = "disk.img";
const KERNEL: &str = "kernel";
const DRIVER: &str = "virtio_blk.ko.xz";
const CODE: &str = "OVMF_CODE.fd";
const VARIABLES: &str = "OVMF_VARS.fd";

impl BootDisk {
    /// Returns the disk, with the lab's own made first where that is missing.
    ///
    /// # Errors
    ///
    /// When packages cannot be downloaded or lack a file, or mke2fs is missing.
    pub fn prepare(disk: &Disk, images: &Images, session: &Session<'_>) -> Result<Self> {
        let _lock = session.lock()?;
        let fetch = |selection| Pool::fetch(&selection, session);
        let pools = Pools {
            guests: fetch(Selection::guests(Arch::X86_64))?,
            boot: fetch(Selection::boot())?,
            kernel: fetch(Selection::kernel(disk.release))?,
        };
        let folder = pools.folder();
        if !folder.is_dir() {
            let _task = session.progress.task("making the boot disk");
            (pools.kernel).derive(PREFIX, &folder, |scratch, made| {
                pools.build(images, scratch, made, session.cancel)
            })?;
        }
        let file = |name: &str| folder.join(name);
        let uefi = match disk.firmware {
            Firmware::Bios => None,
            Firmware::Uefi => Some([file(CODE), file(VARIABLES)]),
        };
        let (image, format, kernel) = match &disk.image {
            None => (file(IMAGE), "raw", Some(file(KERNEL))),
            Some(path) => (path.clone(), format_of(path)?, None),
        };
        Ok(Self {
            image,
            format,
            uefi,
            driver: file(DRIVER),
            kernel,
        })
    }

    /// Checks that this machine can make the disk.
    pub(crate) fn check() -> Result<()> {
        MKE2FS.command().map(drop)
    }
}

/// Returns the format of the user's image: QEMU's own, or none. One that has parts in other files is refused: whoever made it
/// would choose which of this machine's files the guest reads.
fn format_of(path: &Path) -> Result<&'static str> {
    use std::io::Read;
    // As QEMU's docs/interop/qcow2.txt has it, in big-endian numbers.
    const OF_DATA_FILE: u64 = 1 << 2;
    let mut head = Vec::new();
    let read = File::open(path).and_then(|file| file.take(80).read_to_end(&mut head));
    read.map_err(Error::file("read", path))?;
    let number = |at: usize| {
        let bytes = head.get(at..at + 8)?.try_into().ok()?;
        Some(u64::from_be_bytes(bytes))
    };
    if !head.starts_with(b"QFI\xfb") {
        return Ok("raw");
    }
    let is_old = head[4..].starts_with(&2_u32.to_be_bytes());
    let has_backing = number(8) != Some(0);
    let has_data_file = !is_old && number(72).is_none_or(|bits| bits & OF_DATA_FILE != 0);
    match has_backing || has_data_file {
        true => Err(Error::format(
            path,
            "has parts in other files; make it whole by qemu-img convert -O qcow2 IMAGE WHOLE",
        )),
        false => Ok("qcow2"),
    }
}

const PREFIX: &str = "disk-";

const INIT: &str = include_str!("disk-init.sh");

/// The packages of a disk.
struct Pools {
    /// Those of the KVM host. Its kernel may be another version than the disk's.
    guests: Pool,
    boot: Pool,
    kernel: Pool,
}

impl Pools {
    /// Returns the folder of the disk.
    fn folder(&self) -> PathBuf {
        let others = [&self.guests, &self.boot].map(|pool| pool.manifest.packages.iter());
        let others = others.into_iter().flatten().map(|package| &*package.sha256);
        self.kernel
            .derived(PREFIX, others.chain([LAYOUT, INIT, GRUB_CONFIG]))
    }

    fn build(&self, images: &Images, scratch: &Path, made: &Path, cancel: &Cancel) -> Result<()> {
        let places = ["boot", "kernel", "host", "root"];
        let [boot, kernel, host, root] = places.map(|name| scratch.join(name));
        for path in [&boot, &kernel, &host, &root] {
            fs::create_dir(path).map_err(Error::file("create", path))?;
        }
        self.boot.unpack("", &boot, cancel)?;
        self.kernel.unpack("", &kernel, cancel)?;
        self.guests.unpack("linux-image-", &host, cancel)?;
        let copy = |from: PathBuf, name: &str| {
            let copied = fs::copy(&from, made.join(name)).map(drop);
            copied.map_err(Error::file("copy", &from))
        };
        let driver = ModuleFiles::of(&host)?.find(VIRTIO_BLK);
        copy(
            driver.ok_or_else(|| self.guests.missing(VIRTIO_BLK))?,
            DRIVER,
        )?;
        for (name, file) in [("OVMF_CODE_4M.fd", CODE), ("OVMF_VARS_4M.fd", VARIABLES)] {
            copy(boot.join("usr/share/OVMF").join(name), file)?;
        }
        let modules = ModuleFiles::of(&kernel)?;
        let vmlinuz = modules.kernel_of(&kernel);
        copy(
            vmlinuz.ok_or_else(|| self.kernel.missing("the kernel"))?,
            KERNEL,
        )?;

        archive::extract(&images.guest(), &root)?;
        let grub_folder = root.join("boot/grub");
        fs::create_dir_all(&grub_folder).map_err(Error::file("create", &grub_folder))?;
        let config = grub_folder.join("grub.cfg");
        fs::write(&config, GRUB_CONFIG).map_err(Error::file("write", &config))?;
        let vmlinuz = root.join("boot/vmlinuz");
        fs::copy(made.join(KERNEL), &vmlinuz).map_err(Error::file("write", &vmlinuz))?;
        initrd(&modules, &root).write_file(&root.join("boot/initrd.img"))?;
        cancel.check()?;

        let image = made.join(IMAGE);
        let mut disk = File::create(&image).map_err(Error::file("create", &image))?;
        let bios = grub(&boot, "i386-pc", &scratch.join("core.img"), cancel)?;
        let uefi = grub(&boot, "x86_64-efi", &scratch.join("grub.efi"), cancel)?;
        let sector = boot.join("usr/lib/grub/i386-pc/boot.img");
        let sector = fs::read(&sector).map_err(Error::file("read", &sector))?;
        let written = write_boot(&mut disk, &sector, &bios).and_then(|()| write_efi(&disk, &uefi));
        written.map_err(Error::file("write", &image))?;
        make_system(&root, &image, cancel)
    }
}

/// Makes the initrd: drivers, and a script that goes to the disk's system.
fn initrd(modules: &ModuleFiles, root: &Path) -> Archive {
    let mut archive = Archive::default();
    for place in ["dev", "proc", "root", "sys"] {
        archive.folder(place);
    }
    archive
        .bytes("init", 0o755, INIT)
        .copy("bin/busybox", 0o755, root.join("usr/bin/busybox"));
    for (number, name) in MODULES.into_iter().enumerate() {
        if let Some(path) = modules.find(name) {
            let place = format!("modules/{number}-{}", file_name(&path).unwrap_or(name));
            archive.copy(&place, 0o644, path);
        }
    }
    archive
}

/// Makes GRUB's program for `platform` by the packages' own grub-mkimage.
fn grub(tree: &Path, platform: &str, out: &Path, cancel: &Cancel) -> Result<Vec<u8>> {
    let libraries = tree.join(Arch::X86_64.libraries());
    let mut command = crate::host::tool::bound_to_us(&libraries.join("ld-linux-x86-64.so.2"))?;
    command
        .arg("--library-path")
        .arg(&libraries)
        .arg(tree.join("usr/bin/grub-mkimage"));
    command
        .arg("--directory")
        .arg(tree.join("usr/lib/grub").join(platform));
    command
        .args(["--format", platform, "--prefix", GRUB_PREFIX, "--output"])
        .arg(out);
    command.args(GRUB_MODULES);
    if platform == "i386-pc" {
        command.arg("biosdisk");
    }
    GRUB_MKIMAGE.run(command, cancel, &|| ())?;
    fs::read(out).map_err(Error::file("read", out))
}

/// Writes the boot sector with the table of partitions, and behind it GRUB's program, which the boot sector loads.
fn write_boot(disk: &mut File, boot: &[u8], core: &[u8]) -> std::io::Result<()> {
    /// GRUB's code and data in the boot sector; what follows is the table.
    const CODE: usize = 440;
    /// A jump over the workaround for a BIOS that does not say from which disk it boots. On disks, GRUB's own
    /// installer makes it two NOPs (`GRUB_BOOT_MACHINE_DRIVE_CHECK`), so that the workaround is done.
    const DRIVE_CHECK: usize = 0x66;
    const TABLE: usize = 446;
    let mut sector = [0; SECTOR as usize];
    sector[..CODE].copy_from_slice(&boot[..CODE]);
    sector[DRIVE_CHECK..DRIVE_CHECK + 2].fill(0x90);
    for (entry, partition) in sector[TABLE..].chunks_mut(16).zip([&EFI, &SYSTEM, &SWAP]) {
        entry[4] = partition.kind;
        entry[8..12].copy_from_slice(&sectors(partition.start).to_le_bytes());
        entry[12..16].copy_from_slice(&sectors(partition.size).to_le_bytes());
    }
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    disk.write_all(&sector)?;
    disk.write_all(core)?;
    assert!(
        core.len() as u64 + SECTOR <= EFI.start,
        "GRUB is larger than its place"
    );
    disk.set_len(SWAP.start + SWAP.size)
}

fn sectors(bytes: u64) -> u32 {
    u32::try_from(bytes / SECTOR).expect("the disk is smaller than 2 TiB")
}

/// Makes UEFI's file system with the file that firmware boots without any setting.
fn write_efi(disk: &File, grub: &[u8]) -> std::io::Result<()> {
    let volume = Volume::new(EFI.size, *b"EFI        ")?;
    volume.add("EFI/BOOT/BOOTX64.EFI", grub)?;
    let mut volume = volume.finish()?;
    let mut disk = disk;
    disk.seek(SeekFrom::Start(EFI.start))?;
    std::io::copy(&mut volume, &mut disk).map(drop)
}

/// Makes the file system of the disk's system out of `root`.
fn make_system(root: &Path, image: &Path, cancel: &Cancel) -> Result<()> {
    let mut command = MKE2FS.command()?;
    // A file system that is made whole leaves the guest's kernel nothing to do in the background.
    let options = format!(
        "offset={},root_owner=0:0,hash_seed={UUID},lazy_itable_init=0,lazy_journal_init=0,nodiscard",
        SYSTEM.start
    );
    command.args(["-q", "-F", "-t", "ext4", "-U", UUID, "-E", &options, "-d"]);
    command
        .arg(root)
        .arg(image)
        .arg(format!("{}k", SYSTEM.size >> 10));
    command.env("E2FSPROGS_FAKE_TIME", archive::MTIME.to_string());
    MKE2FS.run(command, cancel, &|| ()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_read_by_itself_alone() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let format = |version: u8, backing: u64, features: u64| {
            let mut head = [0; 104];
            head[..4].copy_from_slice(b"QFI\xfb");
            head[7] = version;
            head[8..16].copy_from_slice(&backing.to_be_bytes());
            head[72..80].copy_from_slice(&features.to_be_bytes());
            fs::write(file.path(), head).unwrap();
            format_of(file.path()).ok()
        };
        assert_eq!(format(2, 0, 0), Some("qcow2"));
        assert_eq!(format(3, 0, 1), Some("qcow2"));
        assert_eq!(format(3, 0, 1 << 2), None, "a data file");
        assert_eq!(format(2, 512, 0), None, "a backing file");
        fs::write(file.path(), "raw").unwrap();
        assert_eq!(format_of(file.path()).unwrap(), "raw");
        fs::write(file.path(), b"QFI\xfb").unwrap();
        assert!(format_of(file.path()).is_err(), "cut off");
    }
}
