//! The parts of a guest, the same under every design.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::Result;
use crate::image::archive::concatenate;
use crate::image::disk::BootDisk;
use crate::image::host_kernel::HostKernel;
use crate::image::images::Images;
use crate::spec::Request;
use crate::spec::arch::Arch;

/// The parts of a guest, before a backend puts something below it.
#[derive(Debug)]
pub(crate) struct Parts<'a> {
    /// The request of the guest.
    pub(crate) request: &'a Request,
    /// Images of Debian packages; present when [`crate::spec::Spec::needs_images`] says so.
    pub(crate) images: Option<&'a Images>,
    /// The kernel for our modules, when a guest has one of them.
    pub(crate) kernel: Option<PathBuf>,
    /// The kernel of a host whose KVM hands the PMU over, when a guest has such a host.
    pub(crate) host_kernel: Option<&'a HostKernel>,
    /// The disk that the guest boots from, where there is one.
    pub(crate) disk: Option<&'a BootDisk>,
    /// The second archive of our own file tree, when a command runs.
    pub(crate) job: Option<PathBuf>,
    /// The second archive of the file tree of the guest beside it, when a command runs there.
    pub(crate) second_job: Option<PathBuf>,
    /// Selects the moment of the kernel's ticks at which the command begins, and
    /// a KVM host's guest: each number is another moment.
    pub(crate) phase: u32,
}

/// The files and the command line that a machine boots.
#[derive(Debug, Clone)]
pub(super) struct Boot {
    pub(super) kernel: PathBuf,
    pub(super) initrd: Option<PathBuf>,
    /// The kernel's command line.
    pub(super) append: String,
}

impl Boot {
    /// Returns QEMU's options for a machine that ends instead of booting again.
    pub(super) fn options(&self) -> Vec<OsString> {
        let mut options: Vec<OsString> = vec!["-no-reboot".into()];
        options.extend(["-append".into(), self.append.clone().into()]);
        options.extend(["-kernel".into(), self.kernel.clone().into_os_string()]);
        if let Some(initrd) = &self.initrd {
            options.extend(["-initrd".into(), initrd.clone().into_os_string()]);
        }
        options
    }
}

impl Parts<'_> {
    /// Returns the user's kernel, or the modules', where there is one.
    pub(super) fn own_kernel(&self) -> Option<&Path> {
        self.request.kernel.as_deref().or(self.kernel.as_deref())
    }

    /// Returns the user's initrd, where there is one.
    pub(super) fn own_initrd(&self) -> Option<&Path> {
        self.request.initrd.as_deref()
    }

    /// Returns the kernel command line of the guest.
    pub(super) fn command_line(&self, arch: Arch) -> String {
        let user = self.request.append.as_deref().unwrap_or_default().trim();
        if self.request.command.is_none() {
            return user.to_owned();
        }
        let mut own = command_line(arch);
        if user.split_whitespace().any(|word| word == "kaslr") {
            own = own.replace(" nokaslr", "");
        }
        format!("{own} {user}").trim().to_owned()
    }

    /// Returns the kernel that the guest boots.
    pub(crate) fn boot_kernel(&self, arch: Arch) -> Result<PathBuf> {
        let on_disk = self.disk.and_then(|disk| disk.kernel.as_deref());
        match (self.own_kernel().or(on_disk), self.images) {
            (Some(kernel), _) => Ok(kernel.to_owned()),
            (None, Some(images)) => images.boot_kernel(arch),
            (None, None) => unreachable!("a command without a kernel needs images"),
        }
    }

    /// Returns the files that boot the guest itself, with its initrd written into `folder`.
    pub(super) fn boot(&self, arch: Arch, folder: &Path) -> Result<Boot> {
        let kernel = self.boot_kernel(arch)?;
        let initrd = match (&self.job, self.images) {
            (Some(job), Some(images)) => {
                let initrd = folder.join("initrd");
                concatenate(&[&images.guest(), job], &initrd)?;
                Some(initrd)
            }
            _ => self.own_initrd().map(Path::to_owned),
        };
        Ok(Boot {
            kernel,
            initrd,
            append: self.command_line(arch),
        })
    }
}

/// Returns the kernel command line of a system of the lab's.
///
/// - `cryptomgr.notests`: otherwise the kernel tests its ciphers in the
///   background for half a second, partly while the command runs.
/// - `panic=-1 oops=panic`: a broken kernel ends at once instead of hanging.
/// - `no_timer_check`: otherwise an x86-64 kernel tries for 40 ms whether its timer's interrupt works, which takes QEMU
///   ten times as long.
pub(super) fn command_line(arch: Arch) -> String {
    let quick = match arch {
        Arch::Aarch64 => "",
        Arch::X86_64 => " no_timer_check",
    };
    format!(
        "console={} nokaslr quiet cryptomgr.notests{quick} panic=-1 oops=panic rdinit=/init",
        arch.serial(0)
    )
}
