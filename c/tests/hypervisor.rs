//! What a hypervisor must know of the object that `build-arm` makes: its size, its stack, its registers.
//!
//! The instructions are read as the architecture encodes them (DDI 0487, C4.1 "A64 instruction set encoding"); each has
//! four bytes, and rustc puts no data between them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use object::read::elf::ElfFile64;
use object::{
    Object as _, ObjectSection as _, ObjectSymbol as _, RelocationFlags, RelocationTarget, elf,
};

/// A hypervisor may have stacks of a page, of which it uses some itself.
const STACK: u64 = 1 << 10;
/// What a hypervisor without `--gc-sections` gains, with either design or with both.
const TEXT: u64 = 40_000;

/// `None`: this machine cannot build for bare metal.
fn object_of(parts: &[&str]) -> Option<Vec<u8>> {
    let room = tempfile::tempdir().expect("a folder");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut build = Command::new(folder.join("build-arm"));
    let ended = build.arg(room.path()).args(parts).output();
    let ended = ended.expect("to start build-arm");
    let said = String::from_utf8_lossy(&ended.stderr);
    if said.contains("no Rust toolchain has") {
        println!("skipped: {said}");
        return None;
    }
    assert!(ended.status.success(), "{said}");
    Some(std::fs::read(room.path().join("vpmu_arm.o")).expect("the object"))
}

/// A function of the object.
#[derive(Debug, Default)]
struct Function {
    frame: u64,
    calls: BTreeSet<String>,
}

/// How far an instruction moves the stack pointer down: `sub sp, sp, #n`, or a store with pre-index.
fn pushes(code: u32) -> u64 {
    const SP: u32 = 31;
    let (rn, rd) = (code >> 5 & 31, code & 31);
    if code & 0xff80_0000 == 0xd100_0000 && (rn, rd) == (SP, SP) {
        let shift = if code >> 22 & 1 != 0 { 12 } else { 0 };
        return u64::from(code >> 10 & 0xfff) << shift;
    }
    // STP Xt1, Xt2, [SP, #imm7 * 8]! and STR Xt, [SP, #imm9]!
    let pair = code & 0xffc0_0000 == 0xa980_0000 && rn == SP;
    let single = code & 0xffe0_0c00 == 0xf800_0c00 && rn == SP;
    if pair {
        let imm7 = (code << 10) as i32 >> 25;
        return u64::from((-imm7 * 8).max(0).unsigned_abs());
    }
    if single {
        let imm9 = (code << 11) as i32 >> 23;
        return u64::from((-imm9).max(0).unsigned_abs());
    }
    0
}

/// Whether an instruction names a floating-point, SIMD or SVE register.
fn is_vector(code: u32) -> bool {
    let op0 = code >> 25 & 15;
    // Data processing on them; loads and stores with V set; SVE and SME.
    op0 & 7 == 7 || op0 & 5 == 4 && code >> 26 & 1 != 0 || op0 == 2 || code >> 25 == 0x40
}

/// The functions, with the names of those that each calls.
fn functions(object: &[u8]) -> BTreeMap<String, Function> {
    let file = ElfFile64::<object::LittleEndian>::parse(object).expect("an ELF file");
    assert_eq!(file.architecture(), object::Architecture::Aarch64);
    let symbols: Vec<_> = file
        .symbols()
        .filter(|symbol| symbol.kind() == object::SymbolKind::Text && symbol.size() > 0)
        .collect();
    let name_at = |section, address: u64| {
        symbols
            .iter()
            .find(|s| {
                s.section_index() == Some(section)
                    && (s.address()..s.address() + s.size()).contains(&address)
            })
            .map(|s| s.name().expect("a name").to_owned())
    };
    let mut functions: BTreeMap<String, Function> = BTreeMap::new();
    for section in file
        .sections()
        .filter(|s| s.kind() == object::SectionKind::Text)
    {
        let mut relocations = BTreeMap::new();
        for (at, relocation) in section.relocations() {
            let RelocationFlags::Elf { r_type } = relocation.flags() else {
                continue;
            };
            let RelocationTarget::Symbol(index) = relocation.target() else {
                continue;
            };
            if ![elf::R_AARCH64_CALL26, elf::R_AARCH64_JUMP26].contains(&r_type) {
                continue;
            }
            let symbol = file.symbol_by_index(index).expect("a symbol");
            let local = symbol.section_index().and_then(|section| {
                name_at(section, symbol.address() + relocation.addend() as u64)
            });
            let called = local.unwrap_or_else(|| symbol.name().expect("a name").to_owned());
            relocations.insert(at, called);
        }
        let data = section.data().expect("the code");
        for (n, word) in data.chunks_exact(4).enumerate() {
            let at = 4 * n as u64;
            let code = u32::from_le_bytes(word.try_into().expect("four bytes"));
            let Some(own) = name_at(section.index(), section.address() + at) else {
                continue;
            };
            assert!(
                !is_vector(code),
                "{own}+{at:#x}: {code:#010x} uses a vector register"
            );
            let function = functions.entry(own).or_default();
            function.frame += pushes(code);
            // B and BL without a relocation stay in their section.
            let branches = code & 0x7c00_0000 == 0x1400_0000;
            let distance = (code << 6) as i32 >> 4;
            let called = relocations.get(&at).cloned().or_else(|| {
                let to = (section.address() + at).wrapping_add_signed(distance.into());
                name_at(section.index(), to).filter(|_| branches)
            });
            function.calls.extend(called);
        }
    }
    for (name, function) in &mut functions {
        function.calls.remove(name);
    }
    functions
}

