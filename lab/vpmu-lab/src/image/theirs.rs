//! The user's own VMM in the KVM host: its program, its files, and what its options say of the guest.
//!
//! The options are the VMM's own, so that only they can say where it takes the kernel. Placeholders stand in them, and in
//! the text files that the user gives, for what the lab alone knows.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::elf;
use super::program::{LOADER, libraries, library_name};
use crate::image::archive::{Archive, add_file};
use crate::spec::Request;
use crate::{Error, Result, usage};

/// The folder of the VMM and its files in the KVM host.
const FOLDER: &str = "vmm";
/// The place of the kernel as an ELF file in the KVM host.
pub(crate) const UNPACKED_PLACE: &str = "guest/vmlinux";

const KERNEL: &str = "{kernel}";
const UNPACKED: &str = "{vmlinux}";
const INITRD: &str = "{initrd}";
const COMMAND_LINE: &str = "{cmdline}";
const FILES: &str = "{dir}";

/// Puts the user's VMM and its files, with nothing left to fill in, where the host starts it, and returns its place there. Its
/// libraries replace those of the host's file tree, none of which another program then uses, so that the program finds all
/// of this machine's and none of another release.
pub(crate) fn put(
    request: &Request,
    under_exec: bool,
    command_line: &str,
    archive: &mut Archive,
) -> Result<String> {
    let file = request.vmm.as_deref().unwrap_or(Path::new(""));
    let file = fs::canonicalize(file).map_err(Error::file("open", file))?;
    check_program(&file, under_exec)?;
    let name = file.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| Error::format(&file, "the name is not UTF-8; rename it"))?;
    let program = format!("{FOLDER}/{name}");
    archive.copy(&program, 0o755, &file);
    for (place, library) in libraries(&file)? {
        let place = match place.starts_with("usr/lib64/") {
            // The kernel looks for the interpreter there.
            true => place,
            false => {
                let folder = request.machine.arch.libraries();
                format!("{folder}/{}", library_name(&place))
            }
        };
        archive.copy(&place, 0o755, library);
    }
    for path in &request.vmm_files {
        match (text(path)?, path.file_name().and_then(|name| name.to_str())) {
            (Some(text), Some(name)) => {
                let text = fill(&text, request, command_line);
                archive.bytes(&format!("{FOLDER}/{name}"), 0o644, text);
            }
            _ => add_file(archive, FOLDER, path)?,
        }
    }
    Ok(format!("/{program}"))
}

/// Checks that the KVM host can run the file.
fn check_program(path: &Path, under_exec: bool) -> Result<()> {
    let refuse = |problem: &str| Err(Error::format(path, problem.to_owned()));
    let about = fs::metadata(path).map_err(Error::file("open", path))?;
    if !about.is_file() {
        return refuse("not a file: --vmm takes a program");
    }
    if about.permissions().mode() & 0o111 == 0 {
        return refuse("not executable: chmod +x, if this is the VMM's program");
    }
    let data = fs::read(path).map_err(Error::file("read", path))?;
    if data.starts_with(b"#!") {
        return refuse(
            "a script: the KVM host has no interpreter; give the program that it starts",
        );
    }
    if let Some(other) = elf::other_machine(&data) {
        return refuse(&format!(
            "a program for {other}: the KVM host is x86_64, so build the VMM for that"
        ));
    }
    match elf::needed(path)?.interpreter {
        None if under_exec => refuse(
            "linked statically, so that vpmu exec reaches none of its calls: --pmu vmm runs it as it is",
        ),
        Some(loader) if !loader.ends_with(LOADER) => refuse(&format!(
            "for {loader}, not for x86-64's GNU C library: build it for that, or link it statically"
        )),
        _ => Ok(()),
    }
}

/// Returns the contents of a text file; `None`: it holds something else.
fn text(path: &Path) -> Result<Option<String>> {
    let bytes = fs::read(path).map_err(Error::file("read", path))?;
    Ok(String::from_utf8(bytes).ok())
}

