//! The Linux modules of `guest/`, built for a Debian kernel, and that kernel.
//!
//! The kernel is one of Debian 12's. A distribution's headers need the compiler that built the
//! kernel, and gcc 12 is in Debian 12 and 13. Sources and recipe are part of vpmu, and are built
//! once for each set of packages.

use std::fs;
use std::path::{Path, PathBuf};

use super::kernel_module::find_kernel;
use crate::host::cancel::Cancel;
use crate::host::tool::Tool;
use crate::image::cache::Session;
use crate::image::debian::{Pool, Selection};
use crate::spec::arch::Arch;
use crate::{Error, Result, usage};

/// A kernel that the modules are built for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// Debian 12's, Linux 6.1.
    Bookworm,
    /// The newer kernel in its backports, Linux 6.12.
    Backports,
}

impl Kernel {
    /// Returns the release of Debian that has it.
    pub fn release(self) -> &'static str {
        match self {
            Self::Bookworm => "bookworm",
            Self::Backports => "bookworm-backports",
        }
    }
}

/// A file of `guest/`, by its path there.
macro_rules! source {
    ($path:literal) => {
        ($path, include_str!(concat!("../../../../guest/", $path)))
    };
}

/// The modules' sources, by the paths that the recipe expects.
const SOURCES: [(&str, &str); 22] = [
    source!("include/kernel.mk"),
    source!("include/vpmu_guest.h"),
    source!("build"),
    source!("lazy_deadline/Makefile"),
    source!("lazy_deadline/break_even.h"),
    source!("lazy_deadline/cost.c"),
    source!("lazy_deadline/lazy_deadline.h"),
    source!("lazy_deadline/main.c"),
    source!("lazy_deadline/stats.c"),
    source!("lazy_deadline/timer.c"),
    source!("lazy_deadline/ping_pong.c"),
    source!("lazy_deadline/sleepers.c"),
    source!("vpmu_pmu/Makefile"),
    source!("vpmu_pmu/page.h"),
    source!("vpmu_pmu/vpmu_pmu.h"),
    source!("vpmu_pmu/main.c"),
    source!("vpmu_pmu/pmu.c"),
    source!("vpmu_pmu/records.c"),
    source!("vpmu_pmu/events.c"),
    source!("vpmu_pmu/gone.c"),
    source!("counter_reader/Makefile"),
    source!("counter_reader/counter_reader.c"),
];
/// The source that is the recipe.
const RECIPE: &str = "build";

/// The compiler of the guest's kernel.
pub const COMPILER: Tool = Tool {
    program: "gcc-12",
    fix: "apt-get install gcc-12 make libc6-dev (modules need the compiler of Debian 12's kernel)",
    hint: "",
};
/// The program that builds kernels.
pub const MAKE: Tool = Tool {
    program: "make",
    fix: "apt-get install gcc-12 make libc6-dev",
    hint: "",
};
const SHELL: Tool = Tool {
    program: "sh",
    fix: "apt-get install dash",
    hint: "modules are built with Debian's headers: apt-get install gcc-12 make libc6-dev",
};

const KERNEL: &str = "kernel";
const PMU: &str = "vpmu_pmu.ko";
const READER: &str = "counter_reader.ko";
/// The files for guests with a lazy deadline.
const FILES: [&str; 3] = ["lazy_deadline.ko", "ping_pong", "sleepers"];

/// The modules, the kernel they are for, and programs that exercise them.
#[derive(Debug, Clone)]
pub struct Modules {
    folder: PathBuf,
}

impl Modules {
    /// Words for a kernel with a lazy deadline. The kernel then stops its tick whenever it idles,
    /// as the kernels did for which a lazy deadline was published. Newer kernels keep the tick
    /// through idle moments that did not end with a tick before, unless a cpuidle governor says
    /// otherwise. Of Debian's governors, `ladder` does. Its driver halts, as the kernel without a
    /// driver does.
    ///
    /// The guest starts its second processor when all is quiet: processors that
    /// wait for each other boot slowly where the machine runs one at a time.
    pub const DEADLINE_COMMAND_LINE: &str =
        "maxcpus=1 cpuidle_haltpoll.force=1 cpuidle.governor=ladder";

