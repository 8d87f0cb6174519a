//! `vgpu-guest`: drives a VM's vGPU and checks the computed results.

use std::process::ExitCode;

use clap::Parser;
use mdev_core::untrusted::message;
use vgpu_guest::cli::Cli;

fn main() -> ExitCode {
    match Cli::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vgpu-guest: {}", message(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}
