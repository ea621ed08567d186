//! The lazy TSC deadline: a guest moves its timer later without an exit.
//!
//! # Why
//!
//! A local APIC in TSC-deadline mode (Intel SDM vol. 3A, "TSC-Deadline Mode": section 10.5.4.1, in
//! newer revisions 11.5.4.1 or 12.5.4.1) has one register, IA32_TSC_DEADLINE. A write arms the
//! timer for an absolute TSC value. The timer fires once when the TSC reaches that value, and the
//! register reads as 0 afterwards. Under a hypervisor each write is an exit. An operating system
//! writes the register whenever its next timer changes, above all when a CPU goes idle and when it
//! wakes up, and overwrites most of these deadlines before they fire. Most writes move the deadline
//! later.
//!
//! So the real timer stays where it is, the guest notes the later deadline in memory, and the note
//! is read when the real timer expires. The noted deadline is then due, or the timer is armed again
//! for it. A deadline *earlier* than the real timer is written to the register as ever. There are
//! two modes:
//!
//! - *paravirtual* ([`ParavirtualTimer`] in the guest, [`DeadlineTimer`] in the host): guest and
//!   host share a [`Slot`] with two words, `armed` and `pending`, and the host reads the note. It
//!   does not wake a halted vCPU for that.
//! - *guest-only* ([`GuestOnlyTimer`]): the guest's driver keeps both words to itself and reads the
//!   note when the early interrupt comes. The host takes no part, so this mode works on any host.
//!
//! Where few writes are avoided, the paravirtual mode may cost more than it saves: [`BreakEven`] notices, and says when
//! to write IA32_TSC_DEADLINE instead.
//!
//! # The paravirtual protocol
//!
//! ```text
//! guest, interrupts off                 host, at the expiry of its timer
//!   pending = deadline                    armed = 0
//!   full barrier                          full barrier
//!   if armed == 0 or deadline < armed:    p = pending
//!       WRMSR deadline                    p == 0:  nothing is wanted
//!                                         p > now: arm p, armed = p
//! host, at the WRMSR                      else:    pending: p -> 0, inject
//!   arm deadline, armed = deadline
//! ```
//!
//! *No deadline is lost.* A guest skips the WRMSR only if it reads an `armed` that is no later than
//! its deadline. The host that published this `armed` clears it before it reads `pending`. The
//! guest has read `armed` before it was cleared, so the guest's barrier precedes the host's in the
//! single order of all such barriers, and the host reads this deadline or a newer one. Without
//! either barrier a store may be delayed past the load after it (x86 does that): both sides read
//! the old word, the host fires for the old deadline, and the guest waits for ever.
//!
//! *No deadline fires before its time.* The host fires only for a value that it has compared with
//! the clock, and this value is the guest's latest at a moment when the older deadline was due.
//!
//! *No deadline fires twice.* One case remains: the host finds a deadline in `pending` and fires
//! it, all between the guest's load of `armed` and its WRMSR of the same deadline. The host
//! therefore replaces a deadline that it fired by 0, remembers it, and drops the write of exactly
//! this value while the 0 stands. (A guest that asks for the same value anew has stored it anew.)
//!
//! The model checker tries these three for every interleaving that the memory model permits;
//! `docs/how/lazy-deadline.md` has the method, and the guest's half in C.
//!
//! # The host does not trust the slot
//!
//! The host never reads `armed` back, loads `pending` once for each decision, and treats any value
//! as a request: a guest that scribbles over its slot delays, loses or repeats its own interrupts.
//! A write of the register has authority over the slot. If the slot holds another value, the writer
//! does not know the slot (a kernel started by kexec), and its deadline is kept as a plain one.
//!
//! # Embedding
//!
//! ```
//! use lazy_deadline::{
//!     DeadlineTimer, GuestCpu, HostTimer, LvtTimer, ParavirtualTimer, Request, Slot, Verdict,
//! };
//!
//! /// The host's timer (a timerfd, an hrtimer), and the vCPU's TSC.
//! #[derive(Default)]
//! struct Clock {
//!     tsc: u64,
//!     armed: Option<u64>,
//! }
//!
//! impl HostTimer for Clock {
//!     fn now(&mut self) -> u64 {
//!         self.tsc
//!     }
//!     fn host_clock(&mut self) -> u64 {
//!         self.tsc // this guest's TSC is the host's
//!     }
//!     fn arm(&mut self, deadline: u64) {
//!         self.armed = Some(deadline);
//!     }
//!     fn disarm(&mut self) {
//!         self.armed = None;
//!     }
//! }
//!
//! let mut clock = Clock::default();
//! let slot = Slot::new(); // in the guest's memory
//! let mut host = DeadlineTimer::new();
//! host.set_lvt(LvtTimer::decode(0x4_00ec), None, &mut clock);
//!
//! // The guest: a WRMSR is an exit, on which the host calls `write`.
//! struct Cpu<'a>(&'a mut DeadlineTimer, &'a mut Clock, &'a Slot);
//! impl GuestCpu for Cpu<'_> {
//!     fn tsc(&mut self) -> u64 {
//!         self.1.tsc
//!     }
//!     fn write_deadline(&mut self, deadline: u64) {
//!         let verdict = self.0.write(deadline, Some(self.2.words()), self.1);
//!         assert_eq!(verdict, Verdict::Quiet, "else: inject");
//!     }
//! }
//! let mut guest = ParavirtualTimer::new();
//! guest.prepare(slot.words());
//! host.attach(slot.words())?;
//!
//! let mut cpu = Cpu(&mut host, &mut clock, &slot);
//! assert_eq!(guest.set(1_000, slot.words(), &mut cpu), Request::Written);
//! assert_eq!(guest.set(2_000, slot.words(), &mut cpu), Request::Avoided);
//! assert_eq!(guest.set(3_000, slot.words(), &mut cpu), Request::Avoided);
//!
//! clock.tsc = 1_000;
//! assert_eq!(host.expire(Some(slot.words()), &mut clock), Verdict::Quiet);
//! assert_eq!(clock.armed, Some(3_000), "moved, and the guest not disturbed");
//! clock.tsc = 3_000;
//! assert_eq!(host.expire(Some(slot.words()), &mut clock), Verdict::Inject(3_000));
//! # Ok::<(), Box<dyn core::error::Error>>(())
//! ```

#![no_std]
#![forbid(unsafe_code)]

mod guest;
mod host;
mod slot;
mod sync;
#[cfg(all(test, loom))]
mod tests;

pub use guest::{
    BreakEven, BreakEvenStatistics, GuestCpu, GuestOnlyTimer, GuestStatistics, Interrupt,
    ParavirtualTimer, Request, Way,
};
pub use host::{
    DeadlineState, DeadlineTimer, HostStatistics, HostTimer, LvtTimer, RestoreError, TimerMode,
    Verdict,
};
pub use slot::{AttachError, Slot, SlotRef};

/// Counts an event.
// Wraps: a count must not end the host, however long that runs.
fn count(n: &mut u64) {
    *n = n.wrapping_add(1);
}
