//! `completions`, `man`: output generated from the definition of the command line.

use clap::CommandFactory;

use crate::cli::{Cli, Completions, Man};
use crate::failure::Failure;

/// Runs `completions`.
pub fn completions(args: &Completions) -> Vec<u8> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "vgpuctl", &mut text);
    text
}

/// Runs `man`.
pub fn man(args: &Man) -> Result<Vec<u8>, Failure> {
    clap_mangen::generate_to(Cli::command(), &args.folder).map_err(|error| {
        Failure::Local(format!("Cannot write pages into {}: {error}", args.folder.display()))
    })?;
    Ok(Vec::new())
}
