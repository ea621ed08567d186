//! `vpmu manual`: manual pages and shell completions, from the command line's own definition.

use std::fs;
use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;
use vpmu_lab::{Error, Result};

use crate::options::Cli;

/// Writes all pages and completions into `folder`.
pub(crate) fn manual(folder: &Path) -> Result<()> {
    let failed = || Error::file("write in", folder);
    fs::create_dir_all(folder).map_err(failed())?;
    clap_mangen::generate_to(Cli::command(), folder).map_err(failed())?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut Cli::command(), "vpmu", folder).map_err(failed())?;
    }
    Ok(())
}
