//! `vpmu bench`.

use std::path::PathBuf;

use clap::Args;
use vpmu_lab::bench::BENCHES;
use vpmu_lab::host::cancel::Cancel;
use vpmu_lab::host::files::{check_writable, write_json, write_whole};
use vpmu_lab::host::progress::Progress;
use vpmu_lab::host::qemu::Qemu;
use vpmu_lab::image::cache::Session;
use vpmu_lab::report::markdown::markdown as page_of;
use vpmu_lab::report::table;
use vpmu_lab::spec::design::{Backing, Model};
use vpmu_lab::{Result, usage};

use crate::print::print;
use crate::values::choice;

#[derive(Debug, Args)]
pub(crate) struct Bench {
    /// Which one
    name: Option<String>,
    /// Whose PMU the guests have (exits, lbr, rings, sampling, paused)
    ///
    /// The default is intel, which is what was published.
    #[arg(long, value_name = "NAME", value_parser = choice::<Model>())]
    model: Option<Model>,
    /// Write the figures to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page of the figures to a file, as those in docs/results
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Keep console logs, QEMU command lines and records in a folder
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Run guests on the QEMU in this folder, such as the one that script/qemu builds
    #[arg(long, value_name = "DIR")]
    qemu: Option<PathBuf>,
}

pub(crate) fn bench(options: &Bench, cancel: &Cancel) -> Result<()> {
    let Some(name) = &options.name else {
        let files = [
            &options.json,
            &options.markdown,
            &options.keep,
            &options.qemu,
        ];
        if options.model.is_some() || files.into_iter().any(Option::is_some) {
            return usage(
                "--model, --json, --markdown, --keep and --qemu are about a bench: give its name",
            );
        }
        let list = BENCHES
            .iter()
            .map(|bench| format!("{:12} {}\n", bench.name, bench.page().about));
        return print(&list.collect::<String>());
    };
    let Some(bench) = BENCHES.iter().find(|bench| bench.name == *name) else {
        return usage(format!(
            "no bench is called {name}; `vpmu bench` lists them"
        ));
    };
    for path in options.json.iter().chain(&options.markdown) {
        check_writable(path)?;
    }
    let qemu = Qemu::chosen(options.qemu.as_deref());
    let session = Session::new(cancel, Progress::stderr())?;
    let (report, warnings) = bench.run(options.model, qemu, options.keep.as_deref(), &session)?;
    let qemu = table::qemu(report.qemu.as_deref()).unwrap_or_default();
    let counted = |backing: Backing| format!("counted by {}\n", backing.counter());
    let backing = report.backing.map_or_else(String::new, counted);
    // First: a full disk takes no figures away.
    print(&format!("{}\n{backing}{qemu}", table::bench(&report.rows)))?;
    for warning in warnings {
        eprintln!("vpmu: warning: {warning}");
    }
    let json = (options.json.as_ref()).map_or(Ok(()), |path| write_json(path, &report));
    if let Some(path) = &options.markdown {
        let page = page_of(&bench.page(), &report, None);
        write_whole(path, page.as_bytes())?;
    }
    json
}
