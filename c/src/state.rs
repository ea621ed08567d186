//! Saved states as bytes.

use crate::room::{Mut, Ref, promised};
use crate::status::VpmuStatus;

/// No saved state is longer, in bytes.
pub const VPMU_STATE_SIZE: usize = 4096;

/// A state that can be written to bytes and read from them.
pub(crate) trait Bytes: Sized {
    /// Writes the state, and returns how many bytes.
    // `&mut`, so that the registers of a state are listed once for reading and for writing.
    fn write(&mut self, to: &mut [u8]) -> Option<usize>;

    /// Answers what `act` does with the state in `from`.
    // Not the state itself: it is too large for a hypervisor's stack to hold it twice.
    fn read<A>(from: &[u8], act: impl FnOnce(&Self) -> A) -> Option<A>;
}

#[cfg(feature = "x86")]
macro_rules! bytes {
    ($state:ty) => {
        impl Bytes for $state {
            fn write(&mut self, to: &mut [u8]) -> Option<usize> {
                postcard::to_slice(self, to)
                    .ok()
                    .map(|written| written.len())
            }

            fn read<A>(from: &[u8], act: impl FnOnce(&Self) -> A) -> Option<A> {
                // Bytes that are left over belong to another state.
                postcard::take_from_bytes(from)
                    .ok()
                    .filter(|(_, rest)| rest.is_empty())
                    .map(|(state, _)| act(&state))
            }
        }
    };
}

#[cfg(feature = "arm")]
mod arm {
    use vpmu::arm::{MAX_EVENT_COUNTERS, PmuState, PmuVersion};

    use super::Bytes;

    /// Bytes of a saved state: the layout and the version, ten registers, and two of each event counter.
    // Without serde, which would be a third of a hypervisor's library.
    const LENGTH: usize = 8 * (1 + 8 + 2 * MAX_EVENT_COUNTERS as usize);

    /// Calls `each` with each register of `state`, in the order in which they are saved.
    #[inline(never)]
    fn registers<'a>(state: &'a mut PmuState, each: &mut dyn FnMut(&'a mut u64)) {
        let PmuState {
            layout: _,
            version: _,
            pmcr,
            pmcnten,
            pminten,
            pmovs,
            pmselr,
            pmuserenr,
            pmccntr,
            pmccfiltr,
            pmevcntr,
            pmevtyper,
        } = state;
        for register in [
            pmcr, pmcnten, pminten, pmovs, pmselr, pmuserenr, pmccntr, pmccfiltr,
        ] {
            each(register);
        }
        pmevcntr.iter_mut().for_each(&mut *each);
        pmevtyper.iter_mut().for_each(each);
    }

    impl Bytes for PmuState {
        fn write(&mut self, to: &mut [u8]) -> Option<usize> {
            let mut words = to.get_mut(..LENGTH)?.chunks_exact_mut(8);
            let head = u64::from(self.layout) | u64::from(self.version.pmuver()) << 16;
            words.next()?.copy_from_slice(&head.to_le_bytes());
            registers(self, &mut |register| {
                if let Some(word) = words.next() {
                    word.copy_from_slice(&register.to_le_bytes());
                }
            });
            Some(LENGTH)
        }

        fn read<A>(from: &[u8], act: impl FnOnce(&Self) -> A) -> Option<A> {
            let mut state = Self::reset(PmuVersion::V3, 0);
            fill(&mut state, from)?;
            Some(act(&state))
        }
    }

