use super::*;
use crate::ports::PortsState;
use crate::saved::{Clock, VcpuState, VmState};

const MEMORY: u64 = 64 << 20;

fn memory() -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY as usize)]).unwrap()
}

fn state() -> MachineState {
    MachineState {
        memory: MEMORY,
        backing: None,
        rdpmc: None,
        measuring: true,
        vcpus: vec![VcpuState::blank()],
        vm: VmState::default(),
        clock: Clock::default(),
        ports: PortsState::default(),
    }
}

/// Returns a machine with some contents.
fn machine() -> (MachineState, GuestMemoryMmap) {
    let memory = memory();
    // The first page, the last one, some in a row, and more than a buffer.
    for (at, length) in [
        (0, 1),
        (0x5000, 0x3000),
        (0x10_0800, BUFFER),
        (MEMORY - 1, 1),
    ] {
        memory
            .write_slice(&vec![0x5a; length], GuestAddress(at))
            .unwrap();
    }
    (state(), memory)
}

fn written() -> Vec<u8> {
    let (state, memory) = machine();
    let mut bytes = Vec::new();
    write_to(&mut bytes, &state, &memory).unwrap();
    bytes
}

fn read(bytes: &[u8]) -> Result<(MachineState, GuestMemoryMmap), Error> {
    let (state, reader) = Reader::new(bytes, "file".to_owned())?;
    let memory = memory();
    reader.memory(&memory)?;
    Ok((state, memory))
}

fn contents(memory: &GuestMemoryMmap) -> Vec<u8> {
    let mut bytes = vec![0; MEMORY as usize];
    memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
    bytes
}

#[test]
fn what_is_written_is_read() {
    let (state, memory) = machine();
    let bytes = written();
    let stored = 5 * PAGE + BUFFER + PAGE;
    assert!(
        (stored..stored + 0x8000).contains(&bytes.len()),
        "zero pages are not stored"
    );
    let (read_state, read_memory) = read(&bytes).unwrap();
    assert!(contents(&read_memory) == contents(&memory));
    assert_eq!(
        postcard::to_stdvec(&read_state).unwrap(),
        postcard::to_stdvec(&state).unwrap()
    );
}

#[test]
fn a_file_that_ends_too_early_is_refused() {
    let bytes = written();
    let header = MAGIC.len();
    for length in (0..0x3000)
        .step_by(13)
        .chain((0x3000..bytes.len()).step_by(40_009))
    {
        match read(&bytes[..length.min(bytes.len() - 1)]) {
            Err(Error::Foreign(_)) if length < header => {}
            Err(Error::Damaged(..)) if length >= header => {}
            other => panic!("{length}: {:?}", other.err()),
        }
    }
}

#[test]
fn a_byte_that_has_changed_is_noticed() {
    let mut bytes = written();
    let step = bytes.len() / 40;
    for at in (0..2000)
        .step_by(7)
        .chain((2000..bytes.len()).step_by(step))
    {
        bytes[at] ^= 0x10;
        assert!(read(&bytes).is_err(), "byte {at}");
        bytes[at] ^= 0x10;
    }
    assert!(read(&bytes).is_ok());
}

#[test]
fn what_is_no_saved_machine_says_so() {
    assert!(matches!(read(b""), Err(Error::Foreign(_))));
    assert!(matches!(
        read(b"\x7fELF and so on, and so on"),
        Err(Error::Foreign(_))
    ));
    let mut newer = written();
    newer[MAGIC.len()] += 1;
    assert!(matches!(
        read(&newer),
        Err(Error::Version(_, saved, FORMAT)) if saved == FORMAT + 1
    ));
    let mut longer = written();
    longer.push(0);
    assert!(matches!(read(&longer), Err(Error::Damaged(..))));
}

#[test]
fn a_file_is_replaced_whole_or_not_at_all() {
    let (state, memory) = machine();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("machine");
    fs::write(&path, b"what was there").unwrap();
    write(&path, &state, &memory).unwrap();
    assert_eq!(fs::read(&path).unwrap(), written());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);

    let nowhere = folder.path().join("none/machine");
    assert!(matches!(
        write(&nowhere, &state, &memory),
        Err(Error::Save(..))
    ));
    // A machine that claims more memory than there is cannot be written to its end.
    let state = MachineState {
        memory: MEMORY + 1,
        ..state
    };
    assert!(write(&path, &state, &memory).is_err());
    assert_eq!(fs::read(&path).unwrap(), written(), "still what it was");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// A small machine's file, and the places of its parts.
struct Forger {
    bytes: Vec<u8>,
    /// The checksum of the state.
    sum: usize,
}

