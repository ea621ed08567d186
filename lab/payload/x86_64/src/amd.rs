//! The MSRs of AMD's PMU as CPUID describes them: AMD64 Architecture Programmer's Manual vol. 2, 13.2, and the PPRs'
//! pages of the registers.
//!
//! This table follows the manuals, not the engine, because it tests the engine.
//! A host test compares the two.

/// The first of the legacy registers: four PERF_CTL, then four PERF_CTR.
pub const LEGACY: u32 = 0xc001_0000;
/// PERF_CTL0; PERF_CTR0 follows, then those of counter 1.
pub const PERF_CTL: u32 = 0xc001_0200;
/// PERF_CTR0.
pub const PERF_CTR: u32 = 0xc001_0201;
/// PerfCntrGlobalStatus.
pub const GLOBAL_STATUS: u32 = 0xc000_0300;
/// PerfCntrGlobalCtl.
pub const GLOBAL_CTL: u32 = 0xc000_0301;
/// PerfCntrGlobalStatusClr.
pub const GLOBAL_STATUS_CLR: u32 = 0xc000_0302;
/// PerfCntrGlobalStatusSet.
pub const GLOBAL_STATUS_SET: u32 = 0xc000_0303;

/// Bits of a counter.
pub const COUNTER: u64 = 0xffff_ffff_ffff;
/// Bits that PERF_CTL keeps; the others are ignored.
pub const CONTROL: u64 = 0x30f_ffd7_ffff;

/// CPUID's description of the PMU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capability {
    /// PerfCtrExtCore: 8000_0001H, ECX\[23\].
    pub core: bool,
    /// PerfMonV2: 8000_0022H, EAX\[0\].
    pub v2: bool,
    /// Number of counters: 4, 6, or the number in 8000_0022H.
    pub counters: u32,
}

impl Capability {
    /// Makes the description from ECX of leaf 8000_0001H, and EAX and EBX of leaf 8000_0022H, which are 0 if there is
    /// none.
    pub const fn new(features: u32, [eax, ebx]: [u32; 2]) -> Self {
        let core = features >> 23 & 1 != 0;
        let v2 = eax & 1 != 0;
        Self {
            core,
            v2,
            counters: match (core, v2) {
                (_, true) => ebx & 0xf,
                (true, false) => 6,
                (false, false) => 4,
            },
        }
    }

    /// Returns a bit for each counter, as the global registers have them.
    pub const fn all(&self) -> u64 {
        (1 << self.counters) - 1
    }
}

/// The behaviour of one MSR: its address, its value out of reset, and the bits that it keeps. No write is a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Row {
    /// The MSR's address.
    pub address: u32,
    /// The value out of reset.
    pub reset: u64,
    /// Bits that read back as written.
    pub keeps: u64,
}

/// Returns every address that a PMU may have, as a PMU with `c` has it. `Err`: the MSR does not exist.
pub fn rows(c: Capability) -> impl Iterator<Item = Result<Row, u32>> {
    let when = |there, address, reset, keeps| {
        let row = Row {
            address,
            reset,
            keeps,
        };
        if there { Ok(row) } else { Err(address) }
    };
    let all = c.all();
    let legacy = (0..8).map(move |n| {
        let keeps = if n < 4 { CONTROL } else { COUNTER };
        when(n % 4 < c.counters, LEGACY + n, 0, keeps)
    });
    let core = (0..12).map(move |n| {
        let keeps = if n % 2 == 0 { CONTROL } else { COUNTER };
        when(c.core && n / 2 < c.counters, PERF_CTL + n, 0, keeps)
    });
    let global = [
        (GLOBAL_STATUS, 0, 0),
        (GLOBAL_CTL, all, all),
        (GLOBAL_STATUS_CLR, 0, 0),
        (GLOBAL_STATUS_SET, 0, 0),
    ];
    let global = global.map(|(address, reset, keeps)| when(c.v2, address, reset, keeps));
    legacy.chain(core).chain(global)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroU64;

    use vpmu::counter::{Counter, CounterHost, CounterSet, Lost};
    use vpmu::x86::amd::{self, Interface};
    use vpmu::x86::{CounterConfig, Outcome, Pmu, PmuConfig};

    struct NoHost;

    impl CounterHost<CounterConfig> for NoHost {
        fn create(&mut self, _: Counter, _: &CounterConfig) -> Result<(), Lost> {
            Err(Lost::Unsupported)
        }
        fn set_period(&mut self, _: Counter, _: Option<NonZeroU64>) {}
        fn resume(&mut self, _: CounterSet) {}
        fn pause(&mut self, _: CounterSet) {}
        fn read(&mut self, _: Counter) -> u64 {
            0
        }
        fn release(&mut self, _: Counter) {}
    }

    #[test]
    fn the_engine_is_as_the_manual() {
        use Interface::{Core, Legacy, V2};
        for (interface, v2_counters) in [(Legacy, 6), (Core, 6), (V2, 6), (V2, 5), (V2, 1)] {
            let engine = amd::Capability {
                v2_counters,
                ..amd::Capability::new(interface)
            };
            let leaf = engine.leaf_8000_0022();
            let capability = Capability::new(engine.leaf_8000_0001_ecx(), [leaf.eax, leaf.ebx]);
            assert_eq!(capability.counters, u32::from(engine.count()));
            let mut pmu = Pmu::new(PmuConfig::new(engine)).unwrap();
            for row in rows(capability) {
                let (address, want) = match row {
                    Ok(row) => (row.address, Outcome::Value(row.reset)),
                    Err(address) => (address, Outcome::GeneralProtection),
                };
                assert_eq!(pmu.rdmsr(address, &mut NoHost), want, "{address:#x}");
            }
        }
    }
}
