//! A guest that boots from a disk.

use std::path::PathBuf;
use std::str::FromStr;

use crate::image::debian::RELEASE;

/// The Debian releases whose kernels a disk of the lab's may have, oldest first.
pub const RELEASES: [&str; 4] = ["bookworm", "trixie", "trixie-backports", "sid"];

/// The program in a machine that boots its disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Firmware {
    /// SeaBIOS.
    Bios,
    /// OVMF.
    Uefi,
}

/// The disk of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// The machine's firmware.
    pub firmware: Firmware,
    /// The Debian release that the lab takes the disk's kernel and the firmware from, of [`RELEASES`].
    pub release: &'static str,
    /// The user's own image, raw or qcow2, which a run does not change; `None` for a disk that the lab makes of Debian
    /// packages.
    pub image: Option<PathBuf>,
}

impl FromStr for Disk {
    type Err = String;

    /// Reads `bios`, `uefi`, either with `:RELEASE` behind it, `FILE` or `uefi:FILE`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (first, rest) = text.split_once(':').unwrap_or((text, RELEASE));
        let disk = |firmware, release, image| Self {
            firmware,
            release,
            image,
        };
        let firmware = match first {
            "bios" => Firmware::Bios,
            "uefi" => Firmware::Uefi,
            _ => return Ok(disk(Firmware::Bios, RELEASE, Some(text.into()))),
        };
        Ok(
            match RELEASES.into_iter().find(|&release| release == rest) {
                Some(release) => disk(firmware, release, None),
                None => disk(firmware, RELEASE, Some(rest.into())),
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_by_name() {
        use Firmware::{Bios, Uefi};
        let ours = |firmware, release| Disk {
            firmware,
            release,
            image: None,
        };
        let file = |firmware, path: &str| Disk {
            image: Some(path.into()),
            ..ours(firmware, RELEASE)
        };
        for (text, disk) in [
            ("bios", ours(Bios, RELEASE)),
            ("uefi:bookworm", ours(Uefi, "bookworm")),
            ("/srv/a:b.qcow2", file(Bios, "/srv/a:b.qcow2")),
            ("uefi:/srv/a.img", file(Uefi, "/srv/a.img")),
            ("./bios", file(Bios, "./bios")),
            ("sid", file(Bios, "sid")),
        ] {
            assert_eq!(text.parse(), Ok(disk), "{text}");
        }
    }
}
