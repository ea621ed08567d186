//! Every entry point of the engine, with hosts of which the compiler knows nothing.
//!
//! `script/no-panic` builds this for bare metal with all optimization across crates, and searches for
//! functions of `core::panicking` in what is left: a bounds check, an unwrap or an overflow check
//! that the compiler cannot prove superfluous stays, and calls one. So a new `pub fn` that guests or
//! hosts feed belongs here.
//!
//! Not here: `Display` of errors and names. Formatting is the embedder's to call, on a path where
//! allocating and panicking are possible anyway.
#![no_std]
// UNSAFETY: symbols that keep their names. Nothing else in this crate is unsafe.
#![expect(unsafe_code, reason = "without `no_mangle` the functions are not kept")]
#![expect(unreachable_pub, reason = "they are named by the linker alone")]

/// Keeps these functions, whose addresses anybody may call.
macro_rules! keep {
    ($($function:path as $signature:ty),* $(,)?) => {
        $(core::hint::black_box($function as $signature);)*
    };
}

mod arm;
mod x86;

use core::hint::black_box;
use core::num::NonZeroU64;

use vpmu::counter::{Counter, CounterHost, CounterSet, Events, Lost, Slots};
use vpmu::x86::pebs::{self, Fault, GeneralRegisters, Sample, TakenSamples};

/// A host that may answer anything.
pub struct Host;

impl<E> CounterHost<E> for Host {
    fn create(&mut self, counter: Counter, event: &E) -> Result<(), Lost> {
        black_box((counter, core::ptr::from_ref(event)));
        black_box(Ok(()))
    }
    fn set_period(&mut self, counter: Counter, events: Option<NonZeroU64>) {
        black_box((counter, events));
    }
    fn resume(&mut self, counters: CounterSet) {
        black_box(counters);
    }
    fn pause(&mut self, counters: CounterSet) {
        black_box(counters);
    }
    fn read(&mut self, counter: Counter) -> u64 {
        black_box(u64::from(counter.number()))
    }
    fn release(&mut self, counter: Counter) {
        black_box(counter);
    }
    fn pause_and_read(&mut self, counters: CounterSet, totals: &mut Slots<u64>) -> bool {
        *totals = black_box(Slots::filled(u64::from(counters.bits())));
        black_box(true)
    }
    fn support_pebs(&mut self) -> Option<&mut dyn pebs::Host> {
        Some(black_box(self))
    }
    fn follows_branches(&self) -> bool {
        black_box(true)
    }
    fn reports_promptly(&self) -> bool {
        black_box(true)
    }
    fn repeats(&self) -> bool {
        black_box(true)
    }
    fn shortest_period(&self, sharing: u32) -> u64 {
        black_box(u64::from(sharing))
    }
    fn deficit(&self, counter: Counter) -> Option<Lost> {
        black_box((counter.number() != 0).then_some(Lost::Multiplexed))
    }
}

impl pebs::Host for Host {
    fn guest(&mut self) -> Option<&mut dyn pebs::Guest> {
        Some(black_box(self))
    }
    fn begin_sampling(&mut self, counter: Counter, events: NonZeroU64) -> u64 {
        black_box((counter, events));
        black_box(u64::from(counter.number()))
    }
    fn end_sampling(&mut self, counter: Counter) {
        black_box(counter);
    }
    fn take_samples(&mut self, counter: Counter, samples: &mut [Sample]) -> TakenSamples {
        black_box((counter, samples));
        black_box(TakenSamples::default())
    }
}

impl pebs::Guest for Host {
    fn read(&mut self, address: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        black_box((address, bytes));
        black_box(Ok(()))
    }
    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        black_box((address, bytes));
        black_box(Ok(()))
    }
    fn sample(&mut self) -> Result<Sample, Fault> {
        black_box(Err(Fault))
    }
    fn general(&mut self) -> Result<GeneralRegisters, Fault> {
        black_box(Ok(GeneralRegisters::default()))
    }
    fn xmm(&mut self) -> Result<[u128; 16], Fault> {
        black_box(Ok([0; 16]))
    }
}

/// An observer that sees everything.
pub struct Watch;

impl Events for Watch {
    fn overflowed(&mut self, counter: Counter) {
        black_box(counter);
    }
    fn lost(&mut self, counter: Counter, reason: Lost) {
        black_box((counter, reason));
    }
}

/// A bounds check that cannot be proven superfluous.
#[cfg(feature = "panics")]
#[unsafe(no_mangle)]
pub fn can_panic(totals: &[u64; 32], n: u8) -> u64 {
    totals[usize::from(n)]
}

#[cfg(target_os = "none")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
