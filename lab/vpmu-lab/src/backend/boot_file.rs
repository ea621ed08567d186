//! One file that boots the monitor with a guest behind it.
//!
//! QEMU's `-kernel` takes a single file. So the monitor's raw image is padded to 2 MiB, the
//! alignment that an arm64 `Image` wants, and the guest follows. The builder fills in two words of
//! the monitor's header. The first is the memory of the whole (Linux
//! `Documentation/arch/arm64/booting.rst`, `image_size`), so that the loader puts device tree and
//! initrd behind it. The second is the guest's length. A second guest's parts follow. UEFI takes the file for a program of
//! its own, whose header says the same once more (Microsoft, PE and COFF Specification, 3.4.1 and 4).

use std::fs;
use std::path::Path;

use super::parts::Boot;
use crate::{Error, Result};

/// Where the guest begins in the file.
const GUEST_OFFSET: usize = 2 << 20;
/// Header words, as offsets into the file.
const IMAGE_SIZE: usize = 0x10;
const IMAGE_MAGIC: usize = 0x38;
const MONITOR_MAGIC: usize = 0x7f8;
const GUEST_LENGTH: usize = 0x800;
/// Of the program's header: the bytes in memory of all, of its one section, and the bytes of that in the file.
const PE_MEMORY: usize = 0x90;
const PE_SECTION_MEMORY: usize = 0xd0;
const PE_SECTION_FILE: usize = 0xd8;
/// Where that section begins.
const PE_SECTION: u64 = 0x1000;
/// The second guest: distance of its file from the beginning, and its length.
const SECOND_FILE: usize = 0x808;
/// The same of its initrd.
const SECOND_INITRD: usize = 0x818;
/// Bytes of its memory; 0: the monitor's default.
const SECOND_MEMORY: usize = 0x828;
/// Where these words end.
const WORDS_END: usize = 0x830;
/// Its command line, with a zero behind it, and the end of its room.
const SECOND_WORDS: std::ops::Range<usize> = 0x100..0x700;

/// The guest beside the first, and its memory, MiB; `None`: the monitor's default.
pub(super) type Second = (Boot, Option<u32>);

/// Returns the boot file's contents.
pub(super) fn build(monitor: &Path, guest: &Path, second: Option<&Second>) -> Result<Vec<u8>> {
    let mut file = fs::read(monitor).map_err(Error::file("read", monitor))?;
    if file.get(MONITOR_MAGIC..MONITOR_MAGIC + 8) != Some(b"VPMUGST1")
        || file.len() < WORDS_END
        || file.len() > GUEST_OFFSET
    {
        return Err(Error::format(
            monitor,
            "not a monitor image of this version; build it anew with script/setup",
        ));
    }
    let guest_file = read(guest)?;
    // The lengths are what a file's header claims.
    let behind = |offset: u64, length: u64| {
        let end = length.checked_next_multiple_of(0x1000);
        let end = end.and_then(|length| offset.checked_add(length));
        end.filter(|end| u32::try_from(*end).is_ok())
            .ok_or_else(|| Error::format(guest, "a boot file takes less than 4 GiB of memory"))
    };
    let mut memory = behind(GUEST_OFFSET as u64, guest_memory(&guest_file))?;
    file.resize(GUEST_OFFSET, 0);
    put(&mut file, GUEST_LENGTH, guest_file.len() as u64);
    file.extend_from_slice(&guest_file);
    if let Some((second, mib)) = second {
        put_words(&mut file, second)?;
        let initrd = second.initrd.as_deref().map(read_any).transpose()?;
        let parts = [
            (SECOND_FILE, Some(read(&second.kernel)?)),
            (SECOND_INITRD, initrd),
        ];
        for (word, part) in parts {
            let Some(part) = part else { continue };
            let offset = memory.next_multiple_of(GUEST_OFFSET as u64);
            put(&mut file, word, offset);
            put(&mut file, word + 8, part.len() as u64);
            file.resize(offset as usize, 0);
            file.extend_from_slice(&part);
            memory = behind(offset, part.len() as u64)?;
        }
        let bytes = u64::from(mib.unwrap_or(0)) << 20;
        put(&mut file, SECOND_MEMORY, bytes);
    }
    put(&mut file, IMAGE_SIZE, memory);
    let length = file.len() as u64;
    for (word, value) in [
        (PE_MEMORY, memory),
        (PE_SECTION_MEMORY, memory - PE_SECTION),
        (PE_SECTION_FILE, length - PE_SECTION),
    ] {
        // Less than `memory`, which fits.
        file[word..word + 4].copy_from_slice(&(value as u32).to_le_bytes());
    }
    Ok(file)
}

