//! An ELF file's headers, read once and checked: what is loaded where, and what is code.
//!
//! A file's headers are its author's word. Nothing here takes more time or memory than a linker's
//! file of the same length: no byte is code twice, none is loaded twice, and no header is believed
//! about bytes that the file does not have.

use std::ops::Range;

use object::LittleEndian as LE;
use object::elf::{
    EM_X86_64, FileHeader64, PT_LOAD, SHF_EXECINSTR, SHN_UNDEF, SHT_NOBITS, SHT_SYMTAB,
};
use object::read::FileKind;
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader, Sym};

use super::{Error, MOST_HEADERS};

type Header = FileHeader64<LE>;

/// A part of the kernel's memory, as a program header of type PT_LOAD describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where it goes: a physical address.
    pub address: u64,
    /// Bytes of memory. Those that are not in the file are zero.
    pub size: u64,
    /// Its bytes in the file, at most `size`.
    pub file: Range<usize>,
}

impl Segment {
    /// The first address behind it.
    pub fn end(&self) -> u64 {
        self.address + self.size
    }

    /// Whether a byte of the file goes to `address`.
    pub fn holds(&self, address: u64) -> bool {
        let offset = address.checked_sub(self.address);
        offset.is_some_and(|offset| offset < self.file.len() as u64)
    }
}

/// A part of the file that holds code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Code {
    pub(crate) file: Range<usize>,
    /// Of its first byte, in the running kernel.
    pub(crate) address: u64,
}

/// What the headers say.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) entry: u64,
    /// By address. No two share memory or bytes of the file.
    pub(crate) segments: Vec<Segment>,
    /// By place in the file. No two share bytes. `None`: there are no section headers.
    pub(crate) code: Option<Vec<Code>>,
}

fn damaged(error: object::read::Error) -> Error {
    Error::Elf(error.to_string())
}

/// `size` bytes at `start`, where the file has them.
fn within(file: &[u8], start: u64, size: u64) -> Option<Range<usize>> {
    let end = usize::try_from(start.checked_add(size)?).ok()?;
    (end <= file.len()).then_some(start as usize..end)
}

impl Layout {
    pub(crate) fn of(file: &[u8]) -> Result<Self, Error> {
        if matches!(FileKind::parse(file), Ok(FileKind::Elf32)) {
            return Err(Error::Machine);
        }
        let header = Header::parse(file).map_err(damaged)?;
        if header.e_machine(LE) != EM_X86_64 {
            return Err(Error::Machine);
        }
        // Both counts are asked before the tables are read: a count may be 32 bits wide.
        let (segments, sections) = counts(header, file)?;
        let mut code = None;
        if sections != 0 {
            let found = code_of(header, file)?;
            apart_from_headers(header, &found, segments, sections)?;
            code = Some(found);
        }
        Ok(Self {
            entry: header.e_entry(LE),
            segments: segments_of(header, file)?,
            code,
        })
    }
}

/// How many program headers and section headers there are.
fn counts(header: &Header, file: &[u8]) -> Result<(u32, u32), Error> {
    let segments = header.phnum(LE, file).map_err(damaged)?;
    let sections = match header.e_shoff(LE) {
        0 => 0,
        _ => header.shnum(LE, file).map_err(damaged)?,
    };
    for (count, kind) in [(segments, "program"), (sections, "section")] {
        if count > MOST_HEADERS {
            return Err(Error::Headers(count.into(), kind));
        }
    }
    Ok((segments, sections))
}

fn segments_of(header: &Header, file: &[u8]) -> Result<Vec<Segment>, Error> {
    let mut segments = Vec::new();
    for segment in header.program_headers(LE, file).map_err(damaged)? {
        let (address, size) = (segment.p_paddr(LE), segment.p_memsz(LE));
        if segment.p_type(LE) != PT_LOAD || size == 0 {
            continue;
        }
        let file = within(file, segment.p_offset(LE), segment.p_filesz(LE))
            .ok_or(Error::Truncated("it ends within a segment"))?;
        if file.len() as u64 > size || address.checked_add(size).is_none() {
            return Err(Error::Elf("a segment's size makes no sense".to_owned()));
        }
        segments.push(Segment {
            address,
            size,
            file,
        });
    }
    segments.sort_by_key(|segment| segment.file.start);
    let filled = segments.iter().filter(|segment| !segment.file.is_empty());
    if overlap(filled.map(|segment| (segment.file.start as u64, segment.file.end as u64))) {
        return Err(Error::Overlap("segments in the file"));
    }
    segments.sort_by_key(|segment| segment.address);
    if overlap(segments.iter().map(|it| (it.address, it.end()))) {
        return Err(Error::Overlap("segments in memory"));
    }
    Ok(segments)
}

