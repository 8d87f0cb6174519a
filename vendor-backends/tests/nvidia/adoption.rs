//! Workers that die, and the next ones, which continue with their clients of the driver.

mod exceptions;
mod programs;
mod records;
mod requests;
mod teardown;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use ipc::mem::{Mapping, SharedMemory};
use mdev_core::abi::mailbox::VA_START;
use mdev_core::abi::userd;
use mdev_core::gpu::{
    Adoption, Backing, Client, ClientSpec, EngineKind, Gpu, GpuError, MapRequest, Pending,
};
use mdev_core::ids::{ChannelId, GpuVa};
use mdev_core::units::{GIB, MIB};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nvidia_rm::fake_rm::{self, FakeProcess, FakeRm};
use vendor_backends::conformance::lifecycle;
use vendor_backends::nvidia::adoption::descriptors::Descriptors;
use vendor_backends::nvidia::{NvidiaClient, NvidiaGpu, Options};

use super::{DRIVER, OPTIONS, eventually, ram, set_ring, spec};

/// Options of vGPUs that can be continued.
const CONTINUED: Options = Options { direct_vram: false, ..OPTIONS };

/// What outlives a worker: descriptors, the position that is recorded, and the VM's memory.
#[derive(Debug)]
pub(super) struct Anchor {
    rm: Arc<FakeRm>,
    connection: OwnedFd,
    kept: BTreeMap<u64, OwnedFd>,
    position: Option<u64>,
    processes: u32,
    ram: SharedMemory,
}

impl Anchor {
    pub(super) fn new(rm: &Arc<FakeRm>, gpu: &mut NvidiaGpu, spec: &ClientSpec) -> (Self, Worker) {
        let connection = gpu.admit(spec).unwrap().fd.unwrap().into_trusted();
        let process = FakeProcess::new(rm, 1);
        let client = NvidiaClient::open(process.clone(), connection.try_clone().unwrap()).unwrap();
        let (kept, rm, ram) = (BTreeMap::new(), rm.clone(), ram(MIB));
        let anchor = Self { rm, connection, kept, position: None, processes: 1, ram };
        (anchor, Worker { process, client })
    }

    /// Records the worker's state, as the worker does after each message.
    pub(super) fn record(&mut self, client: &mut NvidiaClient) {
        let position = client.position();
        if position != self.position {
            for kept in client.take_descriptors() {
                match kept.fd {
                    Some(fd) => drop(self.kept.insert(kept.number, fd)),
                    None => drop(self.kept.remove(&kept.number)),
                }
            }
        }
        self.position = position;
        client.record();
    }

    pub(super) fn adopt(&mut self) -> Result<Worker, GpuError> {
        self.processes += 1;
        let process = FakeProcess::new(&self.rm, self.processes);
        let mut take = |number| Some(self.kept.get(&number)?.try_clone().unwrap());
        let connection = self.connection.try_clone().unwrap();
        let position = self.position.ok_or(GpuError::NotFound("record"))?;
        let client =
            NvidiaClient::adopt(process.clone(), connection, position, Descriptors(&mut take))?;
        Ok(Worker { process, client })
    }

    /// Ends a worker and starts the next one.
    fn replace(&mut self, worker: Worker) -> Worker {
        worker.end();
        let mut next = self.adopt().unwrap();
        self.record(&mut next.client);
        next
    }
}

#[derive(Debug)]
pub(super) struct Worker {
    pub(super) process: Arc<FakeProcess>,
    pub(super) client: NvidiaClient,
}

impl Worker {
    /// Ends as a process does: the driver frees nothing.
    pub(super) fn end(self) {
        self.process.end_after(0);
        self.client.end();
    }
}

/// Makes a copy channel and a compute channel, and memory of both kinds.
fn with_work(anchor: &mut Anchor, mut worker: Worker) -> (Worker, Vec<u32>) {
    let client = &mut worker.client;
    let memory = lifecycle::import(client, &anchor.ram).unwrap();
    let guest = MapRequest::new(GpuVa(VA_START), MIB, Backing::Guest { memory, offset: 0 });
    client.map(&guest).unwrap();
    let vram = Backing::Vram { offset: 2 * MIB };
    client.map(&MapRequest::new(GpuVa(VA_START + GIB), 2 * MIB, vram)).unwrap();
    let tokens =
        [EngineKind::Copy, EngineKind::Compute].into_iter().enumerate().map(|(index, engine)| {
            let spec = lifecycle::channel_spec(engine, memory, index as u64 * 512);
            client.create_channel(&spec).unwrap().token.0
        });
    let tokens = tokens.collect();
    anchor.record(&mut worker.client);
    (worker, tokens)
}

