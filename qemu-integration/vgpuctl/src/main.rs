//! `vgpuctl`: the command line client of `vgpud`.
//!
//! * [`cli`]: definition of the command line
//! * [`commands`]: implementations of the commands
//! * [`doctor`]: checks of the host, with fixes
//! * [`top`]: live shares on the terminal
//! * [`mdevctl`]: text and JSON formats of mdevctl
//! * [`units`]: formatting of times and sizes
//! * [`failure`]: errors and exit statuses

mod cli;
mod commands;
mod doctor;
mod failure;
mod mdevctl;
mod top;
mod units;

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use vgpud_host::command_line;

use crate::cli::Cli;
use crate::failure::{Failure, say};

fn main() -> ExitCode {
    let cli = command_line::parse::<Cli>(expand_alias(std::env::args_os())).map_err(Failure::Usage);
    match cli.and_then(run).and_then(|output| print(&output)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if let Failure::Found { output, .. } = &failure {
                // The error below counts the findings, also if writing them fails.
                let _ = print(output);
            }
            say(&failure);
            failure.exit_status().into()
        }
    }
}

/// Inserts `list` if the program's name is `lsvgpu`, as mdevctl does for `lsmdev`.
fn expand_alias(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut args: Vec<_> = args.collect();
    if args.first().is_some_and(|name| Path::new(name).file_name() == Some("lsvgpu".as_ref())) {
        args.insert(1, "list".into());
    }
    args
}

fn run(cli: Cli) -> Result<Vec<u8>, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(Failure::start)?;
    runtime.block_on(commands::run(cli))
}

/// Writes the output. A closed pipe (`| head`) is not an error.
fn print(output: &[u8]) -> Result<(), Failure> {
    if output.is_empty() {
        return Ok(());
    }
    let mut stdout = io::stdout().lock();
    match stdout.write_all(output).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Failure::output(error)),
        _ => Ok(()),
    }
}
