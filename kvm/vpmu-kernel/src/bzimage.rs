//! The vmlinux in a bzImage (the kernel's Documentation/arch/x86/boot.rst).

use std::cell::Cell;
use std::io::{self, Read};
use std::ops::Range;

use super::{Error, LARGEST_BZIMAGE, LARGEST_UNPACKED, LARGEST_WINDOW};

pub(super) const MAGIC_AT: usize = 0x202;
const SECTORS_AT: usize = 0x1f1;
const VERSION_AT: usize = 0x206;
const PAYLOAD_OFFSET_AT: usize = 0x248;
const PAYLOAD_LENGTH_AT: usize = 0x24c;
/// Bytes of the size behind the payload.
const SIZE: usize = 4;
/// The first protocol with a payload field.
const PROTOCOL_2_08: u16 = 0x208;
/// What the compressed data begins with.
pub(super) const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
pub(super) const LZ4_MAGIC: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];
/// Bytes of the kernel in each block of LZ4's legacy frame, but for the last.
pub(super) const LZ4_BLOCK: usize = 8 << 20;
/// Bytes that a decompressor may read before it writes.
const SLACK: u64 = 1 << 20;
/// What xz's decoder needs besides its window, KiB.
const XZ_OVERHEAD: u32 = 1024;

fn word(bytes: &[u8], at: usize) -> Result<u32, Error> {
    let four = bytes.get(at..at + 4).and_then(|four| four.try_into().ok());
    four.map(u32::from_le_bytes)
        .ok_or(Error::Truncated("it ends in its header"))
}

/// What a bzImage has of its kernel.
pub(super) struct Payload {
    /// The compressed data, with the size behind it.
    pub(super) range: Range<usize>,
    /// Bytes of the kernel.
    pub(super) size: usize,
}

impl Payload {
    pub(super) fn of(image: &[u8]) -> Result<Self, Error> {
        if image.len() as u64 > LARGEST_BZIMAGE {
            return Err(Error::BzImage);
        }
        if (word(image, VERSION_AT)? as u16) < PROTOCOL_2_08 {
            return Err(Error::Header);
        }
        let sectors = match image[SECTORS_AT] {
            0 => 4,
            n => usize::from(n),
        };
        let start = (sectors + 1) * 512 + word(image, PAYLOAD_OFFSET_AT)? as usize;
        let end = start + word(image, PAYLOAD_LENGTH_AT)? as usize;
        if end > image.len() {
            return Err(Error::Truncated("it ends before its payload does"));
        }
        // The build puts the size behind the compressed data; gzip has it there by itself.
        let size_at = end.checked_sub(SIZE).filter(|&at| at >= start);
        let size = u64::from(word(image, size_at.ok_or(Error::Header)?)?);
        if size > LARGEST_UNPACKED {
            return Err(Error::Unpacked(size));
        }
        Ok(Self {
            range: start..end,
            size: size as usize,
        })
    }

    /// The compressed data. gzip's goes on to the end of `range`.
    pub(super) fn data(&self) -> Range<usize> {
        self.range.start..self.range.end - SIZE
    }
}

/// Decompresses the vmlinux in `image`.
pub(super) fn extract(image: &[u8]) -> Result<Vec<u8>, Error> {
    let found = Payload::of(image)?;
    let (payload, data, size) = (
        &image[found.range.clone()],
        &image[found.data()],
        found.size,
    );

    // Not for zstd: its decoder keeps all of a window back, and blocks of nothing cost it little.
    let written = Cell::new(0);
    let input = |data| Input {
        data,
        read: 0,
        written: &written,
    };
    let (method, kernel) = match *data {
        [0x1f, 0x8b, ..] => {
            let decoder = flate2::read::GzDecoder::new(input(payload));
            ("gzip", unpack(decoder, size, &written))
        }
        [0xfd, b'7', b'z', b'X', ..] => {
            let most = (LARGEST_WINDOW >> 10) as u32 + XZ_OVERHEAD;
            let decoder = lzma_rust2::XzReader::new_mem_limit(input(data), false, most);
            ("xz", unpack(decoder, size, &written))
        }
        _ if data.starts_with(&ZSTD_MAGIC) => {
            let decoder =
                ruzstd::decoding::StreamingDecoder::new_with_max_window_size(data, LARGEST_WINDOW);
            let decoder = decoder.map_err(io::Error::other);
            ("zstd", decoder.and_then(|it| unpack(it, size, &written)))
        }
        _ if data.starts_with(&LZ4_MAGIC) => {
            ("lz4", Ok(lz4_legacy(&data[LZ4_MAGIC.len()..], size)?))
        }
        [a, b, c, d, ..] => return Err(Error::Compression([a, b, c, d])),
        _ => return Err(Error::Truncated("its payload is empty")),
    };
    match kernel {
        Ok(kernel) if kernel.len() == size => Ok(kernel),
        Ok(kernel) => Err(Error::Damaged(
            method,
            format!("{size} bytes announced, {} found", kernel.len()),
        )),
        Err(error) => Err(Error::Damaged(method, error.to_string())),
    }
}

/// Returns what `decoder` gives: one byte more than there should be at most, to notice it.
fn unpack(decoder: impl Read, size: usize, written: &Cell<u64>) -> io::Result<Vec<u8>> {
    // The host gives pages as they are filled: an announced size alone costs nothing.
    let mut kernel = Vec::with_capacity(size);
    let mut decoder = decoder.take(size as u64 + 1);
    let mut some = [0; 1 << 16];
    loop {
        match decoder.read(&mut some)? {
            0 => return Ok(kernel),
            more => kernel.extend_from_slice(&some[..more]),
        }
        written.set(kernel.len() as u64);
    }
}

/// Compressed data, as long as it is worth reading. No method makes data longer by more than a few
/// parts in a thousand, so a file whose blocks are emptier than that is made to take long: xz needs
/// 10 microseconds for a block of 16 bytes that holds nothing.
struct Input<'a> {
    data: &'a [u8],
    read: u64,
    /// What has become of it so far.
    written: &'a Cell<u64>,
}

impl Read for Input<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.read > SLACK + self.written.get() / 8 * 9 {
            return Err(io::Error::other("it is longer than what is in it"));
        }
        let more = self.data.read(buffer)?;
        self.read += more as u64;
        Ok(more)
    }
}

/// LZ4's legacy frame: blocks of at most 8 MiB, each with its compressed size before it.
fn lz4_legacy(mut blocks: &[u8], size: usize) -> Result<Vec<u8>, Error> {
    let mut kernel = vec![0; size];
    let mut done = 0;
    while !blocks.is_empty() {
        let length = word(blocks, 0)? as usize;
        // As for Linux: what is behind is padding.
        if length == 0 {
            break;
        }
        let block = blocks
            .get(4..)
            .and_then(|rest| rest.get(..length))
            .ok_or(Error::Truncated("it ends within an lz4 block"))?;
        let end = size.min(done + LZ4_BLOCK);
        done += lz4_flex::block::decompress_into(block, &mut kernel[done..end])
            .map_err(|error| Error::Damaged("lz4", error.to_string()))?;
        blocks = &blocks[4 + length..];
    }
    kernel.truncate(done);
    Ok(kernel)
}

#[cfg(test)]
mod tests;
