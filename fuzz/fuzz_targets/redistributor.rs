//! Accesses of any offset and width to the GIC's filtered frames, against a model of the machine behind the filter.
//!
//! The model is written from Arm IHI 0069 ("The GIC Redistributor register map"): bits that set, bits that clear, bytes of
//! priority. Whatever the guest does, the monitor's interrupts stay as they are in the machine, LPIs stay off, and the
//! guest reads what it would read from a redistributor of its own.
#![no_main]

use std::ops::Range;

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use vpmu_monitor::world::distributor;
use vpmu_monitor::world::redistributor::{FRAME, View, find};

fuzz_target!(|data: &[u8]| {
    let _ = run(&mut Unstructured::new(data));
});

fn run(input: &mut Unstructured<'_>) -> Result<()> {
    match input.int_in_range(0..=7)? {
        0 => regions(input),
        1 => distributor(input),
        _ => redistributor(input),
    }
}

/// One redistributor's SGI frame: what the filter lets through to it, and what the guest believes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Sgi {
    groups: u32,
    enabled: u32,
    pending: u32,
    active: u32,
    priorities: [u8; 32],
    configuration: [u32; 2],
}

impl Sgi {
    /// The bits of each register of one bit an interrupt, at the offset of the register that sets (or is) them.
    fn bits(&mut self, set: u64) -> Option<&mut u32> {
        Some(match set {
            0x080 => &mut self.groups,
            0x100 => &mut self.enabled,
            0x200 => &mut self.pending,
            0x300 => &mut self.active,
            _ => return None,
        })
    }

    fn read(&mut self, register: u64, bytes: u8) -> u64 {
        match register {
            0x400..0x420 => {
                let from = (register - 0x400) as usize;
                let bytes = &self.priorities[from..from + usize::from(bytes)];
                bytes
                    .iter()
                    .rev()
                    .fold(0, |word, &byte| word << 8 | u64::from(byte))
            }
            0xc00 | 0xc04 => self.configuration[(register - 0xc00) as usize / 4].into(),
            // The register that clears reads as the one that sets.
            0x180 | 0x280 | 0x380 => self.read(register - 0x80, bytes),
            _ => self.bits(register).copied().unwrap_or(0).into(),
        }
    }

    fn write(&mut self, register: u64, bytes: u8, value: u64) {
        match register {
            0x400..0x420 => {
                let from = (register - 0x400) as usize;
                let value = &value.to_le_bytes()[..usize::from(bytes)];
                self.priorities[from..from + value.len()].copy_from_slice(value);
            }
            0xc00 | 0xc04 => self.configuration[(register - 0xc00) as usize / 4] = value as u32,
            0x080 => self.groups = value as u32,
            0x100 | 0x200 | 0x300 => *self.bits(register).unwrap() |= value as u32,
            0x180 | 0x280 | 0x380 => *self.bits(register - 0x80).unwrap() &= !(value as u32),
            _ => {}
        }
    }

    /// All of the interrupts of `owned`.
    fn of(&self, owned: u32) -> Self {
        let mut of = *self;
        for n in 0..32 {
            if owned >> n & 1 == 0 {
                of.priorities[n] = 0;
                of.configuration[n / 16] &= !(3 << (n % 16 * 2));
            }
        }
        for bits in [0x080, 0x100, 0x200, 0x300] {
            *of.bits(bits).unwrap() &= owned;
        }
        of
    }
}

fn redistributor(input: &mut Unstructured<'_>) -> Result<()> {
    let owned = input.arbitrary()?;
    let view = View::new(owned);
    let mut machine = Sgi {
        groups: u32::MAX,
        enabled: input.arbitrary::<u32>()? | owned,
        pending: input.arbitrary()?,
        active: input.arbitrary()?,
        priorities: input.arbitrary()?,
        configuration: input.arbitrary()?,
    };
    let monitors = machine.of(owned);
    // What the guest would have without a monitor; of the monitor's interrupts it starts with none.
    let mut own = machine;
    own.enabled &= !owned;
    (0..32)
        .filter(|n| owned >> n & 1 != 0)
        .for_each(|n| own.priorities[n] = 0);
    while !input.is_empty() {
        let (offset, bytes) = place(input, 4 * FRAME)?;
        let register = offset % FRAME;
        let defined = defined(register, bytes) && offset / FRAME == 1;
        let priorities = (0x400..0x420).contains(&register);
        if input.arbitrary()? {
            let value: u64 = input.arbitrary()?;
            let there = if defined {
                machine.read(register, bytes)
            } else {
                !0
            };
            if let Some(value) = view.write(offset, bytes, value, || there) {
                assert!(defined, "{bytes} bytes are written at {offset:#x}");
                assert!(register < 0xd00, "{register:#x} is written");
                machine.write(register, bytes, value);
            }
            if defined {
                own.write(register, bytes, value);
            }
        } else if defined && (register < 0x400 || priorities || (0xc00..0xc08).contains(&register))
        {
            let value = view.read(offset, bytes, || machine.read(register, bytes));
            let (mask, believed) = match register {
                // Which group, how triggered, pending and active: no guest finds the monitor's.
                0x200..0x400 => (!owned, own.read(register, bytes)),
                0x080 => (!owned, own.read(register, bytes)),
                0xc00.. => (0, 0),
                _ => (!0, own.read(register, bytes)),
            };
            assert_eq!(
                value & u64::from(mask),
                believed & u64::from(mask),
                "{bytes} bytes at {offset:#x}"
            );
            if (0x200..0x400).contains(&register) {
                assert_eq!(value & u64::from(owned), 0);
            }
        } else {
            let value = view.read(offset, bytes, || u64::MAX);
            control(offset, bytes, value);
        }
        assert_eq!(
            machine.of(owned),
            monitors,
            "after {bytes} bytes at {offset:#x}"
        );
    }
    for n in 0..32 {
        if owned >> n & 1 != 0 {
            assert_eq!(view.enabled(n), own.enabled >> n & 1 != 0);
            assert_eq!(view.priority(n), own.priorities[n as usize]);
        }
    }
    Ok(())
}

