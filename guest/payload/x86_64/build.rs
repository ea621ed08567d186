//! Link arguments of the bare-metal program.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("none") {
        return;
    }
    for argument in [
        "--static",
        "--entry=payload_start",
        // Linked where it is loaded: nothing applies relocations.
        "--no-pie",
        // Above what the boot protocol puts below, and within the 2 MiB page
        // that `user` opens to ring 3.
        "--image-base=0x400000",
        // The VMM finds RDPMC instructions by section, so those stay.
        "--strip-debug",
    ] {
        println!("cargo::rustc-link-arg-bins={argument}");
    }
}
