//! Device trees, ACPI tables and memory maps of UEFI's that lie: each is refused, or becomes a machine and a tree for the
//! guest that can be read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vpmu_monitor::boot::{
    acpi::{self, Tables},
    device_tree::{self, Machine},
    uefi::{self, Handover, Map},
};

fuzz_target!(|data: &[u8]| {
    check(data);
    // The same with a header that leads to the rest: totalsize, struct at 56, strings behind it.
    let words = [
        0xd00d_feed,
        56 + data.len() as u32,
        56,
        56 + data.len() as u32 / 2,
        40,
        17,
        16,
        0,
    ];
    let sizes = [
        data.len() as u32 - data.len() as u32 / 2,
        data.len() as u32 / 2,
    ];
    let header = words
        .iter()
        .chain(&sizes)
        .flat_map(|word| word.to_be_bytes());
    let tree: Vec<u8> = header.chain([0; 16]).chain(data.iter().copied()).collect();
    check(&tree);
    check_uefi(data);
});

/// The bytes as a memory map, and behind a signature as each table: the XSDT names four, by number.
fn check_uefi(data: &[u8]) {
    let (map, rest) = data.split_at(data.len() / 4);
    let signatures = [b"XSDT", b"APIC", b"FACP", b"GTDT", b"SPCR"];
    let mut tables: Vec<Vec<u8>> = signatures.map(|signature| signature.to_vec()).into();
    for table in &mut tables {
        table.resize(acpi::HEADER, 0);
    }
    tables[0].extend((1..5_u64).flat_map(u64::to_le_bytes));
    for (table, part) in tables[1..].iter_mut().zip(rest.chunks(rest.len() / 4 + 1)) {
        table.extend_from_slice(part);
    }
    let mut rsdp = b"RSD PTR ".to_vec();
    rsdp.resize(acpi::RSDP, 0);
    let found = Tables::find(&rsdp, |at| tables.get(at as usize).map(Vec::as_slice));
    let handover = Handover {
        words: "",
        initrd: None,
        system_table: 0,
        map: Map { bytes: map, stride: 48 },
        version: 1,
        map_at: 0..0x1000,
    };
    check(&uefi::tree(found.unwrap().tree(None), &handover).unwrap());
    handover.map.without(&[0x1000..0x20_0000]);
    acpi::hide_its(&mut tables[1]);
}

fn check(tree: &[u8]) {
    let _ = device_tree::command_line(tree);
    let _ = Machine::read(tree);
    if let Ok(guest) = device_tree::for_guest(tree, &[0x4020_0000..0x4100_0000], 0x0900_0000, None, None) {
        assert!(device_tree::command_line(&guest).is_ok());
    }
}
