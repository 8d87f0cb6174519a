//! Requests of guests, in workers that die at any call of the driver.

use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use ipc::mem::SharedMemory;
use mdev_core::abi::mailbox::VA_START;
use mdev_core::gpu::{
    Backing, ChannelSpec, Client, EngineKind, Exception, GpuError, MapRequest, Programs,
};
use mdev_core::ids::{ChannelId, GpuVa, MemoryId, SpaceId};
use mdev_core::units::{GIB, MIB, PAGE_SIZE};
use nvidia_rm::fake_rm::{self, FakeRm};
use proptest::prelude::*;
use vendor_backends::conformance::lifecycle;
use vendor_backends::nvidia::adoption::descriptors;
use vendor_backends::nvidia::adoption::journal::{Journal, Live};
use vendor_backends::nvidia::channels::LiveChannels;
use vendor_backends::nvidia::{NvidiaClient, NvidiaGpu};

use super::{Anchor, CONTINUED, Worker};
use crate::{DRIVER, spec};

/// Request of a guest.
#[derive(Clone, Debug)]
enum Request {
    Import,
    Release(usize),
    CreateSpace,
    DestroySpace(usize),
    Map { memory: usize, space: usize, page: u64, pages: u64 },
    Unmap { space: usize, page: u64, pages: u64 },
    CreateChannel { engine: EngineKind, memory: usize, userd: u64 },
    DestroyChannel(usize),
    Allocate,
    MapAllocated { memory: usize, space: usize, page: u64 },
    MapLaunchRegion { space: usize, page: u64 },
    ProgramChannel { engine: EngineKind, memory: usize, space: usize, group: u32 },
    WatchExceptions(usize),
    Reset,
    Renew,
}

/// What a guest has got, from which it makes its next requests.
#[derive(Clone, Debug, Default, PartialEq)]
struct Guest {
    memories: Vec<MemoryId>,
    spaces: Vec<SpaceId>,
    channels: Vec<ChannelId>,
    allocations: Vec<MemoryId>,
    /// Whether each request succeeded.
    results: Vec<bool>,
}

impl Guest {
    fn request(&self, client: &mut NvidiaClient, ram: &SharedMemory, request: &Request) -> Self {
        let mut next = self.clone();
        let done = next.carry_out(client, ram, request);
        next.results.push(done.is_ok());
        next
    }

    fn carry_out(
        &mut self,
        client: &mut NvidiaClient,
        ram: &SharedMemory,
        request: &Request,
    ) -> Result<(), GpuError> {
        match *request {
            Request::Import => self.memories.push(lifecycle::import(client, ram)?),
            Request::Release(index) => {
                let all: Vec<_> = self.memories.iter().chain(&self.allocations).copied().collect();
                let memory = pick(&all, index)?;
                client.release(memory)?;
                self.memories.retain(|other| *other != memory);
                self.allocations.retain(|other| *other != memory);
            }
            Request::CreateSpace => self.spaces.push(client.create_space()?),
            Request::DestroySpace(index) => {
                let space = pick(&self.spaces, index)?;
                client.destroy_space(space)?;
                self.spaces.retain(|other| *other != space);
            }
            Request::Map { memory, space, page, pages } => {
                let backing = match pick(&self.memories, memory) {
                    Ok(memory) if page % 3 > 0 => Backing::Guest { memory, offset: 0 },
                    _ => Backing::Vram { offset: page * PAGE_SIZE },
                };
                let space = self.space_of(space);
                let request = MapRequest::new(va(page), pages * PAGE_SIZE, backing);
                client.map(&request.in_space(space))?;
            }
            Request::Unmap { space, page, pages } => {
                client.unmap(self.space_of(space), va(page), pages * PAGE_SIZE)?;
            }
            Request::CreateChannel { engine, memory, userd } => {
                let memory = pick(&self.memories, memory)?;
                let spec: ChannelSpec = lifecycle::channel_spec(engine, memory, userd * 512);
                self.channels.push(client.create_channel(&spec)?.id);
            }
            Request::DestroyChannel(index) => {
                let channel = pick(&self.channels, index)?;
                client.destroy_channel(channel)?;
                self.channels.retain(|other| *other != channel);
            }
            Request::Reset => {
                client.reset()?;
                self.channels.clear();
                self.spaces.clear();
            }
            Request::Renew => {
                client.renew()?;
                self.allocations.clear();
                self.channels.clear();
                self.spaces.clear();
            }
            Request::Allocate
            | Request::MapAllocated { .. }
            | Request::MapLaunchRegion { .. }
            | Request::ProgramChannel { .. }
            | Request::WatchExceptions(_) => self.carry_out_for_programs(client, request)?,
        }
        Ok(())
    }

