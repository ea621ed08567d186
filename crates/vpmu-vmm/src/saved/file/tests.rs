use super::*;
use crate::ports::tests::ports;
use crate::saved::{Clock, VmState};

const MEMORY: u64 = 4 << 20;

fn memory() -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY as usize)]).unwrap()
}

/// A machine with something in it.
fn machine() -> (MachineState, GuestMemoryMmap) {
    let state = MachineState {
        memory: MEMORY,
        pmu: None,
        measuring: true,
        vcpus: Vec::new(),
        vm: VmState::default(),
        clock: Clock::default(),
        ports: ports().state(),
    };
    let memory = memory();
    // The first page, the last one, some in a row, and one that is longer than a buffer.
    for (at, length) in [(0, 1), (0x5000, 0x3000), (0x10_0800, RUN), (MEMORY - 1, 1)] {
        memory
            .write_slice(&vec![0x5a; length], GuestAddress(at))
            .unwrap();
    }
    (state, memory)
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
    let stored = 5 * PAGE + RUN + PAGE;
    assert!(
        (stored..stored + 0x4000).contains(&bytes.len()),
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
            other => panic!("{length}: {:?}", other.map(|(state, _)| state)),
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
        Err(Error::Version { saved, known: FORMAT, .. }) if saved == FORMAT + 1
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
    std::fs::write(&path, b"what was there").unwrap();
    write(&path, &state, &memory).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), written());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);

    let nowhere = folder.path().join("none/machine");
    assert!(matches!(
        write(&nowhere, &state, &memory),
        Err(Error::Write(..))
    ));
    // A machine with more memory than there is cannot be written to its end.
    let state = MachineState {
        memory: MEMORY + 1,
        ..state
    };
    assert!(write(&path, &state, &memory).is_err());
    assert_eq!(
        std::fs::read(&path).unwrap(),
        written(),
        "still what it was"
    );
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}
