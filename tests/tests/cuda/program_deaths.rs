//! Workers that die under programs of the host and of a container: the programs do not notice.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use system_tests::vgpuctl::vgpuctl_json;
use system_tests::worker_deaths::{Place, kill_at, replace, replace_again, worker};
use system_tests::{is_alive, kill_process, skipped, wait_for};

use crate::containers::for_container;
use crate::{Gpu, on_vgpu};

/// Workers that are killed at any time.
const KILLS: u32 = 40;
/// Stops at system calls of the worker's event loop, at each of which a worker dies once.
const STOPS: u32 = 70;
/// Workers that may try to finish a request.
const ATTEMPTS: u64 = 6;
/// Place of the number of those that tried, in the file with the records of programs.
const ATTEMPTS_AT: u64 = 40;
/// Rounds of a program in which workers are killed at these stops.
const LEAST_ROUNDS: usize = 5;

/// A program that works until it is told to end.
struct Working {
    child: Child,
    told: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Gpu<'_> {
    fn start_working(&self) -> Result<Working> {
        let mut command = self.command("works_until_told")?;
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let output = BufReader::new(child.stdout.take().context("No output")?);
        let mut working = Working { told: child.stdin.take(), child, output };
        working.read_until("ready")?;
        Ok(working)
    }

    /// Kills workers until `is_over`. Returns their number.
    fn kill_workers(&self, is_over: &AtomicBool) -> Result<u32> {
        let mut kills = 0;
        while !is_over.load(Ordering::Relaxed) {
            replace_again(self.vgpud, &self.uuid, kills)?;
            kills += 1;
            thread::sleep(Duration::from_millis(u64::from(10 + kills * 37 % 60)));
        }
        Ok(kills)
    }

    /// Waits until no program has anything on the vGPU.
    fn wait_for_nothing(&self) -> Result<()> {
        wait_for("nothing is left of the programs", || {
            let stats = self.vgpud.get("/v1/stats").unwrap_or_default();
            let stats = &stats["vgpus"][0];
            stats["channels"] == 0 && stats["faults"] == 0 && stats["programs"].is_null()
        })
    }
}

impl Working {
    fn read_until(&mut self, start: &str) -> Result<String> {
        let mut all = String::new();
        loop {
            let mut line = String::new();
            let bytes = self.output.read_line(&mut line)?;
            ensure!(bytes > 0, "The program ended: {all}");
            if line.starts_with(start) {
                return Ok(line.trim_start_matches(start).trim().to_owned());
            }
            all += &line;
        }
    }

    /// Ends the program. Returns the number of its rounds.
    fn end(mut self) -> Result<usize> {
        drop(self.told.take());
        let rounds = self.read_until("rounds=")?.parse()?;
        ensure!(self.child.wait()?.success(), "The program failed");
        Ok(rounds)
    }
}

/// Returns the file with the records of programs, which an anchor has.
fn records(anchor: u32) -> Result<File> {
    for entry in fs::read_dir(format!("/proc/{anchor}/fd"))? {
        let path = entry?.path();
        if fs::read_link(&path)?.to_string_lossy().starts_with("/memfd:vgpu-queue") {
            return Ok(File::options().write(true).open(path)?);
        }
    }
    bail!("The anchor has no records of programs")
}

/// Runs `work` while workers are killed. Returns their number.
fn beside_deaths(gpu: &Gpu<'_>, work: impl FnOnce() -> Result<()>) -> Result<u32> {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let killing = scope.spawn(|| gpu.kill_workers(&is_over));
        let worked = work();
        is_over.store(true, Ordering::Relaxed);
        let kills = killing.join().ok().context("The killer panicked")?;
        worked?;
        kills
    })
}

#[test]
fn libcuda_does_not_notice_that_its_workers_die() -> Result<()> {
    on_vgpu(|gpu| {
        let mut waiting = gpu.start_waiting()?;
        let names =
            ["copies", "streams_and_events", "managed_memory", "exports_memory_and_an_event"];
        for name in names {
            let kills = beside_deaths(gpu, || gpu.run(name).map(drop))?;
            println!("{name}: right with {kills} deaths");
            ensure!(kills > 0, "{name} had no death");
        }
        // A program that has been there all the time.
        ensure!(waiting.try_wait()?.is_none(), "The other program ended");
        waiting.kill()?;
        waiting.wait()?;
        gpu.wait_for_nothing()?;
        gpu.run("out_of_memory").map(drop)
    })
}

#[test]
fn a_program_works_on_while_its_workers_die() -> Result<()> {
    on_vgpu(|gpu| {
        // One program: each looks at the vGPU's free memory.
        let working = gpu.start_working()?;
        for number in 0..KILLS {
            thread::sleep(Duration::from_millis(u64::from(10 + number * 37 % 60)));
            replace_again(gpu.vgpud, &gpu.uuid, number)?;
        }
        let rounds = working.end()?;
        println!("{rounds} rounds beside {KILLS} deaths");
        ensure!(rounds > LEAST_ROUNDS, "{rounds} rounds");
        gpu.wait_for_nothing()
    })
}

