//! What the engine asks of an embedder to write a record: the guest's memory, and its registers.

use crate::x86::Ring;

/// The request cannot be met: there is no such memory, or the host fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault;

/// A guest whose counters have overflowed, as a host shows it by [`Host::guest`](super::Host::guest). It does not run
/// meanwhile.
pub trait Guest {
    /// Fills `bytes` from linear `address` on, as the processor reads for itself: with the guest's page tables, in
    /// ring 0, whatever the guest's ring is.
    ///
    /// # Errors
    ///
    /// A part of the range cannot be read. The content of `bytes` is then undefined.
    fn read(&mut self, address: u64, bytes: &mut [u8]) -> Result<(), Fault>;

    /// Writes `bytes` from linear `address` on, in the same way. Only RAM may be written.
    ///
    /// # Errors
    ///
    /// A part of the range cannot be written. The rest may have been written.
    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), Fault>;

    /// Returns where the guest is now.
    ///
    /// # Errors
    ///
    /// The host fails. The record is lost.
    fn sample(&mut self) -> Result<Sample, Fault>;

    /// Its general registers. Asked for only where the guest wants them.
    ///
    /// # Errors
    ///
    /// The host fails. The record is lost.
    // Apart from `sample`, since it costs the host a call that most records do not need.
    fn general(&mut self) -> Result<GeneralRegisters, Fault>;

    /// XMM0 to XMM15. Asked for only where the guest wants them.
    ///
    /// # Errors
    ///
    /// The host fails. The record is lost.
    fn xmm(&mut self) -> Result<[u128; 16], Fault>;
}

/// Where a guest is, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// RIP: the instruction that comes next, as IA32_PERF_CAPABILITIES says.
    pub ip: u64,
    /// The ring it is in.
    pub ring: Ring,
    /// The guest's TSC.
    // Taken with the address: a record that is written later must not have the later time.
    pub tsc: u64,
}

/// A guest's general registers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GeneralRegisters {
    /// RFLAGS.
    pub rflags: u64,
    /// RIP.
    pub rip: u64,
    /// In the order of their numbers, as in a record: RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15.
    pub general: [u64; 16],
}
