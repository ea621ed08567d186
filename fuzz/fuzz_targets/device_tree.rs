//! Device trees that lie: each is refused, or becomes a machine and a tree for the guest that can be
//! read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vpmu_monitor::boot::device_tree::{self, Machine};

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
});

fn check(tree: &[u8]) {
    let _ = device_tree::command_line(tree);
    let _ = Machine::read(tree);
    if let Ok(guest) = device_tree::for_guest(tree, &[0x4020_0000..0x4100_0000], 0x0900_0000, None) {
        assert!(device_tree::command_line(&guest).is_ok());
    }
}
