//! The ACPI tables (ACPI 6.5, chapter 5): processors, interrupt controllers, how to power off.
//!
//! Debian's kernels find processors in ACPI only, and switch off with it. What is not there is said
//! not to be, above all the keyboard controller, for which Linux would wait a second.

/// Power management registers, as [`ports`](super::ports) has them.
pub(super) const PM1_EVENT: u16 = 0x600;
pub(super) const PM1_CONTROL: u16 = 0x604;
/// The PC's reset register, and what is written to it.
pub(super) const RESET: u16 = 0xcf9;
pub(super) const RESET_VALUE: u8 = 6;
/// The sleep type that powers off, as `_S5` says.
pub(super) const S5: u8 = 5;

const SCI: u8 = 9;
const LOCAL_APIC: u32 = 0xfee0_0000;
const IO_APIC: u32 = 0xfec0_0000;

/// A system description table: the header, filled in, and `body`.
fn table(signature: &[u8; 4], revision: u8, body: &[u8]) -> Vec<u8> {
    let mut table = Vec::with_capacity(36 + body.len());
    table.extend(signature);
    table.extend((36 + body.len() as u32).to_le_bytes());
    table.extend([revision, 0]);
    table.extend(b"VPMU  VPMUVMM ");
    table.extend(1_u32.to_le_bytes());
    table.extend(b"VPMU");
    table.extend(1_u32.to_le_bytes());
    table.extend(body);
    table[9] = checksum(&table);
    table
}

/// The byte that makes the sum of `bytes` and itself 0.
fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0_u8, |sum, n| sum.wrapping_sub(*n))
}

/// A generic address: a port.
fn port(width: u8, address: u16) -> [u8; 12] {
    let mut gas = [0; 12];
    gas[..4].copy_from_slice(&[1, width, 0, 0]);
    gas[4..6].copy_from_slice(&address.to_le_bytes());
    gas
}

fn madt(vcpus: u8) -> Vec<u8> {
    let mut body = Vec::new();
    body.extend(LOCAL_APIC.to_le_bytes());
    body.extend(1_u32.to_le_bytes()); // there are 8259s as well
    for cpu in 0..vcpus {
        body.extend([0, 8, cpu, cpu, 1, 0, 0, 0]);
    }
    body.extend([1, 12, 0, 0]);
    body.extend(IO_APIC.to_le_bytes());
    body.extend(0_u32.to_le_bytes());
    // The SCI is level triggered, active high.
    body.extend([2, 10, 0, SCI, SCI, 0, 0, 0, 0x0d, 0]);
    table(b"APIC", 5, &body)
}

fn fadt(facs: u64, dsdt: u64) -> Vec<u8> {
    const NO_VGA: u16 = 1 << 2;
    const NO_CMOS_CLOCK: u16 = 1 << 5;
    // WBINVD works, C1 works, no fixed power button, no fixed sleep button, a reset register.
    const FLAGS: u32 = 1 << 0 | 1 << 2 | 1 << 4 | 1 << 5 | 1 << 10;
    let mut t = [0_u8; 276];
    let mut put = |at: usize, bytes: &[u8]| t[at..at + bytes.len()].copy_from_slice(bytes);
    put(36, &(facs as u32).to_le_bytes());
    put(40, &(dsdt as u32).to_le_bytes());
    put(46, &u16::from(SCI).to_le_bytes());
    put(56, &u32::from(PM1_EVENT).to_le_bytes());
    put(64, &u32::from(PM1_CONTROL).to_le_bytes());
    put(88, &[4, 2]);
    // No C2, no C3.
    put(96, &101_u16.to_le_bytes());
    put(98, &1001_u16.to_le_bytes());
    put(109, &(NO_VGA | NO_CMOS_CLOCK).to_le_bytes());
    put(112, &FLAGS.to_le_bytes());
    put(116, &port(8, RESET));
    put(128, &[RESET_VALUE]);
    put(131, &[5]);
    put(132, &facs.to_le_bytes());
    put(140, &dsdt.to_le_bytes());
    put(148, &port(32, PM1_EVENT));
    put(172, &port(16, PM1_CONTROL));
    table(b"FACP", 6, &t[36..])
}

/// All tables, to be put at `base`; the first is the RSDP.
pub(super) fn tables(base: u64, vcpus: u8) -> Vec<u8> {
    let mut all = vec![0; 64];
    let mut place = |bytes: &[u8]| {
        let at = all.len().next_multiple_of(64);
        all.resize(at, 0);
        all.extend(bytes);
        base + at as u64
    };
    let mut facs = [0; 64];
    facs[..4].copy_from_slice(b"FACS");
    facs[4] = 64;
    facs[32] = 2;
    let facs = place(&facs);
    // Name (_S5, Package () { 5, 0, 0, 0 })
    let s5 = [0x08, b'_', b'S', b'5', b'_', 0x12, 7, 4, 0x0a, S5, 0, 0, 0];
    let dsdt = place(&table(b"DSDT", 2, &s5));
    let fadt = place(&fadt(facs, dsdt));
    let madt = place(&madt(vcpus));
    let mut pointers = Vec::new();
    for address in [fadt, madt] {
        pointers.extend(address.to_le_bytes());
    }
    let xsdt = place(&table(b"XSDT", 1, &pointers));

    let mut rsdp = [0; 36];
    rsdp[..8].copy_from_slice(b"RSD PTR ");
    rsdp[9..15].copy_from_slice(b"VPMU  ");
    rsdp[15] = 2;
    rsdp[20] = 36;
    rsdp[24..32].copy_from_slice(&xsdt.to_le_bytes());
    rsdp[8] = checksum(&rsdp[..20]);
    rsdp[32] = checksum(&rsdp);
    all[..36].copy_from_slice(&rsdp);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_checksum_is_right_and_every_pointer_leads_to_its_table() {
        const BASE: u64 = 0xe0000;
        let all = tables(BASE, 3);
        let at = |address: u64| &all[(address - BASE) as usize..];
        let u32_of = |bytes: &[u8]| u32::from_le_bytes(bytes[..4].try_into().unwrap());
        let u64_of = |bytes: &[u8]| u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let sum = |bytes: &[u8]| bytes.iter().fold(0_u8, |sum, n| sum.wrapping_add(*n));
        let checked = |address: u64, signature: &[u8]| {
            let table = at(address);
            assert_eq!(&table[..4], signature);
            let table = &table[..u32_of(&table[4..]) as usize];
            assert_eq!(sum(table), 0, "{signature:?}");
            table
        };
        assert_eq!((sum(&all[..20]), sum(&all[..36])), (0, 0));
        let xsdt = checked(u64_of(&all[24..]), b"XSDT");
        let fadt = checked(u64_of(&xsdt[36..]), b"FACP");
        assert_eq!(fadt.len(), 276);
        assert_eq!(fadt[109] & 2, 0, "no keyboard controller");
        assert_eq!(&at(u64_of(&fadt[132..]))[..4], b"FACS");
        let dsdt = checked(u64_of(&fadt[140..]), b"DSDT");
        assert_eq!(
            usize::from(dsdt[36 + 6]) + 6,
            dsdt.len() - 36,
            "the package's length"
        );
        let madt = checked(u64_of(&xsdt[44..]), b"APIC");
        assert_eq!(madt.len(), 36 + 8 + 3 * 8 + 12 + 10);
    }
}
