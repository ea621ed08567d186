//! `vpmu rewrite-kernel`: a distribution's kernel without RDPMC.

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use vpmu_kernel::{Kernel, Search};
use vpmu_lab::host::cancel::Cancel;
use vpmu_lab::host::files::{check_writable, write_whole};
use vpmu_lab::{Error, Result};

use crate::print::print;

/// Unpacks, rewrites, packs into a `bzimage` again if that is wanted, writes, and says what was done.
pub(crate) fn rewrite_kernel(
    input: &Path,
    output: &Path,
    bzimage: bool,
    cancel: &Cancel,
) -> Result<ExitCode> {
    check_writable(output)?;
    let image = match vpmu_kernel::read_file(input) {
        Ok(image) => image,
        Err(vpmu_kernel::Error::Read(_, error)) => return Err(Error::file("read", input)(error)),
        Err(error) => return Ok(refused(input, &error)),
    };
    match rewritten(image, bzimage) {
        Ok((kernel, search, bytes)) => {
            let bytes = bytes.as_deref().unwrap_or(kernel.elf());
            // To pack takes a minute.
            cancel.check()?;
            write_whole(output, bytes)?;
            print(&report(output, bytes.len(), &kernel, &search))?;
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => Ok(refused(input, &error)),
    }
}

/// Returns the rewritten kernel in `image`, and the bzImage with it if that is wanted.
fn rewritten(
    image: Vec<u8>,
    bzimage: bool,
) -> std::result::Result<(Kernel, Search, Option<Vec<u8>>), vpmu_kernel::Error> {
    let packed = bzimage.then(|| image.clone());
    let mut kernel = Kernel::from_bytes(image)?;
    let search = kernel.rewrite_rdpmc()?;
    let bzimage = match packed {
        Some(image) => {
            eprintln!("vpmu: packing the kernel again, which takes a minute ...");
            Some(kernel.repack(&image)?)
        }
        None => None,
    };
    Ok((kernel, search, bzimage))
}

fn refused(input: &Path, error: &vpmu_kernel::Error) -> ExitCode {
    eprintln!("vpmu: {}: {error}", input.display());
    ExitCode::FAILURE
}

fn report(output: &Path, bytes: usize, kernel: &Kernel, search: &Search) -> String {
    let names = kernel.symbols(&search.sites).unwrap_or_default();
    let mut text = String::new();
    for (n, site) in search.sites.iter().enumerate() {
        let _ = write!(text, "{:#x}", site.address);
        if let Some(Some((name, offset))) = names.get(n) {
            let _ = write!(text, " {name}+{offset:#x}");
        }
        let _ = writeln!(text, ": rdpmc -> out 0xe6, al");
    }
    let _ = writeln!(
        text,
        "{}: {bytes} bytes, {} RDPMC rewritten, {} other places with its bytes left alone",
        output.display(),
        search.sites.len(),
        search.pairs - search.sites.len(),
    );
    text
}
