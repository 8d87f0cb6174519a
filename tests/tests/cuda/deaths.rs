//! Workers that die under programs in a VM: the programs do not notice.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use mdev_core::abi::control::reg;
use mdev_core::abi::queue::{self, Failure, State, node};
use mdev_core::testing::queue_driver::{Bus, QueueDriver};
use mdev_core::units::{MIB, PAGE_SIZE};
use nix::sys::ptrace;
use nix::unistd::Pid;
use serde_json::json;
use system_tests::guest_vm;
use system_tests::worker_deaths::{Place, kill_at, replace, replace_again, worker};
use system_tests::{Vgpud, skipped, wait_for};
use vendor_backends::nvidia::frontend::testing::memory_params;
use vendor_backends::nvidia::frontend::testing::program::Program;

use super::TYPE;
use super::in_vm::CudaVm;
use super::queue::{DEVICE_CONTROL, FUNCTION_RESET, thread_of};
use super::queue_vm::{COMMAND, CONFIG, RAM, Vm};

/// Workers that are killed under a driver, and under libcuda.
const KILLS: u32 = 30;
const KILLS_IN_VM: u32 = 20;
/// Stops at system calls of the thread of the control queue, at each of which a worker dies once.
const STOPS: u32 = 40;

/// Runs programs until told to stop. Each maps memory, copies with checked results, and gives all
/// of its memory back. Returns their number.
fn run_programs(driver: &mut QueueDriver<Vm>, stop: &AtomicBool) -> Result<u32> {
    let mut programs = 0;
    while !stop.load(Ordering::Relaxed) {
        driver.reuse_pages();
        let mut program = Program::start(driver);
        let mut channel = program.channel(driver);
        for round in 0..3_u64 {
            let (len, va) = (16 * PAGE_SIZE, 0x7000_0000_0000 + round * MIB);
            let memory = program.alloc(driver, 0x10, 0x40, 0x3e, &memory_params(len, 0));
            let memory = memory.ok().context("no memory")?;
            ensure!(program.map_for_gpu(driver, memory, va, len) == 0, "not mapped");
            ensure!(program.map_for_gpu(driver, memory, va, len) != 0, "mapped twice");
            let text = format!("program {programs}, round {round}").into_bytes();
            channel.copy(driver, &text);
            driver.bus.store(reg::WAKE, channel.token);
            wait_for("the semaphore", || channel.is_done(driver))?;
            ensure!(channel.copied(driver, text.len()) == text, "another text was copied");
            program.free(driver, memory);
        }
        for file in [program.control, program.gpu, program.uvm] {
            ensure!(driver.close(file).is_ok(), "a file cannot be closed");
        }
        driver.collect();
        ensure!(driver.memories.is_empty(), "the guest does not get its memory back");
        programs += 1;
    }
    Ok(programs)
}

/// Runs programs while `kill` ends workers of their vGPU.
fn survive(kill: impl FnOnce(&Vgpud, &str) -> Result<u32>) -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = vgpud.create(&json!({ "mdev_type": TYPE, "run": true }))?;
    let mut driver = Vm::attach(&vgpud, &uuid)?.start()?;
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let guest = scope.spawn(|| run_programs(&mut driver, &stop));
        let killed = kill(&vgpud, &uuid);
        stop.store(true, Ordering::Relaxed);
        let programs = guest.join().ok().context("The guest panicked")??;
        println!("{programs} programs beside {} deaths", killed?);
        ensure!(programs > 2, "{programs} programs");
        anyhow::Ok(())
    })?;
    let stats = || vgpud.get("/v1/stats").unwrap_or_default()["vgpus"][0].clone();
    wait_for("nothing is left of the programs", || {
        let stats = stats();
        stats["channels"] == 0 && stats["faults"] == 0 && stats["programs"].is_null()
    })
}

#[test]
fn programs_in_a_vm_do_not_notice_that_their_workers_die() -> Result<()> {
    survive(|vgpud, uuid| {
        for number in 0..KILLS {
            thread::sleep(Duration::from_millis(u64::from(number * 37 % 90)));
            replace_again(vgpud, uuid, number)?;
        }
        Ok(KILLS)
    })
}

