//! The part of a request that is about the VMM of an x86-64 guest: this project's, or the user's.

use super::Request;
use crate::spec::arch::Arch;
use crate::spec::design::{Design, Freeze, Lbr, Model, Pebs, Pmu};
use crate::spec::disturbance;
use crate::{Result, usage};

/// The most memory that vpmu-vmm's memory map has, MiB.
const MOST_VMM_MEMORY: u32 = 3 << 10;

impl Request {
    pub(super) fn check_vmm(&self, designs: &[Design]) -> Result<()> {
        self.check_theirs(designs)?;
        let any = |is_it: fn(Pmu) -> bool| designs.iter().any(|design| is_it(design.pmu));
        let has_vmm = self.machine.arch == Arch::X86_64 && any(Pmu::has_our_pmu);
        let has_emulated = has_vmm && any(|pmu| pmu == Pmu::Emulated);
        if !has_vmm && self.vmm.is_none() && !self.vmm_args.is_empty() {
            return usage("--vmm-arg is about --arch x86_64 --pmu emulated and exec, and --vmm");
        }
        if !has_vmm && self.model != Model::default() {
            return usage("--model is about --arch x86_64 --pmu emulated and exec");
        }
        let is_patched = |design: &Design| design.pmu == Pmu::Qemu;
        if self.lbr != Lbr::Off && !has_emulated {
            return usage("--lbr is about --arch x86_64 --pmu emulated");
        }
        if self.lbr != Lbr::Off && self.model == Model::Amd {
            return usage("AMD's PMU has last branch records with --model amd-v2");
        }
        if self.pebs != Pebs::Off && !has_emulated {
            return usage("--pebs is about --arch x86_64 --pmu emulated");
        }
        if self.pebs != Pebs::Off && matches!(self.model, Model::Amd | Model::AmdV2) {
            return usage("PEBS is Intel's: leave --pebs out, or give --model intel");
        }
        let is_backed = |pmu: Pmu| pmu.is_ours() || pmu == Pmu::Exec;
        if self.backing.is_some() && !(has_vmm && any(is_backed)) {
            return usage("--backing is about --arch x86_64 --pmu emulated, paravirt and exec");
        }
        let has_clock = |design: &Design| matches!(design.pmu, Pmu::Emulated | Pmu::Paravirt);
        if self.freeze != Freeze::Vm && !(has_vmm && designs.iter().all(has_clock)) {
            return usage(
                "--freeze is about --arch x86_64 --pmu emulated and paravirt, and no other design",
            );
        }
        if self.perfmon.is_some()
            && !(has_vmm && any(|pmu| matches!(pmu, Pmu::Emulated | Pmu::Exec)))
        {
            return usage("--perfmon is about --arch x86_64 --pmu emulated and exec");
        }
        if self.perfmon.is_some() && matches!(self.model, Model::Amd | Model::AmdV2) {
            return usage(
                "--perfmon is about Intel's PMU: leave --model out, or give --model intel",
            );
        }
        for word in self.vmm_args.iter().filter(|_| self.vmm.is_none()) {
            if word.contains(char::is_whitespace) {
                return usage(format!(
                    "--vmm-arg takes one word, without a space in it: {word}"
                ));
            }
            let disturbs = word.starts_with("--disturb");
            if disturbs && (disturbance(word).is_none() || !designs.iter().all(is_patched)) {
                return usage(
                    "--vmm-arg takes --disturb=migrate:N, loadvm:N or reset:N, with --pmu qemu alone",
                );
            }
            if word == "--save" || word.starts_with("--restore") {
                return usage(
                    "--vmm-arg takes --save=FILE as one word; vpmu-vmm --restore runs by itself only",
                );
            }
        }
        if has_vmm && any(Pmu::is_ours) && self.machine.memory > MOST_VMM_MEMORY {
            return usage("--memory is too large: vpmu-vmm's guests have at most 3G");
        }
        Ok(())
    }

    fn check_theirs(&self, designs: &[Design]) -> Result<()> {
        let has = |pmu| designs.iter().any(|design| design.pmu == pmu);
        if self.vmm.is_none() {
            return match (has(Pmu::Vmm), self.vmm_files.is_empty()) {
                (true, _) => usage("--pmu vmm runs the guest on a VMM of yours: give --vmm FILE"),
                (_, false) => usage("--vmm-file is about --vmm"),
                _ => Ok(()),
            };
        }
        if self.machine.arch != Arch::X86_64 {
            return usage("--vmm is about --arch x86_64");
        }
        if !has(Pmu::Vmm) && !has(Pmu::Exec) {
            return usage("--vmm is about --pmu vmm and exec");
        }
        if self.disk.is_some() {
            return usage("--vmm boots a kernel that it is given: leave --disk out");
        }
        Ok(())
    }
}
