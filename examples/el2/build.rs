//! Linking of the bare-metal image.

fn main() {
    println!("cargo::rerun-if-changed=el2.ld");
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "none") {
        let folder = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
        println!("cargo::rustc-link-arg-bins=-T{folder}/el2.ld");
        println!("cargo::rustc-link-arg-bins=--oformat=binary");
    }
}
