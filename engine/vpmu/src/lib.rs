//! An embeddable virtual PMU: performance counters for virtual machines, for any hypervisor or VMM.
//!
//! A guest programs its performance counters through registers that trap. This crate implements those registers: it
//! knows what a guest must see, and has the host do as little as possible for that. The crate needs no operating system
//! and no hypervisor, allocates nothing (`no_std`, without `alloc`) and has no `unsafe` code
//! (`#![forbid(unsafe_code)]`).
//!
//! - [`arm`]: PMUv3, [emulated](arm::emulated) or [partitioned](arm::partition);
//! - [`x86`]: Intel's architectural performance monitoring, versions 2 to 5, and AMD's core counters;
//! - [`paravirt`]: a PMU for guests that have a driver for it: a page in place of registers;
//! - [`counter`]: what all of them ask of a host, and when.
//!
//! This page embeds the emulated PMU of Arm, step by step; the PMU of x86 is embedded in the same way.
//!
//! # 1. A host
//!
//! You supply what counts for the guest: hardware counters, `perf_event_open`, a simulator's ticks. The engine reaches
//! it through [`CounterHost`](counter::CounterHost), six calls that name the guest's counters. Here is a host that
//! counts when a guest has set it to:
//!
//! ```
//! use core::num::NonZeroU64;
//! use vpmu::arm::CounterConfig;
//! use vpmu::counter::{Counter, CounterHost, CounterSet, Lost, Slots};
//!
//! #[derive(Default)]
//! struct Host {
//!     totals: Slots<u64>,
//!     running: CounterSet,
//! }
//!
//! impl CounterHost<CounterConfig> for Host {
//!     fn create(&mut self, counter: Counter, config: &CounterConfig) -> Result<(), Lost> {
//!         // Program the event in `config`, for the exception levels it names, stopped.
//!         self.totals[counter] = 0;
//!         Ok(())
//!     }
//!     fn set_period(&mut self, counter: Counter, events: Option<NonZeroU64>) {
//!         // Have an interrupt, a signal, a callback after so many events.
//!     }
//!     fn resume(&mut self, counters: CounterSet) {
//!         self.running |= counters;
//!     }
//!     fn pause(&mut self, counters: CounterSet) {
//!         self.running -= counters;
//!     }
//!     fn read(&mut self, counter: Counter) -> u64 {
//!         self.totals[counter]
//!     }
//!     fn release(&mut self, counter: Counter) {}
//! }
//! # fn main() {}
//! ```
//!
//! # 2. A PMU for each vCPU
//!
//! [`EmulatedConfig`](arm::emulated::EmulatedConfig) says what the guest finds of its PMU. It
//! must agree with the ID registers you show it: [`PmuVersion::pmuver`](arm::PmuVersion::pmuver)
//! gives the field for ID_AA64DFR0_EL1.
//!
//! # 3. Accesses
//!
//! At a trap, [`Encoding::from_iss`](arm::Encoding::from_iss) and
//! [`Register::decode`](arm::Register::decode) turn the syndrome into a
//! [`Register`](arm::Register); the PMU's `read` and `write` perform the access and answer with an
//! [`Outcome`](arm::Outcome) that says what you do next. The engine never injects anything itself.
//! After each access, drive the guest's PMU interrupt with `line()`: it is a level.
//!
//! # 4. Overflows
//!
//! When the report comes that `set_period` asked for, call `overflow`, which again returns the level of the line. Late,
//! early and stray reports do no harm.
//!
//! ```
//! # use core::num::NonZeroU64;
//! # use vpmu::arm::CounterConfig;
//! use vpmu::counter::{Counter, CounterHost, CounterSet, Lost, Policy, Report, Slots};
//! # #[derive(Default)]
//! # struct Host { totals: Slots<u64>, running: CounterSet }
//! # impl CounterHost<CounterConfig> for Host {
//! #     fn create(&mut self, _: Counter, _: &CounterConfig) -> Result<(), Lost> { Ok(()) }
//! #     fn set_period(&mut self, _: Counter, _: Option<NonZeroU64>) {}
//! #     fn resume(&mut self, counters: CounterSet) { self.running |= counters; }
//! #     fn pause(&mut self, counters: CounterSet) { self.running -= counters; }
//! #     fn read(&mut self, counter: Counter) -> u64 { self.totals[counter] }
//! #     fn release(&mut self, _: Counter) {}
//! # }
//! use vpmu::arm::emulated::{EmulatedConfig, EmulatedPmu, Identity};
//! use vpmu::arm::{
//!     Encoding, EventFilter, ExceptionLevel, Outcome, PmuVersion, Register, pmcr,
//! };
//!
//! let mut host = Host::default();
//! let mut pmu = EmulatedPmu::new(EmulatedConfig {
//!     counters: 6,
//!     version: PmuVersion::V3p5,
//!     el3: false,
//!     aarch32: true,
//!     identity: Identity::default(),
//!     events: [1 << 0x08 | 1 << 0x11, 0], // INST_RETIRED, CPU_CYCLES
//!     pmmir: 0,
//!     filter: EventFilter::default(),
//!     policy: Policy::default(),
//! })?;
//!
//! // The guest's `msr PMEVTYPER0_EL0, x0` traps with this in ESR_EL2.ISS.
//! let register = Register::decode(Encoding::from_iss(0x0030_f818)).ok_or("no PMU register")?;
//! assert_eq!(register, Register::Pmevtyper(0));
//! match pmu.write(register, ExceptionLevel::El1, 0x08, &mut host) {
//!     Outcome::Done => { /* step over the instruction */ }
//!     Outcome::Value(_) => { /* only a read: put it into Xt, step over the instruction */ }
//!     Outcome::Undefined => { /* inject an Undefined Instruction exception */ }
//!     Outcome::TrapToEl1 => { /* inject the trap, EC 0x18, into the guest's EL1 */ }
//!     Outcome::NotHandled => { /* as for any register you do not know */ }
//! }
//!
//! // It goes on like Linux does for a sample every 1000 instructions.
//! let mut write = |register, value, host: &mut Host| {
//!     assert_eq!(pmu.write(register, ExceptionLevel::El1, value, host), Outcome::Done);
//! };
//! write(Register::Pmevcntr(0), 0xffff_ffff - 999, &mut host);
//! write(Register::PmintenSet, 1, &mut host);
//! write(Register::PmcntenSet, 1, &mut host);
//! assert!(host.running.is_empty(), "a host counter is created when something has to count");
//! write(Register::Pmcr, pmcr::E, &mut host);
//! let counter = Counter::at::<0>();
//! assert!(host.running.contains(counter));
//!
//! // The guest runs, the host counts 1000 instructions and reports it.
//! host.totals[counter] += 1000;
//! assert!(pmu.overflow(counter, Report::Unsure, &mut host), "raise the guest's PMU interrupt");
//!
//! // The guest's handler acknowledges.
//! let _ = pmu.write(Register::PmovsClr, ExceptionLevel::El1, 1, &mut host);
//! assert!(!pmu.line(), "lower it");
//! # Ok::<(), Box<dyn core::error::Error>>(())
//! ```
//!
//! # 5. Switching vCPUs
//!
//! Call `put` before the vCPU leaves its CPU, and `load` when it comes back. A vCPU whose guest uses no counter makes
//! no host call in either. A vCPU whose guest has stopped using its counters gives them back after a whole slice
//! without use.
//!
//! # 6. Saving
//!
//! `save` gives a [`PmuState`](arm::PmuState), a plain value without anything of the host in it,
//! and `restore` takes one or says why it cannot.
//!
//! # When something cannot be counted
//!
//! A host that cannot back a counter answers `create` with a [`Lost`](counter::Lost). The guest's
//! counter then stands still, and is [`Lost`](counter::CounterState::Lost) to you: in
//! `counter_state`, in [`Statistics`](counter::Statistics) and, if you pass an observer, through
//! [`Events`](counter::Events).
#![no_std]
#![forbid(unsafe_code)]

pub mod arm;
pub mod counter;
pub mod paravirt;
pub mod x86;