/// Puts the second guest's command line into the head of `file`.
fn put_words(file: &mut [u8], second: &Boot) -> Result<()> {
    let words = second.append.as_bytes();
    if words.len() >= SECOND_WORDS.len() {
        let most = SECOND_WORDS.len() - 1;
        let problem = format!("its command line has more than {most} bytes");
        return Err(Error::format(&second.kernel, problem));
    }
    file[SECOND_WORDS][..words.len()].copy_from_slice(words);
    file[SECOND_WORDS][words.len()] = 0;
    Ok(())
}

fn read_any(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(Error::file("read", path))
}

/// Returns the contents of a guest's file.
fn read(guest: &Path) -> Result<Vec<u8>> {
    let file = read_any(guest)?;
    match compression(&file) {
        Some(kind) => Err(Error::format(
            guest,
            format!("{kind}; give the uncompressed arm64 Image or a raw binary"),
        )),
        None => Ok(file),
    }
}

/// Returns the bytes of memory that a guest takes: the value in its arm64 header, or its length.
fn guest_memory(guest: &[u8]) -> u64 {
    let length = guest.len() as u64;
    let is_image = guest.get(IMAGE_MAGIC..IMAGE_MAGIC + 4) == Some(b"ARM\x64");
    match guest.get(IMAGE_SIZE..IMAGE_SIZE + 8) {
        Some(word) if is_image => {
            let size = u64::from_le_bytes(word.try_into().expect("eight bytes"));
            size.max(length)
        }
        _ => length,
    }
}

/// Names the format of a file that cannot be booted as it is.
fn compression(file: &[u8]) -> Option<&'static str> {
    match file {
        [] => Some("empty"),
        [0x1f, 0x8b, ..] => Some("compressed with gzip"),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Some("compressed with zstd"),
        [0x7f, b'E', b'L', b'F', ..] => Some("an ELF file"),
        [b'M', b'Z', _, _, b'z', b'i', b'm', b'g', ..] => Some("a self-extracting EFI zboot image"),
        _ => None,
    }
}

