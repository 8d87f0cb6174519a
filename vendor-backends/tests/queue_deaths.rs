//! Programs in a VM whose workers die: each request has its effect once.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "support/ending_client.rs"]
mod ending_client;
#[path = "support/soft_vgpu.rs"]
mod soft_vgpu;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use ipc::seqpacket::{decode, encode};
use mdev_core::abi::queue::{completion, node};
use mdev_core::gpu::{Client, ClientSpec, Pending};
use mdev_core::ids::{GuestPa, Token, VgpuId};
use mdev_core::mem::{JournaledMemory, SharedGuestMemory};
use mdev_core::testing::queue_driver::{Bus, QueueDriver, SLOTS};
use mdev_core::testing::shared_ram;
use mdev_core::units::{MIB, PAGE_SIZE};
use programs::FrontEnd;
use programs::control_queue::ControlQueue;
use programs::control_queue::journal::QueueState;
use proptest::prelude::*;
use vendor_backends::nvidia::frontend::testing::program::Program;
use vendor_backends::nvidia::frontend::testing::{front_end, identity, memory_params, words};

use ending_client::{Ended, EndingClient, Steps};

/// Guest RAM, and where the queue is in it.
const RAM: u64 = 32 * MIB;
const BASE: u64 = 0x10_0000;
const VRAM: u64 = 64 * MIB;

/// What is recorded of a worker.
#[derive(Debug, Default)]
struct Journal {
    position: u64,
    memory: JournaledMemory,
    queue: Vec<u8>,
    changes: Vec<Vec<u8>>,
}

/// A worker that serves a queue.
struct Worker {
    queue: ControlQueue,
    client: EndingClient,
    memory: SharedGuestMemory,
    /// It continues, and has not served yet.
    repeats: bool,
}

/// A vGPU of a software GPU whose workers die, and its guest's memory.
struct Device {
    ram: File,
    connection: OwnedFd,
    steps: Steps,
    journal: Journal,
    worker: Option<Worker>,
    deaths: u64,
    /// Steps of each further worker.
    next_ends: Vec<u64>,
    _held: soft_vgpu::Held,
}

fn new_front_end() -> Box<dyn FrontEnd> {
    Box::new(front_end(identity("550.163.01", VRAM), 64 * MIB))
}

impl Worker {
    /// Serves all requests, as the queue's thread does. `steps` are between what can be
    /// interrupted.
    fn serve(&mut self, journal: &mut Journal) {
        let steps = self.client.steps.clone();
        loop {
            // A request that was begun comes first, so that it is the same for the GPU process.
            if !std::mem::take(&mut self.repeats) {
                let pending = self.client.take_pending();
                if !pending.is_empty() {
                    self.queue.on_gpu_event(&mut self.client, pending).unwrap();
                }
                self.queue.update_utilization(&mut self.client);
                self.record(journal);
            }
            let served = self.queue.serve(&mut self.client).unwrap();
            steps.step();
            self.record(journal);
            steps.step();
            self.queue.flush().unwrap();
            steps.step();
            if !served {
                return;
            }
        }
    }

    fn record(&mut self, journal: &mut Journal) {
        journal.changes.extend(self.queue.take_changes());
        journal.queue = encode(&self.queue.state()).unwrap();
        journal.position = self.client.adoption().unwrap().position().unwrap();
        journal.memory = self.memory.lock().journaled();
        self.client.adoption().unwrap().record();
    }
}

impl Device {
    /// Starts the next worker, which continues.
    fn adopt(&mut self) -> Worker {
        if self.deaths > 0
            && let Some(steps) = self.next_ends.pop()
        {
            self.steps.end_after(steps);
        }
        let Journal { position, memory: recorded, queue, changes } = &self.journal;
        let client = EndingClient::adopt(&self.connection, &self.steps, *position);
        let memory = SharedGuestMemory::default();
        memory.lock().adopt(recorded, |_| Some(self.ram.try_clone().unwrap().into()));
        let state: QueueState = decode(queue).unwrap();
        let queue = ControlQueue::adopt(new_front_end(), changes, state, memory.clone());
        Worker { queue: queue.unwrap(), client, memory, repeats: true }
    }

