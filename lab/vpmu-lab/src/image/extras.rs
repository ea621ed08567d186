//! What a run adds to its guest out of Debian's packages: modules of the guest's kernel, and programs.

use std::path::PathBuf;

use super::archive::{Archive, add_tree};
use super::kernel_module::{self, ModuleFiles};
use crate::image::cache::{RunDir, Session};
use crate::image::debian::{Pool, Selection};
use crate::spec::Request;
use crate::{Result, usage};

/// Unpacked for one run, and gone with it.
#[derive(Debug)]
pub(crate) struct Extras {
    folder: RunDir,
    /// The modules, each behind those that it needs.
    modules: Vec<PathBuf>,
}

/// The folder of the packages' files.
const PROGRAMS: &str = "programs";
/// The folder of the kernel's.
const KERNEL: &str = "kernel";

impl Extras {
    /// Fetches and unpacks what is asked for; `None` where that is nothing. `kernel` selects the guest's.
    pub(crate) fn prepare(
        request: &Request,
        kernel: &Selection,
        session: &Session<'_>,
    ) -> Result<Option<Self>> {
        if request.modules.is_empty() && request.packages.is_empty() {
            return Ok(None);
        }
        let folder = session.cache.run_dir()?;
        let _lock = session.lock()?;
        let _task = session.progress.task("unpacking packages for the guest");
        let programs = folder.path().join(PROGRAMS);
        for name in &request.packages {
            let selection = Selection::package(name, request.machine.arch);
            let pool = Pool::fetch(&selection, session)?;
            pool.unpack("", &programs, session.cancel)?;
        }
        let mut modules = Vec::new();
        if !request.modules.is_empty() {
            let root = folder.path().join(KERNEL);
            let pool = Pool::fetch(kernel, session)?;
            for kind in ["linux-image-", "linux-modules-"] {
                pool.unpack(kind, &root, session.cancel)?;
            }
            let tree = ModuleFiles::of(&root)?;
            for name in &request.modules {
                if !tree.add(name, &mut modules)? {
                    return usage(format!(
                        "--module {name}: the guest's kernel has no module of this name"
                    ));
                }
            }
        }
        Ok(Some(Self { folder, modules }))
    }

    /// Puts all of it where the guest's process 1 finds it.
    pub(super) fn put(&self, archive: &mut Archive) -> Result<()> {
        let programs = self.folder.path().join(PROGRAMS);
        if programs.is_dir() {
            add_tree(archive, &programs)?;
        }
        for (number, path) in self.modules.iter().enumerate() {
            let name = kernel_module::file_name(path).unwrap_or_default();
            // Process 1 loads modules in the order of their names.
            let place = format!("vpmu/modules/{number:02}-{name}");
            archive.copy(&place, 0o644, path);
        }
        Ok(())
    }
}
