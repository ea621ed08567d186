//! A guest in this machine's own KVM, under this project's x86 VMM.

use std::ffi::OsString;
use std::path::Path;

use super::{Backend, Launch, Parts};
use crate::Result;
use crate::image::artifacts;
use crate::image::job::Notify;
use crate::spec::Request;
use crate::spec::design::{Design, Freeze, Lbr, Pebs, Pmu};

/// Runs the guest in real time, at the speed of the machine.
pub(super) struct Direct<'a> {
    pub(super) request: &'a Request,
    pub(super) design: Design,
}

impl Backend for Direct<'_> {
    fn check(&self) -> Result<()> {
        artifacts::find_beside(artifacts::VMM).map(drop)
    }

    fn notify(&self) -> Notify {
        Notify::Doorbell
    }

    fn construct(&self, parts: &Parts<'_>, folder: &Path) -> Result<Launch> {
        let boot = parts.boot(self.request.machine.arch, folder)?;
        let options = arguments(self.request, self.design);
        let mut arguments: Vec<OsString> = options.iter().map(OsString::from).collect();
        arguments.extend(["--kernel".into(), boot.kernel.into_os_string()]);
        if let Some(initrd) = boot.initrd {
            arguments.extend(["--initrd".into(), initrd.into_os_string()]);
        }
        arguments.extend(["--append".into(), OsString::from(boot.append)]);
        let program = artifacts::find_beside(artifacts::VMM)?;
        Ok(Launch { program, arguments })
    }
}

/// Returns the arguments of this project's x86 VMM, without kernel and initrd.
pub(super) fn arguments(request: &Request, design: Design) -> Vec<String> {
    let words = [
        "--vcpus",
        &request.machine.vcpus.to_string(),
        "--memory",
        &format!("{}M", request.machine.memory),
        "--policy",
        design.policy.unwrap_or_default().name(),
        "--model",
        request.model.name(),
        "--measure",
        // A nested host keeps its files in memory and boots once, so nothing would read a cache.
        "--no-kernel-cache",
    ];
    let mut words = words.map(str::to_owned).to_vec();
    if design.pmu == Pmu::Paravirt {
        words.push("--paravirt".to_owned());
    } else {
        words.extend(
            request
                .perfmon
                .map(|version| format!("--perfmon={version}")),
        );
        let (pebs, lbr) = (request.pebs, request.lbr);
        words.extend((pebs != Pebs::Off).then(|| format!("--pebs={}", pebs.name())));
        words.extend((lbr != Lbr::Off).then(|| format!("--lbr={}", lbr.name())));
    }
    let freeze = request.freeze;
    words.extend((freeze != Freeze::Vm).then(|| format!("--freeze={}", freeze.name())));
    words.extend((request.backing).map(|backing| format!("--backing={}", backing.name())));
    words.extend_from_slice(request.our_vmm_args());
    words
}
