//! The guest that travels behind the monitor in one boot file.
//!
//! `booti` and QEMU's `-kernel` load one file and leave `/chosen` to the initrd and the command
//! line, so the guest is appended to the monitor: monitor, padded to [`PAYLOAD_OFFSET`], then the
//! guest's file as it is. An arm64 `Image` may run at any 2 MiB boundary (Linux,
//! `Documentation/arch/arm64/booting.rst`), so it runs where it was loaded, unless it asks for an offset
//! from one; a raw binary is copied to where such binaries expect to be, 512 KiB above the start of RAM.
//! By then the monitor is elsewhere (see [`super::home`]).

use core::ops::Range;

/// Distance from the monitor's first byte to the guest's: keeps an `Image` on a 2 MiB boundary.
pub const PAYLOAD_OFFSET: u64 = 2 << 20;

/// Where a raw binary expects to run, relative to the start of RAM.
pub const RAW_OFFSET: u64 = 0x8_0000;

/// Boundary that an `Image` is placed at.
const ALIGNMENT: u64 = 2 << 20;

const HEADER_LEN: usize = 64;
const IMAGE_MAGIC: [u8; 4] = *b"ARM\x64";

/// Why the appended guest cannot be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// Nothing was appended.
    #[error(
        "no guest is appended to the monitor; build the boot file with `vpmu run`, or see docs/use/monitor.md"
    )]
    Missing,
    /// The length says less than a header or the file is cut short.
    #[error("the appended guest has {0} bytes, which is no program")]
    TooShort(u64),
    /// The image wants a place that does not exist.
    #[error("the arm64 image asks for text offset {0:#x}, which is beyond all memory")]
    TextOffset(u64),
    /// It needs so much memory.
    #[error("the guest needs {} MiB of memory and the machine has too little", .0 >> 20)]
    TooLarge(u64),
    /// A big-endian kernel.
    #[error("the arm64 image is big-endian")]
    BigEndian,
}

/// Decides where the guest runs: all memory that it takes, its copy included. It is entered at the first byte.
///
/// `head` is the start of the guest's file, `len` its whole length, `loaded_at` where it lies and
/// `ram` the RAM that it may take.
///
/// # Errors
///
/// [`ImageError`], when the guest is absent or cannot run where it would have to.
pub fn place(
    head: &[u8],
    len: u64,
    loaded_at: u64,
    ram: &Range<u64>,
) -> Result<Range<u64>, ImageError> {
    if len == 0 {
        return Err(ImageError::Missing);
    }
    if len < 4 {
        return Err(ImageError::TooShort(len));
    }
    // A file with the magic and without a whole header is entered as what it is: a raw binary.
    let is_image = len >= HEADER_LEN as u64 && head.get(56..60).is_some_and(|m| m == IMAGE_MAGIC);
    let (entry, memory) = if is_image {
        let word = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().unwrap_or_default());
        let (text_offset, image_size, flags) = (word(8), word(16), word(24));
        if flags & 1 != 0 {
            return Err(ImageError::BigEndian);
        }
        let entry = match text_offset {
            // Padding has put the file on the boundary already.
            0 => Some(loaded_at),
            offset => ram.start.next_multiple_of(ALIGNMENT).checked_add(offset),
        };
        let entry = entry.ok_or(ImageError::TextOffset(text_offset))?;
        // Images of kernels before 3.17 say 0; the size has the BSS in it, which the file has not.
        (entry, image_size.max(len))
    } else {
        (ram.start + RAW_OFFSET, len)
    };
    let end = entry.checked_add(memory).filter(|&end| end <= ram.end);
    Ok(entry..end.ok_or(ImageError::TooLarge(memory))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAM: u64 = 0x4000_0000;
    const END: u64 = 0x8000_0000;
    const LOADED: u64 = RAM + (2 << 20) + PAYLOAD_OFFSET;

    fn image(text_offset: u64, size: u64, flags: u64) -> [u8; HEADER_LEN] {
        let mut head = [0; HEADER_LEN];
        head[8..16].copy_from_slice(&text_offset.to_le_bytes());
        head[16..24].copy_from_slice(&size.to_le_bytes());
        head[24..32].copy_from_slice(&flags.to_le_bytes());
        head[56..60].copy_from_slice(&IMAGE_MAGIC);
        head
    }

    fn decide(head: &[u8], len: u64) -> Result<Range<u64>, ImageError> {
        place(head, len, LOADED, &(RAM..END))
    }

    #[test]
    fn an_image_runs_in_place() {
        let place = decide(&image(0, 0x30_0000, 0xa), 0x20_0000);
        assert_eq!(place, Ok(LOADED..LOADED + 0x30_0000));
    }

    #[test]
    fn a_raw_binary_is_copied_to_its_place() {
        let start = RAM + RAW_OFFSET;
        assert_eq!(decide(&[0; 64], 4096), Ok(start..start + 4096));
    }

    #[test]
    fn an_image_gets_the_offset_it_asks_for() {
        let place = decide(&image(0x8_0000, 0x30_0000, 0xa), 0x20_0000);
        assert_eq!(place, Ok(RAM + 0x8_0000..RAM + 0x38_0000));
    }

    #[test]
    fn what_cannot_run_is_refused() {
        assert_eq!(decide(&[], 0), Err(ImageError::Missing));
        assert_eq!(decide(&[0; 3], 3), Err(ImageError::TooShort(3)));
        assert_eq!(
            decide(&image(u64::MAX, 0, 0), 4096),
            Err(ImageError::TextOffset(u64::MAX))
        );
        let room = END - LOADED;
        assert!(decide(&image(0, room, 0), 4096).is_ok());
        for huge in [room + 1, u64::MAX] {
            let refused = Err(ImageError::TooLarge(huge));
            assert_eq!(decide(&image(0, huge, 0), 4096), refused);
        }
        assert_eq!(decide(&image(0, 0, 1), 4096), Err(ImageError::BigEndian));
    }
}
