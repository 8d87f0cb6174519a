//! Address spaces, groups and memory of CUDA programs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_socket::{FileId, IoctlRequest, Node};
use ipc::mem::SharedMemory;
use mdev_core::abi::mailbox::VA_START;
use mdev_core::gpu::{
    Backing, ChannelHandle, ChannelSpec, Client, ClientSpec, EngineKind, Gpu, GpuError, MapRequest,
    Placement, Programs,
};
use mdev_core::ids::{GpuVa, MemoryId, SpaceId};
use mdev_core::units::{GIB, MIB, PAGE_SIZE};
use nvidia_rm::fake_rm::FakeRm;
use nvidia_rm::generation;
use programs::FrontEnd;
use programs::front_end::{Opener, Outcome};
use vendor_backends::conformance::lifecycle;
use vendor_backends::nvidia::NvidiaClient;
use vendor_backends::nvidia::frontend::testing::{front_end, identity, word, words};

use crate::{DRIVER, eventually, gpu, ram, set_ring, spec, try_client, with_channels};

/// Numbers of engines: `NV2080_ENGINE_TYPE_GRAPHICS` and `NV2080_ENGINE_TYPE_COPY0`.
const GRAPHICS: u32 = 1;
const COPY0: u32 = 9;

const VA: GpuVa = GpuVa(0x7f00_0000_0000);

/// A vGPU with room for two programs.
fn many_channels() -> ClientSpec {
    ClientSpec { max_channels: 80, ..spec(64 * MIB) }
}

pub fn open(rm: &Arc<FakeRm>, gpu: &mut vendor_backends::nvidia::NvidiaGpu) -> NvidiaClient {
    try_client(rm, gpu, &many_channels()).unwrap()
}

/// Returns the parameters of a channel of a program, with USERD number `index`.
pub fn of_program(
    memory: MemoryId,
    index: u64,
    engine: EngineKind,
    (space, group): (SpaceId, u32),
) -> ChannelSpec {
    let spec = lifecycle::channel_spec(engine, memory, index * 512);
    ChannelSpec { space, group: Some(group), ..spec }
}

pub fn channel(
    client: &mut NvidiaClient,
    memory: MemoryId,
    index: u64,
    of: (SpaceId, u32),
) -> ChannelHandle {
    client.create_channel(&of_program(memory, index, EngineKind::Compute, of)).unwrap()
}

#[test]
fn a_program_has_a_space_groups_and_memory_of_its_own() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let mut client = open(&rm, &mut gpu);
    let memory = ram(MIB);
    let import = lifecycle::import(&mut client, &memory).unwrap();
    let space = client.create_space().unwrap();
    let data = client.allocate(4 * MIB).unwrap();
    let backing = Backing::Allocated { memory: data, offset: 0 };
    let mapping = MapRequest::new(VA, 4 * MIB, backing).in_space(space);
    client.map(&mapping).unwrap();
    assert!(matches!(client.map(&mapping), Err(GpuError::Overlap(_))));
    // The same address in the other space is another one.
    let low = MapRequest { va: GpuVa(VA_START), ..mapping };
    client.map(&low.in_space(SpaceId::DEFAULT)).unwrap();
    client.map(&low).unwrap();
    client.map_launch_region(space, GpuVa(VA.0 + GIB), PAGE_SIZE).unwrap();

    let handles: Vec<_> = (0..20).map(|n| channel(&mut client, import, n, (space, 7))).collect();
    client.preempt_instructions(handles[0].id).unwrap();
    let mut wrong = of_program(import, 30, EngineKind::Copy, (space, 7));
    assert!(client.create_channel(&wrong).is_err(), "a group has one engine");
    wrong = of_program(import, 30, EngineKind::Compute, (SpaceId::DEFAULT, 7));
    assert!(client.create_channel(&wrong).is_err(), "a group has one address space");

    client.destroy_space(space).unwrap();
    assert!(client.query_channel(handles[19].id).is_err(), "its channels are gone");
    assert!(client.map(&mapping).is_err(), "it is gone itself");
    client.release(data).unwrap();
    assert!(client.renew().unwrap());
    drop(client);
    assert_eq!(rm.violations(), Vec::<String>::new());
}

