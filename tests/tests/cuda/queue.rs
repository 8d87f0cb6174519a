//! Programs in a VM: a guest's driver on the control queue of a vGPU.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use mdev_core::abi::control::{Features, reg};
use mdev_core::abi::doorbell::TOKEN;
use mdev_core::abi::queue::{self, CONTROL_ENABLE, Failure, State, completion, node, op};
use mdev_core::testing::queue_driver::{Bus, QueueDriver, SLOTS, request};
use mdev_core::units::MIB;
use memmap2::MmapOptions;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use system_tests::Vgpud;
use system_tests::in_process::window;
use vendor_backends::nvidia::frontend::testing::memory_params;
use vendor_backends::nvidia::frontend::testing::program::Program;
use zerocopy::IntoBytes;

use super::TYPE;
use super::fairness::cpu_time;
use super::queue_vm::{COMMAND, CONFIG, RAM, Vm};

/// Region of the doorbell page.
const DOORBELL: u32 = 1;
/// Register of configuration space, and its bits.
pub const DEVICE_CONTROL: u64 = 0x60;
pub const FUNCTION_RESET: [u8; 2] = [0, 0x80];

pub fn start(vgpud: &Vgpud) -> Result<QueueDriver<Vm>> {
    let uuid = vgpud.create(&json!({ "mdev_type": TYPE, "run": true }))?;
    Vm::attach(vgpud, &uuid)?.start()
}

fn wait_for(what: &str, mut ready: impl FnMut() -> bool) -> Result<()> {
    system_tests::wait_for(what, &mut ready)
}

#[test]
fn programs_in_a_vm_copy_through_channels_of_their_own() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let mut driver = start(&vgpud)?;
    ensure!(driver.bus.load(reg::FEATURES) & Features::QUEUE.bits() != 0, "no feature");
    ensure!(driver.bus.load(reg::QUEUE_VERSION) == queue::VERSION, "no version");
    let mut program = Program::start(&mut driver);
    let mut channel = program.channel(&mut driver);
    let region = driver.bus.client.region(DOORBELL).context("no doorbell")?;
    let offset = region.file_offset.as_ref().context("the doorbell is not mapped")?;
    let options = MmapOptions::new().offset(offset.start()).len(region.size as usize).to_owned();
    let page = options.map_raw(offset.file())?;
    let ring = |token: u32| window(&page).write32(TOKEN, token);
    // Nothing looks whether the engine sleeps, as libcuda.
    for text in [&b"first"[..], b"second"] {
        channel.copy(&mut driver, text);
        ring(channel.token);
        wait_for("the semaphore", || channel.is_done(&mut driver))?;
        assert_eq!(channel.copied(&mut driver, text.len()), text);
    }
    // The page is withdrawn when nothing rings it. The next access wakes the device again.
    let mut generation = None;
    wait_for("a request to withdraw the doorbell", || {
        driver.collect();
        generation =
            driver.events.iter().find(|it| it.kind == completion::WITHDRAW).map(|it| it.value);
        generation.is_some()
    })?;
    let withdrawn = queue::Withdrawn {
        request: request(op::WITHDRAWN, 0),
        generation: generation.unwrap_or_default(),
    };
    driver.request(withdrawn.as_bytes());
    driver.bus.store(reg::WAKE, channel.token);
    channel.copy(&mut driver, b"third");
    ring(channel.token);
    wait_for("the semaphore after a sleep", || channel.is_done(&mut driver))?;

    for file in [program.control, program.gpu, program.uvm] {
        assert_eq!(driver.close(file), Ok(()));
    }
    driver.collect();
    assert!(driver.memories.is_empty(), "the guest gets its memory back");
    Ok(())
}

#[test]
fn a_guests_mistake_costs_its_own_queue_until_a_reset() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let mut driver = start(&vgpud)?;
    let mut program = Program::start(&mut driver);
    program.channel(&mut driver);
    // A page of the buffer is not in RAM.
    let mut bad = driver.submission(16);
    bad.list = RAM;
    driver.submit(&bad);
    driver.bus.notify();
    driver.bus.reach(State::Failed, Some(Failure::Access))?;
    driver.bus.store(reg::QUEUE_CONTROL, 0);
    driver.bus.reach(State::Off, None)?;
    let vm = driver.bus;

    let mut driver = vm.start()?;
    Program::start(&mut driver).channel(&mut driver);
    // A reset ends everything before it is complete.
    driver.bus.client.region_write(CONFIG, DEVICE_CONTROL, &FUNCTION_RESET)?;
    assert_eq!(driver.bus.load(reg::QUEUE_STATUS), queue::status(State::Off, None));
    let mut vm = driver.bus;
    vm.client.region_write(CONFIG, COMMAND, &[6, 0])?;
    vm.client.region_write(CONFIG, 0x4a, &[1, 0])?;
    let mut driver = vm.start()?;
    assert_eq!(driver.open(node::CONTROL, 1), Ok(1), "no file is left");
    // An address that is no queue.
    driver.bus.store(reg::QUEUE_CONTROL, 0);
    driver.bus.reach(State::Off, None)?;
    driver.bus.store(reg::QUEUE_BASE_HI, 1);
    driver.bus.store(reg::QUEUE_CONTROL, CONTROL_ENABLE);
    driver.bus.reach(State::Failed, Some(Failure::Config))
}

