//! The data that the boot loader leaves: the boot parameters ("zero page") or
//! PVH's start info, and the ACPI tables. Linux,
//! Documentation/arch/x86/boot.rst and zero-page.rst; Xen,
//! docs/misc/pvh.pandoc; ACPI 6.5, 5.2.
//!
//! Memory is read through a function, so that host tests can supply their own.

/// The program leaves further processors alone.
pub const MAX_CPUS: usize = 8;

/// The facts about the machine that the tests need.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Boot {
    /// The address of the command line.
    pub command_line: u64,
    /// The length of the command line.
    pub command_line_length: usize,
    /// APIC identifiers of the processors, the first [`MAX_CPUS`].
    pub apic_ids: [u8; MAX_CPUS],
    /// Number of these processors.
    pub cpus: usize,
    /// Whether QEMU's machine booted the program: the PMU is then the emulated processor's own.
    pub native: bool,
}

/// The first word of PVH's start info.
const PVH_MAGIC: u64 = 0x336e_c578;
/// The longest command line that is read.
const MAX_COMMAND_LINE: u64 = 2048;

/// Reads memory, a byte at an address.
pub trait Memory {
    /// Returns the byte at `address`.
    fn byte(&self, address: u64) -> u8;

    /// Returns the little-endian number of `bytes` bytes, at most 8, at
    /// `address`.
    fn number(&self, address: u64, bytes: u64) -> u64 {
        (0..bytes).fold(0, |number, n| {
            number | u64::from(self.byte(address + n)) << (8 * n)
        })
    }

    /// Returns whether `text` is at `address`.
    fn has(&self, address: u64, text: &[u8]) -> bool {
        (address..)
            .zip(text)
            .all(|(at, byte)| self.byte(at) == *byte)
    }
}

impl Boot {
    /// Reads the boot parameters, or PVH's start info, at `parameters` and
    /// the processors in ACPI's MADT.
    ///
    /// # Errors
    ///
    /// Names the missing part.
    pub fn read(memory: &impl Memory, parameters: u64) -> Result<Self, &'static str> {
        let native = memory.number(parameters, 4) == PVH_MAGIC;
        let (command_line, length, rsdp) = if native {
            let line = memory.number(parameters + 24, 8);
            let end = (0..MAX_COMMAND_LINE).find(|n| line == 0 || memory.byte(line + n) == 0);
            let length = end.unwrap_or(MAX_COMMAND_LINE);
            (line, length, memory.number(parameters + 32, 8))
        } else {
            let line = memory.number(parameters + 0x228, 4);
            let length = memory.number(parameters + 0x238, 4);
            (line, length, memory.number(parameters + 0x70, 8))
        };
        let mut boot = Self {
            command_line,
            command_line_length: length as usize,
            apic_ids: [0; MAX_CPUS],
            cpus: 0,
            native,
        };
        let madt = find_madt(memory, rsdp)?;
        let end = madt + memory.number(madt + 4, 4);
        let mut at = madt + 44;
        while at + 2 <= end {
            let (kind, length) = (memory.byte(at), u64::from(memory.byte(at + 1)));
            if length < 2 {
                return Err("an empty entry in the MADT");
            }
            // The entry is a processor's local APIC, and it is enabled.
            if kind == 0 && memory.number(at + 4, 4) & 1 != 0 && boot.cpus < MAX_CPUS {
                boot.apic_ids[boot.cpus] = memory.byte(at + 3);
                boot.cpus += 1;
            }
            at += length;
        }
        Ok(boot)
    }
}

