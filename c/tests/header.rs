//! The headers that C programs include are what the Rust sources say.

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

/// The headers, each with what it is of and the beginnings of the names that it has. Names that no other has are the first's.
const PARTS: [(&str, &str, &[&str]); 5] = [
    (
        "types",
        "what all parts have in common.",
        &[
            "vpmu_status",
            "vpmu_outcome",
            "vpmu_event",
            "vpmu_host",
            "vpmu_version",
        ],
    ),
    (
        "arm",
        "the PMUs of Arm. The order of calls at EL2 is in docs/embed/embedding-el2.md.",
        &[
            "vpmu_arm",
            "vpmu_backed",
            "vpmu_isolates",
            "vpmu_partition",
            "vpmu_registers",
            "vpmu_traps",
        ],
    ),
    (
        "x86",
        "the PMUs of x86.",
        &["vpmu_x86", "vpmu_cpuid", "vpmu_amd"],
    ),
    (
        "el2",
        "what every hypervisor at EL2 of Arm needs around a PMU.",
        &["vpmu_el2"],
    ),
    (
        "kvm",
        "VMMs on Linux KVM. They count by perf events and allocate. Calls for one PMU wait for one another.",
        &["vpmu_kvm"],
    ),
];

/// A hypervisor's author reads one of them whole.
const LONGEST: usize = 500;

/// What a block of the generated header declares: its name, and whether it is a function.
fn declared(block: &str) -> Option<(&str, bool)> {
    // Behind the comment of the whole.
    let code = block.split_once("*/\n").map_or(block, |(_, code)| code);
    let is_function = code.contains('(') && !code.contains('{') && !code.starts_with('#');
    let words = code.split(|c: char| !(c.is_alphanumeric() || c == '_'));
    let mut names = words.filter(|word| word.to_lowercase().starts_with("vpmu_"));
    let name = if is_function {
        // Of a result's type, the function and its arguments the one before the parenthesis.
        let (head, _) = code.split_once('(')?;
        head.rsplit([' ', '*']).next()?
    } else {
        names.next()?
    };
    (name != "VPMU_H").then_some((name, is_function))
}

fn part_of(name: &str) -> usize {
    // What `create` answers, and no part of `vpmu_backed`.
    if name == "VPMU_BACKED" {
        return 0;
    }
    let name = name.to_lowercase();
    let own = |(_, _, names): &(_, _, &[&str])| names.iter().any(|own| name.starts_with(own));
    PARTS.iter().position(own).unwrap_or(0)
}

/// `source` with the functions' pointers as cbindgen knows them.
fn with_raw_pointers(source: &str) -> String {
    let pointers = [("Mut<'_, ", "*mut "), ("Ref<'_, ", "*const ")];
    pointers
        .into_iter()
        .fold(source.to_owned(), |source, (ours, raw)| {
            let mut pieces = source.split(ours);
            let first = pieces.next().unwrap_or_default().to_owned();
            pieces.fold(first, |made, piece| {
                made + raw + &piece.replacen('>', "", 1)
            })
        })
}

fn generated() -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).expect("cbindgen.toml");
    let mut builder = cbindgen::Builder::new().with_config(config);
    let room = tempfile::tempdir().expect("a folder");
    for name in [
        "status",
        "counter",
        "host",
        "state",
        "version",
        "filter",
        "registers",
        "arm",
        "partition",
        "backed",
        "el2",
        "x86",
        "amd",
        "kvm",
        "kvm/filter",
        "kvm/handle",
        "kvm/memory",
        "kvm/vm",
    ] {
        let source = folder.join("src").join(name).with_extension("rs");
        if let Ok(source) = fs::read_to_string(source) {
            let for_cbindgen = room.path().join(name.replace('/', "_"));
            fs::write(&for_cbindgen, with_raw_pointers(&source)).expect("a file");
            builder = builder.with_src(for_cbindgen);
        }
    }
    let mut made = Vec::new();
    builder.generate().expect("a header").write(&mut made);
    short_comments(&String::from_utf8(made).expect("text"))
}

/// `text` with comments of one line on one line.
fn short_comments(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let (mut short, mut n) = (String::new(), 0);
    while let Some(line) = lines.get(n) {
        let begins = line.trim_start() == "/**";
        let ends = lines.get(n + 2).is_some_and(|end| end.trim() == "*/");
        if let (true, true, Some(only)) = (begins, ends, lines.get(n + 1)) {
            let only = only.trim_start().trim_start_matches("* ");
            let _ = writeln!(short, "{line} {only} */");
            n += 3;
        } else {
            let _ = writeln!(short, "{line}");
            n += 1;
        }
    }
    short
}

/// The text of a header with these declarations.
fn header(part: &str, of: &str, head: &str, types: &[&str], functions: &[&str]) -> String {
    let mut text = format!("/*\n * vpmu: {of}\n *\n{head} */\n\n");
    let guard = format!("VPMU_{}_H", part.to_uppercase());
    let _ = write!(text, "#ifndef {guard}\n#define {guard}\n\n");
    if part == "types" {
        text.push_str("#include <stdbool.h>\n#include <stddef.h>\n#include <stdint.h>\n\n");
    } else {
        let over = if part == "el2" { "arm" } else { "types" };
        let _ = write!(text, "#include \"vpmu_{over}.h\"\n\n");
    }
    for declaration in types {
        let _ = write!(text, "{}\n\n", declaration.trim_matches('\n'));
    }
    text.push_str("#ifdef __cplusplus\nextern \"C\" {\n#endif\n\n");
    for declaration in functions {
        let _ = write!(text, "{}\n\n", declaration.trim_matches('\n'));
    }
    text.push_str("#ifdef __cplusplus\n}\n#endif\n\n");
    let _ = writeln!(text, "#endif /* {guard} */");
    text
}

#[test]
fn the_headers_are_up_to_date() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let made = generated();
    let blocks: Vec<&str> = made.split("\n\n").collect();
    for (n, (part, of, _)) in PARTS.into_iter().enumerate() {
        let of_part = |function: bool| -> Vec<&str> {
            let mine = |block: &&str| {
                declared(block).is_some_and(|(name, is)| is == function && part_of(name) == n)
            };
            blocks.iter().copied().filter(mine).collect()
        };
        let (types, functions) = (of_part(false), of_part(true));
        let head = " * Made from the Rust sources by cbindgen. Do not edit. vpmu.h says what holds for all calls.\n";
        let text = header(part, of, head, &types, &functions);
        let lines = text.lines().count();
        assert!(lines < LONGEST, "vpmu_{part}.h has {lines} lines");
        let committed = folder.join(format!("vpmu_{part}.h"));
        if env::var_os("VPMU_UPDATE_HEADER").is_some() {
            fs::write(&committed, &text).expect("to write the header");
        }
        assert!(
            fs::read_to_string(&committed).unwrap_or_default() == text,
            "include/vpmu_{part}.h is not what the sources say: VPMU_UPDATE_HEADER=1 cargo test -p vpmu-c --test header"
        );
    }
}