#[test]
fn a_worker_that_follows_a_reset_finds_no_program() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = vgpud.create(&json!({ "mdev_type": TYPE, "run": true }))?;
    let mut driver = Vm::attach(&vgpud, &uuid)?.start()?;
    Program::start(&mut driver).channel(&mut driver);
    replace(&vgpud, &uuid)?;
    driver.bus.client.region_write(CONFIG, DEVICE_CONTROL, &FUNCTION_RESET)?;
    let mut vm = driver.bus;
    vm.client.region_write(CONFIG, COMMAND, &[6, 0])?;
    vm.client.region_write(CONFIG, 0x4a, &[1, 0])?;
    replace(&vgpud, &uuid)?;
    ensure!(vm.load(reg::QUEUE_STATUS) == queue::status(State::Off, None), "the queue runs");
    let mut driver = vm.start()?;
    ensure!(driver.open(node::CONTROL, 1) == Ok(1), "a file is left");
    replace(&vgpud, &uuid)?;
    ensure!(driver.open(node::CONTROL, 1) == Ok(2), "the file is lost");
    // Neither is one of the programs before.
    ensure!(driver.close(3).is_err() && driver.close(1) == Ok(()), "other files are open");
    // A queue that has failed stays so until it is stopped.
    let mut bad = driver.submission(16);
    bad.list = RAM;
    driver.submit(&bad);
    driver.bus.notify();
    driver.bus.reach(State::Failed, Some(Failure::Access))?;
    replace(&vgpud, &uuid)?;
    driver.bus.reach(State::Failed, Some(Failure::Access))?;
    driver.bus.store(reg::QUEUE_CONTROL, 0);
    driver.bus.reach(State::Off, None)
}

#[test]
fn each_request_has_its_effect_once_wherever_its_worker_dies() -> Result<()> {
    survive(|vgpud, uuid| {
        for stop in 0..STOPS {
            let before = worker(vgpud, uuid)?;
            let folder = thread_of(before.into(), "queue")?;
            let name = folder.file_name().and_then(|name| name.to_str()).context("a thread")?;
            let thread: u32 = name.parse()?;
            let traced = Pid::from_raw(thread.cast_signed());
            if ptrace::seize(traced, ptrace::Options::empty()).is_err() {
                skipped("this user may not trace other processes");
                return Ok(stop);
            }
            kill_at(before, thread, Place::Stop(stop))?;
            wait_for("another worker", || {
                worker(vgpud, uuid)
                    .is_ok_and(|pid| pid != before && thread_of(pid.into(), "queue").is_ok())
            })?;
            // A worker that dies at once, again and again, is not replaced for ever.
            thread::sleep(Duration::from_millis(u64::from(10 + stop % 7)));
        }
        Ok(STOPS)
    })
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn libcuda_in_a_vm_does_not_notice_that_its_workers_die() -> Result<()> {
    let Some(mut vm) = CudaVm::boot("")? else { return Ok(()) };
    let waiting = vm.start_waiting("/tmp/waiting")?;
    for name in ["copies", "streams_and_events", "managed_memory"] {
        let command = format!("env {} > /tmp/{name} 2>&1 & echo $!", CudaVm::command(name));
        vm.guest.run(&command)?;
        let end = format!("grep -q 'test result' /tmp/{name}");
        let mut kills = 0;
        while vm.guest.vm.guest.run(&end, guest_vm::LIMIT)?.status != 0 {
            ensure!(kills < 20 * KILLS_IN_VM, "{name} does not end");
            vm.replace_worker()?;
            thread::sleep(Duration::from_millis(u64::from(kills * 53 % 120)));
            kills += 1;
        }
        ensure!(kills > 2, "{name} had {kills} deaths");
        let output = vm.guest.run(&format!("cat /tmp/{name}"))?;
        ensure!(output.contains("1 passed"), "{name}, after {kills} deaths: {output}");
        println!("{name}: right with {kills} deaths");
    }
    // A program that has been there all the time, and a new one.
    vm.guest
        .run(&format!("kill -0 {waiting} && ! grep -q FAILED /tmp/waiting && kill {waiting}"))?;
    vm.run("copies")?;
    vm.guest.check_log()
}