#[test]
fn programs_have_channels_on_every_generation_and_vgpu_guest_on_hopper() {
    for generation in generation::all() {
        let rm = FakeRm::of_generation(DRIVER, generation);
        let mut gpu = gpu(&rm);
        let mut client = open(&rm, &mut gpu);
        let memory = ram(MIB);
        let import = lifecycle::import(&mut client, &memory).unwrap();
        let space = client.create_space().unwrap();
        for (index, engine) in [EngineKind::Compute, EngineKind::Copy].into_iter().enumerate() {
            let of_program = of_program(import, index as u64, engine, (space, index as u32));
            let created = client.create_channel(&of_program);
            assert!(created.is_ok(), "{generation:?}: {created:?}");
            let own = lifecycle::channel_spec(engine, import, 2048 + index as u64 * 512);
            match client.create_channel(&own) {
                Ok(_) => assert!(generation.is_tested(), "{generation:?}"),
                Err(GpuError::Unsupported(_)) => assert!(!generation.is_tested(), "{generation:?}"),
                Err(error) => panic!("{generation:?}: {error}"),
            }
        }
        drop(client);
        assert_eq!(rm.violations(), Vec::<String>::new(), "{generation:?}");
    }
}

#[test]
fn programs_use_the_classes_that_the_driver_lists() {
    // NV_ERR_INVALID_CLASS.
    const INVALID_CLASS: u32 = 0x22;
    for listed in generation::all() {
        let rm = FakeRm::of_generation(DRIVER, listed);
        let mut gpu = gpu(&rm);
        let mut client = open(&rm, &mut gpu);
        let mut front_end = front_end(identity(DRIVER, 64 * MIB), 256 * MIB);
        front_end.open(FileId(1), Node::Control, Opener::new(1, None)).unwrap();
        let mut alloc = |[root, parent, handle, class]: [u32; 4]| {
            let argument = words(&[root, parent, handle, class, 0, 0, 0, 0]);
            let request = IoctlRequest {
                file: FileId(1),
                request: 0xc020_462b,
                argument,
                blocks: Vec::new(),
                files: Vec::new(),
                shared: Vec::new(),
                refused: cuda_socket::Refused::default(),
            };
            match front_end.ioctl(&mut client, &request, None) {
                Outcome::Done(done, _) => (word(&done.argument, 2), word(&done.argument, 7)),
                Outcome::Fetch(fetch) => panic!("{fetch:?}"),
            }
        };
        let (root, _) = alloc([0, 0, 0, 0x41]);
        let device = root + 1;
        assert_eq!(alloc([root, root, device, 0x80]).1, 0);
        // Without a channel, its class is known and its parent is wrong.
        for other in generation::all() {
            let status = alloc([root, device, root + 2, other.compute]).1;
            let known = status != INVALID_CLASS;
            assert_eq!(
                known,
                other.compute == listed.compute,
                "{other:?} on {listed:?}: {status:#x}"
            );
        }
    }
}

#[test]
fn a_space_takes_channels_along_that_have_faulted() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let mut client = open(&rm, &mut gpu);
    let memory = ram(MIB);
    let import = lifecycle::import(&mut client, &memory).unwrap();
    let space = client.create_space().unwrap();
    let lost = channel(&mut client, import, 0, (space, 7));
    rm.fault(lost.token.0, 31);
    assert_eq!(client.query_channel(lost.id).unwrap().error, 31);
    client.destroy_space(space).unwrap();
    assert!(client.query_channel(lost.id).is_err());
    assert_eq!(rm.violations(), Vec::<String>::new());
}

#[test]
fn allocations_take_the_place_of_the_partition() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let mut client = open(&rm, &mut gpu);
    let half = client.allocate(32 * MIB).unwrap();
    client.allocate(32 * MIB).unwrap();
    assert!(matches!(client.allocate(PAGE_SIZE), Err(GpuError::Limit(_))), "it is full");
    assert_eq!(rm.video_memory(), 64 * MIB, "the partition is given up");
    client.release(half).unwrap();
    client.allocate(16 * MIB).unwrap();
    client.renew().unwrap();
    assert_eq!(rm.video_memory(), 64 * MIB, "a VM gets the partition again");
    client.map(&MapRequest::new(GpuVa(VA_START), 64 * MIB, Backing::Vram { offset: 0 })).unwrap();
}

