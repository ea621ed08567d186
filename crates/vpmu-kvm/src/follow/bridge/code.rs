//! The code that is executed, decoded once as long as its bytes stay.

use iced_x86::{Decoder, DecoderOptions};

use super::super::space::LONGEST;
use super::Stop;
use super::memory::Memory;
use super::op::Op;

/// Instructions that are remembered: more than Linux executes for a record. Each has one of `WAYS` places.
const MOST: usize = 512;
const WAYS: usize = 8;

/// Instructions by their addresses.
pub(super) struct Code {
    ops: Vec<Known>,
    /// The number of the present bridge. Within a bridge, bytes that were compared stay as they were.
    bridge: u32,
}

#[derive(Clone, Copy)]
struct Known {
    ip: u64,
    bridge: u32,
    length: u8,
    bytes: [u8; LONGEST],
    op: Op,
    /// The places of the instructions that came next: the one behind it, and another one.
    after: [u16; 2],
}

impl Code {
    pub(super) fn new() -> Self {
        let none = Known {
            ip: 0,
            bridge: 0,
            length: 0,
            bytes: [0; LONGEST],
            op: Op::UNKNOWN,
            after: [0; 2],
        };
        Self {
            ops: vec![none; MOST],
            bridge: 0,
        }
    }

    /// Another bridge begins: the guest may have changed its code.
    pub(super) fn begin(&mut self) {
        self.bridge = self.bridge.wrapping_add(1);
        if self.bridge == 0 {
            self.ops.iter_mut().for_each(|known| known.bridge = 0);
            self.bridge = 1;
        }
    }

    /// Returns where the instruction at `ip` is, or where there is room for it.
    fn place(&self, ip: u64) -> usize {
        let begin = (ip ^ ip >> 9) as usize;
        let mut room = None;
        for n in 0..WAYS {
            let at = (begin + n) % MOST;
            let known = &self.ops[at];
            if known.ip == ip {
                return at;
            }
            if known.bridge != self.bridge {
                room = room.or(Some(at));
            }
        }
        room.unwrap_or(begin % MOST)
    }

    /// Returns the instruction at a place.
    pub(super) fn op(&self, place: u16) -> &Op {
        &self.ops[place as usize % MOST].op
    }

    /// Returns the place of the instruction at `ip`, to which the one at `from` leads.
    #[inline]
    pub(super) fn next(
        &mut self,
        from: u16,
        ip: u64,
        memory: &mut Memory<'_, '_>,
    ) -> Result<u16, Stop> {
        let known = &self.ops[usize::from(from) % MOST];
        let way = usize::from(known.op.next != ip);
        let after = known.after[way];
        let next = &self.ops[usize::from(after) % MOST];
        if next.ip == ip && next.bridge == self.bridge {
            return Ok(after);
        }
        let found = self.at(ip, memory)?;
        self.ops[usize::from(from) % MOST].after[way] = found;
        Ok(found)
    }

    /// Returns the place of the instruction at `ip`.
    #[inline(never)]
    pub(super) fn at(&mut self, ip: u64, memory: &mut Memory<'_, '_>) -> Result<u16, Stop> {
        let at = self.place(ip);
        let known = &mut self.ops[at];
        if known.ip == ip && known.bridge == self.bridge {
            return Ok(at as u16);
        }
        let (bytes, length) = memory.code(ip)?;
        let is_known = known.ip == ip
            && (1..=length).contains(&usize::from(known.length))
            && known.bytes[..usize::from(known.length)] == bytes[..usize::from(known.length)];
        if !is_known {
            let mut decoder = Decoder::with_ip(64, &bytes[..length], ip, DecoderOptions::NONE);
            let instruction = decoder.decode();
            if instruction.is_invalid() {
                return Err(Stop);
            }
            *known = Known {
                ip,
                bridge: 0,
                length: instruction.len() as u8,
                bytes,
                op: Op::of(&instruction),
                after: [0; 2],
            };
        }
        known.bridge = self.bridge;
        Ok(at as u16)
    }
}
