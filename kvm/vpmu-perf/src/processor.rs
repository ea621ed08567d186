//! The processor of a machine, as far as its events matter.

use std::sync::OnceLock;

use vpmu::x86::EventKind;

/// The maker of a processor, as far as its events matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    /// Intel.
    Intel,
    /// AMD, or Hygon, whose processors are AMD's.
    Amd,
    /// Another maker.
    Other,
}

impl Vendor {
    /// Returns the vendor of this machine's processor.
    pub fn of_host() -> Self {
        static VENDOR: OnceLock<Vendor> = OnceLock::new();
        *VENDOR.get_or_init(|| {
            let [_, ebx, ecx, edx] = cpuid(0);
            let name: Vec<u8> = [ebx, edx, ecx]
                .into_iter()
                .flat_map(u32::to_le_bytes)
                .collect();
            match name.as_slice() {
                b"GenuineIntel" => Self::Intel,
                b"AuthenticAMD" | b"HygonGenuine" => Self::Amd,
                _ => Self::Other,
            }
        })
    }

    /// Returns the vendor whose event select `event` is, or `None` if it is no event select.
    pub(crate) fn of(event: EventKind) -> Option<Self> {
        match event {
            EventKind::General { .. } => Some(Self::Intel),
            EventKind::Amd { .. } => Some(Self::Amd),
            EventKind::Fixed(_) => None,
        }
    }
}

/// AMD's event 0x120/01, in the layout of PERF_CTL: cycles of the clock of P-state 0, in which the TSC and MPERF count, while
/// the processor is not halted.
pub(crate) const P0_CYCLES: u64 = 0x1_0000_0120;

/// A processor: what decides which number an event has there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Processor {
    pub(crate) vendor: Vendor,
    /// The family, by CPUID.
    pub(crate) family: u8,
    /// Whether [`P0_CYCLES`] counts.
    pub(crate) has_p0_cycles: bool,
}

impl Processor {
    /// Returns this machine's processor. Where no manual says whether [`P0_CYCLES`] counts, `counts` tries that.
    pub(crate) fn of_host(counts: impl FnOnce() -> bool) -> Self {
        let [signature, ..] = cpuid(1);
        Self::of(Vendor::of_host(), signature, counts)
    }

    /// Returns the processor with this `signature`, EAX of CPUID leaf 01H.
    fn of(vendor: Vendor, signature: u32, counts: impl FnOnce() -> bool) -> Self {
        let family = family(signature);
        let has_p0_cycles = match (vendor, family) {
            (Vendor::Intel | Vendor::Other, _) => false,
            // Their manuals (BKDG) end at 0x0ff, or have nothing at 0x120.
            (Vendor::Amd, 0..=0x16) => false,
            // The PPRs name the event from Zen 4 on (PMCx120, LsNotHaltedP0Cyc), and so does Linux 6.10.
            (Vendor::Amd, 0x1a..) => true,
            (Vendor::Amd, _) if is_zen4(family, model(signature)) => true,
            // Zen to Zen 3: under no name. An event that is not there would count 0, and a guest would believe that.
            (Vendor::Amd, _) => counts(),
        };
        Self {
            vendor,
            family,
            has_p0_cycles,
        }
    }
}

/// Returns the family of a signature: the extended one counts from 0xf on (CPUID leaf 01H).
const fn family(eax: u32) -> u8 {
    let (base, extended) = ((eax >> 8 & 0xf) as u8, (eax >> 20) as u8);
    match base {
        0xf => extended.saturating_add(0xf),
        _ => base,
    }
}

/// Returns the model of a signature of family 0xf or later.
const fn model(eax: u32) -> u8 {
    (eax >> 4 & 0xf | eax >> 12 & 0xf0) as u8
}

/// Whether the processor is Zen 4 (Linux 6.12, arch/x86/kernel/cpu/amd.c, `bsp_init_amd`).
const fn is_zen4(family: u8, model: u8) -> bool {
    family == 0x19 && matches!(model, 0x10..=0x1f | 0x60..=0xaf)
}

/// Executes CPUID. /proc/cpuinfo says the same, but a process in a jail may have no /proc. Returns EAX to EDX.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "the oldest compiler has no safe CPUID")]
#[expect(clippy::allow_attributes, reason = "compilers differ")]
fn cpuid(leaf: u32) -> [u32; 4] {
    #[allow(unused_unsafe, reason = "the newest compiler has one")]
    // SAFETY: every processor of 64 bits has CPUID.
    let leaf = unsafe { std::arch::x86_64::__cpuid(leaf) };
    [leaf.eax, leaf.ebx, leaf.ecx, leaf.edx]
}

#[cfg(not(target_arch = "x86_64"))]
fn cpuid(_: u32) -> [u32; 4] {
    [0; 4]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A processor of AMD's with this signature, on a machine where the event counts or not.
    fn amd(signature: u32, counts: bool) -> Processor {
        Processor::of(Vendor::Amd, signature, || counts)
    }

    #[test]
    fn an_event_that_no_manual_names_is_tried() {
        // Naples, Rome, Dhyana, Milan.
        for eax in [0x0080_0f12, 0x0083_0f10, 0x0090_0f02, 0x00a0_0f11] {
            assert!(amd(eax, true).has_p0_cycles, "{eax:#x}");
            assert!(!amd(eax, false).has_p0_cycles, "{eax:#x}");
        }
        // Genoa, Raphael, Turin: named.
        for eax in [0x00a1_0f11, 0x00a6_0f12, 0x00b0_0f21] {
            assert!(amd(eax, false).has_p0_cycles, "{eax:#x}");
        }
        // Barcelona, Bulldozer, Jaguar: another event's number, or none.
        for eax in [0x0010_0f23, 0x0060_0f12, 0x0070_0f01] {
            assert!(!amd(eax, true).has_p0_cycles, "{eax:#x}");
        }
    }

    #[test]
    fn families_are_those_of_their_signatures() {
        for (eax, expected) in [
            (0x0010_0f23, 0x10),
            (0x0060_0f12, 0x15),
            (0x0083_0f10, 0x17),
            (0x0090_0f02, 0x18),
            (0x00a1_0f11, 0x19),
            (0x00b0_0f21, 0x1a),
            // Skylake: the extended family is another field's.
            (0x0005_0654, 0x06),
        ] {
            assert_eq!(family(eax), expected, "{eax:#x}");
        }
        assert_eq!(model(0x00a1_0f11), 0x11);
    }
}