fn started() -> (Arc<FakeRm>, NvidiaGpu, Anchor, Worker, Vec<u32>, ClientSpec) {
    let rm = FakeRm::new(DRIVER);
    rm.set_clock(1_000_000_000);
    let mut gpu = NvidiaGpu::open(rm.clone(), fake_rm::ADDRESS, CONTINUED).unwrap();
    let spec = spec(64 * MIB);
    let (mut anchor, worker) = Anchor::new(&rm, &mut gpu, &spec);
    let (mut worker, tokens) = with_work(&mut anchor, worker);
    worker.client.start().unwrap();
    (rm, gpu, anchor, worker, tokens, spec)
}

fn memory(anchor: &Anchor) -> &Mapping {
    &anchor.ram.mapping
}

#[test]
fn what_was_rung_meanwhile_is_rung_again_and_new_rings_work() {
    let (rm, _gpu, mut anchor, worker, tokens, _) = started();
    eventually("the guest need not wake the worker", || {
        memory(&anchor).load_u32(userd::NEED_WAKEUP) == Some(0)
    });
    worker.process.end_after(0);
    // The guest submits while there is no worker: both channels have entries.
    set_ring(memory(&anchor), 0, 0, 3);
    set_ring(memory(&anchor), 1, 0, 0);
    let mut worker = anchor.replace(worker);
    worker.client.start().unwrap();
    eventually("the ring that was missed", || rm.last_ring() == Some(tokens[0]));
    set_ring(memory(&anchor), 1, 0, 1);
    eventually("a new ring", || rm.last_ring() == Some(tokens[1]));
    // A ring that has come round to where it began.
    set_ring(memory(&anchor), 0, 60, 0);
    set_ring(memory(&anchor), 1, 1, 1);
    let mut worker = anchor.replace(worker);
    worker.client.start().unwrap();
    eventually("the ring after a whole round", || rm.last_ring() == Some(tokens[0]));
}

#[test]
fn the_manager_keeps_its_worker() {
    let (rm, mut gpu, mut anchor, worker, tokens, spec) = started();
    let gate = |gpu: &mut NvidiaGpu, open: bool| {
        gpu.set_gate(spec.vgpu, open).unwrap();
        eventually("gate", || rm.may_run(tokens[0]) == open && rm.may_run(tokens[1]) == open);
    };
    gate(&mut gpu, false);
    gpu.set_timeslice(spec.vgpu, Duration::from_millis(3)).unwrap();
    let mut worker = anchor.replace(worker);
    worker.client.start().unwrap();
    assert!(!rm.may_run(tokens[0]), "the gate stays closed");
    gate(&mut gpu, true);
    eventually("time slice", || rm.timeslice_us(tokens[1]) == Some(3000));
    // A message that comes between two workers.
    worker.process.end_after(0);
    gpu.set_gate(spec.vgpu, false).unwrap();
    std::thread::sleep(Duration::from_millis(150));
    let mut worker = anchor.replace(worker);
    worker.client.start().unwrap();
    eventually("gate", || !rm.may_run(tokens[0]));
    gate(&mut gpu, true);
    eventually("usage", || {
        let report = gpu.usage().unwrap();
        report.vgpus.iter().any(|(_, usage)| usage.gate_closings == 2 && usage.channels == 2)
    });
    // A new manager's connection is kept, too.
    let mut next = NvidiaGpu::open(rm.clone(), fake_rm::ADDRESS, CONTINUED).unwrap();
    let fd = next.readmit(&spec).unwrap().unwrap();
    worker.client.attach_manager(fd).unwrap();
    anchor.record(&mut worker.client);
    drop(gpu);
    let mut worker = anchor.replace(worker);
    worker.client.start().unwrap();
    gate(&mut next, false);
    assert!(rm.violations().is_empty(), "{:?}", rm.violations());
}

