//! Answers the questions of a [`Pair`](crate::pair::Pair) to the reference.

use super::{Numbers, Reference};
use crate::pair;
use crate::pebs_reference::Pebs;
use crate::support::Happening;
use vpmu::counter::CounterSet;
use vpmu::x86::intel::{FIXED, Msr};
use vpmu::x86::{ArchEvent, Capability, EventFilter, MaskedEvent, Outcome, Ring};

/// Returns the number, in the global registers, of the counter that the engine numbers `n`.
fn global(n: u8) -> u32 {
    u32::from(if n < FIXED { n } else { n - FIXED + 32 })
}

impl pair::Reference for Reference {
    fn of(capability: Capability) -> Self {
        let Capability::Intel(capability) = capability else {
            panic!("Intel's");
        };
        Self::new(Numbers {
            version: capability.version.number().into(),
            general: capability.general.into(),
            general_width: capability.general_width.into(),
            fixed: capability.fixed.into(),
            fixed_width: capability.fixed_width.into(),
            events: capability.events.into(),
            pdcm: capability.pdcm,
            full_width: capability.full_width_writes,
            smm: capability.freeze_while_smm,
            other_debugctl: capability.other_debugctl,
            pebs: capability.pebs.map(|pebs| pebs.linear_address_bits.into()),
        })
    }

    fn read(&self, address: u32) -> Outcome {
        self.read(address)
    }

    fn write(&mut self, address: u32, value: u64) -> Outcome {
        self.write(address, value)
    }

    fn rdpmc(&self, ecx: u32, ring: Ring, pce: bool) -> Outcome {
        self.rdpmc(ecx, ring, pce)
    }

    fn emulate(&mut self, what: Happening, ring: Ring, times: u64) {
        self.emulate(what, ring, times);
    }

    fn happening(event: ArchEvent) -> Option<Happening> {
        Some(match event {
            ArchEvent::Instructions => Happening::Instructions,
            ArchEvent::CoreCycles => Happening::Cycles,
            ArchEvent::TscCycles => Happening::TscCycles,
            ArchEvent::Branches => Happening::Other(0xc4, 0),
            _ => return None,
        })
    }

    fn pmi(&mut self) -> &mut bool {
        &mut self.pmi
    }

    fn lose(&mut self, lost: CounterSet) {
        self.lost = lost
            .iter()
            .fold(0, |bits, n| bits | 1 << global(n.number()));
    }

    fn deny(&mut self, deny: bool) -> EventFilter {
        let all = EventFilter::default();
        if !deny {
            self.denied = (Vec::new(), 0);
            return all;
        }
        self.denied = (vec![0x3c], 0b1);
        all.with(MaskedEvent::one(0x3c, 0))
            .expect("one event fits")
            .with_fixed(0b1)
    }

    fn freezes(&self) -> bool {
        self.freezes()
    }

    fn pebs(&mut self) -> Option<&mut Pebs> {
        Some(&mut self.pebs)
    }

    fn unsupported(&self, n: u8) -> bool {
        self.unsupported(global(n))
    }

    fn interrupts(&self, n: u8) -> bool {
        self.interrupts(global(n))
    }

    fn addresses() -> Vec<u32> {
        let own = Msr::all().map(Msr::address);
        own.chain([0x10, 0x1d8, 0x3f0]).collect()
    }
}
