//! `vpmu report`.

use std::path::Path;

use vpmu_lab::Result;
use vpmu_lab::bench;
use vpmu_lab::host::files::{check_writable, write_whole};
use vpmu_lab::report::page;

use crate::print::print;

/// In the folder, unless the user names another place.
const NAME: &str = "report.html";

pub(crate) fn report(folder: &Path, output: Option<&Path>) -> Result<()> {
    let output = output.map_or_else(|| folder.join(NAME), Path::to_owned);
    let page = page::of_folder(folder, bench::page)?;
    check_writable(&output)?;
    write_whole(&output, page.html.as_bytes())?;
    for file in &page.skipped {
        eprintln!("vpmu: {file}: no results of this vpmu; left out");
    }
    let (files, output) = (page.files, output.display());
    print(&format!("{output}: results of {files} files\n"))
}
