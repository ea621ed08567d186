//! The engine and the [`Reference`] side by side. After every step, each register, the PMI and the branches that it waits
//! for are the same.

use super::reference::Reference;
use crate::guest::FakeGuest;
use crate::pebs_reference::Pebs;
use crate::support::{END, FakeHost};
use vpmu::counter::Policy;
use vpmu::x86::lbr::{Branch, amd, intel};
use vpmu::x86::{ArchEvent, Capability, CounterConfig, Outcome, Pmu, PmuConfig, Ring};

#[derive(Clone, Debug)]
pub(crate) enum Step {
    Write(u32, u64),
    Read(u32),
    Branch(Branch),
    Overflow,
    /// Counter 1 counts so many events of user space.
    Count(u64),
    /// The guest is somewhere else, in this ring.
    GoOn(Ring, u64),
    /// The guest has read all records in its buffer.
    EmptyBuffer,
    EndFollowing,
    Lose,
    Disable,
    TakePmi,
    Reset,
    Migrate,
}

pub(crate) struct Pair {
    engine: Pmu,
    host: FakeHost<CounterConfig>,
    reference: Reference,
    capability: Capability,
}

/// Returns the registers of the counters that the reference has: control, status, status clear, status set.
pub(crate) fn globals(capability: &Capability) -> [u32; 4] {
    match capability {
        Capability::Intel(_) => [0x38f, 0x38e, 0x390, 0x391],
        Capability::Amd(_) => [0xc000_0301, 0xc000_0300, 0xc000_0302, 0xc000_0303],
    }
}

/// Returns whether the guest has PEBS.
pub(crate) fn has_pebs(capability: &Capability) -> bool {
    matches!(capability, Capability::Intel(intel) if intel.pebs.is_some())
}

/// Where the guest's buffer is, for two of the largest records, and what its first PMI comes after.
const BUFFER: u64 = FakeGuest::RAM + 0x100;
const THRESHOLD: u64 = 0x500;
/// Counter 1's.
const PERIOD: u64 = 1000;

/// Returns a guest with a DS save area.
fn guest() -> FakeGuest {
    let mut guest = FakeGuest::new();
    for (offset, value) in [
        (0x20, BUFFER),
        (0x28, BUFFER),
        (0x30, BUFFER + 2 * 1232),
        (0x38, BUFFER + THRESHOLD),
        (0x48, END - PERIOD),
    ] {
        guest.store(FakeGuest::RAM + offset, value);
    }
    guest
}

/// Returns the registers of the records, and DebugCtl.
pub(crate) fn addresses(capability: &Capability) -> Vec<u32> {
    match capability {
        Capability::Intel(_) => intel::msrs().chain([0x1d9]).collect(),
        Capability::Amd(_) => amd::msrs().collect(),
    }
}

impl Pair {
    pub(crate) fn new(capability: Capability, follows: bool) -> Self {
        let mut host = FakeHost::new(Policy::ReusePaused);
        host.follows = follows;
        host.guest = has_pebs(&capability).then(guest);
        let pebs = host.guest.clone().map(|guest| Pebs {
            guest,
            ..Pebs::new()
        });
        let mut pair = Self {
            engine: Pmu::new(PmuConfig::new(capability)).expect("possible"),
            host,
            reference: Reference::new(capability, follows, pebs),
            capability,
        };
        pair.set_up();
        pair
    }

    /// Lets counter 0 count instructions and interrupt, and counter 1 count branches in user space and write records.
    fn set_up(&mut self) {
        let select = match self.capability {
            Capability::Intel(_) => 0x186,
            Capability::Amd(_) => 0xc001_0200,
        };
        let gate = globals(&self.capability)[0];
        let mut registers = vec![(select, 0x0053_00c0), (gate, 1)];
        if let Some(pebs) = &mut self.reference.pebs {
            (pebs.enable, pebs.config, pebs.area) = (2, 0x1f00_000f, FakeGuest::RAM);
            registers.extend([
                (0x600, pebs.area),
                (0x3f2, pebs.config),
                (0x3f1, pebs.enable),
            ]);
            registers.extend([(0x187, 0x4_0041_00c4), (gate, 3)]);
        }
        for (address, value) in registers {
            let written = self.engine.wrmsr(address, value, &mut self.host);
            assert_eq!(written, Outcome::Done);
        }
    }

