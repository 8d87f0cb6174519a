//! Programs of this machine on a vGPU whose worker is killed.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context, Result, bail};

use super::{check_faults, kill_workers, report_runs, report_training};
use crate::build::Programs;
use crate::demo::cuda::files::Needs;
use crate::demo::cuda::python::Python;
use crate::demo::cuda::{Options, SIZE, VGPUS};
use crate::host::Host;
use crate::progress::Progress;

/// Kills the worker under small CUDA programs, and under a training of PyTorch.
pub(super) fn run(
    programs: &Programs,
    options: &Options,
    (needs, folder): (&Needs, &Path),
    kills: u32,
    failures: &mut Vec<String>,
) -> Result<()> {
    let host = Host::start(programs, &[options.parent.argument()])?;
    host.start_vgpu(VGPUS[0].1, &host.type_without_display(SIZE)?.name, None)?;
    let progress = Progress::new();
    let step = progress.step("Killing the worker of CUDA programs of this machine");
    small_programs(&host, &needs.program, kills, failures)?;
    step.done();
    if let Some(python) = &needs.python {
        let step = progress.step("Killing the worker of a training of PyTorch of this machine");
        training(&host, python, folder, kills, failures)?;
        step.done();
    }
    check_faults(&host, failures)
}

/// Returns a command that runs a program on the vGPU.
fn on_vgpu(host: &Host, program: &Command) -> Result<Command> {
    let mut command = host.command(&["run", "-u", VGPUS[0].1, "--"])?;
    command.arg(program.get_program()).args(program.get_args());
    command.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
    Ok(command)
}

fn small_programs(
    host: &Host,
    program: &Path,
    kills: u32,
    failures: &mut Vec<String>,
) -> Result<()> {
    let is_over = AtomicBool::new(false);
    let (deaths, output) = thread::scope(|scope| {
        let running = scope.spawn(|| run_until(host, program, &is_over));
        let deaths = kill_workers(host, kills);
        is_over.store(true, Ordering::Relaxed);
        let output = running.join().ok().context("The thread of the programs panicked")??;
        anyhow::Ok((deaths?, output))
    })?;
    report_runs(&output, deaths, failures);
    Ok(())
}

/// Runs a program again and again. Returns what it prints, with its status after each run.
fn run_until(host: &Host, program: &Path, is_over: &AtomicBool) -> Result<String> {
    let mut printed = String::new();
    while !is_over.load(Ordering::Relaxed) {
        let output = on_vgpu(host, Command::new(program).arg("results"))?.output()?;
        printed += &String::from_utf8_lossy(&output.stdout);
        printed += &String::from_utf8_lossy(&output.stderr);
        let status = output.status.code().unwrap_or(-1);
        writeln!(printed, "status {status}")?;
    }
    Ok(printed)
}

fn training(
    host: &Host,
    python: &Python,
    folder: &Path,
    kills: u32,
    failures: &mut Vec<String>,
) -> Result<()> {
    let (go, stop) = (folder.join("go"), folder.join("stop"));
    let mut command = on_vgpu(host, &python.command(folder, [&go, &stop]))?;
    let mut child = command.stdout(Stdio::piped()).spawn().context("Cannot run Python")?;
    let mut output = BufReader::new(child.stdout.take().context("Python has no output")?);
    let mut printed = String::new();
    while !printed.lines().any(|line| line.starts_with("ready")) {
        if output.read_line(&mut printed)? == 0 {
            bail!("The training ended early: {}: {printed}", child.wait()?);
        }
    }
    File::create(&go)?;
    let deaths = kill_workers(host, kills);
    File::create(&stop)?;
    output.read_to_string(&mut printed)?;
    let status = child.wait()?;
    for file in [go, stop] {
        fs::remove_file(file)?;
    }
    if !status.success() {
        failures.push(format!("training: {status}:\n{printed}"));
    }
    report_training(&printed, deaths?, failures);
    Ok(())
}