#[test]
fn the_partition_comes_back_when_no_allocation_is_left() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let mut client = open(&rm, &mut gpu);
    let all = MapRequest::new(GpuVa(VA_START), 64 * MIB, Backing::Vram { offset: 0 });
    let allocated = client.allocate(48 * MIB).unwrap();
    assert!(client.map(&all).is_err(), "the partition is given up");
    client.release(allocated).unwrap();
    client.map(&all).unwrap();
    assert_eq!(rm.video_memory(), 64 * MIB);
    // Programs can follow again.
    client.allocate(64 * MIB).unwrap();
    assert_eq!(rm.video_memory(), 64 * MIB);
    assert_eq!(rm.violations(), Vec::<String>::new());
}

#[test]
fn the_programs_of_a_vgpu_share_its_slice() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let spec = many_channels();
    let mut client = try_client(&rm, &mut gpu, &spec).unwrap();
    let memory: SharedMemory = ram(MIB);
    let import = lifecycle::import(&mut client, &memory).unwrap();
    let spaces = [client.create_space().unwrap(), client.create_space().unwrap()];
    let first = channel(&mut client, import, 0, (spaces[0], 1));
    let second = channel(&mut client, import, 1, (spaces[1], 2));
    gpu.set_timeslice(spec.vgpu, Duration::from_millis(8)).unwrap();
    let slices = || [first, second].map(|of| rm.timeslice_us(of.token.0));
    set_ring(&memory.mapping, 0, 0, 1);
    eventually("one program has the whole slice", || slices()[0] == Some(8000));
    set_ring(&memory.mapping, 1, 0, 1);
    eventually("two programs have a half each", || slices() == [Some(4000); 2]);
    set_ring(&memory.mapping, 1, 1, 1);
    eventually("one program has the whole slice again", || slices()[0] == Some(8000));
}

#[test]
fn slices_are_short_while_a_long_kernel_of_a_program_runs() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let spec = many_channels();
    let mut client = try_client(&rm, &mut gpu, &spec).unwrap();
    let memory = ram(MIB);
    let import = lifecycle::import(&mut client, &memory).unwrap();
    let space = client.create_space().unwrap();
    let program = channel(&mut client, import, 0, (space, 1));
    let (other, _other_client, other_memory, others) = with_channels(&rm, &mut gpu);
    gpu.set_timeslice(spec.vgpu, Duration::from_millis(16)).unwrap();
    gpu.set_timeslice(other, Duration::from_millis(8)).unwrap();
    let started = Instant::now();
    let process = u64::from(std::process::id());
    rm.log_residency(true, process, 1);
    let mut slices = |progress: u32| {
        rm.set_clock(started.elapsed().as_nanos() as u64 + 1);
        set_ring(&memory.mapping, 0, progress, progress);
        // The other vGPU always waits.
        set_ring(&other_memory.mapping, 1, 0, 1);
        gpu.usage().unwrap();
        [program.token.0, others[1].token.0].map(|token| rm.timeslice_us(token))
    };
    let (long, short) = ([Some(16_000), Some(8000)], [Some(6000), Some(3000)]);
    // Many kernels, one after the other.
    let mut progress = 0;
    eventually("normal slices", || slices(0) == long);
    while started.elapsed() < Duration::from_millis(600) {
        progress = (progress + 1) % 64;
        assert_eq!(slices(progress), long, "with progress");
        std::thread::sleep(Duration::from_millis(2));
    }
    eventually("short slices", || slices(progress) == short);
    eventually("normal slices after the kernel's end", || {
        progress = (progress + 1) % 64;
        slices(progress) == long
    });
    assert_eq!(rm.violations(), Vec::<String>::new());
}

#[test]
fn a_gate_stops_all_channels_of_all_programs() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let spec = many_channels();
    let mut client = try_client(&rm, &mut gpu, &spec).unwrap();
    let memory = ram(MIB);
    let import = lifecycle::import(&mut client, &memory).unwrap();
    let space = client.create_space().unwrap();
    // More than one call of the driver takes.
    let handles: Vec<_> =
        (0..70).map(|n| channel(&mut client, import, n, (space, n as u32 % 4))).collect();
    let running = || handles.iter().filter(|handle| rm.may_run(handle.token.0)).count();
    assert_eq!(running(), 70);
    gpu.set_gate(spec.vgpu, false).unwrap();
    eventually("the gate closes", || running() == 0);
    gpu.set_gate(spec.vgpu, true).unwrap();
    eventually("the gate opens", || running() == 70);
}

