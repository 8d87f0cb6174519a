//! `completions`, `man`: what the command line's definition can be turned into besides `--help`.

use clap::CommandFactory;

use crate::cli::{Cli, Completions, Man};
use crate::failure::Failure;

/// `completions`
pub fn completions(args: &Completions) -> Vec<u8> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "vgpuctl", &mut text);
    text
}

/// `man`
pub fn man(args: &Man) -> Result<Vec<u8>, Failure> {
    clap_mangen::generate_to(Cli::command(), &args.folder).map_err(|error| {
        Failure::Local(format!("Cannot write pages into {}: {error}", args.folder.display()))
    })?;
    Ok(Vec::new())
}