#[test]
fn a_worker_that_dies_while_the_gate_closes_leaves_it_as_the_manager_wants() {
    for end in 0..24 {
        let (rm, mut gpu, mut anchor, worker, tokens, spec) = started();
        match end % 2 {
            0 => worker.process.end_after(end / 2),
            _ => worker.process.end_within(end / 2),
        }
        gpu.set_gate(spec.vgpu, false).unwrap();
        std::thread::sleep(Duration::from_millis(60));
        let mut worker = anchor.replace(worker);
        worker.client.start().unwrap();
        eventually("closed", || !rm.may_run(tokens[0]) && !rm.may_run(tokens[1]));
        gpu.set_gate(spec.vgpu, true).unwrap();
        eventually("open", || rm.may_run(tokens[0]) && rm.may_run(tokens[1]));
        drop(worker);
        assert!(rm.violations().is_empty(), "{:?}", rm.violations());
    }
}

#[test]
fn engine_time_is_charged_once() {
    let (rm, mut gpu, mut anchor, worker, _, _) = started();
    let own = u64::from(std::process::id());
    let charged = |gpu: &mut NvidiaGpu| gpu.usage().unwrap().vgpus[0].1.compute_ns;
    set_ring(memory(&anchor), 1, 0, 1);
    std::thread::sleep(Duration::from_millis(120));
    rm.log_residency(true, own, 1_000_000_000);
    rm.set_clock(1_010_000_000);
    rm.log_residency(false, own, 1_010_000_000);
    eventually("10 ms", || charged(&mut gpu) > 0);
    worker.process.end_after(0);
    // Without a worker, a kernel ends and another one begins.
    rm.log_residency(true, own, 1_020_000_000);
    rm.log_residency(false, own, 1_030_000_000);
    rm.log_residency(true, own, 1_030_000_000);
    rm.set_clock(1_034_000_000);
    let mut worker = anchor.replace(worker);
    worker.client.start().unwrap();
    // The engine changed contexts for 60 us of each.
    let used_ns = 24_000_000 - 3 * 60_000;
    assert_eq!(worker.client.usage().unwrap().compute_ns, used_ns, "10, 10 and 4 ms");
    let mut worker = anchor.replace(worker);
    worker.client.start().unwrap();
    assert_eq!(worker.client.usage().unwrap().compute_ns, used_ns, "no time twice");
}

#[test]
fn faults_and_interrupts_are_passed_on() {
    let (rm, mut gpu, mut anchor, mut worker, tokens, _) = started();
    let event = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC).unwrap();
    worker.client.set_interrupt(0, Some(std::os::fd::AsFd::as_fd(&event))).unwrap();
    anchor.record(&mut worker.client);
    worker.process.end_after(0);
    rm.fault(tokens[1], 31);
    let mut worker = anchor.replace(worker);
    worker.client.start().unwrap();
    eventually("the eventfd of the process before", || event.read().is_ok());
    assert!(worker.client.take_pending().contains(Pending::NONSTALL | Pending::CHANNEL_ERROR));
    assert_eq!(worker.client.query_channel(ChannelId(2)).unwrap().error, 31);
    assert_eq!(worker.client.query_channel(ChannelId(1)).unwrap().error, 0);
    let mut worker = anchor.replace(worker);
    worker.client.start().unwrap();
    eventually("one fault", || {
        gpu.usage().unwrap().vgpus.iter().any(|(_, usage)| usage.faults == 1)
    });
    assert_eq!(worker.client.query_channel(ChannelId(2)).unwrap().error, 31);
}

#[test]
fn vgpus_whose_video_memory_vmms_map_are_not_continued() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = NvidiaGpu::open(rm.clone(), fake_rm::ADDRESS, OPTIONS).unwrap();
    let (_, mut worker) = Anchor::new(&rm, &mut gpu, &spec(64 * MIB));
    assert_eq!(worker.client.position(), None);
}

#[test]
fn a_worker_that_was_evicted_is_not_continued() {
    let (_rm, mut gpu, mut anchor, mut worker, _, spec) = started();
    // A manager that has read what the worker has sent, as usual.
    gpu.usage().unwrap();
    gpu.evict(spec.vgpu).unwrap();
    eventually("eviction", || worker.client.take_pending().contains(Pending::DEVICE_LOST));
    anchor.record(&mut worker.client);
    std::thread::sleep(Duration::from_millis(60));
    worker.end();
    assert!(matches!(anchor.adopt(), Err(GpuError::Lost(_))));
}
