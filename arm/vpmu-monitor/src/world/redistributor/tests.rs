use core::slice::from_ref;

use super::*;

const MAINTENANCE: u32 = 25;
const OWNED: u64 = 1 << MAINTENANCE;
const SGI: u64 = FRAME;

/// A machine's frames: bytes that are read and written as they are.
struct Machine(Vec<u8>);

impl Machine {
    fn new() -> Self {
        Self(vec![0; 4 * FRAME as usize])
    }

    fn word(&self, offset: u64) -> u64 {
        let at = offset as usize;
        u32::from_le_bytes(self.0[at..at + 4].try_into().unwrap()).into()
    }

    fn set(&mut self, offset: u64, bytes: u8, value: u64) {
        let at = offset as usize;
        self.0[at..at + usize::from(bytes)]
            .copy_from_slice(&value.to_le_bytes()[..usize::from(bytes)]);
    }

    fn get(&self, offset: u64, bytes: u8) -> u64 {
        let mut value = [0; 8];
        let at = offset as usize;
        value[..usize::from(bytes)].copy_from_slice(&self.0[at..at + usize::from(bytes)]);
        u64::from_le_bytes(value)
    }

    /// The guest's write, performed as the monitor does.
    fn guest_writes(&mut self, view: &View, offset: u64, bytes: u8, value: u64) {
        let there = self.get(offset, bytes);
        if let Some(value) = view.write(offset, bytes, value, || there) {
            self.set(offset, bytes, value);
        }
    }

    fn guest_reads(&self, view: &View, offset: u64, bytes: u8) -> u64 {
        view.read(offset, bytes, || self.get(offset, bytes))
    }
}

#[test]
fn the_guest_cannot_switch_the_monitors_interrupts_off() {
    let view = View::new(OWNED as u32);
    let write = |offset, value| view.write(SGI + offset, 4, value, || 0);
    assert_eq!(write(ICENABLER0, 0xffff_ffff), Some(0xffff_ffff & !OWNED));
    assert_eq!(write(ICACTIVER0, 0xffff_ffff), Some(0xffff_ffff & !OWNED));
    assert_eq!(write(ISPENDR0, OWNED), Some(0));
    assert_eq!(write(IGROUPR0, 0), Some(OWNED));
}

/// Every byte of the frame, by every width at every alignment.
#[test]
fn no_access_changes_a_byte_of_the_monitors_interrupts() {
    for bytes in [1, 2, 4, 8] {
        for value in [0, u64::MAX, 0x5555_5555_5555_5555] {
            for offset in 0..4 * FRAME - 8 {
                let view = View::new(OWNED as u32);
                let there = 0x0123_4567_89ab_cdef;
                let Some(written) = view.write(offset, bytes, value, || there) else {
                    continue;
                };
                assert!(
                    is_defined(offset % FRAME, bytes) && offset / FRAME == 1,
                    "{bytes} bytes at {offset:#x}"
                );
                // The bits of the access that are the monitor's, from the register's definition.
                let register = offset % FRAME;
                let (mask, want) = match register {
                    0x080 => (OWNED, OWNED),
                    0x100 | 0x180 | 0x200 | 0x280 | 0x300 | 0x380 => (OWNED, 0),
                    0x418 if bytes == 4 => (0xff00, there & 0xff00),
                    0x419 => (0xff, there & 0xff),
                    0xc04 => (3 << 18, there & 3 << 18),
                    // Security, non-maskable interrupts and what nobody has defined.
                    0xd00.. => panic!("{register:#x} is written"),
                    _ => (0, 0),
                };
                assert_eq!(written & mask, want, "{bytes} bytes at {offset:#x}");
            }
        }
    }
}

#[test]
fn a_store_that_overlaps_a_register_without_being_its_own_does_nothing() {
    let view = View::new(OWNED as u32);
    for (offset, bytes) in [
        (0x182, 4),
        (0x17e, 4),
        (0x181, 2),
        (0x183, 1),
        (0x178, 8),
        (0x180, 8),
        (0x416, 4),
        (0x418, 2),
    ] {
        assert_eq!(view.write(SGI + offset, bytes, u64::MAX, || 0), None);
        assert_eq!(view.read(SGI + offset, bytes, || u64::MAX), 0);
    }
    assert!(!view.enabled(MAINTENANCE));
}

#[test]
fn the_guest_sees_its_own_enable_bits() {
    let view = View::new(OWNED as u32);
    let read = |there| view.read(SGI + ISENABLER0, 4, || there);
    let write = |offset, value| view.write(SGI + offset, 4, value, || 0);
    assert!(!view.enabled(MAINTENANCE));
    assert_eq!(read(OWNED | 1), 1);
    assert_eq!(write(ISENABLER0, OWNED | 2), Some(2));
    assert!(view.enabled(MAINTENANCE));
    assert_eq!(read(3), OWNED | 3);
    write(ICENABLER0, OWNED);
    assert!(!view.enabled(MAINTENANCE));
}

