//! A kernel of 32 bits that GRUB boots: it finds no PMU, says so, and goes on.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use vpmu_lab::image::archive::Archive;
use vpmu_lab::image::debian::{Pool, Selection};
use vpmu_lab::image::disk::BootDisk;
use vpmu_lab::spec::arch::Arch;
use vpmu_lab::spec::disk::Disk;

use crate::support::{ON_A_CLOCK, images, nested_vpmu, number, prepared, said, text, turn};

/// Process 1 of the initrd. Each line that the test reads begins with a word of its own.
const INIT: &str = r#"#!/bin/busybox sh
export PATH=/applets
/bin/busybox --install -s /applets
mount -t devtmpfs dev /dev; mount -t proc proc /proc; mount -t sysfs sys /sys
exec > /dev/ttyS0 2>&1
# GRUB has left the last line unfinished.
echo
echo "machine $(uname -m)"
echo "vendor $(grep -m1 vendor_id /proc/cpuinfo)"
echo "driver $(dmesg | grep -c 'PMU driver')"
echo "unavailable $(dmesg | grep -c 'PMU not available due to virtualization')"
echo "devices $(ls /sys/bus/event_source/devices | grep -c -x cpu)"
echo "complaints $(dmesg | grep -c -E '[Uu]nknown NMI|unchecked MSR|BUG:|Oops:|general protection')"
n=0; while [ $n -lt 10000 ]; do n=$((n + 1)); done; echo "worked $n"
poweroff -f
"#;

/// Where the lab's disk has its system, and where GRUB finds the kernel and the initrd.
const SYSTEM: &str = "?offset=17825792";
const KERNEL: &str = "/boot/vmlinuz";
const INITRD: &str = "/boot/initrd.img";

/// Makes the lab's disk with a kernel of 32 bits and an initrd of its programs, in `folder`.
fn disk(folder: &Path) -> PathBuf {
    let images = images(Arch::X86_64);
    let ours: Disk = "bios:bookworm".parse().unwrap();
    let ours = prepared(|session| BootDisk::prepare(&ours, &images, session));
    let tree = folder.join("tree");
    fs::create_dir(&tree).unwrap();
    prepared(|session| {
        let _lock = session.lock()?;
        let pool = Pool::fetch(&Selection::kernel_of_32_bits(), session)?;
        pool.unpack("", &tree, session.cancel)
    });
    let mut files = fs::read_dir(tree.join("boot")).unwrap().flatten();
    let is_kernel = |name: &Path| name.to_string_lossy().contains("/vmlinuz-");
    let kernel = files.find_map(|file| Some(file.path()).filter(|path| is_kernel(path)));

    let initrd = folder.join("initrd");
    let mut archive = Archive::default();
    for place in ["applets", "dev", "proc", "sys"] {
        archive.folder(place);
    }
    archive
        .bytes("init", 0o755, INIT)
        .copy("bin/busybox", 0o755, tree.join("bin/busybox"));
    archive.write_file(&initrd).unwrap();

    let image = folder.join("disk.img");
    let copied = Command::new("cp")
        .arg("--sparse=always")
        .args([&ours.image, &image])
        .status();
    assert!(copied.unwrap().success());
    for (file, place) in [(kernel.unwrap(), KERNEL), (initrd, INITRD)] {
        for request in [
            format!("rm {place}"),
            format!("write {} {place}", file.display()),
        ] {
            let system = format!("{}{SYSTEM}", image.display());
            let debugfs = Command::new("debugfs")
                .args(["-w", "-R", &request, &system])
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status();
            assert!(debugfs.unwrap().success());
        }
    }
    image
}

#[test]
#[ignore = "long: script/test --long"]
fn a_kernel_of_32_bits_finds_no_pmu_and_goes_on() {
    let Some(mut vpmu) = nested_vpmu(", and vpmu exec's are in the lab's KVM host") else {
        return;
    };
    let _turn = turn(1);
    let folder = tempfile::tempdir().unwrap();
    let output = vpmu
        .args(["run", "--arch", "x86_64", "--pmu", "exec", "--disk"])
        .arg(disk(folder.path()))
        .args(ON_A_CLOCK)
        .args(["--boot-timeout", "900", "--timeout", "1800"])
        .output()
        .unwrap();
    let console = text(&output).replace('\r', "");
    println!("{console}");
    assert!(output.status.success());
    assert_eq!(said(&console, "machine"), "i686");
    let number = |word| number::<u64>(&console, word);
    assert_eq!((number("driver"), number("unavailable")), (0, 1));
    assert_eq!((number("devices"), number("complaints")), (0, 0));
    assert_eq!(number("worked"), 10_000);
}