/// Whether one of `ranges`, which are sorted by their begin, begins before another ends.
fn overlap(ranges: impl Iterator<Item = (u64, u64)>) -> bool {
    let mut last = 0;
    let mut found = false;
    for (start, end) in ranges {
        found |= start < last;
        last = end.max(last);
    }
    found
}

/// Sections of code, in the order of the file. Where some share bytes they become one: each byte is
/// searched once, however many headers claim it.
fn code_of(header: &Header, file: &[u8]) -> Result<Vec<Code>, Error> {
    let mut all = Vec::new();
    for section in header.section_headers(LE, file).map_err(damaged)? {
        let code = section.sh_flags(LE).0 & SHF_EXECINSTR.0 != 0;
        if !code || section.sh_type(LE) == SHT_NOBITS || section.sh_size(LE) == 0 {
            continue;
        }
        let range = within(file, section.sh_offset(LE), section.sh_size(LE))
            .ok_or(Error::Truncated("it ends within its code"))?;
        all.push(Code {
            file: range,
            address: section.sh_addr(LE),
        });
    }
    all.sort_by_key(|code| code.file.start);
    let mut apart: Vec<Code> = Vec::new();
    for code in all {
        match apart.last_mut() {
            Some(last) if code.file.start < last.file.end => {
                last.file.end = last.file.end.max(code.file.end);
            }
            _ => apart.push(code),
        }
    }
    Ok(apart)
}

/// Code is rewritten; headers must not be, or what is loaded is not what was checked.
fn apart_from_headers(
    header: &Header,
    code: &[Code],
    segments: u32,
    sections: u32,
) -> Result<(), Error> {
    let table = |start: u64, count: u32, each: u16| {
        start..start.saturating_add(u64::from(count) * u64::from(each))
    };
    let headers = [
        0..size_of::<Header>() as u64,
        table(header.e_phoff(LE), segments, header.e_phentsize(LE)),
        table(header.e_shoff(LE), sections, header.e_shentsize(LE)),
    ];
    let shared = code.iter().any(|code| {
        let (start, end) = (code.file.start as u64, code.file.end as u64);
        headers.iter().any(|it| start < it.end && it.start < end)
    });
    match shared {
        true => Err(Error::Overlap("code and headers")),
        false => Ok(()),
    }
}

/// For each of `addresses`, which ascend, the nearest symbol that does not begin after it, and how
/// far into it the address is. One pass over the symbols.
pub(crate) fn symbols(file: &[u8], addresses: &[u64]) -> Result<Vec<Option<(String, u64)>>, Error> {
    let header = Header::parse(file).map_err(damaged)?;
    let sections = header.sections(LE, file).map_err(damaged)?;
    let table = sections.symbols(LE, file, SHT_SYMTAB).map_err(damaged)?;
    let mut nearest: Vec<Option<(u64, &[u8])>> = vec![None; addresses.len()];
    for symbol in table.iter() {
        let value = symbol.st_value(LE);
        let slot = addresses.partition_point(|&address| address < value);
        let (Some(best), Ok(name)) = (nearest.get_mut(slot), table.symbol_name(LE, symbol)) else {
            continue;
        };
        let named = symbol.st_shndx(LE) != SHN_UNDEF && !name.is_empty();
        if named && best.is_none_or(|(before, _)| value >= before) {
            *best = Some((value, name));
        }
    }
    let mut last = None;
    let named = nearest.into_iter().zip(addresses).map(|(found, address)| {
        last = found.or(last);
        last.map(|(value, name): (u64, &[u8])| (printable(name), address - value))
    });
    Ok(named.collect())
}

/// A name from a file, fit for a terminal. Linux's own are shorter than 512 bytes.
fn printable(name: &[u8]) -> String {
    let name = &name[..name.len().min(512)];
    name.iter()
        .copied()
        .map(char::from)
        .map(|c| if c.is_ascii_graphic() { c } else { '?' })
        .collect()
}

#[cfg(test)]
mod tests;
