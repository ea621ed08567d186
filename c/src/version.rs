//! The library's version.

/// Returns the version of the library that the program runs with: major, minor and patch, 8 bits each, the major in bits
/// 23:16. Programs that were compiled against a library of the same major version go on to work. Before 1.0, of the same
/// minor version.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_version() -> u32 {
    const fn number(text: &str) -> u32 {
        let (bytes, mut at, mut number) = (text.as_bytes(), 0, 0);
        while at < bytes.len() {
            number = number * 10 + (bytes[at] - b'0') as u32;
            at += 1;
        }
        number
    }
    const VERSION: u32 = number(env!("CARGO_PKG_VERSION_MAJOR")) << 16
        | number(env!("CARGO_PKG_VERSION_MINOR")) << 8
        | number(env!("CARGO_PKG_VERSION_PATCH"));
    VERSION
}
