//! Command lines: the monitor's words are understood or named, and none of them reaches the guest.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vpmu_monitor::boot::words::{GuestWords, Settings};

fuzz_target!(|line: &str| {
    let _ = Settings::parse(line);
    let guest = GuestWords(line).to_string();
    assert!(
        !guest
            .split_ascii_whitespace()
            .any(|word| word.starts_with("vpmu.")),
        "{guest:?}"
    );
    assert!(guest.len() <= line.len());
    assert_eq!(GuestWords(&guest).to_string(), guest);
});
