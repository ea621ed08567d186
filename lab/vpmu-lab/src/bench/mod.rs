//! Published experiments, done again: measured figures beside published ones.
//!
//! Absolute times differ: the published machines are faster and ran the command
//! longer. The relation of one design to another is comparable.

mod callstacks;
mod deadline;
mod exits;
mod host_profile;
mod lbr;
mod paravirt;
mod partition;
mod parts;
mod paused;
mod pebs;
mod peers;
mod reprogram;
mod rings;
mod sampling;
mod switch;

use std::path::Path;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use itertools::Itertools;

use parts::Part;

use crate::host::parallel::lock;
use crate::host::qemu::Qemu;
use crate::image::cache::Session;
use crate::report::figures::{Report, Row};
use crate::report::result;
use crate::report::story::Page;
use crate::report::table;
use crate::run::compare::compare;
use crate::run::{self, Lab};
use crate::spec::Request;
use crate::spec::arch::Arch;
use crate::spec::command::Command;
use crate::spec::design::{Backing, Design, Model, Pmu, Policy};
use crate::{Result, usage};

/// One published experiment.
#[derive(Debug)]
pub struct Bench {
    /// The bench's name on the command line.
    pub name: &'static str,
    /// The text of `docs/results` beside the bench's figures, for [`Page::parse`].
    page: &'static str,
    /// Whether the bench measures guests of either vendor.
    has_models: bool,
    /// Whether the emulated x86 processor has counters, on a QEMU that can emulate them. Without them, a clock counts.
    has_counters: bool,
    /// Checks before anything is downloaded, then measures.
    rows: fn(&Context<'_>) -> Result<Vec<Row>>,
}

/// All benches.
pub const BENCHES: &[Bench] = &[
    partition::BENCH,
    host_profile::BENCH,
    switch::BENCH,
    reprogram::BENCH,
    paused::BENCH,
    sampling::BENCH,
    exits::BENCH,
    deadline::BENCH,
    paravirt::BENCH,
    pebs::BENCH,
    peers::BENCH,
    lbr::BENCH,
    callstacks::BENCH,
    rings::BENCH,
];

/// Returns the page of the bench called `name`.
pub fn page(name: &str) -> Option<Page> {
    let bench = BENCHES.iter().find(|bench| bench.name == name)?;
    Some(bench.page())
}

/// A bench's tools and options.
struct Context<'a> {
    bench: &'static Bench,
    /// The model of x86 guests. The published guests had Intel's.
    model: Model,
    qemu: Qemu,
    /// The version of the QEMU that ran the guests, once one has.
    version: OnceLock<String>,
    /// What counted for this project's x86 guests.
    backings: Mutex<Vec<Backing>>,
    /// What makes figures doubtful.
    warnings: Mutex<Vec<String>>,
    keep: Option<&'a Path>,
    session: &'a Session<'a>,
}

impl Bench {
    /// Returns the bench's page, without figures.
    pub fn page(&self) -> Page {
        Page::parse(self.page)
    }

    /// Measures everything on `qemu`, with x86 guests of `model`, by default Intel's. Returns the figures, and sentences about
    /// what makes some of them doubtful.
    ///
    /// # Errors
    ///
    /// When a design fails, on an interruption, or when the bench has no models.
    pub fn run(
        &'static self,
        model: Option<Model>,
        qemu: Qemu,
        keep: Option<&Path>,
        session: &Session<'_>,
    ) -> Result<(Report, Vec<String>)> {
        if model.is_some() && !self.has_models {
            return usage("--model is about the benches exits, lbr, rings, sampling and paused");
        }
        let context = Context {
            bench: self,
            model: model.unwrap_or(Model::Intel),
            qemu,
            version: OnceLock::new(),
            backings: Mutex::default(),
            warnings: Mutex::default(),
            keep,
            session,
        };
        let rows = (self.rows)(&context)?;
        // Else none counted, or each mode says what did.
        let backing = lock(&context.backings).drain(..).exactly_one().ok();
        let warnings = std::mem::take(&mut *lock(&context.warnings));
        let report = Report {
            schema: 1,
            bench: self.name.to_owned(),
            qemu: context.version.into_inner(),
            backing,
            rows,
        };
        Ok((report, warnings))
    }
}

