//! Writes the manual pages and the shell completions of `vpmu`, for packages:
//! `cargo run -p vpmu-cli --example manual -- FOLDER`.

use std::fs;
use std::path::PathBuf;

use clap::CommandFactory;
use clap_complete::Shell;

#[path = "../src/options.rs"]
#[expect(dead_code, reason = "the command line is looked at, and not read")]
mod options;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args_os()
        .nth(1)
        .ok_or("the folder for the pages is missing")?;
    let folder = PathBuf::from(folder);
    fs::create_dir_all(&folder)?;
    clap_mangen::generate_to(options::Cli::command(), &folder)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut options::Cli::command(), "vpmu", &folder)?;
    }
    Ok(())
}