#[test]
fn only_known_queries_reach_the_driver() {
    const NOT_SUPPORTED: u32 = 0x56;
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let mut client = open(&rm, &mut gpu);
    // NV2080_CTRL_CMD_MC_GET_ARCH_INFO, which the fake driver does not have.
    assert_eq!(client.query_driver(0x2080_1701, &mut [0; 16]), Some(NOT_SUPPORTED));
    assert_eq!(client.query_driver(0x2080_1701, &mut [0; 12]), None, "another length");
    // NV2080_CTRL_CMD_ECC_GET_VOLATILE_COUNTS and NV2080_CTRL_CMD_PERF_GET_CURRENT_PSTATE.
    assert_eq!(client.query_driver(0x2080_3401, &mut [0; 40]), Some(NOT_SUPPORTED));
    assert_eq!(client.query_driver(0x2080_2068, &mut [0; 4]), Some(NOT_SUPPORTED));
    // NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS.
    assert_eq!(client.query_driver(0x2080_110b, &mut [0; 536]), None, "no query");
    // NV2080_CTRL_CMD_GR_GET_TPC_MASK, for the engine of a channel with this handle.
    let mut of_channel = [0; 24];
    of_channel[..12].copy_from_slice(&[2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0x55, 0x5e]);
    assert_eq!(client.query_driver(0x2080_122b, &mut of_channel), Some(0x1f), "a handle");
    assert_eq!(client.query_driver(0x2080_122b, &mut [0; 24]), Some(NOT_SUPPORTED));
    assert_eq!(client.driver(), DRIVER);
}

#[test]
fn channels_of_programs_are_where_the_program_asks_for_them() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let mut client = open(&rm, &mut gpu);
    let memory = ram(MIB);
    let import = lifecycle::import(&mut client, &memory).unwrap();
    let space = client.create_space().unwrap();
    let mut create = |index, engine, group, placement| {
        let spec = of_program(import, index, engine, (space, group));
        let handle = client.create_channel(&ChannelSpec { placement, ..spec }).unwrap();
        rm.placement(handle.token.0).unwrap()
    };
    let on = |second_runqueue| Placement { copy_engine: None, second_runqueue };
    assert_eq!(create(0, EngineKind::Compute, 1, on(false)), (GRAPHICS, false));
    assert_eq!(create(1, EngineKind::Compute, 1, on(true)), (GRAPHICS, true));
    let copies = |number| Placement { copy_engine: number, second_runqueue: true };
    assert_eq!(create(2, EngineKind::Copy, 2, copies(Some(2))), (COPY0 + 2, false));
    assert_eq!(create(3, EngineKind::Copy, 3, copies(Some(3))), (COPY0 + 3, false));
    // The fastest one, instead of those that take turns with compute or are not there.
    for (index, number) in [None, Some(0), Some(1), Some(9), Some(u32::MAX)].iter().enumerate() {
        let index = index as u32;
        let found = create(10 + u64::from(index), EngineKind::Copy, 10 + index, copies(*number));
        assert_eq!(found, (COPY0 + 4, false), "{number:?}");
    }
}

#[test]
fn the_gpu_caches_guest_memory_only_where_that_is_asked_for() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let mut client = open(&rm, &mut gpu);
    let memory = ram(MIB);
    let import = lifecycle::import(&mut client, &memory).unwrap();
    let space = client.create_space().unwrap();
    let backing = Backing::Guest { memory: import, offset: 0 };
    for (at, gpu_caches) in [(VA.0, false), (VA.0 + GIB, true)] {
        let request = MapRequest::new(GpuVa(at), PAGE_SIZE, backing).in_space(space);
        client.map(&MapRequest { gpu_caches, ..request }).unwrap();
        assert_eq!(rm.gpu_caches(at), Some(gpu_caches));
    }
}