    fn serve(&mut self) {
        loop {
            let worker = self.worker.take();
            let journal = &mut self.journal;
            let served = worker.map(|mut worker| {
                catch_unwind(AssertUnwindSafe(|| {
                    worker.serve(journal);
                    worker
                }))
            });
            match served {
                Some(Ok(worker)) => return self.worker = Some(worker),
                Some(Err(end)) => {
                    assert!(end.is::<Ended>(), "{:?}", end.downcast::<String>());
                    self.deaths += 1;
                }
                None => {
                    if let Ok(worker) = catch_unwind(AssertUnwindSafe(|| self.adopt())) {
                        self.worker = Some(worker);
                    } else {
                        self.deaths += 1;
                    }
                }
            }
        }
    }
}

impl Bus for Device {
    fn read(&mut self, address: u64, bytes: &mut [u8]) {
        self.ram.read_exact_at(bytes, address).unwrap();
    }

    fn write(&mut self, address: u64, bytes: &[u8]) {
        self.ram.write_all_at(bytes, address).unwrap();
    }

    fn notify(&mut self) {
        self.serve();
    }

    fn wait(&mut self) {
        panic!("the device has not answered");
    }
}

type Driver = QueueDriver<Device>;

/// Returns a driver whose queue runs, and whose first worker ends after so many steps.
fn start(ends: &[u64]) -> Driver {
    // What is made twice is beyond a limit.
    let spec = ClientSpec {
        vgpu: VgpuId::random(),
        vram_bytes: VRAM,
        framebuffer_bytes: 0,
        max_channels: 1,
        max_import_bytes: RAM,
    };
    let (connection, held) = soft_vgpu::admit(&spec);
    let steps = Steps::default();
    let client = EndingClient::open(&connection, &steps);
    let memory = SharedGuestMemory::default();
    let ram = shared_ram(&mut memory.lock(), 0, RAM);
    let mut next_ends = ends.to_vec();
    next_ends.reverse();
    let device = Device {
        ram,
        connection,
        steps,
        journal: Journal::default(),
        worker: None,
        deaths: 0,
        next_ends,
        _held: held,
    };
    let mut driver = QueueDriver::new(device, BASE, RAM);
    let queue = ControlQueue::start(new_front_end(), memory.clone(), GuestPa(BASE), SLOTS).unwrap();
    let mut worker = Worker { queue, client, memory, repeats: false };
    let device = &mut driver.bus;
    worker.record(&mut device.journal);
    if let Some(steps) = device.next_ends.pop() {
        device.steps.end_after(steps);
    }
    device.worker = Some(worker);
    driver
}

/// What a program and its VM have in the end, and the number of steps.
#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    token: u32,
    copied: Vec<Vec<u8>>,
    mapped: Vec<u32>,
    events: usize,
    left: (usize, usize),
}

