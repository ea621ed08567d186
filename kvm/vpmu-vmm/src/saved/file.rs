//! The file of a saved machine.
//!
//! ```text
//! "vpmu-vmm" | format, u32 | length, u32 | the state (postcard) | CRC-32 of all before, u32
//! any number of: address, u64 | a page of memory
//! all ones, u64 | CRC-32 of all before, u32
//! ```
//!
//! Numbers are little-endian. Pages ascend, and those that are missing are zero. The state is checked before it is used, and the memory before a vCPU runs.
//!
//! A file may be forged, with right checksums and everything else wrong. Reading it takes at most 2 MiB for the state,
//! 16 MiB for the decoded state, and one pass over a file that is no longer than the largest guest, however long the
//! file is.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use flate2::{CrcReader, CrcWriter};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::MachineState;
use crate::Error;

const MAGIC: &[u8; 8] = b"vpmu-vmm";
/// The format's number, which changes with everything in [`MachineState`].
const FORMAT: u32 = 10;
/// 64 vCPUs, the largest machine, need about 700 KiB. Decoded, a byte becomes eight at the most.
const LONGEST_STATE: u32 = 2 << 20;
const PAGE: usize = 4096;
/// Stands where another page's address would.
const NO_MORE: u64 = u64::MAX;
/// The file goes through a buffer of this size.
const BUFFER: usize = 1 << 20;

/// Checks that [`write`] can write there, as far as that is known before there is something to write.
pub(crate) fn check_place(path: &Path) -> Result<(), Error> {
    let real = real(path);
    // A device would become a file.
    let place = match fs::metadata(path) {
        Ok(about) if !about.is_file() => Err(io::Error::other("it is there, and is no file")),
        _ => tempfile::tempfile_in(folder(&real)).map(drop),
    };
    place.map_err(|error| Error::Save(path.display().to_string(), error))
}

/// Returns where a file is that a link may name.
fn real(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Writes a machine to `path`, or to the file that a link there names, whole or not at all.
pub(crate) fn write(
    path: &Path,
    state: &MachineState,
    memory: &GuestMemoryMmap,
) -> Result<(), Error> {
    let error = |error| Error::Save(path.display().to_string(), error);
    let path = &real(path);
    let file = tempfile::NamedTempFile::new_in(folder(path)).map_err(error)?;
    write_to(
        BufWriter::with_capacity(BUFFER, file.as_file()),
        state,
        memory,
    )
    .map_err(error)?;
    file.as_file().sync_all().map_err(error)?;
    file.persist(path).map_err(|e| error(e.error))?;
    Ok(())
}

fn write_to<W: Write>(output: W, state: &MachineState, memory: &GuestMemoryMmap) -> io::Result<()> {
    let mut output = CrcWriter::new(output);
    write_state(
        &mut output,
        &postcard::to_stdvec(state).map_err(io::Error::other)?,
    )?;

    let mut page = [0; PAGE];
    for at in (0..state.memory).step_by(PAGE) {
        memory
            .read_slice(&mut page, GuestAddress(at))
            .map_err(io::Error::other)?;
        if page != [0; PAGE] {
            output.write_all(&at.to_le_bytes())?;
            output.write_all(&page)?;
        }
    }
    output.write_all(&NO_MORE.to_le_bytes())?;
    write_sum(&mut output)?;
    output.flush()
}

fn write_state<W: Write>(output: &mut CrcWriter<W>, bytes: &[u8]) -> io::Result<()> {
    output.write_all(MAGIC)?;
    output.write_all(&FORMAT.to_le_bytes())?;
    output.write_all(&(bytes.len() as u32).to_le_bytes())?;
    output.write_all(bytes)?;
    write_sum(output)
}

/// Returns a file with right checksums, of a state and of pages of memory that may be anything: the place that each
/// claims, and the bytes.
#[cfg(fuzzing)]
pub(crate) fn forge(state: &[u8], pages: &[(u64, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut output = CrcWriter::new(&mut bytes);
    let mut write = || {
        write_state(&mut output, state)?;
        for (at, page) in pages {
            output.write_all(&at.to_le_bytes())?;
            output.write_all(page)?;
        }
        output.write_all(&NO_MORE.to_le_bytes())?;
        write_sum(&mut output)
    };
    write().expect("a vector takes all");
    bytes
}

fn write_sum<W: Write>(output: &mut CrcWriter<W>) -> io::Result<()> {
    let sum = output.crc().sum();
    output.write_all(&sum.to_le_bytes())
}

/// A file whose memory has not been read yet.
pub(crate) struct Reader<R = BufReader<File>> {
    name: String,
    input: CrcReader<R>,
}

impl Reader {
    /// Opens a file, and returns the machine without its memory, and the rest.
    pub(crate) fn open(path: &Path) -> Result<(MachineState, Self), Error> {
        let name = path.display().to_string();
        let file = File::open(path).map_err(|error| Error::Restore(name.clone(), error))?;
        Self::new(BufReader::with_capacity(BUFFER, file), name)
    }
}

impl<R: Read> Reader<R> {
    pub(crate) fn new(input: R, name: String) -> Result<(MachineState, Self), Error> {
        let mut reader = Self {
            name,
            input: CrcReader::new(input),
        };
        let mut magic = [0; MAGIC.len()];
        let begun = reader.input.read_exact(&mut magic);
        if begun.is_err() || magic != *MAGIC {
            return Err(Error::Foreign(reader.name));
        }
        let saved = u32::from_le_bytes(reader.number()?);
        if saved != FORMAT {
            return Err(Error::Version(reader.name, saved, FORMAT));
        }
        let length = u32::from_le_bytes(reader.number()?);
        if length > LONGEST_STATE {
            return Err(reader.damaged("the length of its state"));
        }
        let mut bytes = vec![0; length as usize];
        reader.fill(&mut bytes)?;
        reader.check_sum()?;
        let state: MachineState =
            postcard::from_bytes(&bytes).map_err(|_| reader.damaged("its state"))?;
        state.check().map_err(|what| reader.damaged(what))?;
        Ok((state, reader))
    }

    /// Fills `memory`, which is all zero, and checks that the file ends there.
    pub(crate) fn memory(mut self, memory: &GuestMemoryMmap) -> Result<(), Error> {
        let mut page = [0; PAGE];
        let mut next = 0;
        loop {
            let at = u64::from_le_bytes(self.number()?);
            if at == NO_MORE {
                break;
            }
            // Each page comes once, so that a file without an end is not read for ever.
            if at < next || !at.is_multiple_of(PAGE as u64) {
                return Err(self.damaged("the place of a page of memory"));
            }
            next = at.saturating_add(PAGE as u64);
            self.fill(&mut page)?;
            memory
                .write_slice(&page, GuestAddress(at))
                .map_err(|_| self.damaged("the place of a page of memory"))?;
        }
        self.check_sum()?;
        match self.input.read(&mut [0]) {
            Ok(0) => Ok(()),
            _ => Err(self.damaged("something follows its end")),
        }
    }

    fn check_sum(&mut self) -> Result<(), Error> {
        let sum = self.input.crc().sum();
        if u32::from_le_bytes(self.number()?) == sum {
            Ok(())
        } else {
            Err(self.damaged("its checksum"))
        }
    }

    fn number<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Error> {
        self.input
            .read_exact(bytes)
            .map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => self.damaged("it ends too early"),
                _ => Error::Restore(self.name.clone(), error),
            })
    }

    fn damaged(&self, what: &'static str) -> Error {
        Error::Damaged(self.name.clone(), what)
    }
}

#[cfg(test)]
mod tests;
