//! Which QEMU emulates machines: Debian's on `PATH`, or one in a folder of its own.
//!
//! `script/qemu` builds the latter: QEMU with the patches of `packaging/qemu`, whose faults guests do not meet.

use std::fmt;
use std::fs::File;
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use crate::host::cancel::Cancel;
use crate::host::tool::{Tool, bound_to_us};
use crate::spec::arch::QEMU_X86_64;
use crate::{Error, Result};

/// The variable with the folder of another QEMU.
pub(crate) const VARIABLE: &str = "VPMU_QEMU";

/// The longest that QEMU may take to say what it has.
const PATIENCE: Duration = Duration::from_secs(30);

/// The beginning of the package's name that `script/qemu` gives to its QEMU.
const MENDED: &str = " (vpmu patches ";

/// Options of `-cpu` for AMD's PMU, which `packaging/qemu` adds.
pub(crate) const X86_PMU: &str = "perfctr-core=on,perfmon-v2=on";

/// The place of QEMU's programs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Qemu {
    folder: Option<PathBuf>,
    /// Whether emulated x86 processors have a PMU, once QEMU was asked.
    has_x86_pmu: OnceLock<bool>,
}

impl Qemu {
    /// Returns the QEMU in `folder`, else in `$VPMU_QEMU`, else on `PATH`.
    pub fn chosen(folder: Option<&Path>) -> Self {
        let named = || std::env::var_os(VARIABLE).filter(|value| !value.is_empty());
        Self {
            folder: folder
                .map(Path::to_owned)
                .or_else(|| named().map(PathBuf::from)),
            has_x86_pmu: OnceLock::new(),
        }
    }

    /// Tells whether this QEMU emulates AMD's PMU. The first call asks QEMU, whose list of processors' features does not say.
    pub fn has_x86_pmu(&self) -> bool {
        *self.has_x86_pmu.get_or_init(|| self.try_x86_pmu().is_ok())
    }

    /// Starts a machine that does not run, and whose processor must have the PMU.
    fn try_x86_pmu(&self) -> Result<()> {
        let quit = || -> std::io::Result<File> {
            let mut words = tempfile::tempfile()?;
            words.write_all(b"quit\n")?;
            words.rewind()?;
            Ok(words)
        };
        let quit = quit().map_err(Error::file("write in", std::env::temp_dir()))?;
        let mut command = self.command(&QEMU_X86_64)?;
        let cpu = format!("max,{X86_PMU},enforce");
        command.args(["-M", "pc", "-accel", "tcg", "-cpu", &cpu]);
        command.args(["-S", "-nodefaults", "-display", "none", "-monitor", "stdio"]);
        command.stdin(quit);
        let said = QEMU_X86_64.run_within(PATIENCE, command, &Cancel::default(), &|| ());
        said.map(drop)
    }

    /// Returns the name to call `tool` by: a path, or a name in `PATH`.
    pub(crate) fn program(&self, tool: &Tool) -> PathBuf {
        match &self.folder {
            Some(folder) => folder.join(tool.program),
            None => tool.program.into(),
        }
    }

    /// Returns a command line of `tool` to add arguments to, as [`Tool::command`] does.
    pub(crate) fn command(&self, tool: &Tool) -> Result<Command> {
        if self.folder.is_none() {
            return tool.command();
        }
        let program = self.program(tool);
        if !program.is_file() {
            return Err(Error::missing(
                program.display().to_string(),
                "script/qemu builds a QEMU and says its folder; without --qemu and VPMU_QEMU, Debian's runs",
            ));
        }
        bound_to_us(&program)
    }

    /// Asks `tool` for its version.
    ///
    /// # Errors
    ///
    /// When the program is not installed, or does not say what QEMU says.
    pub fn version(&self, tool: &Tool) -> Result<Version> {
        let mut command = self.command(tool)?;
        command.arg("--version");
        let text = tool.run(command, &Cancel::default(), &|| ())?;
        Version::parse(&text).ok_or_else(|| Error::Program {
            program: self.program(tool).display().to_string(),
            status: "version not understood".to_owned(),
            output: text,
            hint: tool.hint,
        })
    }
}

/// A version of QEMU: the number and, where QEMU says so, the package in parentheses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version(String);

impl Version {
    /// Reads the first line of `qemu-system-x86_64 --version`.
    fn parse(text: &str) -> Option<Self> {
        let line = text.lines().next()?;
        let version = line.strip_prefix("QEMU emulator version ")?;
        Some(Self(version.to_owned()))
    }

    /// Returns the first number of the version, 0 where there is none.
    pub fn major(&self) -> u32 {
        let first = self.0.split('.').next();
        first.and_then(|word| word.parse().ok()).unwrap_or(0)
    }

    /// Tells whether this QEMU has the patches of `packaging/qemu`, so that no fault of QEMU's excuses a guest that breaks.
    pub fn is_mended(&self) -> bool {
        self.0.contains(MENDED)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const QEMU: Tool = Tool {
        program: "qemu-system-none",
        fix: "",
        hint: "",
    };

    #[test]
    fn versions_say_whose_qemu_it_is() {
        for (line, shown, major, is_mended) in [
            (
                "10.0.2 (Debian 1:10.0.2+ds-2+deb13u1)",
                "10.0.2 (Debian 1:10.0.2+ds-2+deb13u1)",
                10,
                false,
            ),
            (
                "10.0.13 (vpmu patches 0123456789ab)",
                "10.0.13 (vpmu patches 0123456789ab)",
                10,
                true,
            ),
            ("9.1.50", "9.1.50", 9, false),
            ("next", "next", 0, false),
        ] {
            let text = format!("QEMU emulator version {line}\nCopyright (c) vpmu patches\n");
            let version = Version::parse(&text).unwrap();
            assert_eq!(version.to_string(), shown);
            assert_eq!((version.major(), version.is_mended()), (major, is_mended));
        }
        assert_eq!(Version::parse("other 1.0"), None);
        assert_eq!(Version::parse(""), None);
    }

    #[test]
    fn a_qemu_is_tried_for_the_x86_pmu() {
        for (asks, has) in [("*,perfmon-v2=on,enforce*", true), ("*other*", false)] {
            let folder = tempfile::tempdir().unwrap();
            let qemu = Qemu::chosen(Some(folder.path()));
            let program = qemu.program(&QEMU_X86_64);
            let script = format!(
                "#!/bin/sh\ncase $* in {asks}) read word; [ $word = quit ];; *) false;; esac\n"
            );
            fs::write(&program, script).unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
            assert_eq!(qemu.has_x86_pmu(), has);
        }
    }

    #[test]
    fn a_folder_goes_before_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let qemu = Qemu::chosen(Some(folder.path()));
        let error = qemu.version(&QEMU).unwrap_err().to_string();
        assert!(
            error.contains("qemu-system-none") && error.contains("script/qemu"),
            "{error}"
        );
        let program = qemu.program(&QEMU);
        fs::write(
            &program,
            "#!/bin/sh\necho \"QEMU emulator version 8.0 ($1)\"\n",
        )
        .unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(qemu.version(&QEMU).unwrap().to_string(), "8.0 (--version)");
        fs::write(&program, "#!/bin/sh\n").unwrap();
        assert!(matches!(qemu.version(&QEMU), Err(Error::Program { .. })));
    }
}