/// Runs a program with copies, memory of all kinds, an event, and all of its files closed.
fn run(ends: &[u64]) -> (Outcome, u64, u64) {
    let mut driver = start(ends);
    let mut program = Program::start(&mut driver);
    let mut channel = program.channel(&mut driver);
    let mut mapped = Vec::new();
    let mut copied = Vec::new();
    for round in 0..2_u32 {
        let len = 16 * PAGE_SIZE;
        let system = program.alloc(&mut driver, 0x10, 0x40, 0x3e, &memory_params(len, 0));
        let va = 0x7000_0000_0000 + u64::from(round) * MIB;
        mapped.push(program.map_for_gpu(&mut driver, system.unwrap(), va, len));
        // What is mapped already is refused, also by the adopting worker.
        mapped.push(program.map_for_gpu(&mut driver, 0x40, va, len));
        let video = program.alloc(&mut driver, 0x10, 0x41, 0x40, &memory_params(2 * MIB, 0));
        mapped.push(program.map_for_gpu(&mut driver, video.unwrap(), va + 16 * MIB, 2 * MIB));
        let text = format!("in round {round}").into_bytes();
        channel.copy(&mut driver, &text);
        let end = Instant::now() + Duration::from_secs(20);
        while !channel.is_done(&mut driver) {
            let device = &mut driver.bus;
            device.serve();
            device.worker.as_mut().unwrap().client.wake(Token(channel.token)).unwrap();
            assert!(Instant::now() < end, "the copy of round {round} is not done");
            std::thread::sleep(Duration::from_millis(1));
        }
        copied.push(channel.copied(&mut driver, text.len()));
        program.free(&mut driver, 0x40);
        program.free(&mut driver, 0x41);
    }
    let fd = 30;
    let waits = driver.open(node::GPU, 7).unwrap();
    program.process.files.insert(fd, waits);
    let event = words(&[program.root, 0, 0x79, 0, fd.cast_unsigned(), 0]);
    program.alloc(&mut driver, 0x10, 0x50, 0x79, &event).unwrap();
    driver.collect();
    driver.events.clear();
    let worker = driver.bus.worker.as_mut().unwrap();
    worker.queue.on_gpu_event(&mut worker.client.inner, Pending::NONSTALL).unwrap();
    driver.bus.serve();
    driver.collect();
    let events = driver.events.iter().filter(|one| one.kind == completion::EVENT).count();
    for file in [waits, program.uvm, program.gpu, program.control] {
        driver.close(file).unwrap();
    }
    driver.collect();
    assert!(driver.memories.is_empty(), "the guest gets its memory back");
    let device = &driver.bus;
    let left = device.worker.as_ref().unwrap().queue.counts();
    let outcome = Outcome { token: channel.token, copied, mapped, events: events.min(1), left };
    (outcome, device.steps.done(), device.deaths)
}

#[test]
fn a_program_has_the_same_results_wherever_its_worker_dies() {
    let (expected, steps, deaths) = run(&[]);
    assert_eq!((deaths, expected.left), (0, (0, 0)));
    assert_eq!(expected.copied, [b"in round 0", b"in round 1"]);
    // Each step of the first worker, or one of the next worker's first.
    for end in (0..steps).step_by(4) {
        let (outcome, _, deaths) = run(&[end, end % 7 / 2]);
        assert!(deaths == 2 && outcome == expected, "after {end} of {steps} steps: {outcome:?}");
    }
}

#[test]
fn a_program_has_the_same_results_if_its_workers_die_all_the_time() {
    let (expected, ..) = run(&[]);
    for first in 0..12 {
        let ends: Vec<u64> = (0..40).map(|n| (first * 7 + n * 5) % 23).collect();
        let (outcome, _, deaths) = run(&ends);
        assert!(deaths > 5, "{deaths} deaths");
        assert_eq!(outcome, expected, "{ends:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// No record of a worker that a guest has compromised leads to a panic.
    #[test]
    fn damaged_records_are_refused_or_continued(
        damage in proptest::collection::vec((any::<bool>(), any::<usize>(), any::<u8>()), 1..6),
    ) {
        let mut driver = start(&[]);
        let mut program = Program::start(&mut driver);
        program.channel(&mut driver);
        let device = &mut driver.bus;
        let Journal { queue, changes, .. } = &mut device.journal;
        for (of_queue, at, byte) in damage {
            let count = changes.len();
            let bytes = if of_queue { &mut *queue } else { &mut changes[at % count] };
            let len = bytes.len();
            bytes[at / count % len] = byte;
        }
        let Ok(state) = decode::<QueueState>(queue) else { return Ok(()) };
        let worker = device.worker.as_mut().unwrap();
        let memory = worker.memory.clone();
        if let Ok(mut queue) = ControlQueue::adopt(new_front_end(), changes, state, memory) {
            let _ = queue.serve(&mut worker.client);
            let _ = queue.repeat_gpu_events(&mut worker.client);
            let _ = queue.flush();
            queue.stop(&mut worker.client);
        }
    }
}
