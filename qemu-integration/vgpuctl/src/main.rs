//! `vgpuctl`: defines, starts, stops and watches vGPUs by asking `vgpud`.
//!
//! * [`cli`]: the command line
//! * [`client`]: the control API's client
//! * [`commands`]: what each verb does
//! * [`doctor`]: what on this host is in the way, and how to mend it
//! * [`top`]: shares as they are used, on the terminal
//! * [`mdevctl`]: mdevctl's text and JSON shapes
//! * [`words`]: numbers as people read them
//! * [`failure`]: what can go wrong, and the exit status that says so

mod cli;
mod client;
mod commands;
mod doctor;
mod failure;
mod mdevctl;
mod top;
mod words;

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use vfio_user_server::usage;

use crate::cli::Cli;
use crate::failure::Failure;

fn main() -> ExitCode {
    let cli = usage::parse::<Cli>(as_called(std::env::args_os())).map_err(Failure::Usage);
    match cli.and_then(run).and_then(|output| print(&output)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if let Failure::Found { output, .. } = &failure {
                // What was found is said even where its end is not read.
                let _ = print(output);
            }
            eprintln!("vgpuctl: {failure}");
            failure.exit_status().into()
        }
    }
}

/// Called `lsvgpu`, it lists, as mdevctl does by the name of `lsmdev`.
fn as_called(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
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

/// Writes all at once. Whoever stops reading early (`| head`) has seen enough.
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
