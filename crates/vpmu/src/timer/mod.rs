//! The lazy TSC deadline: moving a timer later costs no exit.
//!
//! # Why it is driven this way
//!
//! A local APIC in TSC-deadline mode (Intel SDM vol. 3A, "TSC-Deadline Mode": section 10.5.4.1, in
//! newer revisions 11.5.4.1 or 12.5.4.1) has one register, IA32_TSC_DEADLINE. A write arms the
//! timer for an absolute TSC value, it fires once when the TSC gets there, and reads as 0
//! afterwards. Under a hypervisor each write is an exit. An operating system writes it whenever its
//! next timer changes, going idle and coming back above all, and nearly always overwrites it before
//! it fires: what it writes is mostly "later than before".
//!
//! So: leave the real timer where it is, note the later deadline in memory, and look at the note
//! when the real timer expires. Then it is either due, or armed again for the noted time. Deadlines
//! that move *earlier* than the real timer are written as ever. There are two modes:
//!
//! - *paravirtual* ([`ParavirtualTimer`] in the guest, [`DeadlineTimer`] in the host): guest and
//!   host share a [`Slot`] with two words, `armed` and `pending`, and the host looks. A halted vCPU
//!   is not woken for it.
//! - *guest-only* ([`GuestOnlyTimer`]): the guest's driver keeps both words itself and looks when
//!   the early interrupt comes. The host does not know, so it works on any.
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
//! *No deadline is lost.* A guest leaves out the WRMSR only if it reads an `armed` that is no later
//! than its deadline. Whoever published that value will clear it before looking at `pending`. The
//! guest has read it before it was cleared, so the guest's barrier comes before the host's in the
//! one order of all such barriers, and so the host's look finds the deadline or a newer one. Without
//! either barrier a store may be delayed past the load after it (x86 does that), both sides read
//! the old word, the host fires for the old deadline and the guest waits for ever.
//!
//! *None fires before its time.* The host fires only for a value it has compared with the clock,
//! and that value is the guest's latest at a moment when the older deadline was due.
//!
//! *None fires twice.* One case remains: the host finds a deadline in `pending` and fires it, all
//! between the guest's look at `armed` and its WRMSR of the same deadline. The host therefore
//! replaces what it fired by 0, remembers it, and drops the write of exactly that value while the
//! 0 stands. (A guest that asks for the same value anew has stored it anew.)
//!
//! These three are checked for every interleaving that the memory model permits; see
//! `docs/lazy-deadline.md` for how, and for the guest's half in C.
//!
//! # The host does not trust the slot
//!
//! It never reads `armed` back, loads `pending` once for each decision, and treats any value as a
//! wish: a guest that scribbles over its slot delays, loses or repeats its own interrupts. A write of
//! the register is the authority: if it is not what the slot says, the writer does not know the slot
//! (a kernel started by kexec), and its deadline is kept as a plain one.
//!
//! # Embedding it
//!
//! ```
//! use vpmu::timer::{
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

mod guest;
mod host;
#[cfg(all(test, loom))]
mod model_check;
mod slot;
mod sync;

pub use guest::{GuestCpu, GuestOnlyTimer, GuestStatistics, Interrupt, ParavirtualTimer, Request};
pub use host::{
    DeadlineState, DeadlineTimer, HostStatistics, HostTimer, LvtTimer, RestoreError, TimerMode,
    Verdict,
};
pub use slot::{AttachError, Slot, SlotRef};
