//! ELF objects in a program's memory: which one covers an address, and where its CFI is.
//!
//! No list of what a program has mapped is in its own memory. An object's header is at the start of its first mapping, so it
//! is searched for downwards from the address, over the pages that are present. The kernel or the loader has read
//! it, so that it is present where anything of the object is.

use crate::Cut;
use crate::bytes::{PAGE, Reader};

/// Objects that are kept, of all address spaces together.
const KEPT: usize = 64;
/// Ranges without an object that are kept.
const GAPS: usize = 8;
/// A gap is looked at anew after so many uses: the program may have loaded an object there.
const GAP_USES: u16 = 64;
/// An object's header is searched for so far below its code.
const FARTHEST: u64 = 1 << 28;
/// Program headers that are looked at. Linkers write some 14.
const MOST_SEGMENTS: u16 = 64;
/// Bytes of an object that make its identity, from its start on: its headers, and with today's linkers its build ID.
const IDENTIFIED: usize = 1024;

const PT_LOAD: u32 = 1;
const PT_GNU_EH_FRAME: u32 = 0x6474_e550;
const PF_X: u32 = 1;

/// An object in an address space.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Object {
    space: u64,
    /// The stack for which the object was last looked up.
    checked: u64,
    /// Its code: from the first executable byte to behind the last.
    code: (u64, u64),
    /// The address of its header.
    pub(crate) base: u64,
    /// What its rules are kept by: the same for each address space where the same file is mapped.
    pub(crate) identity: u64,
    /// The address of `.eh_frame_hdr`, and how many entries its table has, eight bytes each; 0: there is no CFI.
    pub(crate) header: u64,
    pub(crate) entries: u64,
}

/// Code that no object covers.
#[derive(Clone, Copy)]
struct Gap {
    space: u64,
    from: u64,
    to: u64,
    uses: u16,
}

pub(crate) struct Objects {
    kept: [Option<Object>; KEPT],
    next: usize,
    gaps: [Option<Gap>; GAPS],
    next_gap: usize,
    space: u64,
    stack: u64,
}

impl Objects {
    pub(crate) const fn new() -> Self {
        Self {
            kept: [None; KEPT],
            next: 0,
            gaps: [None; GAPS],
            next_gap: 0,
            space: 0,
            stack: 0,
        }
    }

    /// Begins a stack.
    pub(crate) fn begin(&mut self, space: u64) {
        self.space = space;
        self.stack += 1;
    }

    /// Returns the object whose code is at `at`; `None`: there is none.
    pub(crate) fn find(&mut self, reader: &mut Reader<'_>, at: u64) -> Result<Option<Object>, Cut> {
        let covers = |object: &Object| {
            object.space == self.space && object.code.0 <= at && at < object.code.1
        };
        let known = self
            .kept
            .iter_mut()
            .find(|o| o.as_ref().is_some_and(covers));
        if let Some(place) = known
            && let Some(object) = place
        {
            // The address space may be another program's by now, or the object another one.
            if object.checked == self.stack || identity(reader, object.base) == Ok(object.identity)
            {
                object.checked = self.stack;
                return Ok(Some(*object));
            }
            *place = None;
        }
        if self.is_gap(at) {
            return Ok(None);
        }
        let found = self.search(reader, at)?;
        if found.is_some() {
            self.kept[self.next] = found;
            self.next = (self.next + 1) % KEPT;
        }
        Ok(found)
    }

    fn is_gap(&mut self, at: u64) -> bool {
        for place in &mut self.gaps {
            let Some(gap) = place else { continue };
            if gap.space != self.space || at < gap.from || gap.to < at {
                continue;
            }
            gap.uses += 1;
            // By uses, not by time: the guest's time is not known here.
            if gap.uses < GAP_USES {
                return true;
            }
            *place = None;
        }
        false
    }

