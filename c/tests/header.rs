//! The header that C programs include is what the Rust sources say.

use std::path::Path;
use std::{env, fs};

#[test]
fn the_header_is_up_to_date() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).expect("cbindgen.toml");
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in [
        "arm",
        "counter",
        "host",
        "kvm",
        "kvm/filter",
        "kvm/handle",
        "kvm/memory",
        "kvm/vm",
        "partition",
        "state",
        "status",
        "version",
        "x86",
        "amd",
    ] {
        let source = folder.join("src").join(source).with_extension("rs");
        if source.exists() {
            builder = builder.with_src(source);
        }
    }
    let mut made = Vec::new();
    builder.generate().expect("a header").write(&mut made);
    // The sections on safety speak of Rust's rules; the head of the header says C's.
    let made = String::from_utf8(made).expect("text");
    let made = made.replace(" *\n * # Safety\n *\n * See the crate's page.", " *");
    let made = made
        .replace(" *\n */", " */")
        .replace(" * The functions of", " *\n * The functions of");
    let committed = folder.join("include/vpmu.h");
    if env::var_os("VPMU_UPDATE_HEADER").is_some() {
        fs::write(&committed, &made).expect("to write the header");
    }
    let committed = fs::read_to_string(&committed).unwrap_or_default();
    assert!(
        made == committed,
        "include/vpmu.h is not what the sources say: VPMU_UPDATE_HEADER=1 cargo test -p vpmu-c --test header"
    );
}