impl Forger {
    fn new() -> Self {
        let memory = memory();
        memory
            .write_slice(&[0x5a; 2 * PAGE], GuestAddress(0x5000))
            .unwrap();
        memory
            .write_slice(&[0xa5; PAGE], GuestAddress(0x9000))
            .unwrap();
        Self::of(&state(), &memory)
    }

    fn of(state: &MachineState, memory: &GuestMemoryMmap) -> Self {
        let mut bytes = Vec::new();
        write_to(&mut bytes, state, memory).unwrap();
        let length = u32::from_le_bytes(bytes[12..16].try_into().unwrap());
        let sum = 16 + length as usize;
        Self { bytes, sum }
    }

    /// Returns the file with one byte more or less, and right checksums.
    fn forged(&self, at: usize, change: u8) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        bytes[at] = bytes[at].wrapping_add(change);
        let end = bytes.len() - 4;
        for sum in [self.sum, end] {
            let mut crc = flate2::Crc::new();
            crc.update(&bytes[..sum]);
            bytes[sum..sum + 4].copy_from_slice(&crc.sum().to_le_bytes());
        }
        bytes
    }
}

#[test]
fn no_byte_may_change() {
    let forger = Forger::new();
    let mut bytes = forger.bytes.clone();
    for at in 0..bytes.len() {
        bytes[at] ^= 1 << (at % 8);
        assert!(read(&bytes).is_err(), "byte {at}");
        bytes[at] ^= 1 << (at % 8);
    }
}

#[test]
fn a_forged_file_is_an_error_or_a_machine_that_may_be() {
    let forger = Forger::new();
    let (mut refused, mut taken) = (0, 0);
    // The test changes all of the state and the first page's place, and some of the rest.
    let state = forger.sum + 4 + 8;
    for at in (0..state).chain((state..forger.bytes.len() - 4).step_by(61)) {
        match read(&forger.forged(at, [1, 0x80, 0xff][at % 3])) {
            Err(_) => refused += 1,
            Ok((state, _)) => {
                assert!(state.check().is_ok());
                taken += 1;
            }
        }
    }
    // Registers and the contents of memory may be anything; places may not.
    assert!(refused > 20 && taken > 1000, "{refused} {taken}");
}

#[test]
fn sizes_that_no_machine_has_are_refused() {
    let vcpus = |count| (0..count).map(|_| VcpuState::blank()).collect();
    let with = |change: &dyn Fn(&mut MachineState)| {
        let mut state = state();
        change(&mut state);
        let bytes = postcard::to_stdvec(&state).unwrap();
        postcard::from_bytes::<MachineState>(&bytes)
            .unwrap()
            .check()
    };
    assert_eq!(with(&|_| {}), Ok(()));
    assert_eq!(with(&|state| state.vcpus = vcpus(64)), Ok(()));
    assert!(with(&|state| state.vcpus = vcpus(0)).is_err());
    assert!(with(&|state| state.vcpus = vcpus(65)).is_err());
    for memory in [
        0,
        MEMORY - PAGE as u64,
        MEMORY + 1,
        (3 << 30) + PAGE as u64,
        u64::MAX,
    ] {
        assert!(with(&|state| state.memory = memory).is_err(), "{memory}");
    }
    let mut bytes = Vec::new();
    let largest = MachineState {
        vcpus: vcpus(64),
        ..state()
    };
    write_to(&mut bytes, &largest, &memory()).unwrap();
    assert!(read(&bytes).is_ok(), "the largest machine is within bounds");
}

/// A file of zeros after `begin`, which ends only when a reader has read more than any reader
/// needs.
struct Endless<'a> {
    begin: &'a [u8],
    page: Vec<u8>,
    left: usize,
}

impl Read for Endless<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if !self.begin.is_empty() {
            return self.begin.read(buffer);
        }
        if self.page.is_empty() {
            self.left = self.left.checked_sub(1).expect("read for ever");
            self.page = [&0x5000_u64.to_le_bytes()[..], &[1; PAGE]].concat();
        }
        let more = self.page.as_slice().read(buffer)?;
        self.page.drain(..more);
        Ok(more)
    }
}

#[test]
fn a_file_without_an_end_is_given_up() {
    let forger = Forger::new();
    // The file repeats the same page for ever.
    let endless = Endless {
        begin: &forger.bytes[..forger.sum + 4],
        page: Vec::new(),
        left: 3,
    };
    let (_, reader) = Reader::new(endless, "file".to_owned()).unwrap();
    let error = reader.memory(&memory()).unwrap_err();
    assert!(error.to_string().contains("the place of a page"), "{error}");
}
