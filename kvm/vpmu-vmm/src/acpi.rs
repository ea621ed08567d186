//! The ACPI tables (ACPI 6.5, chapter 5): processors, interrupt controllers, and the power-off.
//!
//! Debian's kernels find processors in ACPI only, and power off with it. The FADT declares absent
//! devices, so that Linux does not probe for a keyboard controller, which takes a second.

use acpi_tables::fadt::{FADT, FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, ProcessorLocalApic};
use acpi_tables::{Aml, aml, facs::FACS, rsdp::Rsdp, sdt::Sdt, xsdt::XSDT};

/// Power management registers, as [`ports`](super::ports) has them.
pub(super) const PM1_EVENT: u16 = 0x600;
pub(super) const PM1_CONTROL: u16 = 0x604;
/// The PC's reset register, and the value to write.
pub(super) const RESET: u16 = 0xcf9;
pub(super) const RESET_VALUE: u8 = 6;
/// The sleep type that powers off, as `_S5` says.
pub(super) const S5: u8 = 5;

const SCI: u8 = 9;
const LOCAL_APIC: u32 = 0xfee0_0000;
const IO_APIC: u32 = 0xfec0_0000;

const OEM: [u8; 6] = *b"VPMU  ";
const TABLE: [u8; 8] = *b"VPMUVMM ";
const REVISION: u32 = 1;

fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

/// Returns a table that has only the header.
fn table(signature: [u8; 4], revision: u8) -> Sdt {
    Sdt::new(signature, 36, revision, OEM, TABLE, REVISION)
}

fn port(width: u8, address: u16) -> GAS {
    let size = AccessSize::Undefined;
    GAS::new(AddressSpace::SystemIo, width, 0, size, address.into())
}

/// Returns the MADT. It is made by hand except for its structures, because the crate's MADT says
/// that there are no 8259s.
fn madt(vcpus: u8) -> Sdt {
    const PCAT_COMPAT: u32 = 1 << 0;
    // Source override: the SCI is level triggered, active high.
    const SCI_LINE: [u8; 10] = [2, 10, 0, SCI, SCI, 0, 0, 0, 0x0d, 0];
    let mut madt = table(*b"APIC", 5);
    madt.append(LOCAL_APIC);
    madt.append(PCAT_COMPAT);
    for cpu in 0..vcpus {
        let cpu = ProcessorLocalApic::new(cpu, cpu, EnabledStatus::Enabled);
        madt.append_slice(&bytes(&cpu));
    }
    madt.append_slice(&bytes(&IoApic::new(0, IO_APIC, 0)));
    madt.append_slice(&SCI_LINE);
    madt
}

fn fadt(facs: u64, dsdt: u64) -> FADT {
    const NO_VGA: u16 = 1 << 2;
    const NO_CMOS_CLOCK: u16 = 1 << 5;
    let mut fadt = FADTBuilder::new(OEM, TABLE, REVISION);
    fadt.firmware_ctrl = (facs as u32).into();
    fadt.x_firmware_ctrl = facs.into();
    fadt.dsdt = (dsdt as u32).into();
    fadt.x_dsdt = dsdt.into();
    fadt.sci_int = u16::from(SCI).into();
    fadt.pm1a_evt_blk = u32::from(PM1_EVENT).into();
    fadt.pm1a_cnt_blk = u32::from(PM1_CONTROL).into();
    fadt.pm1_evt_len = 4;
    fadt.pm1_cnt_len = 2;
    fadt.x_pm1a_evt_blk = port(32, PM1_EVENT);
    fadt.x_pm1a_cnt_blk = port(16, PM1_CONTROL);
    // These latencies are greater than ACPI allows, so there is no C2, and no C3.
    fadt.p_lvl2_lat = 101.into();
    fadt.p_lvl3_lat = 1001.into();
    fadt.iapc_boot_arch = (NO_VGA | NO_CMOS_CLOCK).into();
    fadt.reset_reg = port(8, RESET);
    fadt.reset_value = RESET_VALUE;
    // There is no fixed power button and no fixed sleep button.
    [
        Flags::Wbinvd,
        Flags::ProcC1,
        Flags::PwrButton,
        Flags::SlpButton,
        Flags::ResetRegSup,
    ]
    .into_iter()
    .fold(fadt, FADTBuilder::flag)
    .finalize()
}

/// Returns all tables, for the address `base`. The first is the RSDP.
pub(super) fn tables(base: u64, vcpus: u8) -> Vec<u8> {
    let mut all = vec![0; 64];
    let mut place = |bytes: &[u8]| {
        let at = all.len().next_multiple_of(64);
        all.resize(at, 0);
        all.extend(bytes);
        base + at as u64
    };
    let mut facs = FACS::new();
    facs.version = 2;
    let facs = place(&bytes(&facs));
    let off = aml::Package::new(vec![&S5, &aml::ZERO, &aml::ZERO, &aml::ZERO]);
    let mut dsdt = table(*b"DSDT", 2);
    dsdt.append_slice(&bytes(&aml::Name::new("_S5_".into(), &off)));
    let dsdt = place(dsdt.as_slice());
    let fadt = place(&bytes(&fadt(facs, dsdt)));
    let madt = place(madt(vcpus).as_slice());
    let mut xsdt = XSDT::new(OEM, TABLE, REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = place(&bytes(&xsdt));
    let rsdp = bytes(&Rsdp::new(OEM, xsdt));
    all[..rsdp.len()].copy_from_slice(&rsdp);
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
