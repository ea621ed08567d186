//! Link arguments of the bare-metal program.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("none") {
        return;
    }
    for argument in [
        "--static",
        "--entry=payload_start",
        // The program is linked where it is loaded, because nothing applies
        // relocations.
        "--no-pie",
        // The program lies above the boot protocol's data, and within the 2 MiB
        // page that `user` opens to ring 3.
        "--image-base=0x400000",
        // The VMM finds RDPMC instructions by section, so the sections stay.
        "--strip-debug",
    ] {
        println!("cargo::rustc-link-arg-bins={argument}");
    }
}