/// In the control frame no register tells of LPIs, whatever the machine has.
fn control(offset: u64, bytes: u8, value: u64) {
    match (offset, bytes) {
        // GICR_CTLR without EnableLPIs; GICR_TYPER without PLPIS, DirectLPI and CommonLPIAff.
        (0x0, 4) => assert_eq!(value & 1, 0),
        (0x8, 4 | 8) => assert_eq!(value & (1 << 0 | 1 << 3 | 3 << 24), 0),
        // GICR_PROPBASER, GICR_PENDBASER, the registers of LPIs and of their invalidation.
        (0x40..0xc8 | 0x100..0x120, _) => assert_eq!(value, 0),
        // Virtual LPIs.
        (0x2_0000.., _) => assert_eq!(value, 0),
        _ => {}
    }
}

fn distributor(input: &mut Unstructured<'_>) -> Result<()> {
    while !input.is_empty() {
        let (offset, bytes) = place(input, FRAME)?;
        let value: u64 = input.arbitrary()?;
        // GICD_INMIR<n> and GICD_INMIR<n>E.
        let is_route = bytes == 8 && (0x6000..0x8000).contains(&offset) && offset % 8 == 0;
        let defined = is_route || defined(offset, bytes);
        let hidden = (0xf80..0x1000).contains(&offset) || (0x3b00..0x3c00).contains(&offset);
        match distributor::write(offset, bytes, value, 0) {
            Some(written) => {
                assert!(
                    defined && !hidden,
                    "{bytes} bytes at {offset:#x}"
                );
                // Affinity routing stays on.
                let kept = if offset == 0 { 1 << 4 } else { 0 };
                assert_eq!(written, value | kept);
            }
            None => assert!(!defined || hidden),
        }
        let read = distributor::read(offset, bytes, || value);
        match offset {
            _ if !defined || hidden => assert_eq!(read, 0),
            0x4 => assert_eq!(read & (1 << 17 | 1 << 9), 0, "LPIS, NMI"),
            0xc => assert_eq!(read, 0),
            _ => assert_eq!(read, value),
        }
    }
    Ok(())
}

/// Any regions of redistributors, any stride, and any GICR_TYPER.
fn regions(input: &mut Unstructured<'_>) -> Result<()> {
    let mut regions = Vec::new();
    for _ in 0..input.int_in_range(1..=3)? {
        let start: u64 = input.arbitrary()?;
        let length = input.arbitrary::<u32>()?;
        let end = start.saturating_add((length & 0xf_ffff).into());
        regions.push(start..end);
    }
    let stride = input.arbitrary()?;
    let typers: Vec<u64> = input.arbitrary()?;
    let typer = |at: u64| match typers.len() {
        0 => 0,
        length => typers[(at >> 16) as usize % length],
    };
    for found in find(&regions, stride, typer) {
        let Range { start, end } = found.frames;
        let inside = |region: &Range<u64>| region.start <= start && end <= region.end;
        assert!(end - start >= 2 * FRAME && regions.iter().any(inside));
        assert_eq!(found.affinity & !0xff_00ff_ffff, 0);
    }
    Ok(())
}

/// Most accesses are close to a register that exists.
fn place(input: &mut Unstructured<'_>, size: u64) -> Result<(u64, u8)> {
    const REGISTERS: [u64; 16] = [
        0x080, 0x100, 0x180, 0x200, 0x280, 0x300, 0x380, 0x400, 0xc00, 0xc04, 0xd00, 0xf80, 0x3b00,
        0x0, 0x8, 0x70,
    ];
    let bytes = *input.choose(&[4, 4, 4, 1, 2, 8])?;
    let register = match input.int_in_range(0..=7)? {
        0 => input.arbitrary::<u32>()?.into(),
        1 => input.int_in_range(0..=0x1000)?,
        2 => 0x400 + input.int_in_range(0..=0x20)?,
        _ => *input.choose(&REGISTERS)?,
    };
    let near: u64 = match input.ratio(1, 8)? {
        true => input.int_in_range(0..=8)?,
        false => 4,
    };
    let frame = match input.ratio(3, 4)? {
        true => 1,
        false => input.int_in_range(0..=3)?,
    };
    let offset = (frame * FRAME + register + near).saturating_sub(4) % size;
    Ok((offset, bytes))
}

/// Words, and priorities by the byte too: all that the manual has.
fn defined(register: u64, bytes: u8) -> bool {
    match bytes {
        4 => register % 4 == 0,
        1 => (0x400..0x800).contains(&register),
        _ => false,
    }
}
