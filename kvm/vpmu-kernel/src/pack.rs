//! A bzImage whose kernel is replaced by a rewritten one.
//!
//! The bzImage's own code unpacks the kernel when it boots, so that the kernel is moved (KASLR), as ever. That code has
//! the payload's place and length in its instructions. Compressed anew, the kernel must therefore be no longer than
//! it was. Linux's build compresses by `zstd -22 --ultra` or `lz4 -l -9` (its scripts/Makefile.lib), so the same libraries at
//! their best come out as long, or a little shorter. Decompressors in the kernel end where the data says that it ends:
//! zstd's at the end of the frame, LZ4's at a block of no bytes.

use std::io::Write;

use super::bzimage::{LZ4_BLOCK, LZ4_MAGIC, Payload, ZSTD_MAGIC};
use super::{Error, Kernel, is_bzimage};

/// zstd's best level.
const ZSTD_BEST: i32 = 22;
/// LZ4's best level.
const LZ4_BEST: i32 = 12;

impl Kernel {
    /// Returns `image`, the bzImage that this kernel was taken from, with this kernel in it. A rewritten kernel takes
    /// half a minute, nearly all of it in zstd, and 1 GiB of memory.
    ///
    /// A signature of the image (secure boot) no longer holds.
    ///
    /// # Errors
    ///
    /// The image is no bzImage or has another kernel, its method is not zstd or LZ4, or the kernel does not fit any more.
    pub fn repack(&self, image: &[u8]) -> Result<Vec<u8>, Error> {
        if !is_bzimage(image) {
            return Err(Error::NoBzImage);
        }
        let payload = Payload::of(image)?;
        if payload.size != self.elf().len() {
            return Err(Error::Another);
        }
        let data = payload.data();
        let packed = match image[data.clone()].first_chunk() {
            Some(&ZSTD_MAGIC) => zstd(self.elf()),
            Some(&LZ4_MAGIC) => lz4(self.elf()),
            _ => return Err(Error::Repack),
        }
        .map_err(Error::Pack)?;
        let room = data.len();
        if packed.len() > room {
            return Err(Error::Longer(packed.len() - room));
        }
        let mut repacked = image.to_vec();
        let (new, rest) = repacked[data].split_at_mut(packed.len());
        new.copy_from_slice(&packed);
        rest.fill(0);
        renew_checksum(image, &mut repacked);
        Ok(repacked)
    }
}

fn zstd(kernel: &[u8]) -> std::io::Result<Vec<u8>> {
    // By a stream, as Linux's build does: a length that is known makes the window smaller, and the result longer.
    let mut encoder = zstd::Encoder::new(Vec::new(), ZSTD_BEST)?;
    encoder.write_all(kernel)?;
    encoder.finish()
}

/// LZ4's legacy frame.
fn lz4(kernel: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut packed = LZ4_MAGIC.to_vec();
    for block in kernel.chunks(LZ4_BLOCK) {
        let best = lz4::block::CompressionMode::HIGHCOMPRESSION(LZ4_BEST);
        let block = lz4::block::compress(block, Some(best), false)?;
        packed.extend((block.len() as u32).to_le_bytes());
        packed.extend(block);
    }
    Ok(packed)
}

/// The file's last four bytes may be a CRC-32 of what is before them, not inverted at its end (boot protocol 2.08). Where
/// `before` has it, `after` gets its own.
fn renew_checksum(before: &[u8], after: &mut [u8]) {
    let sum = |bytes: &[u8]| {
        let mut sum = flate2::Crc::new();
        sum.update(bytes);
        (!sum.sum()).to_le_bytes()
    };
    if let Some((rest, last)) = before.split_last_chunk::<4>()
        && sum(rest) == *last
        && let Some((rest, last)) = after.split_last_chunk_mut::<4>()
    {
        *last = sum(rest);
    }
}

#[cfg(test)]
mod tests;
