//! The folder in which the user wants to find a guest's logs.

use std::fs::{self, File};
use std::path::PathBuf;

use itertools::Itertools;

use crate::backend::Launch;
use crate::report::host_profile::HostProfile;
use crate::spec::Spec;
use crate::spec::command::quote;
use crate::spec::design::Design;
use crate::{Error, Result};

/// Creates the folder in which the user wants to find a guest's logs.
pub(super) struct Kept(Option<PathBuf>);

impl Kept {
    pub(super) fn new(spec: &Spec, design: Design, launch: &Launch) -> Result<Self> {
        let Some(keep) = &spec.request.keep else {
            return Ok(Self(None));
        };
        let folder = keep.join(design.to_string());
        fs::create_dir_all(&folder).map_err(Error::file("create", &folder))?;
        let arguments = launch.arguments.iter();
        let words = arguments.map(|word| quote(&word.to_string_lossy()));
        let program = launch.program.display().to_string();
        let line = [program].into_iter().chain(words).join(" ");
        let kept = Self(Some(folder));
        kept.write("command.txt", line + "\n")?;
        Ok(kept)
    }

    /// Writes one of the logs, where the user wants them.
    pub(super) fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> Result<()> {
        let Some(folder) = &self.0 else {
            return Ok(());
        };
        let path = folder.join(name);
        fs::write(&path, contents).map_err(Error::file("write", &path))
    }

    pub(super) fn console(&self) -> Result<Option<File>> {
        let create = |folder: &PathBuf| {
            let path = folder.join("console.log");
            File::create(&path).map_err(Error::file("create", &path))
        };
        self.0.as_ref().map(create).transpose()
    }

    pub(super) fn host_profile(&self, profile: &HostProfile) -> Result<()> {
        for (index, (event, text)) in profile.folded_texts().enumerate() {
            let name = match index {
                0 => "host-profile.folded".to_owned(),
                _ => format!("host-profile-{event}.folded"),
            };
            self.write(&name, text)?;
        }
        Ok(())
    }
}