    fn search(&mut self, reader: &mut Reader<'_>, at: u64) -> Result<Option<Object>, Cut> {
        // Nothing is mapped at 0 (mmap_min_addr), and `page - 1` below needs a page above it.
        let lowest = at.saturating_sub(FARTHEST).max(PAGE);
        let mut below = at;
        while let Some(page) = reader.present_below(below, lowest)? {
            // The first header below decides, even a bad one: behind it is another object's memory.
            if reader.array(page) == Ok(*b"\x7fELF") {
                let found = self.parse(reader, page, at)?;
                if found.is_none() {
                    // Another object's: that of the address would have been above it.
                    self.note_gap(page, at);
                }
                return Ok(found);
            }
            below = page - 1;
            if below < lowest {
                break;
            }
        }
        self.note_gap(lowest, at);
        Ok(None)
    }

    /// Code from `at` down to another object's pages has none. How far up that object's code goes is not known here.
    fn note_gap(&mut self, lowest: u64, at: u64) {
        let from = (at & !(PAGE - 1)).max(lowest);
        self.gaps[self.next_gap] = Some(Gap {
            space: self.space,
            from,
            to: at | (PAGE - 1),
            uses: 0,
        });
        self.next_gap = (self.next_gap + 1) % GAPS;
    }

    /// Returns the object whose header is at `base`, if its code covers `at`.
    fn parse(&self, reader: &mut Reader<'_>, base: u64, at: u64) -> Result<Option<Object>, Cut> {
        let head: [u8; 64] = reader.array(base)?;
        let (segments, count) = (u64_at(&head, 32), u16_at(&head, 56));
        // 64-bit, little-endian, x86-64, with program headers of the only size (System V ABI, chapter 4).
        let is_ours = head[4] == 2 && head[5] == 1 && u16_at(&head, 18) == 62;
        if !is_ours || u16_at(&head, 54) != 56 || segments > PAGE || count > MOST_SEGMENTS {
            return Ok(None);
        }
        let mut bias = None;
        let mut code = (u64::MAX, 0);
        let (mut covers, mut header) = (false, None);
        for n in 0..u64::from(count) {
            let segment: [u8; 56] = reader.array(base.wrapping_add(segments + 56 * n))?;
            let (kind, flags) = (u32_at(&segment, 0), u32_at(&segment, 4));
            let (offset, address) = (u64_at(&segment, 8), u64_at(&segment, 16));
            let length = u64_at(&segment, 40);
            // The first segment has the header, and says how far the object was moved.
            if kind == PT_LOAD && bias.is_none() {
                if offset != 0 {
                    return Ok(None);
                }
                bias = Some(base.wrapping_sub(address & !(PAGE - 1)));
            }
            let start = address.wrapping_add(bias.unwrap_or(base));
            if kind == PT_GNU_EH_FRAME {
                header = Some((address, length));
            }
            if kind != PT_LOAD || flags & PF_X == 0 {
                continue;
            }
            // Code below its own header would cover other objects' addresses.
            let Some(end) = start.checked_add(length).filter(|_| start >= base) else {
                return Ok(None);
            };
            covers |= start <= at && at < end;
            code = (code.0.min(start), code.1.max(end));
        }
        let (Some(bias), true) = (bias, covers) else {
            return Ok(None);
        };
        let mut object = Object {
            space: self.space,
            checked: self.stack,
            code,
            base,
            identity: identity(reader, base)?,
            header: 0,
            entries: 0,
        };
        if let Some((address, length)) = header {
            let header = address.wrapping_add(bias);
            let words: [u8; 12] = reader.array(header)?;
            let entries = u64::from(u32_at(&words, 8));
            // Version 1, a count of four bytes, and a table of pairs relative to this header: what linkers write.
            let is_known = words[0] == 1 && words[2] == 0x03 && words[3] == 0x3b;
            if is_known && length >= 12 && entries <= (length - 12) / 8 {
                (object.header, object.entries) = (header, entries);
            }
        }
        Ok(Some(object))
    }
}

/// Returns what tells objects apart: the page where the header is, and what is there (FNV-1a of its words).
fn identity(reader: &mut Reader<'_>, base: u64) -> Result<u64, Cut> {
    let page = reader.page(base)?.ok_or(Cut::PageAbsent)?;
    let bytes: [u8; IDENTIFIED] = reader.array(base)?;
    let (words, _) = bytes.as_chunks::<8>();
    let words = words.iter().map(|&word| u64::from_le_bytes(word));
    let hash = words
        .chain([page])
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, word| {
            (hash ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(23)
        });
    Ok(hash)
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