    /// Carries out a request that only CUDA programs make.
    fn carry_out_for_programs(
        &mut self,
        client: &mut NvidiaClient,
        request: &Request,
    ) -> Result<(), GpuError> {
        match *request {
            Request::Allocate => self.allocations.push(client.allocate(2 * MIB)?),
            Request::MapAllocated { memory, space, page } => {
                let memory = pick(&self.allocations, memory)?;
                let backing = Backing::Allocated { memory, offset: page * PAGE_SIZE };
                let request = MapRequest::new(va(page + 100), 4 * PAGE_SIZE, backing);
                client.map(&request.in_space(self.space_of(space)))?;
            }
            Request::MapLaunchRegion { space, page } => {
                client.map_launch_region(self.space_of(space), va(page + 200), PAGE_SIZE)?;
            }
            Request::ProgramChannel { engine, memory, space, group } => {
                let memory = pick(&self.memories, memory)?;
                let userd = self.channels.len() as u64 + 10;
                let spec = lifecycle::channel_spec(engine, memory, userd * 512);
                let spec = ChannelSpec { space: self.space_of(space), group: Some(group), ..spec };
                self.channels.push(client.create_channel(&spec)?.id);
            }
            Request::WatchExceptions(index) => {
                client.watch_exceptions(pick(&self.channels, index)?, 0x3a)?;
            }
            _ => unreachable!("{request:?} is not of programs"),
        }
        Ok(())
    }

    fn space_of(&self, index: usize) -> SpaceId {
        match index {
            0 => SpaceId::DEFAULT,
            index => pick(&self.spaces, index).unwrap_or(SpaceId::DEFAULT),
        }
    }
}

fn pick<T: Copy>(all: &[T], index: usize) -> Result<T, GpuError> {
    let found = all.get(index % all.len().max(1)).copied();
    found.ok_or(GpuError::NotFound("what was asked for"))
}

fn va(page: u64) -> GpuVa {
    GpuVa(VA_START + page * PAGE_SIZE)
}

/// What the manager has set: a time slice, and the gate.
#[derive(Clone, Copy, Debug)]
struct Schedule {
    gate_open: bool,
}

impl Schedule {
    /// Replaces a worker by one that continues with this schedule.
    fn apply(self, anchor: &mut Anchor, mut worker: Worker) -> Worker {
        anchor.record(&mut worker.client);
        worker.end();
        let journal = Journal::open(anchor.kept[&descriptors::JOURNAL].as_fd()).unwrap().unwrap();
        let (live, reported): (LiveChannels, Vec<Exception>) =
            journal.live(Live::Channels).unwrap();
        let (timeslice, gate_open) = (Some(Duration::from_millis(3)), self.gate_open);
        let live = LiveChannels { timeslice, gate_open, ..live };
        journal.write_live(Live::Channels, &(live, reported));
        let mut next = anchor.adopt().unwrap();
        anchor.record(&mut next.client);
        next
    }
}

/// Carries out requests in a worker that never dies, and returns what the guest and the driver
/// have.
fn undisturbed(requests: &[Request], schedule: Schedule) -> (Guest, Vec<String>, u64) {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = NvidiaGpu::open(rm.clone(), fake_rm::ADDRESS, CONTINUED).unwrap();
    let (mut anchor, worker) = Anchor::new(&rm, &mut gpu, &spec(64 * MIB));
    let mut worker = schedule.apply(&mut anchor, worker);
    let before = rm.calls();
    let mut guest = Guest::default();
    for request in requests {
        guest = guest.request(&mut worker.client, &anchor.ram, request);
        anchor.record(&mut worker.client);
    }
    let calls = rm.calls() - before;
    let left = (guest, rm.describe(), calls);
    assert!(rm.violations().is_empty(), "{:?}", rm.violations());
    left
}