#[test]
fn a_program_in_a_container_does_not_notice_that_its_workers_die() -> Result<()> {
    for_container(|gpu| {
        let kills = beside_deaths(gpu, || {
            for name in ["copies", "streams_and_events"] {
                let Some(output) = gpu.run_in_container(name)? else {
                    skipped("this host allows no namespaces");
                    return Ok(());
                };
                let (out, error) = (output.stdout, output.stderr);
                let out = String::from_utf8_lossy(&out);
                let error = String::from_utf8_lossy(&error);
                ensure!(out.contains("1 passed"), "{name}: {out}\n{error}");
            }
            Ok(())
        })?;
        println!("right with {kills} deaths");
        gpu.wait_for_nothing()
    })
}

#[test]
fn each_request_of_a_program_has_its_effect_once_wherever_its_worker_dies() -> Result<()> {
    on_vgpu(|gpu| {
        let working = gpu.start_working()?;
        for stop in 0..STOPS {
            let before = worker(gpu.vgpud, &gpu.uuid)?;
            let traced = Pid::from_raw(before.cast_signed());
            if ptrace::seize(traced, ptrace::Options::empty()).is_err() {
                skipped("this user may not trace other processes");
                break;
            }
            kill_at(before, before, Place::Stop(stop))?;
            wait_for("another worker", || {
                worker(gpu.vgpud, &gpu.uuid).is_ok_and(|pid| pid != before && is_alive(pid))
            })?;
            // A worker that dies at once, again and again, is not replaced for ever.
            thread::sleep(Duration::from_millis(u64::from(10 + stop % 7)));
        }
        let rounds = working.end()?;
        println!("{rounds} rounds beside {STOPS} deaths");
        ensure!(rounds > LEAST_ROUNDS, "{rounds} rounds");
        gpu.wait_for_nothing()
    })
}

#[test]
fn programs_that_start_and_end_beside_deaths_leave_nothing() -> Result<()> {
    on_vgpu(|gpu| {
        let kills = beside_deaths(gpu, || {
            for _ in 0..6 {
                gpu.run("identity")?;
                let mut killed = gpu.start_waiting()?;
                killed.kill()?;
                killed.wait()?;
            }
            Ok(())
        })?;
        println!("12 programs beside {kills} deaths");
        gpu.wait_for_nothing()?;
        gpu.run("out_of_memory").map(drop)
    })
}

#[test]
fn what_a_program_had_that_ends_without_a_worker_is_freed() -> Result<()> {
    on_vgpu(|gpu| {
        let mut other = gpu.start_waiting()?;
        for without_other in [false, true] {
            let mut ending = gpu.start_waiting()?;
            let anchor = gpu.vgpud.anchor(&gpu.uuid)?;
            let before = worker(gpu.vgpud, &gpu.uuid)?;
            kill_process(anchor, Signal::SIGSTOP)?;
            kill_process(before, Signal::SIGKILL)?;
            wait_for("the worker is dead", || !is_alive(before))?;
            ending.kill()?;
            ending.wait()?;
            if without_other {
                other.kill()?;
                other.wait()?;
            }
            kill_process(anchor, Signal::SIGCONT)?;
            if without_other {
                gpu.wait_for_nothing()?;
            } else {
                wait_for("one process", || {
                    let stats = gpu.vgpud.get("/v1/stats").unwrap_or_default();
                    let programs = &stats["vgpus"][0]["programs"]["processes"];
                    programs.as_array().is_some_and(|all| all.len() == 1)
                })?;
                ensure!(other.try_wait()?.is_none(), "The other program ended");
            }
        }
        gpu.run("out_of_memory").map(drop)
    })
}

#[test]
fn a_request_at_which_workers_die_costs_its_program_the_vgpu_and_no_other() -> Result<()> {
    on_vgpu(|gpu| {
        let mut other = gpu.start_waiting()?;
        let mut working = gpu.start_working()?;
        let gpu_process = gpu.vgpud.gpu_process()?;
        let records = records(gpu.vgpud.anchor(&gpu.uuid)?)?;
        wait_for("the program is cut off", || {
            // The worker waits for the GPU within a request, unless the program computes meanwhile.
            let stopped = kill_process(gpu_process, Signal::SIGSTOP);
            thread::sleep(Duration::from_millis(200));
            let replaced = stopped.and_then(|()| replace(gpu.vgpud, &gpu.uuid));
            // As if further workers had died at this request, which the next one begins.
            let counted = records.write_all_at(&ATTEMPTS.to_le_bytes(), ATTEMPTS_AT);
            let continued = kill_process(gpu_process, Signal::SIGCONT);
            thread::sleep(Duration::from_millis(500));
            let done = replaced.and(continued).is_ok() && counted.is_ok();
            done && working.child.try_wait().is_ok_and(|status| status.is_some())
        })?;
        ensure!(!working.child.wait()?.success(), "The program succeeded");
        ensure!(other.try_wait()?.is_none(), "The other program ended");
        gpu.run("copies")?;
        other.kill()?;
        other.wait()?;
        gpu.wait_for_nothing()
    })
}

#[test]
fn a_worker_is_upgraded_under_its_programs() -> Result<()> {
    on_vgpu(|gpu| {
        let working = gpu.start_working()?;
        for _ in 0..3 {
            let before = worker(gpu.vgpud, &gpu.uuid)?;
            let upgraded = vgpuctl_json(gpu.vgpud, "upgrade --output json")?;
            ensure!(upgraded[0]["pid_before"] == before, "{upgraded}");
            thread::sleep(Duration::from_millis(100));
        }
        ensure!(working.end()? > 0);
        gpu.wait_for_nothing()
    })
}
