//! The search of `.eh_frame_hdr`: a sorted table of functions and their entries, of which any page may be absent.

use crate::Cut;
use crate::bytes::{PAGE, Reader};
use crate::object::{Object, u32_at};

/// Entries of a page.
const STRIDE: u64 = PAGE / 8;
/// Pages to either side of an absent one that are tried. One megabyte of table is 130,000 functions.
const AROUND: u64 = 64;

/// Returns the address of the entry (FDE) of the function at `at`. Whether the function covers it is for the entry to say.
/// `None`: no function begins below.
pub(crate) fn search(
    reader: &mut Reader<'_>,
    object: &Object,
    at: u64,
) -> Result<Option<u64>, Cut> {
    let header = object.header;
    let mut table = Table { reader, header };
    // The entry is in `low..high`, or is `best`: the last that begins at or below.
    let (mut low, mut high, mut best) = (0, object.entries, None);
    while low < high {
        let middle = low + (high - low) / 2;
        let (n, (start, fde)) = table.near(middle, low, high)?;
        if start <= at {
            (best, low) = (Some(fde), n + 1);
        } else {
            high = n;
        }
    }
    Ok(best)
}

struct Table<'a, 'b> {
    reader: &'a mut Reader<'b>,
    header: u64,
}

impl Table<'_, '_> {
    /// Returns an entry of `low..high`: the one at `middle`, or one on another page where that is absent.
    fn near(&mut self, middle: u64, low: u64, high: u64) -> Result<(u64, (u64, u64)), Cut> {
        let around = (1..=AROUND).map(|pages| pages * STRIDE);
        let around = around.flat_map(|n| [middle.checked_add(n), middle.checked_sub(n)]);
        let around = around.flatten().filter(|n| (low..high).contains(n));
        // The ends may be on pages of their neighbours'.
        for n in [middle].into_iter().chain(around).chain([low, high - 1]) {
            match self.entry(n) {
                Err(Cut::PageAbsent) => {}
                found => return found.map(|entry| (n, entry)),
            }
        }
        Err(Cut::PageAbsent)
    }

    /// Returns the start of a function, and the address of its entry.
    fn entry(&mut self, n: u64) -> Result<(u64, u64), Cut> {
        let bytes: [u8; 8] = self.reader.array(self.header.wrapping_add(12 + 8 * n))?;
        let of = |at| {
            let offset = u32_at(&bytes, at).cast_signed();
            self.header.wrapping_add_signed(offset.into())
        };
        Ok((of(0), of(4)))
    }
}