/// End of a worker: before the call after this number of calls, or when that has had its effect.
type End = (u64, bool);

/// Carries out requests in workers that end as `ends` says, and are continued.
fn disturbed(requests: &[Request], schedule: Schedule, ends: &[End]) -> (Guest, Vec<String>) {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = NvidiaGpu::open(rm.clone(), fake_rm::ADDRESS, CONTINUED).unwrap();
    let (mut anchor, worker) = Anchor::new(&rm, &mut gpu, &spec(64 * MIB));
    let mut worker = schedule.apply(&mut anchor, worker);
    let mut ends = ends.iter();
    let mut guest = Guest::default();
    let end_next = |worker: &Worker, ends: &mut std::slice::Iter<'_, End>| match ends.next() {
        Some((calls, false)) => worker.process.end_after(*calls),
        Some((calls, true)) => worker.process.end_within(*calls),
        None => {}
    };
    end_next(&worker, &mut ends);
    for request in requests {
        loop {
            let Worker { client, .. } = &mut worker;
            let ram = &anchor.ram;
            let done = catch_unwind(AssertUnwindSafe(|| guest.request(client, ram, request)));
            if let Ok(next) = done {
                guest = next;
                break;
            }
            worker.client.end();
            worker = anchor.adopt().unwrap();
            anchor.record(&mut worker.client);
            end_next(&worker, &mut ends);
        }
        anchor.record(&mut worker.client);
    }
    // Also at the end.
    worker = anchor.replace(worker);
    let left = (guest, rm.describe());
    drop(worker);
    assert_eq!(rm.video_memory(), 0, "everything is freed at last");
    let mapped = |line: &&String| line.contains("while it is mapped");
    let violations = rm.violations();
    // The driver unmaps memory that it frees, and only what was not recorded is freed so.
    assert!(violations.iter().all(|line| mapped(&line)), "{violations:?}");
    left
}

fn requests() -> impl Strategy<Value = Vec<Request>> {
    let index = 0_usize..4;
    let request = prop_oneof![
        3 => Just(Request::Import),
        1 => index.clone().prop_map(Request::Release),
        1 => Just(Request::CreateSpace),
        1 => index.clone().prop_map(Request::DestroySpace),
        4 => (index.clone(), 0_usize..3, 0_u64..12, 1_u64..5).prop_map(
            |(memory, space, page, pages)| Request::Map { memory, space, page, pages }
        ),
        3 => (0_usize..3, 0_u64..12, 1_u64..5)
            .prop_map(|(space, page, pages)| Request::Unmap { space, page, pages }),
        3 => (any::<bool>(), index.clone(), 0_u64..8).prop_map(|(copy, memory, userd)| {
            let engine = if copy { EngineKind::Copy } else { EngineKind::Compute };
            Request::CreateChannel { engine, memory, userd }
        }),
        2 => index.clone().prop_map(Request::DestroyChannel),
        2 => Just(Request::Allocate),
        2 => (index.clone(), 0_usize..3, 0_u64..12).prop_map(
            |(memory, space, page)| Request::MapAllocated { memory, space, page }
        ),
        1 => (0_usize..3, 0_u64..4)
            .prop_map(|(space, page)| Request::MapLaunchRegion { space, page }),
        3 => (any::<bool>(), index.clone(), 0_usize..3, 1_u32..4).prop_map(
            |(copy, memory, space, group)| {
                let engine = if copy { EngineKind::Copy } else { EngineKind::Compute };
                Request::ProgramChannel { engine, memory, space, group }
            }
        ),
        1 => index.prop_map(Request::WatchExceptions),
        1 => Just(Request::Reset),
        1 => Just(Request::Renew),
    ];
    prop::collection::vec(request, 1..24)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Wherever workers end, guest and driver have in the end what they have without that.
    #[test]
    fn continued_clients_are_as_if_their_workers_had_not_died(
        requests in requests(),
        gate_open in any::<bool>(),
        ends in prop::collection::vec((0_u64..60, any::<bool>()), 1..4),
    ) {
        let schedule = Schedule { gate_open };
        let (guest, objects, _) = undisturbed(&requests, schedule);
        let (same_guest, same_objects) = disturbed(&requests, schedule, &ends);
        prop_assert_eq!(guest, same_guest);
        prop_assert_eq!(objects, same_objects);
    }
}

