//! Where the monitor lives: at the end of RAM, so that the guest's RAM is one piece and begins where the
//! machine's does. A bootloader puts the monitor at the beginning, as it would any kernel.

use alloc::vec::Vec;
use core::ops::Range;

/// The monitor and what it hides from the guest begin and end at such an address: a block of stage 2.
pub const ALIGNMENT: u64 = 2 << 20;

/// The highest place for `size` bytes of `ram` that touches nothing in `taken`; `None` when there is none. The place begins
/// at a multiple of `alignment`, which is one of [`ALIGNMENT`]; its size is rounded up to such blocks.
pub fn choose(
    ram: &Range<u64>,
    taken: &[Range<u64>],
    size: u64,
    alignment: u64,
) -> Option<Range<u64>> {
    let size = size.checked_next_multiple_of(ALIGNMENT)?;
    let mut end = ram.end;
    loop {
        let start = end.checked_sub(size)? & !(alignment - 1);
        if start < ram.start {
            return None;
        }
        let place = start..start + size;
        match taken.iter().find(|range| overlap(range, &place)) {
            None => return Some(place),
            // What is in the way begins below the place's end, so this goes down.
            Some(range) => end = range.start,
        }
    }
}

/// Whether two ranges have a byte in common.
pub fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end && one.start < one.end
}

/// The pieces of `whole` that no range of `holes` has.
pub fn without(whole: &Range<u64>, holes: &[Range<u64>]) -> Vec<Range<u64>> {
    // Each hole may cut each piece: those of a board's firmware overlap.
    let mut pieces = Vec::from([whole.clone()]);
    for hole in holes {
        let cut = |piece: Range<u64>| {
            let pieces = [
                piece.start..piece.end.min(hole.start),
                piece.start.max(hole.end)..piece.end,
            ];
            pieces.into_iter().filter(|piece| piece.start < piece.end)
        };
        pieces = pieces.into_iter().flat_map(cut).collect();
    }
    pieces
}

#[cfg(test)]
mod tests {
    use core::slice::from_ref;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_end_of_ram_when_it_is_free() {
        let ram = 0x4000_0000..0x8000_0000;
        assert_eq!(
            choose(&ram, &[], 4 * MIB, ALIGNMENT),
            Some(0x7fc0_0000..0x8000_0000)
        );
        // RAM that ends anywhere, a size of no round number.
        let ram = 0x4000_0000..0x8000_1000;
        assert_eq!(
            choose(&ram, &[], 3 * MIB, ALIGNMENT),
            Some(0x7fc0_0000..0x8000_0000)
        );
    }

    #[test]
    fn below_what_is_there_already() {
        let ram = 0x4000_0000..0x8000_0000;
        let taken = [
            0x7ff0_0000..0x8000_0000,
            0x7fd0_0000..0x7fd0_1000,
            0x4020_0000..0x4400_0000,
            // Nothing at all.
            0x7f00_0000..0x7f00_0000,
        ];
        assert_eq!(
            choose(&ram, &taken, 2 * MIB, ALIGNMENT),
            Some(0x7fa0_0000..0x7fc0_0000)
        );
    }

    #[test]
    fn no_room_is_said() {
        let ram = 0x4000_0000..0x4040_0000;
        assert_eq!(
            choose(
                &ram,
                from_ref(&(0x4020_0000..0x4030_0000)),
                2 * MIB,
                ALIGNMENT
            ),
            Some(0x4000_0000..0x4020_0000)
        );
        assert_eq!(
            choose(
                &ram,
                from_ref(&(0x4000_0000..0x4030_0000)),
                2 * MIB,
                ALIGNMENT
            ),
            None
        );
        assert_eq!(
            choose(&ram, from_ref(&(0..u64::MAX)), 2 * MIB, ALIGNMENT),
            None
        );
        assert_eq!(choose(&(0..MIB), &[], 2 * MIB, ALIGNMENT), None);
        assert_eq!(choose(&(0..0), &[], 2 * MIB, ALIGNMENT), None);
    }
}
