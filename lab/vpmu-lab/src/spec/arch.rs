//! The differences between guests' architectures: names, packages, programs.
//! The devices of a machine are in `backend::qemu`.

use std::path::Path;

use rustix::fs::{Access, access};
use serde::{Deserialize, Serialize};
use strum::Display;

use crate::host::tool::Tool;
use crate::spec::design::Pmu;

choices! {
    /// The architecture of a guest and of the machine it runs on.
    #[derive(Default, Serialize, Deserialize, Display)]
    pub enum Arch {
        /// 64-bit Arm.
        #[default]
        #[serde(rename = "aarch64")]
        Aarch64,
        /// 64-bit x86.
        #[serde(rename = "x86_64")]
        #[strum(serialize = "x86_64")]
        X86_64,
    }
}

/// Packages in guests of any architecture.
const COMMON_PACKAGES: [&str; 4] = ["busybox-static", "gzip", "linux-perf", "stress-ng"];

const QEMU_AARCH64: Tool = Tool {
    program: "qemu-system-aarch64",
    fix: "apt-get install qemu-system-arm",
    hint: "",
};
pub(crate) const QEMU_X86_64: Tool = Tool {
    program: "qemu-system-x86_64",
    fix: "apt-get install qemu-system-x86",
    hint: "",
};

impl Arch {
    /// Returns Debian's name.
    pub fn debian(self) -> &'static str {
        match self {
            Self::Aarch64 => "arm64",
            Self::X86_64 => "amd64",
        }
    }

    /// Returns Debian's folder of libraries.
    pub fn libraries(self) -> &'static str {
        match self {
            Self::Aarch64 => "usr/lib/aarch64-linux-gnu",
            Self::X86_64 => "usr/lib/x86_64-linux-gnu",
        }
    }

    /// Returns the packages from which guests and the KVM host are made, sorted.
    pub fn packages(self) -> Vec<&'static str> {
        let own: &[&str] = match self {
            Self::Aarch64 => &["linux-image-arm64", "qemu-system-arm"],
            Self::X86_64 => &[
                "linux-image-cloud-amd64",
                "qemu-system-x86",
                "qemu-system-data",
                "seabios",
            ],
        };
        let mut all = [&COMMON_PACKAGES, own].concat();
        all.sort_unstable();
        all
    }

    /// Returns QEMU, on the machine and in the KVM host.
    pub fn qemu(self) -> Tool {
        match self {
            Self::Aarch64 => QEMU_AARCH64,
            Self::X86_64 => QEMU_X86_64,
        }
    }

    /// Returns the name of serial port `number`'s device.
    pub fn serial(self, number: u32) -> String {
        match self {
            Self::Aarch64 => format!("ttyAMA{number}"),
            Self::X86_64 => format!("ttyS{number}"),
        }
    }

    /// Returns the architecture's designs, in the order of a table.
    pub fn designs(self) -> &'static [Pmu] {
        match self {
            Self::Aarch64 => &[
                Pmu::Native,
                Pmu::Kvm,
                Pmu::Emulated,
                Pmu::Partitioned,
                Pmu::Direct,
                Pmu::Untrapped,
            ],
            Self::X86_64 => &[
                Pmu::Native,
                Pmu::Kvm,
                Pmu::Mediated,
                Pmu::Emulated,
                Pmu::Paravirt,
                Pmu::Exec,
                Pmu::Qemu,
                Pmu::Vmm,
            ],
        }
    }

    /// Tells whether this machine's own KVM runs stock kernels of this architecture.
    ///
    /// A `/dev/kvm` alone says little: some clouds have a KVM in software
    /// (`kvm_pvm`), in which stock kernels die early.
    pub fn has_hardware_kvm(self) -> bool {
        self == Self::X86_64
            && cfg!(target_arch = "x86_64")
            && ["kvm_intel", "kvm_amd"]
                .iter()
                .any(|module| Path::new("/sys/module").join(module).exists())
            && access("/dev/kvm", Access::READ_OK | Access::WRITE_OK).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for arch in [Arch::Aarch64, Arch::X86_64] {
            let name = arch.name();
            assert_eq!(serde_json::to_string(&arch).unwrap(), format!("\"{name}\""));
            assert!(arch.qemu().program.ends_with(name));
            assert!(arch.packages().is_sorted());
        }
    }
}