#[test]
fn a_worker_dies_at_each_call_of_a_lifecycle() {
    let requests = [
        Request::Import,
        Request::Map { memory: 0, space: 0, page: 1, pages: 4 },
        Request::Map { memory: 0, space: 0, page: 6, pages: 2 },
        Request::Unmap { space: 0, page: 2, pages: 1 },
        Request::CreateSpace,
        Request::CreateChannel { engine: EngineKind::Copy, memory: 0, userd: 0 },
        Request::CreateChannel { engine: EngineKind::Compute, memory: 0, userd: 1 },
        Request::DestroyChannel(0),
        Request::DestroySpace(0),
        Request::Release(0),
        Request::Import,
        Request::Renew,
    ];
    each_call_of(&requests);
}

#[test]
fn a_worker_dies_at_each_call_of_a_program() {
    let channel = |engine, group| Request::ProgramChannel { engine, memory: 0, space: 1, group };
    let requests = [
        Request::Import,
        Request::CreateSpace,
        Request::CreateSpace,
        Request::Allocate,
        Request::MapAllocated { memory: 0, space: 1, page: 1 },
        Request::MapLaunchRegion { space: 1, page: 0 },
        channel(EngineKind::Compute, 1),
        channel(EngineKind::Compute, 1),
        channel(EngineKind::Copy, 2),
        Request::WatchExceptions(0),
        Request::Allocate,
        Request::DestroyChannel(1),
        channel(EngineKind::Compute, 1),
        Request::Unmap { space: 1, page: 102, pages: 1 },
        Request::Release(1),
        Request::DestroySpace(1),
        Request::Renew,
    ];
    each_call_of(&requests);
}

/// Carries out requests, which all succeed, in workers that die before and within each call.
fn each_call_of(requests: &[Request]) {
    for schedule in [true, false].map(|gate_open| Schedule { gate_open }) {
        let (guest, objects, calls) = undisturbed(requests, schedule);
        assert!(guest.results.iter().all(|done| *done), "{guest:?}");
        let expected = (guest, objects);
        for end in (0..calls + 8).flat_map(|calls| [(calls, false), (calls, true)]) {
            let left = disturbed(requests, schedule, &[end]);
            assert_eq!(left, expected, "at {end:?}, {schedule:?}");
        }
    }
}

/// A program that pins 160 MiB of pages that are scattered in its guest's memory has 40,000
/// mappings.
#[test]
fn a_vgpu_with_many_mappings_is_continued() {
    const MAPPINGS: u64 = 40_000;
    let rm = FakeRm::new(DRIVER);
    let mut gpu = NvidiaGpu::open(rm.clone(), fake_rm::ADDRESS, CONTINUED).unwrap();
    let (mut anchor, mut worker) = Anchor::new(&rm, &mut gpu, &spec(GIB));
    let vram = Backing::Vram { offset: 0 };
    let page = |number: u64| GpuVa(VA_START + number * PAGE_SIZE);
    worker.client.map(&MapRequest::new(page(0), GIB, vram)).unwrap();
    for number in 1..MAPPINGS {
        worker.client.unmap(SpaceId::DEFAULT, page(2 * number - 1), PAGE_SIZE).unwrap();
    }
    anchor.record(&mut worker.client);
    assert!(anchor.position.is_some(), "it can be recorded");
    let mut next = anchor.replace(worker);
    // The next worker knows which addresses are in use.
    let last = MapRequest::new(page(2 * MAPPINGS - 2), PAGE_SIZE, vram);
    assert!(next.client.map(&last).is_err());
    let gap = MapRequest::new(page(2 * MAPPINGS - 3), PAGE_SIZE, vram);
    next.client.map(&gap).unwrap();
}
