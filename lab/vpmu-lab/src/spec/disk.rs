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
pub enum Disk {
    /// A disk that the lab makes of Debian packages.
    Ours {
        /// The machine's firmware.
        firmware: Firmware,
        /// The Debian release of the disk's kernel, of [`RELEASES`].
        release: &'static str,
    },
    /// The user's own image, which a run does not change.
    File {
        /// The machine's firmware.
        firmware: Firmware,
        /// The image, raw or qcow2.
        path: PathBuf,
    },
}

impl Disk {
    /// Returns the firmware of the machine.
    pub fn firmware(&self) -> Firmware {
        match self {
            Self::Ours { firmware, .. } | Self::File { firmware, .. } => *firmware,
        }
    }

    /// Returns the Debian release that the lab takes the disk's kernel and the firmware from.
    pub fn release(&self) -> &'static str {
        match self {
            Self::Ours { release, .. } => release,
            Self::File { .. } => RELEASE,
        }
    }
}

impl FromStr for Disk {
    type Err = String;

    /// Reads `bios`, `uefi`, either with `:RELEASE` behind it, `FILE` or `uefi:FILE`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (first, rest) = text.split_once(':').unwrap_or((text, RELEASE));
        let firmware = match first {
            "bios" => Firmware::Bios,
            "uefi" => Firmware::Uefi,
            _ => {
                let (firmware, path) = (Firmware::Bios, text.into());
                return Ok(Self::File { firmware, path });
            }
        };
        let path = rest.into();
        Ok(
            match RELEASES.into_iter().find(|&release| release == rest) {
                Some(release) => Self::Ours { firmware, release },
                None => Self::File { firmware, path },
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
        let ours = |firmware, release| Disk::Ours { firmware, release };
        let file = |firmware, path: &str| Disk::File {
            firmware,
            path: path.into(),
        };
        for (text, disk) in [
            ("bios", ours(Bios, RELEASE)),
            ("uefi:bookworm", ours(Uefi, "bookworm")),
            ("/srv/a:b.qcow2", file(Bios, "/srv/a:b.qcow2")),
            ("uefi:/srv/a.img", file(Uefi, "/srv/a.img")),
            ("./bios", file(Bios, "./bios")),
        ] {
            assert_eq!(text.parse(), Ok(disk), "{text}");
        }
    }
}
