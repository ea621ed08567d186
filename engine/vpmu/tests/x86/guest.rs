//! A guest whose memory is a few pieces, and whose registers have the values that a test sets.

use vpmu::x86::Ring;
use vpmu::x86::pebs::{Fault, GeneralRegisters, Guest, Sample};

#[derive(Clone, Debug, PartialEq, Eq)]
struct Piece {
    at: u64,
    bytes: Vec<u8>,
    writable: bool,
}

impl Piece {
    /// Returns the place of `length` bytes at `address`, if all of them are in this piece.
    fn find(&self, address: u64, length: usize) -> Option<std::ops::Range<usize>> {
        let begin = usize::try_from(address.checked_sub(self.at)?).ok()?;
        let end = begin.checked_add(length)?;
        (end <= self.bytes.len()).then_some(begin..end)
    }
}

/// A guest with memory in pieces. An access goes to one piece, whole, or it faults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FakeGuest {
    pieces: Vec<Piece>,
    pub(crate) sample: Sample,
    pub(crate) general: GeneralRegisters,
    pub(crate) xmm: [u128; 16],
    /// Whether the registers cannot be read.
    pub(crate) is_mute: bool,
}

impl FakeGuest {
    pub(crate) const RAM: u64 = 0x1000;
    pub(crate) const ROM: u64 = 0x2000;
    /// Address of the last piece, which ends with the address space.
    pub(crate) const TOP: u64 = u64::MAX - 0x3ff;

    pub(crate) fn new() -> Self {
        let piece = |at, length, writable| Piece {
            at,
            bytes: vec![0; length],
            writable,
        };
        let general = GeneralRegisters {
            rflags: 0x246,
            rip: 0x40_1000,
            general: [
                0xa,
                0xc,
                0xd,
                0xb,
                0x7ffd_0000,
                0x7ffd_0040,
                0x51,
                0xd1,
                8,
                9,
                10,
                11,
                12,
                13,
                14,
                15,
            ],
        };
        Self {
            pieces: vec![
                piece(Self::RAM, 0xc00, true),
                piece(Self::ROM, 0x200, false),
                piece(Self::TOP, 0x400, true),
            ],
            sample: Sample {
                ip: 0x40_1000,
                ring: Ring::User,
                tsc: 0,
            },
            general,
            xmm: std::array::from_fn(|n| (n as u128 + 1) << 64 | (0xff00 + n as u128)),
            is_mute: false,
        }
    }

    /// Writes `value` as the guest itself does, if there is memory.
    pub(crate) fn store(&mut self, address: u64, value: u64) {
        for piece in &mut self.pieces {
            if let Some(place) = piece.find(address, 8) {
                piece.bytes[place].copy_from_slice(&value.to_le_bytes());
            }
        }
    }

    /// Reads as the guest itself does.
    pub(crate) fn load(&mut self, address: u64) -> u64 {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)
            .expect("memory that is there");
        u64::from_le_bytes(bytes)
    }

    /// Moves the guest on to some place in `ring`.
    pub(crate) fn go_on(&mut self, ring: Ring, times: u64) {
        self.sample.ip = match ring {
            Ring::User => 0x40_1000 + (times & 0xff0),
            Ring::Kernel => 0xffff_ffff_8100_0000 + (times & 0xff0),
        };
        self.sample.ring = ring;
        self.sample.tsc = self.sample.tsc.wrapping_add(times);
        self.general.rip = self.sample.ip;
    }
}

impl Guest for FakeGuest {
    fn read(&mut self, address: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        let mut found = self.pieces.iter().filter_map(|piece| {
            let place = piece.find(address, bytes.len())?;
            piece.bytes.get(place)
        });
        bytes.copy_from_slice(found.next().ok_or(Fault)?);
        Ok(())
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        for piece in self.pieces.iter_mut().filter(|piece| piece.writable) {
            if let Some(place) = piece.find(address, bytes.len()) {
                piece.bytes[place].copy_from_slice(bytes);
                return Ok(());
            }
        }
        Err(Fault)
    }

    fn sample(&mut self) -> Result<Sample, Fault> {
        (!self.is_mute).then_some(self.sample).ok_or(Fault)
    }

    fn general(&mut self) -> Result<GeneralRegisters, Fault> {
        (!self.is_mute).then_some(self.general).ok_or(Fault)
    }

    fn xmm(&mut self) -> Result<[u128; 16], Fault> {
        (!self.is_mute).then_some(self.xmm).ok_or(Fault)
    }
}