/// The deepest stack of a function, without what the hypervisor's own functions take.
fn deepest<'a>(
    name: &'a str,
    functions: &'a BTreeMap<String, Function>,
    above: &mut Vec<&'a str>,
) -> u64 {
    let Some(function) = functions.get(name) else {
        return 0;
    };
    assert!(!above.contains(&name), "{name} calls itself, by {above:?}");
    above.push(name);
    let calls = function.calls.iter();
    let below = calls.map(|called| deepest(called, functions, above)).max();
    above.pop();
    function.frame + below.unwrap_or(0)
}

#[test]
fn the_stack_is_bounded_and_no_vector_register_is_used() {
    let parts = ["partition", "backed", "arm", "el2"];
    let Some(object) = object_of(&parts) else {
        return;
    };
    let functions = functions(&object);
    let mut entries = 0;
    for name in functions.keys().filter(|name| name.starts_with("vpmu_")) {
        let deepest = deepest(name, &functions, &mut Vec::new());
        println!("{deepest:5} {name}");
        assert!(deepest <= STACK, "{name} takes {deepest} bytes of stack");
        entries += 1;
    }
    assert!(entries >= 40, "only {entries} entry points were found");
    let frames = functions.values().filter(|function| function.frame > 0);
    assert!(frames.count() > entries / 2, "frames are not found");
}

#[test]
fn the_object_is_small_and_asks_for_nothing_unusual() {
    let Some(object) = object_of(&["partition", "backed", "el2"]) else {
        return;
    };
    let file = ElfFile64::<object::LittleEndian>::parse(&*object).expect("an ELF file");
    let size = |kind: fn(&str) -> bool| {
        let sections = file.sections().filter(|s| s.name().is_ok_and(kind));
        sections.map(|section| section.size()).sum::<u64>()
    };
    let text = size(|name| name.starts_with(".text"));
    let constants = size(|name| name.starts_with(".rodata"));
    println!("{text} bytes of text, {constants} of constants");
    assert!(
        text > 10_000 && text + constants <= TEXT,
        "{text} + {constants}"
    );
    assert_eq!(size(|name| name.contains("eh_frame")), 0, "unwind tables");
    let wanted = file.symbols().filter(object::ObjectSymbol::is_undefined);
    let wanted: BTreeSet<_> = wanted.filter_map(|symbol| symbol.name().ok()).collect();
    let usual = ["", "memcpy", "memset"];
    assert!(wanted.iter().all(|name| usual.contains(name)), "{wanted:?}");
}

#[test]
fn instructions_are_told_apart() {
    // stp x29, x30, [sp, #-96]!; str x19, [sp, #-16]!; sub sp, sp, #0x10; sub sp, sp, #1, lsl #12; stp x19, x20, [sp, #16]
    let pushed = [
        0xa9ba_7bfd,
        0xf81f_0ff3,
        0xd100_43ff,
        0xd140_07ff,
        0xa901_53f3,
    ];
    assert_eq!(pushed.map(pushes), [96, 16, 16, 4096, 0]);
    // ldr q0, [x0]; stp q0, q1, [x0]; fadd d0, d0, d0; movi v0.2d, #0; ldr s0, [x0, x1]; ptrue p0.b (SVE)
    for code in [
        0x3dc0_0000,
        0xad00_0400,
        0x1e60_2800,
        0x6f00_e400,
        0xbc61_6800,
        0x2518_e3e0,
    ] {
        assert!(is_vector(code), "{code:#x}");
    }
    // ldr x0, [x1]; stp x0, x1, [sp]; add; mrs; bl; ldr (literal); cas; madd; blr
    for code in [
        0xf940_0020,
        0xa900_07e0,
        0x8b00_0000,
        0xd53b_9c00,
        0x9400_0000,
        0x5800_0000,
        0xc8a0_7c20,
        0x9b00_7c00,
        0xd63f_0000,
    ] {
        assert!(!is_vector(code), "{code:#x}");
    }
}