impl Context<'_> {
    /// Returns `command` with events that the guests have. Among AMD's processors, only the newest count reference
    /// cycles, and only the newest kernels know that event. On others, `command` counts cycles once more.
    fn with_events(&self, command: &str) -> String {
        match self.model {
            Model::Auto | Model::Intel => command.to_owned(),
            Model::Amd | Model::AmdV2 => command.replace("ref-cycles", "r76"),
        }
    }

    /// Requests x86 guests of this project's, with options `vmm_args` for the VMM.
    fn request(&self, vmm_args: &[&str]) -> Request {
        Request {
            model: self.model,
            vmm_args: vmm_args.iter().map(|&word| word.to_owned()).collect(),
            ..Request::new(Arch::X86_64)
        }
    }

    /// Runs `command` under each of `designs` in guests as `request` wants them. `part` distinguishes the kept logs of several
    /// calls.
    fn compare(
        &self,
        mut request: Request,
        part: &str,
        designs: &[Design],
        command: &str,
    ) -> Result<Vec<result::Row>> {
        request.command = Command::from_words(&[command.to_owned()]);
        request.machine.qemu = self.qemu.clone();
        let cpu = request.machine.cpu.take();
        request.machine.cpu = cpu.or_else(|| processor(self.bench.has_counters, &request, designs));
        request.timeout = Duration::from_secs(1800);
        // A busy machine boots slowly. A guest that hangs is recognised by its own time.
        request.boot_timeout = Duration::from_secs(1800);
        let keep = |folder: &Path| folder.join(format!("{}-{part}", self.bench.name));
        request.keep = self.keep.map(keep);
        // A bench of deadlines marks its parts, and gives no guest a PMU.
        let has_pmu = !request.marked;
        let spec = request.check(designs)?;
        run::check(&spec)?;
        let lab = Lab::prepare(&spec, self.session)?;
        let comparison = compare(&lab)?;
        if let Some((_, error)) = comparison.failures.into_iter().next() {
            return Err(error);
        }
        if let Some(row) = comparison.rows.iter().find(|row| row.run.status != 0) {
            return Err(row.failed());
        }
        if has_pmu {
            let all = table::warnings(&comparison.rows).into_iter();
            lock(&self.warnings).extend(all.map(|warning| format!("{part}: {warning}")));
        }
        self.note_machine(&comparison.rows);
        Ok(comparison.rows)
    }

    /// Notes which QEMU ran the guests of `rows`, and what counted for them.
    fn note_machine<'r>(&self, rows: impl IntoIterator<Item = &'r result::Row>) {
        for run in rows.into_iter().map(|row| &row.run) {
            if let Some(version) = &run.qemu {
                self.version.get_or_init(|| version.clone());
            }
            // KVM's own PMUs are in no VMM's statistics.
            if let Some(backing) = run.backing.filter(|_| run.vmm.is_some()) {
                self.note_backing(backing);
            }
        }
    }

    fn note_backing(&self, backing: Backing) {
        let mut backings = lock(&self.backings);
        if !backings.contains(&backing) {
            backings.push(backing);
        }
    }

    /// Measures `parts` of guests as `request` wants them. The figures' names end with `suffix`. `label` distinguishes the
    /// kept logs; the modes are those that `mode` says.
    fn measure(
        &self,
        request: &Request,
        designs: &[Design],
        parts: &[Part],
        (label, suffix): (&str, &str),
        mode: impl Fn(&result::Row) -> &'static str,
    ) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for part in parts {
            let label = format!("{label}{}", part.name);
            for row in &self.compare(request.clone(), &label, designs, &part.command)? {
                let figures = (part.figures)(row)?.into_iter();
                rows.extend(figures.map(|figure| figure.row(suffix, mode(row))));
            }
        }
        Ok(rows)
    }
}

/// Returns the name of an emulated x86 processor without counters, where there are to be none.
fn processor(has_counters: bool, request: &Request, designs: &[Design]) -> Option<String> {
    let is_emulated = request.machine.arch == Arch::X86_64 && !request.is_direct(designs);
    (is_emulated && !has_counters).then(|| "max".to_owned())
}

/// Returns this project's VMM with each of `policies`.
fn emulated(policies: &[Policy]) -> Vec<Design> {
    let pmu = Pmu::Emulated;
    let policies = policies.iter().map(|&policy| Some(policy));
    policies.map(|policy| Design { pmu, policy }).collect()
}

/// Returns a design's name in a row of a bench.
fn mode(design: Design) -> &'static str {
    design
        .policy
        .map_or(design.pmu.name(), |policy| policy.name())
}

/// Puts the published result of the row's figure under its mode beside the measured one, if `published` has it.
fn beside(row: Row, published: &[(&str, &str, f64)]) -> Row {
    let mut all = published.iter();
    let found = all.find(|(figure, mode, _)| (*figure, *mode) == (&*row.figure, &*row.mode));
    row.beside(found.map(|(.., value)| *value))
}

/// Rounds to two digits behind the point, as published.
fn hundredths(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// Returns `count` for each of `pmis` in [`hundredths`]; `None` without a PMI.
fn for_each_pmi(count: f64, pmis: Option<u64>) -> Option<f64> {
    let pmis = pmis.filter(|&pmis| pmis > 0)?;
    Some(hundredths(count / pmis as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_processor_is_chosen_where_this_machines_own_kvm_runs_the_guests() {
        let (ours, native) = (emulated(&[Policy::Paused]), [Pmu::Native.into()]);
        let chosen = |own_kvm, designs: &[Design], has_counters| {
            let mut request = Request {
                own_kvm,
                command: Command::from_words(&["true".to_owned()]),
                ..Request::new(Arch::X86_64)
            };
            request.machine.cpu = processor(has_counters, &request, designs);
            request.check(designs).unwrap().request.machine.cpu
        };
        assert_eq!(chosen(true, &ours, false), None);
        assert_eq!(chosen(true, &ours, true), None);
        for (own_kvm, designs) in [(false, &ours[..]), (true, &native)] {
            assert_eq!(chosen(own_kvm, designs, false).as_deref(), Some("max"));
            assert_eq!(chosen(own_kvm, designs, true), None);
        }
    }

    #[test]
    fn pages_are_whole() {
        for bench in BENCHES {
            let (head, _) = bench.page.split_once("\n\n# ").unwrap();
            let kinds = ["about: ", "claim ", "group: ", "group :"];
            let is_known = |line: &str| kinds.iter().any(|kind| line.starts_with(kind));
            assert!(head.lines().all(is_known), "{head}");
            // Only the first group's suffix may be empty.
            let text = format!("{:?}", bench.page()).replace("suffix: \"\"", "");
            assert!(!text.contains("\"\""), "{text}");
        }
    }

    #[test]
    fn names_differ() {
        let mut names: Vec<&str> = BENCHES.iter().map(|bench| bench.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), BENCHES.len());
    }
}
