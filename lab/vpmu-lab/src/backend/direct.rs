//! A guest in this machine's own KVM, under this project's x86 VMM.

use std::ffi::OsString;
use std::path::Path;

use super::{Backend, Launch, Parts};
use crate::Result;
use crate::host::tool;
use crate::image::artifacts;
use crate::image::job::Notify;
use crate::spec::design::{Freeze, Lbr, Pebs};
use crate::spec::{Machine, OurVmm};

/// Runs the guest in real time, at the speed of the machine.
pub(super) struct Direct<'a> {
    pub(super) machine: &'a Machine,
    pub(super) vmm: &'a OurVmm,
}

impl Backend for Direct<'_> {
    fn check(&self) -> Result<()> {
        artifacts::find_beside(artifacts::VMM).map(drop)
    }

    fn notify(&self) -> Notify {
        Notify::Doorbell
    }

    fn construct(&self, parts: &Parts<'_>, folder: &Path) -> Result<Launch> {
        let boot = parts.boot(self.machine.arch, folder)?;
        let options = arguments(self.machine, self.vmm);
        let mut arguments: Vec<OsString> = options.iter().map(OsString::from).collect();
        arguments.extend(["--kernel".into(), boot.kernel.into_os_string()]);
        if let Some(initrd) = boot.initrd {
            arguments.extend(["--initrd".into(), initrd.into_os_string()]);
        }
        arguments.extend(["--append".into(), OsString::from(boot.append)]);
        let program = artifacts::find_beside(artifacts::VMM)?;
        let command = tool::bound_to_us(&program)?;
        Ok(Launch::new(command, program, arguments))
    }
}

/// Returns the arguments of this project's x86 VMM, without kernel and initrd.
pub(super) fn arguments(machine: &Machine, vmm: &OurVmm) -> Vec<String> {
    let words = [
        "--vcpus",
        &machine.vcpus.to_string(),
        "--memory",
        &format!("{}M", machine.memory),
        "--policy",
        vmm.policy.name(),
        "--model",
        vmm.model.name(),
        "--measure",
        // A nested host keeps its files in memory and boots once, so nothing would read a cache.
        "--no-kernel-cache",
    ];
    let paravirtual = vmm.paravirtual.then_some("--paravirt");
    let perfmon = vmm.perfmon.map(|version| format!("--perfmon={version}"));
    let words = words.into_iter().chain(paravirtual).map(str::to_owned);
    let lbr = (vmm.lbr != Lbr::Off).then(|| format!("--lbr={}", vmm.lbr.name()));
    let pebs = (vmm.pebs != Pebs::Off).then(|| format!("--pebs={}", vmm.pebs.name()));
    let freeze = (vmm.freeze != Freeze::Vm).then(|| format!("--freeze={}", vmm.freeze.name()));
    let backing = (vmm.backing).map(|backing| format!("--backing={}", backing.name()));
    let words = words.chain(perfmon).chain(pebs).chain(lbr).chain(freeze);
    let words = words.chain(backing);
    words.chain(vmm.options.iter().cloned()).collect()
}