#[test]
fn no_access_waits_for_a_request() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let mut driver = start(&vgpud)?;
    let mut program = Program::start(&mut driver);
    program.space(&mut driver);
    let memory = program.alloc(&mut driver, 0x10, 0x20, 0x3e, &memory_params(MIB, 0)).unwrap();
    let gpu = context(&vgpud)?;
    // A request that waits for the GPU, which does not answer.
    kill(gpu, Signal::SIGSTOP)?;
    let request = program.mapping_request(memory, 0x1000_0000, MIB);
    driver.fill(&request);
    let submission = driver.submission(request.len() as u32);
    driver.submit(&submission);
    driver.bus.notify();
    thread::sleep(Duration::from_millis(300));
    let mut longest = Duration::ZERO;
    for _ in 0..200 {
        let begun = Instant::now();
        driver.bus.load(reg::INTR_STATUS);
        driver.bus.store(reg::WAKE, 1);
        driver.bus.notify();
        driver.bus.load(reg::QUEUE_STATUS);
        longest = longest.max(begun.elapsed());
    }
    let waiting = driver.completion().is_none();
    kill(gpu, Signal::SIGCONT)?;
    println!("The longest of 200 times four accesses took {longest:?}");
    ensure!(waiting, "The request did not wait for the GPU");
    ensure!(longest < Duration::from_secs(2), "Accesses waited {longest:?}");
    wait_for("the request", || driver.completion().is_some())
}

#[test]
fn statistics_show_the_programs_of_a_vm() -> Result<()> {
    const PROCESS: u64 = 7;
    let vgpud = Vgpud::start()?;
    let mut driver = start(&vgpud)?;
    let mut program = Program::start(&mut driver);
    program.space(&mut driver);
    let stats = || Ok::<_, anyhow::Error>(vgpud.get("/v1/stats")?["vgpus"][0].clone());
    program.alloc(&mut driver, 0x10, 0x20, 0x40, &memory_params(4 * MIB, 0)).unwrap();
    let expected = json!({ "vram_used_bytes": 4 * MIB, "in_vm": true, "processes": [
        { "pid": PROCESS, "name": "", "vram_used_bytes": 4 * MIB }
    ] });
    let mut last = json!(null);
    let shown = wait_for("the program's memory", || {
        last = stats().unwrap();
        last["programs"] == expected
    });
    shown.with_context(|| last.to_string())?;
    ensure!(last["vm_pid"] == std::process::id(), "{last}");
    for file in [program.control, program.gpu, program.uvm] {
        assert_eq!(driver.close(file), Ok(()));
    }
    wait_for("the program's end", || stats().is_ok_and(|stats| stats["programs"].is_null()))?;
    // Also when the guest's driver ends without closing anything.
    Program::start(&mut driver);
    wait_for("another program", || stats().is_ok_and(|stats| !stats["programs"].is_null()))?;
    driver.bus.client.region_write(CONFIG, DEVICE_CONTROL, &FUNCTION_RESET)?;
    wait_for("a reset", || stats().is_ok_and(|stats| stats["programs"].is_null()))
}

/// Returns the folder in `/proc` of a process's thread.
pub fn thread_of(pid: u64, name: &str) -> Result<PathBuf> {
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let folder = thread?.path();
        if std::fs::read_to_string(folder.join("comm"))?.trim_end() == name {
            return Ok(folder);
        }
    }
    bail!("Process {pid} has no thread {name}")
}

#[test]
fn a_flood_of_requests_of_a_vm_takes_a_bounded_part_of_a_cpu() -> Result<()> {
    const TIME: Duration = Duration::from_secs(12);
    /// The reserve of 4 s and half of the time, with a margin for timers.
    const MOST: Duration = Duration::from_millis(8500);
    let vgpud = Vgpud::start()?;
    let mut driver = start(&vgpud)?;
    let worker = vgpud.get("/v1/vgpus")?[0]["pid"].as_u64().context("no worker")?;
    let thread = thread_of(worker, "queue")?;
    let hello = request(op::HELLO, 0);
    driver.fill(hello.as_bytes());
    let submission = driver.submission(size_of_val(&hello) as u32);
    let (before, begun, mut served) = (cpu_time(&thread)?, Instant::now(), 0_u64);
    (0..SLOTS).for_each(|_| driver.submit(&submission));
    driver.bus.notify();
    while begun.elapsed() < TIME {
        if driver.completion().is_some() {
            driver.submit(&submission);
            served += 1;
        } else {
            // Rarely: traps cost another thread's time.
            thread::sleep(Duration::from_millis(1));
            driver.bus.notify();
        }
    }
    let used = cpu_time(&thread)?.saturating_sub(before);
    println!("{served} requests took {used:?} of {TIME:?}");
    ensure!(used < MOST, "A flood takes {used:?} of a CPU in {TIME:?}");
    ensure!(served > 1000, "{served} requests of the flood were served");
    Ok(())
}

/// Returns the process of the software GPU.
fn context(vgpud: &Vgpud) -> Result<Pid> {
    let vgpus = vgpud.get("/v1/vgpus")?;
    let uuid = vgpus[0]["uuid"].as_str().context("no vGPU")?;
    Ok(Pid::from_raw(vgpud.context(uuid)?.cast_signed()))
}