#[test]
fn the_guest_sees_its_own_priorities() {
    let view = View::new(OWNED as u32);
    let mut machine = Machine::new();
    machine.set(SGI + 0x419, 1, 0x20);
    machine.guest_writes(&view, SGI + 0x418, 4, 0x4433_2211);
    assert_eq!(machine.word(SGI + 0x418), 0x4433_2011);
    assert_eq!(view.priority(MAINTENANCE), 0x22);
    assert_eq!(machine.guest_reads(&view, SGI + 0x418, 4), 0x4433_2211);
    machine.guest_writes(&view, SGI + 0x419, 1, 0xa0);
    machine.guest_writes(&view, SGI + 0x41a, 1, 0xb0);
    assert_eq!(machine.word(SGI + 0x418), 0x44b0_2011);
    assert_eq!(machine.guest_reads(&view, SGI + 0x419, 1), 0xa0);
    assert_eq!(machine.guest_reads(&view, SGI + 0x41a, 1), 0xb0);
    assert_eq!(view.priority(MAINTENANCE), 0xa0);
}

#[test]
fn the_rest_of_the_sgi_frame_is_the_machines() {
    let view = View::new(OWNED as u32);
    for offset in [0x084, 0x400, 0x414, 0x420, 0xc08] {
        assert_eq!(
            view.write(SGI + offset, 4, 0xdead_beef, || 0),
            Some(0xdead_beef)
        );
        assert_eq!(view.read(SGI + offset, 4, || 0xdead_beef), 0xdead_beef);
    }
}

#[test]
fn there_are_no_lpis() {
    let view = View::new(OWNED as u32);
    // GICR_TYPER with affinity 1.2.3.4 and everything else, in both widths.
    let typer = 0x0102_0304_ffff_ffff;
    assert_eq!(view.read(TYPER, 8, || typer), 0x0102_0304_f8ff_ff12);
    assert_eq!(view.read(TYPER, 4, || typer & 0xffff_ffff), 0xf8ff_ff12);
    assert_eq!(view.read(TYPER + 4, 4, || typer >> 32), 0x0102_0304);
    assert_eq!(view.read(CTLR, 4, || 0xffff_ffff), 0x8000_0008);
    // EnableLPIs, SETLPIR, PROPBASER, PENDBASER, INVLPIR and the virtual LPIs' registers.
    for offset in [0, 0x40, 0x70, 0x74, 0x78, 0x7c, 0xa0, 0x2_0070, 0x2_0078] {
        for bytes in [4, 8] {
            assert_eq!(view.write(offset, bytes, u64::MAX, || 0), None);
            if offset != 0 {
                assert_eq!(view.read(offset, bytes, || u64::MAX), 0);
            }
        }
    }
}

#[test]
fn the_redistributor_only_seems_to_sleep() {
    let view = View::new(OWNED as u32);
    assert_eq!(view.read(WAKER, 4, || 0), 0);
    assert_eq!(view.write(WAKER, 4, 2, || 0), None);
    assert_eq!(view.read(WAKER, 4, || 0), 6);
    assert_eq!(view.write(WAKER, 4, 0, || 0), None);
    assert_eq!(view.read(WAKER, 4, || 0), 0);
}

#[test]
fn redistributors_are_found_by_what_they_say() {
    // Two regions; the second one's first redistributor has virtual LPIs.
    let regions = [0x80_0000..0x84_0000, 0x100_0000..0x200_0000];
    let typer = |at| match at {
        0x80_0008 => 0,
        0x82_0008 => 1 << 32 | TYPER_LAST,
        0x100_0008 => 0x0100_0100_u64 << 32 | TYPER_VLPIS,
        0x104_0008 => 0x0100_0101_u64 << 32 | TYPER_LAST,
        _ => panic!("{at:#x} is read"),
    };
    let found = find(&regions, None, typer);
    let affinities: Vec<_> = found.iter().map(|one| one.affinity).collect();
    assert_eq!(affinities, [0, 1, 1 << 32 | 0x100, 1 << 32 | 0x101]);
    assert_eq!(found[1].frames, 0x82_0000..0x84_0000);
    assert_eq!(found[2].frames, 0x100_0000..0x104_0000);
    // A stride that the tree states, and a region without an end in sight.
    let found = find(from_ref(&(0..0x10_0000)), Some(0x8_0000), |_| 0);
    assert_eq!(found.len(), 2);
    assert_eq!(found[1].sgi_frame(), 0x9_0000);
    assert!(find(from_ref(&(u64::MAX - 1..u64::MAX)), None, |_| 0).is_empty());
    // The highest place, and a stride that leads beyond it.
    let last = u64::MAX - 2 * FRAME..u64::MAX;
    assert_eq!(find(from_ref(&last), Some(u64::MAX - 1), |_| 2).len(), 1);
}
