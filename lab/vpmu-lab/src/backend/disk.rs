//! QEMU's options for a machine that boots from a disk.

use std::ffi::OsString;
use std::path::Path;

use crate::image::archive::Archive;
use crate::image::disk::BootDisk;

/// A KVM host's disks, in the order of its machine's.
const HOST_DISKS: [&str; 2] = ["/dev/vda", "/dev/vdb"];

/// The places of UEFI's code and variables in the KVM host.
const HOST_UEFI: [&str; 2] = ["guest/uefi-code.fd", "guest/uefi-variables.fd"];

/// Returns the options of a machine whose first disk is the one to boot from and whose second is the run's job. Nothing
/// that the machine writes is kept. The machine has the disk's firmware only if it `boots` by itself.
pub(super) fn machine(disk: &BootDisk, job: Option<&Path>, boots: bool) -> Vec<OsString> {
    let drive = |format: &str, path: &Path| {
        // A comma in a name is doubled.
        let name = path.display().to_string().replace(',', ",,");
        format!("if=virtio,snapshot=on,format={format},file={name}")
    };
    let drives = [drive(disk.format, &disk.image)];
    let job = job.map(|job| drive("raw", job));
    let uefi = disk.uefi.as_ref().filter(|_| boots);
    let uefi = uefi.map(|files| {
        let files = files.each_ref().map(|file| file.display().to_string());
        uefi_drives(files, ",snapshot=on")
    });
    let all = drives
        .into_iter()
        .chain(job)
        .chain(uefi.into_iter().flatten());
    options(all).map(OsString::from).collect()
}

/// Returns the options of the guest of a KVM host on such a machine.
pub(super) fn in_host(disk: &BootDisk, has_job: bool) -> Vec<String> {
    let disks = HOST_DISKS.iter().take(if has_job { 2 } else { 1 });
    let drives = disks.map(|disk| format!("if=virtio,format=raw,file={disk}"));
    let uefi =
        (disk.uefi.is_some()).then(|| uefi_drives(HOST_UEFI.map(|file| format!("/{file}")), ""));
    options(drives.chain(uefi.into_iter().flatten())).collect()
}

/// Puts what such a host needs into its file tree.
pub(super) fn put(disk: &BootDisk, archive: &mut Archive) {
    // The host loads modules in the order of their names.
    archive.copy("vpmu/modules/9-virtio_blk.ko.xz", 0o644, &disk.driver);
    for (place, path) in HOST_UEFI.into_iter().zip(disk.uefi.iter().flatten()) {
        archive.copy(place, 0o644, path);
    }
}

/// Returns the drives of UEFI's firmware, whose variables the guest may write: into the file, or, by `more`, elsewhere.
fn uefi_drives([code, variables]: [String; 2], more: &str) -> [String; 2] {
    [
        format!("if=pflash,format=raw,readonly=on,file={code}"),
        format!("if=pflash,format=raw{more},file={variables}"),
    ]
}

fn options(drives: impl Iterator<Item = String>) -> impl Iterator<Item = String> {
    drives.flat_map(|drive| ["-drive".to_owned(), drive])
}