    /// Checks that this machine can build the modules.
    ///
    /// # Errors
    ///
    /// When the machine has no compiler for the modules, or has a processor of another
    /// architecture.
    pub fn check() -> Result<()> {
        if !cfg!(target_arch = "x86_64") {
            return usage(
                "modules for guests are built by an x86-64 machine's own compiler; use one",
            );
        }
        COMPILER.check()?;
        MAKE.check()
    }

    /// Returns the modules for `kernel`, built first when they are missing.
    ///
    /// # Errors
    ///
    /// When a compiler is missing, or packages cannot be downloaded.
    pub fn prepare(kernel: Kernel, session: &Session<'_>) -> Result<Self> {
        Self::check()?;
        let selection = Selection::kernel_with_headers(kernel.release(), Arch::X86_64);
        let _lock = session.lock()?;
        let pool = Pool::fetch(&selection, session)?;
        let folder = pool.derived(PREFIX, SOURCES.map(|(_, text)| text));
        let whole = FILES
            .iter()
            .chain([&KERNEL, &PMU, &READER])
            .all(|file| folder.join(file).is_file());
        if !whole {
            let _task = session.progress.task("building the guest's modules");
            pool.derive(PREFIX, &folder, |scratch, made| {
                build(&pool, scratch, made, session.cancel)
            })?;
        }
        Ok(Self { folder })
    }

    /// Returns the kernel, a bzImage.
    pub fn kernel(&self) -> PathBuf {
        self.folder.join(KERNEL)
    }

    /// Returns `lazy_deadline.ko`, and the programs `ping_pong` and `sleepers`.
    pub fn files(&self) -> Vec<PathBuf> {
        FILES.map(|file| self.folder.join(file)).into()
    }

    /// Returns `vpmu_pmu.ko`.
    pub fn pmu(&self) -> PathBuf {
        self.folder.join(PMU)
    }

    /// Returns `counter_reader.ko`, which reads counters by an RDPMC of its own.
    pub fn counter_reader(&self) -> PathBuf {
        self.folder.join(READER)
    }
}

const PREFIX: &str = "modules-";

fn build(pool: &Pool, scratch: &Path, made: &Path, cancel: &Cancel) -> Result<()> {
    let [root, sources] = ["root", "sources"].map(|name| scratch.join(name));
    let names = ["lazy_deadline", "vpmu_pmu", "counter_reader", "include"];
    let folders = names.map(|name| sources.join(name));
    for path in [&root, &sources].into_iter().chain(&folders) {
        fs::create_dir(path).map_err(Error::file("create", path))?;
    }
    pool.unpack("", &root, cancel)?;
    let (vmlinuz, version) = find_kernel(&root).ok_or_else(|| pool.missing("the kernel"))?;
    for (name, text) in SOURCES {
        let path = sources.join(name);
        fs::write(&path, text).map_err(Error::file("write", &path))?;
    }
    let mut command = SHELL.command()?;
    command
        .arg(sources.join(RECIPE))
        .arg(&version)
        .args([made, &root])
        .env("CC", COMPILER.program);
    SHELL.run(command, cancel, &|| ())?;
    let kernel = made.join(KERNEL);
    fs::copy(&vmlinuz, &kernel).map_err(Error::file("copy", &vmlinuz))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_recipe_is_valid_shell() {
        let (_, recipe) = SOURCES
            .into_iter()
            .find(|(path, _)| *path == RECIPE)
            .unwrap();
        let status = std::process::Command::new("sh")
            .args(["-n", "-c", recipe])
            .status()
            .unwrap();
        assert!(status.success());
    }
}