/// Returns the options with nothing left to fill in.
pub(crate) fn options(request: &Request, command_line: &str) -> Vec<String> {
    let words = request.vmm_args.iter();
    words
        .map(|word| fill(word, request, command_line))
        .collect()
}

/// Puts the guest's `command_line`, and what else a placeholder stands for, in the places of the placeholders in `text`.
fn fill(text: &str, request: &Request, command_line: &str) -> String {
    let fixed = [
        (KERNEL, "/guest/kernel".to_owned()),
        (UNPACKED, format!("/{UNPACKED_PLACE}")),
        (INITRD, "/guest/initrd".to_owned()),
        (FILES, format!("/{FOLDER}")),
        ("{vcpus}", request.machine.vcpus.to_string()),
        ("{memory}", request.machine.memory.to_string()),
        // The last, because the user's words in it may look like a placeholder.
        (COMMAND_LINE, command_line.to_owned()),
    ];
    let filled = fixed.iter();
    filled.fold(text.to_owned(), |text, (name, value)| {
        text.replace(name, value)
    })
}

/// Tells whether the VMM asks for the kernel as an ELF file.
pub(crate) fn wants_unpacked(request: &Request) -> Result<bool> {
    mentions(request, UNPACKED)
}

fn mentions(request: &Request, placeholder: &str) -> Result<bool> {
    let mut words = request.vmm_args.iter();
    let mut found = words.any(|word| word.contains(placeholder));
    for path in &request.vmm_files {
        found |= text(path)?.is_some_and(|text| text.contains(placeholder));
    }
    Ok(found)
}