    /// Makes `state` the one in `from`.
    // Apart from `read`, of which there is one for each PMU.
    #[inline(never)]
    fn fill(state: &mut PmuState, from: &[u8]) -> Option<()> {
        // Bytes that are left over belong to another state.
        if from.len() != LENGTH {
            return None;
        }
        let mut words = from
            .chunks_exact(8)
            .filter_map(|word| Some(u64::from_le_bytes(word.try_into().ok()?)));
        let head = words.next()?;
        let version = [
            PmuVersion::V3,
            PmuVersion::V3p1,
            PmuVersion::V3p4,
            PmuVersion::V3p5,
        ];
        state.version = version
            .into_iter()
            .find(|version| u64::from(version.pmuver()) == head >> 16)?;
        state.layout = head as u16;
        registers(state, &mut |register| {
            *register = words.next().unwrap_or(0);
        });
        Some(())
    }
}

#[cfg(feature = "x86")]
bytes!(vpmu::x86::PmuState);
#[cfg(all(feature = "kvm", target_os = "linux", target_arch = "x86_64"))]
bytes!(Saved);

/// A vCPU, and the places in its VM's guest by which RDPMC comes to the VMM at run time. Each vCPU is saved with all of
/// them, so that nobody has to know which is restored first.
#[cfg(all(feature = "kvm", target_os = "linux", target_arch = "x86_64"))]
pub(crate) type Saved = (vpmu_kvm::State, Option<vpmu_kvm::RdpmcState>);

/// Where a state is saved.
pub(crate) struct Place<'a> {
    to: &'a mut [u8],
    length: &'a mut usize,
}

impl Place<'_> {
    /// Writes `state`, and its length.
    pub(crate) fn put(self, state: &mut impl Bytes) -> VpmuStatus {
        let Some(written) = state.write(self.to) else {
            return VpmuStatus::Room;
        };
        *self.length = written;
        VpmuStatus::Ok
    }
}

/// Returns the `room` bytes at `buffer` as a place. `None`: they or `length` are none.
///
/// # Safety
///
/// The caller in C has stated this `room` with `buffer`.
pub(crate) unsafe fn place<'a>(
    buffer: Mut<'a, u8>,
    room: usize,
    length: Mut<'a, usize>,
) -> Option<Place<'a>> {
    // No state is longer, so that what is said of the rest of the buffer does not matter.
    let room = room.min(VPMU_STATE_SIZE);
    Some(Place {
        to: promised!(buffer.slice(room, VPMU_STATE_SIZE))?,
        length: length.get()?,
    })
}

/// Writes the state that `save` gives to `place`.
#[cfg(feature = "x86")]
pub(crate) fn save<S: Bytes>(save: impl FnOnce() -> S, place: Option<Place<'_>>) -> VpmuStatus {
    place.map_or(VpmuStatus::Misuse, |place| place.put(&mut save()))
}

/// Bytes that may be a saved state.
pub(crate) struct Source<'a> {
    from: Ref<'a, u8>,
    length: usize,
}

impl<'a> Source<'a> {
    fn bytes(self) -> Option<&'a [u8]> {
        promised!(self.from.slice(self.length, VPMU_STATE_SIZE))
    }
}

/// Returns the `length` bytes at `buffer` as a source.
///
/// # Safety
///
/// The caller in C has stated this `length` with `buffer`.
pub(crate) const unsafe fn source(buffer: Ref<'_, u8>, length: usize) -> Source<'_> {
    Source {
        from: buffer,
        length,
    }
}

/// Has `go_on` go on from the state in `source`.
// The bytes are looked for here, not where the caller's frame would hold what is found.
#[inline(never)]
pub(crate) fn restore<S: Bytes>(
    source: Source<'_>,
    go_on: impl FnOnce(&S) -> VpmuStatus,
) -> VpmuStatus {
    if source.from.is_null() {
        return VpmuStatus::Misuse;
    }
    let read = source.bytes().and_then(|bytes| S::read(bytes, go_on));
    read.unwrap_or(VpmuStatus::State)
}

/// Returns the state in `source`, if it is one.
#[cfg(all(feature = "kvm", target_os = "linux", target_arch = "x86_64"))]
pub(crate) fn read<S: Bytes + Clone>(source: Source<'_>) -> Option<S> {
    S::read(source.bytes()?, S::clone)
}
