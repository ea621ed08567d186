//! Tests of `vpmu rewrite-kernel`: its output file, its messages, and what it leaves alone.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// Returns an ELF file for x86-64 with one section of code, at byte 64.
fn vmlinux(code: &[u8]) -> Vec<u8> {
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    file.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    for word in [0x100_0000, 0, 64 + code.len() as u64] {
        file.extend(u64::to_le_bytes(word));
    }
    file.extend(0_u32.to_le_bytes());
    for half in [64_u16, 56, 0, 64, 2, 0] {
        file.extend(half.to_le_bytes());
    }
    file.extend(code);
    file.extend([0; 64]);
    file.extend([0, 1].map(u32::to_le_bytes).concat()); // SHT_PROGBITS
    for word in [6, 0xffff_ffff_8100_0000, 64, code.len() as u64, 0, 1, 0] {
        file.extend(u64::to_le_bytes(word));
    }
    file
}

fn rewrite(input: &Path, output: &Path) -> Output {
    rewrite_with(&[], input, output)
}

fn rewrite_with(options: &[&str], input: &Path, output: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vpmu"))
        .arg("rewrite-kernel")
        .args(options)
        .args([input, output])
        .output()
        .unwrap()
}

#[test]
fn only_rdpmc_changes_and_the_place_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    let before = vmlinux(&[0x90, 0x0f, 0x33, 0xc3]);
    fs::write(&input, &before).unwrap();
    let done = rewrite(&input, &output);
    assert_eq!(done.status.code(), Some(0), "{done:?}");
    let text = String::from_utf8(done.stdout).unwrap();
    assert!(text.contains("0xffffffff81000001: rdpmc"), "{text}");
    assert!(text.contains("1 RDPMC rewritten"), "{text}");
    let mut after = before;
    after[65..67].copy_from_slice(&[0xe6, 0xe6]);
    assert_eq!(fs::read(&output).unwrap(), after);

    // A kernel without RDPMC is no error: here, the file that was just written.
    let again = rewrite(&output, &input);
    assert_eq!(again.status.code(), Some(0), "{again:?}");
    assert!(
        String::from_utf8(again.stdout)
            .unwrap()
            .contains("0 RDPMC rewritten")
    );
    assert_eq!(fs::read(&input).unwrap(), after);
}

#[test]
fn what_cannot_be_done_leaves_what_was_there() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    fs::write(&output, "precious").unwrap();
    fs::write(&input, "no kernel").unwrap();
    let (absent, nowhere) = (folder.path().join("absent"), folder.path().join("no/out"));
    let kernel = folder.path().join("kernel");
    fs::write(&kernel, vmlinux(&[0x90])).unwrap();
    for (input, output, status, says) in [
        (&input, &output, 1, "neither a bzImage"),
        (&absent, &output, 125, "No such file"),
        (&kernel, &nowhere, 125, "No such file"),
        (&kernel, &folder.path().to_owned(), 125, "is a folder"),
    ] {
        let done = rewrite(input, output);
        let errors = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(status), "{errors}");
        assert!(errors.contains(says), "{errors}");
    }
    let done = rewrite_with(&["--bzimage"], &kernel, &output);
    let errors = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(1), "{errors}");
    assert!(errors.contains("write an ELF file"), "{errors}");
    assert_eq!(fs::read(&output).unwrap(), b"precious");
    let left = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(left, 3, "nothing half-written is left");
}

#[test]
fn a_link_is_followed_and_help_says_what_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    let link = folder.path().join("link");
    fs::write(&input, vmlinux(&[0x90])).unwrap();
    fs::write(&output, "").unwrap();
    std::os::unix::fs::symlink(&output, &link).unwrap();
    assert!(rewrite(&input, &link).status.success());
    assert!(link.is_symlink());
    assert_eq!(fs::read(&output).unwrap(), fs::read(&input).unwrap());

    let vpmu = env!("CARGO_BIN_EXE_vpmu");
    let help = Command::new(vpmu)
        .args(["rewrite-kernel", "--help"])
        .output()
        .unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    for words in ["KASLR", "kexec", "Exit status:"] {
        assert!(help.contains(words), "{help}");
    }
}