/// Checks that the VMM's words name what the guest boots, and nothing that it lacks.
pub(crate) fn check_options(request: &Request) -> Result<()> {
    let ways = "in a --vmm-arg, or in a --vmm-file";
    if !mentions(request, KERNEL)? && !mentions(request, UNPACKED)? {
        return usage(format!(
            "the VMM has no word that names the kernel: give it {KERNEL} (as Debian packs it, or as --kernel gives it) or \
             {UNPACKED} (an ELF file) {ways}"
        ));
    }
    let has_command = request.command.is_some();
    for placeholder in [INITRD, COMMAND_LINE] {
        if has_command && !mentions(request, placeholder)? {
            return usage(format!(
                "the VMM has no word with {placeholder}, by which the guest comes to the command: give it {placeholder} {ways}"
            ));
        }
    }
    let has_initrd = has_command || request.initrd.is_some();
    if !has_initrd && mentions(request, INITRD)? {
        return usage(format!(
            "{INITRD}: this kernel has none: give --initrd, or leave {INITRD} out"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::spec::arch::Arch;
    use crate::spec::command::Command;

    const COMMAND_LINE: &str = "console=ttyS0 {kernel}";

    fn vmm(file: &Path, options: &[&str]) -> Request {
        let mut request = Request {
            vmm: Some(file.to_owned()),
            vmm_args: options.iter().map(|&word| word.to_owned()).collect(),
            ..Request::new(Arch::X86_64)
        };
        (request.machine.vcpus, request.machine.memory) = (2, 512);
        request
    }

    fn put(vmm: &Request, archive: &mut Archive) -> Result<String> {
        super::put(vmm, false, COMMAND_LINE, archive)
    }

    fn command() -> Request {
        Request {
            command: Command::from_words(&["true".to_owned()]),
            ..Request::new(Arch::X86_64)
        }
    }

    #[test]
    fn placeholders_are_filled_and_other_braces_stay() {
        let words = [
            "-k",
            "{kernel}",
            "--mem={memory}",
            "{\"a\":{}}",
            "{cmdline}",
            "{dir}/x",
        ];
        let filled = options(&vmm(Path::new("x"), &words), COMMAND_LINE);
        let want = [
            "-k",
            "/guest/kernel",
            "--mem=512",
            "{\"a\":{}}",
            COMMAND_LINE,
            "/vmm/x",
        ];
        assert_eq!(filled, want);
    }

    #[test]
    fn a_guest_that_could_not_run_is_refused() {
        let check = |words: &[&str], request: &Request| {
            let request = Request {
                vmm_args: words.iter().map(|&word| word.to_owned()).collect(),
                ..request.clone()
            };
            check_options(&request).map_err(|error| error.to_string())
        };
        let bare = |initrd: Option<&str>| Request {
            kernel: Some("k".into()),
            initrd: initrd.map(PathBuf::from),
            ..Request::new(Arch::X86_64)
        };
        assert!(check(&["{kernel}", "{initrd}", "{cmdline}"], &command()).is_ok());
        assert!(check(&["a={vmlinux}"], &bare(None)).is_ok());
        assert!(check(&["{kernel}", "{initrd}"], &bare(Some("i"))).is_ok());
        let cases: [(&[&str], Request, &str); 4] = [
            (&["-k"], bare(None), "{kernel}"),
            (&["{kernel}", "{cmdline}"], command(), "{initrd}"),
            (&["{kernel}", "{initrd}"], command(), "{cmdline}"),
            (&["{kernel}", "{initrd}"], bare(None), "give --initrd"),
        ];
        for (words, request, about) in cases {
            let said = check(words, &request).unwrap_err();
            assert!(said.contains(about), "{about}: {said}");
        }
    }

    #[test]
    fn what_is_no_program_for_the_host_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("vmm");
        let said = |vmm: &Request| {
            let error = put(vmm, &mut Archive::default()).unwrap_err();
            error.to_string()
        };
        assert!(said(&vmm(&file, &[])).contains("No such file"));
        assert!(said(&vmm(folder.path(), &[])).contains("not a file"));
        let own = fs::read(std::env::current_exe().unwrap()).unwrap();
        let write = |bytes: &[u8], mode| {
            fs::write(&file, bytes).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
        };
        write(&own, 0o644);
        assert!(said(&vmm(&file, &[])).contains("not executable"));
        write(b"#!/bin/sh\n", 0o755);
        assert!(said(&vmm(&file, &[])).contains("a script"));
        write(b"text", 0o755);
        assert!(said(&vmm(&file, &[])).contains("ELF"));
        let mut other = own.clone();
        other[18..20].copy_from_slice(&183_u16.to_le_bytes());
        write(&other, 0o755);
        assert!(said(&vmm(&file, &[])).contains("aarch64"));
        // A library whose name begins otherwise is not there.
        let name = b"libc.so.6\0";
        let at = own.windows(name.len()).position(|word| word == name);
        let mut lacking = own;
        lacking[at.unwrap()..][..4].copy_from_slice(b"libx");
        write(&lacking, 0o755);
        let missing = said(&vmm(&file, &[]));
        assert!(missing.contains("libx.so.6"), "{missing}");
    }

    #[test]
    fn libraries_go_where_the_program_finds_them() {
        let this = std::env::current_exe().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let (script, binary) = (folder.path().join("c.json"), folder.path().join("raw"));
        fs::write(&script, "{\"kernel\":\"{kernel}\"}").unwrap();
        fs::write(&binary, [0xff, b'{']).unwrap();
        let vmm = Request {
            vmm_files: vec![script, binary],
            ..vmm(&this, &[])
        };
        let mut archive = Archive::default();
        let program = put(&vmm, &mut archive).unwrap();
        let list = format!("{archive:?}");
        for place in [
            "usr/lib/x86_64-linux-gnu/libc.so.6",
            "usr/lib64/ld-linux-x86-64.so.2",
            "vmm/c.json",
            "vmm/raw",
            &program[1..],
        ] {
            assert!(list.contains(&format!("\"{place}\"")), "{place}: {list}");
        }
    }
}