fn put(file: &mut [u8], offset: usize, value: u64) {
    file[offset..offset + 8].copy_from_slice(&value.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(file: &[u8], offset: usize) -> u64 {
        u64::from_le_bytes(file[offset..offset + 8].try_into().unwrap())
    }

    fn build_from(monitor: &[u8], guest: &[u8]) -> Result<Vec<u8>> {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = (folder.path().join("monitor"), folder.path().join("guest"));
        fs::write(&a, monitor).unwrap();
        fs::write(&b, guest).unwrap();
        build(&a, &b, None)
    }

    fn monitor() -> Vec<u8> {
        let mut monitor = vec![7; 0x2000];
        monitor[MONITOR_MAGIC..MONITOR_MAGIC + 8].copy_from_slice(b"VPMUGST1");
        monitor
    }

    #[test]
    fn raw_guest() {
        let file = build_from(&monitor(), &[9; 5000]).unwrap();
        assert_eq!(file.len(), GUEST_OFFSET + 5000);
        assert_eq!(word(&file, IMAGE_SIZE), GUEST_OFFSET as u64 + 0x2000);
        assert_eq!(word(&file, GUEST_LENGTH), 5000);
        assert_eq!(file[GUEST_OFFSET - 1..GUEST_OFFSET + 1], [0, 9]);
    }

    #[test]
    fn image_with_zeroed_memory_behind_it() {
        let mut guest = vec![0; 5000];
        put(&mut guest, IMAGE_SIZE, 0x1_0001);
        guest[IMAGE_MAGIC..IMAGE_MAGIC + 4].copy_from_slice(b"ARM\x64");
        let file = build_from(&monitor(), &guest).unwrap();
        assert_eq!(word(&file, IMAGE_SIZE), GUEST_OFFSET as u64 + 0x1_1000);
        // As a program of UEFI's: all of it in memory, one section behind the header.
        assert_eq!(word(&file, PE_MEMORY) as u32, 0x21_1000);
        assert_eq!(word(&file, PE_SECTION_MEMORY) as u32, 0x21_0000);
        assert_eq!(word(&file, PE_SECTION_FILE) as u32, 0x20_0388);
    }

    #[test]
    fn two_guests() {
        let folder = tempfile::tempdir().unwrap();
        let names = ["monitor", "first", "second", "initrd"];
        let paths = names.map(|name| folder.path().join(name));
        let contents = [monitor(), vec![9; 5000], vec![8; 3], vec![7; 10]];
        for (path, contents) in paths.iter().zip(contents) {
            fs::write(path, contents).unwrap();
        }
        let (words, too_long) = ("test=count strict", "x".repeat(SECOND_WORDS.len()));
        let second = |words: &str, initrd: Option<&Path>, memory| {
            let boot = Boot {
                kernel: paths[2].clone(),
                initrd: initrd.map(Path::to_owned),
                append: words.to_owned(),
            };
            build(&paths[0], &paths[1], Some(&(boot, memory)))
        };
        let file = second(words, None, None).unwrap();
        assert_eq!(word(&file, SECOND_FILE), 2 * GUEST_OFFSET as u64);
        assert_eq!(word(&file, SECOND_FILE + 8), 3);
        assert_eq!(file[2 * GUEST_OFFSET..], [8; 3]);
        assert_eq!(word(&file, IMAGE_SIZE), 2 * GUEST_OFFSET as u64 + 0x1000);
        assert_eq!(&file[SECOND_WORDS][..words.len()], words.as_bytes());
        assert_eq!(file[SECOND_WORDS][words.len()], 0);
        assert_eq!(word(&file, SECOND_MEMORY), 0);
        assert!(second(&too_long, None, None).is_err());
        let file = second(words, Some(paths[3].as_path()), Some(384)).unwrap();
        assert_eq!(word(&file, SECOND_INITRD), 3 * GUEST_OFFSET as u64);
        assert_eq!(word(&file, SECOND_INITRD + 8), 10);
        assert_eq!(word(&file, SECOND_MEMORY), 384 << 20);
        assert_eq!(file[3 * GUEST_OFFSET..], [7; 10]);
        assert_eq!(word(&file, IMAGE_SIZE), 3 * GUEST_OFFSET as u64 + 0x1000);
    }

    #[test]
    fn refused() {
        for guest in [&b""[..], b"\x1f\x8b\x08", b"\x7fELF", b"MZ\0\0zimg"] {
            assert!(build_from(&monitor(), guest).is_err());
        }
        for claimed in [1 << 32, 1 << 40, u64::MAX - 0xfff, u64::MAX] {
            let mut guest = vec![0; 5000];
            put(&mut guest, IMAGE_SIZE, claimed);
            guest[IMAGE_MAGIC..IMAGE_MAGIC + 4].copy_from_slice(b"ARM\x64");
            assert!(build_from(&monitor(), &guest).is_err());
        }
        assert!(build_from(&[0; 0x2000], b"guest").is_err());
        assert!(build_from(&monitor()[..0x800], b"guest").is_err());
    }
}
