//! The folder in which the user wants to find a guest's logs.

use std::fs::{self, File};
use std::path::PathBuf;

use crate::backend::Launch;
use crate::report::host_profile::HostProfile;
use crate::spec::Spec;
use crate::spec::command::quote;
use crate::spec::design::Design;
use crate::{Error, Result};
use vpmu_measure::Record;

/// Creates the folder in which the user wants to find a guest's logs.
pub(super) struct Kept(Option<PathBuf>);

impl Kept {
    pub(super) fn new(spec: &Spec, design: Design, launch: &Launch) -> Result<Self> {
        let Some(keep) = &spec.keep else {
            return Ok(Self(None));
        };
        let folder = keep.join(design.to_string());
        fs::create_dir_all(&folder).map_err(Error::file("create", &folder))?;
        let arguments = launch.arguments.iter();
        let words: Vec<String> = std::iter::once(launch.program.display().to_string())
            .chain(arguments.map(|word| quote(&word.to_string_lossy())))
            .collect();
        let path = folder.join("command.txt");
        fs::write(&path, words.join(" ") + "\n").map_err(Error::file("write", &path))?;
        Ok(Self(Some(folder)))
    }

    pub(super) fn console(&self) -> Result<Option<File>> {
        let create = |folder: &PathBuf| {
            let path = folder.join("console.log");
            File::create(&path).map_err(Error::file("create", &path))
        };
        self.0.as_ref().map(create).transpose()
    }

    pub(super) fn host_profile(&self, profile: Option<&HostProfile>) -> Result<()> {
        let (Some(folder), Some(profile)) = (&self.0, profile) else {
            return Ok(());
        };
        for (index, (event, text)) in profile.folded_texts().enumerate() {
            let path = folder.join(match index {
                0 => "host-profile.folded".to_owned(),
                _ => format!("host-profile-{event}.folded"),
            });
            fs::write(&path, text).map_err(Error::file("write", &path))?;
        }
        Ok(())
    }

    pub(super) fn second_console(&self, console: Option<&[u8]>) -> Result<()> {
        let (Some(folder), Some(console)) = (&self.0, console) else {
            return Ok(());
        };
        let path = folder.join("second.log");
        fs::write(&path, console).map_err(Error::file("write", &path))
    }

    pub(super) fn records(&self, records: &[Record]) -> Result<()> {
        let Some(folder) = &self.0 else {
            return Ok(());
        };
        let path = folder.join("records.json");
        let text = serde_json::to_vec_pretty(records).expect("records are plain data");
        fs::write(&path, text).map_err(Error::file("write", &path))
    }
}