    pub(crate) fn step(&mut self, step: &Step) {
        let (engine, host, reference) = (&mut self.engine, &mut self.host, &mut self.reference);
        match step {
            &Step::Write(address, value) => {
                let expected = match reference.write(address, value) {
                    Ok(()) => Outcome::Done,
                    Err(()) => Outcome::GeneralProtection,
                };
                let written = engine.wrmsr(address, value, host);
                assert_eq!(written, expected, "{address:#x} = {value:#x}");
            }
            &Step::Read(address) => {
                let expected = match reference.read(address) {
                    Ok(value) => Outcome::Value(value),
                    Err(()) => Outcome::GeneralProtection,
                };
                assert_eq!(engine.rdmsr(address, host), expected, "{address:#x}");
            }
            Step::Branch(branch) => {
                reference.branch(branch);
                let due = engine.branch(branch, host);
                assert_eq!(due, reference.due, "{branch:?}");
            }
            Step::Overflow => {
                reference.overflow();
                let due = engine.emulated(ArchEvent::Instructions, 1 << 48, Ring::User, host);
                assert_eq!(due, reference.due, "overflow");
            }
            &Step::Count(times) => {
                reference.count(times);
                let due = engine.emulated(ArchEvent::Branches, times, Ring::User, host);
                assert_eq!(due, reference.due, "{times} events");
            }
            &Step::GoOn(ring, times) => {
                let here = reference.pebs.as_mut().map(|pebs| &mut pebs.guest);
                for guest in here.into_iter().chain(&mut host.guest) {
                    guest.go_on(ring, times);
                }
            }
            Step::EmptyBuffer => {
                let here = reference.pebs.as_mut().map(|pebs| &mut pebs.guest);
                for guest in here.into_iter().chain(&mut host.guest) {
                    guest.store(FakeGuest::RAM + 0x28, BUFFER);
                }
            }
            Step::EndFollowing => {
                reference.end_run();
                assert_eq!(engine.end_following(host), reference.due);
            }
            Step::Lose => {
                reference.lose();
                engine.lose_branches();
            }
            Step::Disable => assert_eq!(engine.disable_lbr(host), reference.disable()),
            Step::TakePmi => {
                let due = std::mem::take(&mut reference.due);
                assert_eq!(engine.take_pmi(), due);
            }
            Step::Reset => {
                engine.reset(host);
                reference.reset();
                self.set_up();
            }
            Step::Migrate => {
                reference.migrate();
                let state = engine.save(host);
                engine.reset(host);
                let config = PmuConfig::new(self.capability);
                let mut other = Pmu::new(config).expect("as before");
                other.restore(&state, host).expect("its own state");
                assert_eq!(other.save(host), state);
                *engine = other;
                if let Some(pebs) = &mut reference.pebs {
                    pebs.statistics = Default::default();
                }
            }
        }
        self.compare();
    }

    /// On copies: a guest that reads its records is followed no longer.
    fn compare(&self) {
        assert_eq!(self.engine.pmi_due(), self.reference.due);
        assert_eq!(self.engine.branches_awaited(), self.reference.awaited());
        if let Some(pebs) = &self.reference.pebs {
            assert_eq!(self.host.guest.as_ref(), Some(&pebs.guest));
            assert_eq!(self.engine.pebs_statistics(), pebs.statistics);
        }
        let [control, status, ..] = globals(&self.capability);
        let of_pebs: &[u32] = match has_pebs(&self.capability) {
            true => &[0x3f1, 0x3f2, 0xc2],
            false => &[],
        };
        for address in addresses(&self.capability)
            .into_iter()
            .chain([control, status])
            .chain(of_pebs.iter().copied())
        {
            let (mut engine, mut host) = (self.engine.clone(), self.host.clone());
            let expected = match self.reference.clone().read(address) {
                Ok(value) => Outcome::Value(value),
                Err(()) => Outcome::GeneralProtection,
            };
            assert_eq!(engine.rdmsr(address, &mut host), expected, "{address:#x}");
        }
    }
}
