//! Linking of the bare-metal image.

fn main() {
    println!("cargo::rerun-if-changed=monitor.ld");
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "none") {
        let folder = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
        for argument in [
            &format!("-T{folder}/monitor.ld"),
            "-pie",
            "--no-dynamic-linker",
            // Relocations are applied everywhere, `.rodata` included: all of it is our own memory.
            "-znotext",
            "--oformat=binary",
        ] {
            println!("cargo::rustc-link-arg-bins={argument}");
        }
    }
}
