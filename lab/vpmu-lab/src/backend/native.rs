//! A guest directly on the machine that QEMU emulates.

use std::path::Path;

use super::{Backend, Launch, Parts, disk, qemu};
use crate::Result;
use crate::spec::Machine;

/// No hypervisor: the reference that designs are compared with.
pub(super) struct Native<'a>(pub(super) &'a Machine);

impl Backend for Native<'_> {
    fn check(&self) -> Result<()> {
        qemu::check(self.0)
    }

    fn construct(&self, parts: &Parts<'_>, folder: &Path) -> Result<Launch> {
        let boot = match parts.disk {
            None => parts.boot(self.0.arch, folder)?.options(),
            Some(disk) => disk::machine(disk, parts.job.as_deref(), true),
        };
        Ok(qemu::launch(self.0, self.0.memory, boot))
    }
}
