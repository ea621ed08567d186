//! Link arguments of the freestanding programs.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("none") {
        return;
    }
    for argument in [
        "--static",
        "--entry=_start",
        // Some targets ask for position independence; nothing here would
        // apply the relocations.
        "--no-pie",
        // The largest page size an arm64 kernel may have: the same file then
        // runs on kernels with pages of 4, 16 and 64 KiB.
        "-zmax-page-size=65536",
        // `perf` names functions from .symtab and files by build id; line
        // tables would only make the guest's initramfs larger.
        "--strip-debug",
        "--build-id",
    ] {
        println!("cargo::rustc-link-arg-bins={argument}");
    }
}
