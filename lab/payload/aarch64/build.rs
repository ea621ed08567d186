//! Link arguments of the bare-metal image.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=image.ld");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("none") {
        return;
    }
    let folder = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    for argument in [
        &format!("-T{folder}/image.ld"),
        // The image runs wherever it is loaded: the linker leaves relative
        // relocations, which `entry` applies. The target's code is not
        // position-independent, so they lie in read-only sections too.
        "--pie",
        "--no-dynamic-linker",
        "-znotext",
        // This is the format that a boot loader takes; no objcopy is needed.
        "--oformat=binary",
    ] {
        println!("cargo::rustc-link-arg-bins={argument}");
    }
}
