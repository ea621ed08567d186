//! `vpmu bench`.

use std::path::Path;
use std::process::ExitCode;

use vpmu_lab::bench::BENCHES;
use vpmu_lab::host::cancel::Cancel;
use vpmu_lab::host::files::{check_writable, write_whole};
use vpmu_lab::host::progress::Progress;
use vpmu_lab::host::qemu::Qemu;
use vpmu_lab::image::cache::Cache;
use vpmu_lab::report::markdown::markdown as page_of;
use vpmu_lab::report::table;
use vpmu_lab::spec::design::{Backing, Model};
use vpmu_lab::{Error, Result};

use crate::print::print;

pub(crate) fn bench(
    name: Option<&str>,
    model: Option<Model>,
    json: Option<&Path>,
    markdown: Option<&Path>,
    keep: Option<&Path>,
    qemu: Option<&Path>,
    cancel: &Cancel,
) -> Result<ExitCode> {
    let Some(name) = name else {
        if model.is_some()
            || json.is_some()
            || markdown.is_some()
            || keep.is_some()
            || qemu.is_some()
        {
            return Err(Error::Usage(
                "--model, --json, --markdown, --keep and --qemu are about a bench: give its name"
                    .to_owned(),
            ));
        }
        let list = BENCHES
            .iter()
            .map(|bench| format!("{:12} {}\n", bench.name, bench.about));
        print(&list.collect::<String>())?;
        return Ok(ExitCode::SUCCESS);
    };
    let bench = BENCHES
        .iter()
        .find(|bench| bench.name == name)
        .ok_or_else(|| {
            Error::Usage(format!(
                "no bench is called {name}; `vpmu bench` lists them"
            ))
        })?;
    for path in json.into_iter().chain(markdown) {
        check_writable(path)?;
    }
    let cache = Cache::open()?;
    let qemu = Qemu::chosen(qemu);
    let report = bench.run(model, qemu, keep, &cache, cancel, &Progress::stderr())?;
    if let Some(path) = json {
        report.write(path)?;
    }
    if let Some(path) = markdown {
        let page = page_of(bench.name, &bench.page, &report.json(), None)?;
        write_whole(path, page.as_bytes())?;
    }
    let qemu = table::qemu(report.qemu()).unwrap_or_default();
    let counted = |backing: Backing| format!("counted by {}\n", backing.counter());
    let backing = report.backing().map_or_else(String::new, counted);
    print(&format!("{}\n{backing}{qemu}", table::bench(report.rows())))?;
    Ok(ExitCode::SUCCESS)
}