fn find_madt(memory: &impl Memory, rsdp: u64) -> Result<u64, &'static str> {
    if rsdp == 0 || !memory.has(rsdp, b"RSD PTR ") {
        return Err("no ACPI root pointer in the boot parameters");
    }
    // ACPI 1.0 has an RSDT, whose entries have 32 bits.
    let (table, signature, bytes) = match memory.byte(rsdp + 15) {
        0 => (memory.number(rsdp + 16, 4), b"RSDT", 4),
        _ => (memory.number(rsdp + 24, 8), b"XSDT", 8),
    };
    if !memory.has(table, signature) {
        return Err("no RSDT or XSDT in ACPI");
    }
    let end = table + memory.number(table + 4, 4);
    (table + 36..end)
        .step_by(bytes as usize)
        .map(|entry| memory.number(entry, bytes))
        .find(|&table| memory.has(table, b"APIC"))
        .ok_or("no MADT in ACPI")
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Bytes(Vec<u8>);

    impl Memory for Bytes {
        fn byte(&self, address: u64) -> u8 {
            self.0.get(address as usize).copied().unwrap_or(0xff)
        }
    }

    impl Bytes {
        fn put(&mut self, at: usize, bytes: &[u8]) {
            self.0[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }

    /// Returns boot parameters at 0x1000, with two processors of three enabled.
    fn machine() -> Bytes {
        let mut memory = Bytes(vec![0; 0x4000]);
        memory.put(0x1228, &0x3000_u32.to_le_bytes());
        memory.put(0x1238, &7_u32.to_le_bytes());
        memory.put(0x1070, &0x2000_u64.to_le_bytes());
        memory.put(0x2000, b"RSD PTR ");
        memory.0[0x200f] = 2;
        memory.put(0x2018, &0x2100_u64.to_le_bytes());
        memory.put(0x2100, b"XSDT");
        memory.put(0x2104, &52_u32.to_le_bytes());
        memory.put(0x2124, &0x2300_u64.to_le_bytes());
        memory.put(0x212c, &0x2200_u64.to_le_bytes());
        memory.put(0x2300, b"FACP");
        memory.put(0x2200, b"APIC");
        memory.put(0x2204, &(44_u32 + 8 + 12 + 8 + 8).to_le_bytes());
        memory.put(0x222c, &[0, 8, 0, 0, 1, 0, 0, 0]);
        memory.put(0x2234, &[1, 12]);
        memory.put(0x2240, &[0, 8, 1, 3, 1, 0, 0, 0]);
        memory.put(0x2248, &[0, 8, 2, 4, 0, 0, 0, 0]);
        memory
    }

    #[test]
    fn processors_and_the_command_line_are_found() {
        let boot = Boot::read(&machine(), 0x1000).unwrap();
        assert_eq!((boot.command_line, boot.command_line_length), (0x3000, 7));
        assert_eq!(boot.apic_ids[..boot.cpus], [0, 3]);
    }

    #[test]
    fn pvhs_start_info_and_an_rsdt_do_as_well() {
        let mut memory = machine();
        memory.put(0x1100, &PVH_MAGIC.to_le_bytes());
        memory.put(0x1118, &0x3000_u64.to_le_bytes());
        memory.put(0x1120, &0x2000_u64.to_le_bytes());
        memory.put(0x3000, b"test=amd\0");
        memory.0[0x200f] = 0;
        memory.put(0x2010, &0x2100_u32.to_le_bytes());
        memory.put(0x2100, b"RSDT");
        memory.put(0x2104, &44_u32.to_le_bytes());
        memory.put(0x2124, &0x2300_u32.to_le_bytes());
        memory.put(0x2128, &0x2200_u32.to_le_bytes());
        let boot = Boot::read(&memory, 0x1100).unwrap();
        assert_eq!((boot.command_line, boot.command_line_length), (0x3000, 8));
        assert!(boot.native && boot.apic_ids[..boot.cpus] == [0, 3]);
    }

    #[test]
    fn what_is_missing_is_named() {
        for (at, what) in [(0x2000, "root"), (0x2100, "XSDT"), (0x2200, "MADT")] {
            let mut memory = machine();
            memory.0[at] = b'x';
            let error = Boot::read(&memory, 0x1000).unwrap_err();
            assert!(error.contains(what), "{error}");
        }
        let mut memory = machine();
        memory.0[0x222d] = 0;
        assert!(Boot::read(&memory, 0x1000).is_err(), "no endless loop");
    }
}
