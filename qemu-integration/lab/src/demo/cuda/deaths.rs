//! Workers that are killed while CUDA programs run, on this machine and in a VM.

mod host_programs;

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::files::Needs;
use super::numbers::{Numbers, numbers};
use super::python::{self, Python};
use super::{Cuda, LIMIT, Options, VGPUS, command, in_background, is_right};
use crate::Lab;
use crate::build::Programs;
use crate::guest::last_lines;
use crate::host::Host;
use crate::progress::Progress;

/// Limit of the wait for the next worker.
const NEXT_LIMIT: Duration = Duration::from_secs(5);
/// Time between the start of a worker and its death, without up to as much again.
const PAUSE: Duration = Duration::from_millis(100);
/// Programs that are checked, one after the other, until told to stop.
const RUNS: &str = "rm -f /tmp/stop; { while [ ! -e /tmp/stop ]; do PROGRAM; echo status $?; done; \
                    echo ended 1; } > /tmp/runs 2>&1 &";

/// Kills the worker of a vGPU `kills` times under small CUDA programs, and as often under a
/// training of PyTorch, if this machine's Python has it: programs of this machine first, then those
/// of a VM. Records failed claims.
pub(super) fn run(
    lab: &Lab,
    programs: &Programs,
    options: &Options,
    (needs, folder): (&Needs, &Path),
    kills: u32,
    failures: &mut Vec<String>,
) -> Result<()> {
    let progress = Progress::new();
    host_programs::run(programs, options, (needs, folder), kills, failures)?;
    let step = progress.step("Booting a VM with NVIDIA's libcuda of this machine");
    let mut cuda = Cuda::boot(lab, programs, options, needs, folder, &VGPUS[..1])?;
    step.done();
    let killed = cuda.deaths(needs, kills, failures);
    killed.with_context(|| cuda.logs())?;
    for vm in cuda.vms {
        vm.quit()?;
    }
    Ok(())
}

impl Cuda {
    /// Kills workers under the programs of the VM.
    fn deaths(&mut self, needs: &Needs, kills: u32, failures: &mut Vec<String>) -> Result<()> {
        let progress = Progress::new();
        let step = progress.step("Killing its worker under CUDA programs");
        self.small_programs(kills, failures)?;
        check_faults(&self.host, failures)?;
        step.done();
        if let Some(python) = &needs.python {
            let step = progress.step("Killing its worker under a training of PyTorch");
            self.training(python, kills, failures)?;
            step.done();
        }
        check_faults(&self.host, failures)
    }

    /// Returns what the VM's QEMU and console said last, and the warnings of vgpud.
    fn logs(&self) -> String {
        let vms: String =
            self.vms.iter().map(|vm| vm.errors() + &last_lines(&vm.console(), 12)).collect();
        format!("{vms}\n{}", warnings(&self.host))
    }

    fn small_programs(&mut self, kills: u32, failures: &mut Vec<String>) -> Result<()> {
        let runs = RUNS.replace("PROGRAM", &command("results"));
        self.vms[0].guest.run(&runs, LIMIT)?.success()?;
        let deaths = kill_workers(&self.host, kills)?;
        let end =
            "touch /tmp/stop; until grep -q ended /tmp/runs; do sleep 0.1; done; cat /tmp/runs";
        let output = self.vms[0].guest.run(end, LIMIT)?.success()?.stdout;
        report_runs(&output, deaths, failures);
        Ok(())
    }

    fn training(&mut self, python: &Python, kills: u32, failures: &mut Vec<String>) -> Result<()> {
        let prepare = in_background(&python.in_vm(), "pytorch", python::GO);
        let vm = &mut self.vms[0];
        vm.guest.run(&format!("rm -f {}; {prepare}", python::STOP), python::LIMIT)?.success()?;
        vm.guest.run(&format!("touch {}", python::GO), LIMIT)?.success()?;
        let deaths = kill_workers(&self.host, kills)?;
        let end = format!(
            "touch {}; until grep -q '^exit' /tmp/pytorch; do sleep 0.1; done; cat /tmp/pytorch",
            python::STOP
        );
        let output = self.vms[0].guest.run(&end, python::LIMIT)?.success()?.stdout;
        report_training(&output, deaths, failures);
        Ok(())
    }
}

/// Prints and checks what runs of the small programs printed.
fn report_runs(output: &str, deaths: u32, failures: &mut Vec<String>) {
    let Checked { runs, wrong, first_wrong } = check_runs(output);
    println!("{runs} runs of programs with {deaths} deaths of the worker: {wrong} wrong");
    // At once, since the training may end with an error.
    if let Some(printed) = first_wrong {
        println!("the first wrong run printed: {printed}");
    }
    if runs == 0 || wrong > 0 {
        failures.push(format!("{wrong} of {runs} runs of programs are wrong:\n{output}"));
    }
}

/// Prints and checks what a training printed.
fn report_training(output: &str, deaths: u32, failures: &mut Vec<String>) {
    let told = numbers(output);
    println!("training with {deaths} deaths of the worker:");
    for (name, number) in &told {
        println!("    {name} {number}");
    }
    for name in ["loss_falls", "repeatable", "trainings_exact"] {
        if !told.get(name).copied().is_some_and(is_right) {
            failures.push(format!("training: {name} is not 1:\n{output}"));
        }
    }
}

/// Checks that no channel has faulted or was reset.
fn check_faults(host: &Host, failures: &mut Vec<String>) -> Result<()> {
    let stats = host.stats(VGPUS[0].1)?;
    if stats["faults"] != 0 {
        let (faults, warnings) = (&stats["faults"], warnings(host));
        failures.push(format!("the vGPU has faults: {faults}; warnings of vgpud:\n{warnings}"));
    }
    Ok(())
}

/// Returns the warnings of vgpud and its other processes.
fn warnings(host: &Host) -> String {
    host.log().lines().filter(|line| !line.contains(" INFO ")).collect::<Vec<_>>().join("\n")
}

/// Result of [`check_runs`].
#[derive(Debug, Default, PartialEq, Eq)]
struct Checked {
    runs: usize,
    wrong: usize,
    /// What the first wrong run printed, in one line.
    first_wrong: Option<String>,
}

/// Checks the output of runs of the programs, each of which ends with its status.
fn check_runs(output: &str) -> Checked {
    let (mut checked, mut printed) = (Checked::default(), Vec::new());
    for line in output.lines() {
        let Some(status) = line.strip_prefix("status ") else {
            printed.push(line);
            continue;
        };
        let results: Numbers = numbers(&printed.join("\n"));
        printed.push(line);
        let right = status == "0"
            && results.contains_key("vector_addition")
            && results.contains_key("launches_by_kernels")
            && results.values().all(|result| is_right(*result));
        checked.runs += 1;
        if !right {
            checked.wrong += 1;
            checked.first_wrong.get_or_insert_with(|| printed.join("; "));
        }
        printed.clear();
    }
    checked
}

/// Kills workers, one after the other. Returns their number.
fn kill_workers(host: &Host, kills: u32) -> Result<u32> {
    let mut slowest = Duration::ZERO;
    for number in 0..kills {
        thread::sleep(PAUSE + PAUSE * (number * 37 % 100) / 100);
        let before = worker(host)?;
        kill(Pid::from_raw(before), Signal::SIGKILL)?;
        let since = Instant::now();
        while worker(host).map_or(true, |now| now == before) {
            ensure!(since.elapsed() < NEXT_LIMIT, "no worker follows: {}", host.log());
            thread::sleep(Duration::from_millis(5));
        }
        slowest = slowest.max(since.elapsed());
    }
    println!("the slowest of {kills} next workers was there after {slowest:.1?}");
    Ok(kills)
}

/// Returns the process of the VM's worker.
fn worker(host: &Host) -> Result<i32> {
    let vgpu = host.vgpu(VGPUS[0].1)?;
    ensure!(vgpu["state"] == "running", "the vGPU does not run: {vgpu}");
    Ok(i32::try_from(vgpu["pid"].as_i64().context("no worker")?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wrong_result_and_status_is_counted() {
        let right = "vector_addition 1\nlaunches_by_kernels 1\nptx 1\nstatus 0\n";
        let checked = |output: &str| {
            let Checked { runs, wrong, first_wrong } = check_runs(output);
            (runs, wrong, first_wrong.unwrap_or_default())
        };
        assert_eq!(checked(&format!("{right}{right}ended 1\n")), (2, 0, String::new()));
        let wrong = right.replace("ptx 1", "ptx 0");
        let printed = "vector_addition 1; launches_by_kernels 1; ptx 0; status 0".to_owned();
        assert_eq!(checked(&format!("{right}{wrong}ended 1\n")), (2, 1, printed));
        let killed = "vector_addition 1\nstatus 137\n";
        let printed = "vector_addition 1; status 137".to_owned();
        assert_eq!(checked(&format!("{killed}{right}")), (2, 1, printed));
        let failed = "out of memory\nstatus 1\n";
        assert_eq!(checked(&format!("{right}{failed}{killed}")).1, 2);
        assert_eq!(checked("ended 1\n"), (0, 0, String::new()));
    }
}
