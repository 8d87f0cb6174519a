//! The NVIDIA backend on a driver that is not there: every promise that needs no engine.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mdev_core::abi::mailbox::VA_START;
use mdev_core::abi::{doorbell, userd};
use mdev_core::gpu::{
    Backing, ChannelHandle, Client, ClientSpec, EngineKind, Gpu, GpuCapabilities, GpuError, Pending,
};
use mdev_core::ids::{GpuVa, MemoryId, VgpuId};
use mdev_core::profile;
use mdev_core::units::{GIB, MIB};
use vendor_backends::conformance::{self, life, readable};
use vendor_backends::mem::{Mapping, SharedMemory};
use vendor_backends::nvidia::fake::{self, Fake};
use vendor_backends::nvidia::record::Recorder;
use vendor_backends::nvidia::version::Layout;
use vendor_backends::nvidia::{NvidiaClient, NvidiaGpu, Options};

const DRIVER: &str = "580.142";

/// Tests may run as root.
const OPTIONS: Options =
    Options { allow_sys_admin: true, preempt_blocks: false, hang: None, direct_doorbell: false };

fn spec(vram_bytes: u64) -> ClientSpec {
    ClientSpec {
        vgpu: VgpuId::random(),
        vram_bytes,
        framebuffer_bytes: 0,
        max_channels: 4,
        max_import_bytes: 64 * MIB,
    }
}

fn gpu(rm: &Arc<Fake>) -> NvidiaGpu {
    NvidiaGpu::open(rm.clone(), fake::ADDRESS, OPTIONS).unwrap()
}

fn try_client(
    rm: &Arc<Fake>,
    gpu: &mut NvidiaGpu,
    spec: &ClientSpec,
) -> Result<NvidiaClient, GpuError> {
    let admission = gpu.admit(spec)?;
    let mut client = NvidiaClient::open(rm.clone(), admission.fd.unwrap())?;
    client.start()?;
    Ok(client)
}

fn client(rm: &Arc<Fake>, gpu: &mut NvidiaGpu) -> (VgpuId, NvidiaClient) {
    let spec = spec(64 * MIB);
    (spec.vgpu, try_client(rm, gpu, &spec).unwrap())
}

fn ram(len: u64) -> SharedMemory {
    SharedMemory::new(c"ram", len).unwrap()
}

#[test]
fn a_guest_lives_on_every_driver_that_is_known() {
    for layout in Layout::known() {
        let rm = Fake::new(&format!("{}.10", layout.series));
        let mut gpu = gpu(&rm);
        let (_, mut client) = client(&rm, &mut gpu);
        life::live(&mut client).unwrap();
        drop(client);
        assert_eq!((rm.objects(), rm.violations()), (0, vec![]), "series {}", layout.series);
    }
}

#[test]
fn compute_is_preempted_between_blocks_where_that_is_chosen() {
    let rm = Fake::new(DRIVER);
    let options = Options { preempt_blocks: true, ..OPTIONS };
    let mut gpu = NvidiaGpu::open(rm.clone(), fake::ADDRESS, options).unwrap();
    let (_, _client, _memory, channels) = with_channels(&rm, &mut gpu);
    let chosen = rm.take_log().iter().filter(|line| line.contains("0x20801210")).count();
    assert_eq!((chosen, channels.len()), (1, 3), "once for the compute group");
}

/// `tests/golden/nvidia-580.txt` was recorded on an H100 with driver 580.159.04: see `nvidia_hw.rs`.
#[test]
fn the_driver_is_asked_what_the_real_one_was_asked() {
    let rm = Fake::new("580.159.04");
    // As it was recorded.
    let options = Options { direct_doorbell: true, ..OPTIONS };
    let mut gpu = NvidiaGpu::open(rm.clone(), fake::ADDRESS, options).unwrap();
    let recorder = Recorder::new(rm.clone());
    let admission = gpu.admit(&spec(64 * MIB)).unwrap();
    let mut client = NvidiaClient::open(recorder.clone(), admission.fd.unwrap()).unwrap();
    life::live(&mut client).unwrap();
    drop(client);
    let golden = include_str!("golden/nvidia-580.txt");
    for (number, (asked, expected)) in recorder.lines().iter().zip(golden.lines()).enumerate() {
        assert_eq!(asked, expected, "line {}", number + 1);
    }
    assert_eq!(recorder.lines().len(), golden.lines().count());
}

#[test]
fn an_unknown_driver_is_refused() {
    for version in ["565.57.01", "999.1"] {
        let rm = Fake::new(version);
        let error = NvidiaGpu::open(rm, fake::ADDRESS, OPTIONS).unwrap_err().to_string();
        assert!(error.contains(version) && error.contains("580"), "{error}");
    }
    let error = NvidiaGpu::open(Fake::new(DRIVER), "0000:01:00.0", OPTIONS).unwrap_err();
    assert!(error.to_string().contains(fake::ADDRESS), "it says what there is: {error}");
}

#[test]
fn whatever_call_fails_nothing_is_left() {
    let rm = Fake::new(DRIVER);
    let whole = {
        let mut gpu = gpu(&rm);
        let before = rm.calls();
        let (_, mut client) = client(&rm, &mut gpu);
        life::live(&mut client).unwrap();
        drop(client);
        rm.calls() - before
    };
    assert!(whole > 40, "{whole} calls");
    for failing in 1..=whole {
        let rm = Fake::new(DRIVER);
        let mut gpu = gpu(&rm);
        rm.fail_at(Some(rm.calls() + failing));
        let spec = spec(64 * MIB);
        if let Ok(mut client) = try_client(&rm, &mut gpu, &spec) {
            let lived = life::live(&mut client);
            // After any failure the client is good for another life, or was not touched by it.
            rm.fail_at(None);
            if lived.is_err() {
                client.reset().unwrap();
            }
        }
        rm.fail_at(None);
        assert_eq!(rm.objects(), 0, "call {failing} of {whole} failed: {:?}", rm.violations());
        gpu.evict(spec.vgpu).unwrap();
        let (_, mut client) = client(&rm, &mut gpu);
        life::live(&mut client).unwrap();
    }
}

#[test]
fn children_are_freed_first_and_memory_after_those_who_use_it() {
    let rm = Fake::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (_, mut client) = client(&rm, &mut gpu);
    let memory = ram(MIB);
    let id = life::import(&mut client, &memory).unwrap();
    client.map(GpuVa(VA_START), MIB, Backing::Guest { memory: id, offset: 0 }, true).unwrap();
    let channel = client.create_channel(&life::channel(EngineKind::Copy, id, 0)).unwrap();
    client.release(id).unwrap();
    assert_eq!(rm.violations(), Vec::<String>::new(), "the USERD's channel went before its memory");
    assert_ne!(client.query_channel(channel.id).unwrap().error, 0, "and its guest can tell");
    drop(client);
    assert_eq!((rm.objects(), rm.violations()), (0, vec![]));
}

#[test]
fn partitions_are_not_more_than_there_is() {
    let rm = Fake::new(DRIVER);
    let mut gpu = gpu(&rm);
    let total = gpu.describe().vram_bytes;
    assert!(total > 70 * GIB && total < fake::VIDEO_MEMORY);
    let first = spec(64 * GIB);
    gpu.admit(&first).unwrap();
    assert!(matches!(gpu.admit(&spec(16 * GIB)), Err(GpuError::Limit(_))));
    assert!(gpu.admit(&ClientSpec { vram_bytes: MIB, ..first.clone() }).is_err(), "twice");
    assert!(matches!(gpu.admit(&spec(MIB + 1)), Err(GpuError::Invalid(_))));
    gpu.evict(first.vgpu).unwrap();
    gpu.admit(&spec(16 * GIB)).unwrap();
    let names: Vec<_> = profile::profiles(gpu.describe()).into_iter().map(|p| p.name).collect();
    assert!(names.contains(&"H100-16C".into()), "{names:?}");
    assert!(names.iter().all(|name| name.ends_with('C')), "no display heads: {names:?}");
}

#[test]
fn what_cannot_be_is_refused() {
    let rm = Fake::new(DRIVER);
    let mut gpu = gpu(&rm);
    conformance::run_refusals(&mut || Box::new(client(&rm, &mut gpu).1));
    assert_eq!(rm.violations(), Vec::<String>::new());
}

/// Waits for what another thread does.
fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn with_channels(
    rm: &Arc<Fake>,
    gpu: &mut NvidiaGpu,
) -> (VgpuId, NvidiaClient, SharedMemory, Vec<ChannelHandle>) {
    let (vgpu, mut client) = client(rm, gpu);
    let memory = ram(MIB);
    let id = life::import(&mut client, &memory).unwrap();
    let engines = [EngineKind::Copy, EngineKind::Compute, EngineKind::Compute];
    let make = |(place, engine): (usize, EngineKind)| {
        client.create_channel(&life::channel(engine, id, place as u64 * 512)).unwrap()
    };
    let channels = engines.into_iter().enumerate().map(make).collect();
    (vgpu, client, memory, channels)
}

#[test]
fn a_fault_ends_the_channels_of_its_engine_and_is_told() {
    let rm = Fake::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (_, mut client, _memory, channels) = with_channels(&rm, &mut gpu);
    rm.fault(channels[1].token.0, 31);
    assert!(readable(&client.event(), Duration::from_secs(20)));
    assert!(client.take_pending().contains(Pending::CHANNEL_ERROR));
    let errors: Vec<_> =
        channels.iter().map(|channel| client.query_channel(channel.id).unwrap().error).collect();
    assert_eq!(errors, [0, 31, 31]);
    assert_eq!(client.usage().unwrap().faults, 2);
    assert!(!client.gpu().capabilities.contains(GpuCapabilities::CHANNEL_FAULTS));
}

#[test]
fn a_storm_of_faults_has_to_wait() {
    let rm = Fake::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (_, mut client, memory, channels) = with_channels(&rm, &mut gpu);
    for channel in &channels {
        client.destroy_channel(channel.id).unwrap();
    }
    let id = life::import(&mut client, &memory).unwrap();
    let spec = life::channel(EngineKind::Compute, id, 0);
    let mut made = 0;
    let refused = loop {
        match client.create_channel(&spec) {
            Ok(channel) => {
                made += 1;
                rm.fault(channel.token.0, 31);
                client.query_channel(channel.id).unwrap();
                client.destroy_channel(channel.id).unwrap();
            }
            Err(error) => break error,
        }
        assert!(made < 10, "nothing holds it back");
    };
    assert!(matches!(refused, GpuError::Limit(_)), "{refused}");
    client.create_channel(&life::channel(EngineKind::Copy, id, 512)).unwrap();
}

#[test]
fn the_manager_leads_through_the_worker() {
    let rm = Fake::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (vgpu, mut client, _memory, channels) = with_channels(&rm, &mut gpu);
    rm.take_log();
    let mut log = Vec::new();
    let mut seen = |what: &str| {
        eventually(what, || {
            log.extend(rm.take_log());
            log.iter().any(|line| line.contains(what))
        });
        log.clear();
    };
    gpu.set_timeslice(vgpu, Duration::from_millis(3)).unwrap();
    seen("0xa06c0103");
    gpu.set_gate(vgpu, false).unwrap();
    seen("0x2080110b params 536 first 1");
    gpu.set_gate(vgpu, true).unwrap();
    seen("0x2080110b params 536 first 0");
    gpu.reset_group(vgpu).unwrap();
    eventually("reset", || client.query_channel(channels[0].id).unwrap().error == 43);
    eventually("counters", || {
        let report = gpu.usage().unwrap();
        report.vgpus.iter().any(|(id, usage)| *id == vgpu && usage.hang_resets == 1)
    });

    // The next manager: the old connections end, and the worker takes a new one.
    let mut next = NvidiaGpu::open(rm.clone(), fake::ADDRESS, OPTIONS).unwrap();
    let fd = next.readmit(client.spec()).unwrap().unwrap();
    client.attach_manager(fd).unwrap();
    drop(gpu);
    eventually("counters of the next manager", || {
        next.usage().unwrap().vgpus.iter().any(|(_, usage)| usage.hang_resets == 1)
    });
    next.evict(vgpu).unwrap();
    eventually("eviction", || client.take_pending().contains(Pending::DEVICE_LOST));
    assert!(next.usage().unwrap().vgpus.is_empty());
}

#[test]
fn a_gate_that_a_dead_manager_closed_opens() {
    let rm = Fake::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (vgpu, _client, _memory, _channels) = with_channels(&rm, &mut gpu);
    gpu.set_gate(vgpu, false).unwrap();
    eventually("closed", || {
        rm.take_log().iter().any(|line| line.contains("0x2080110b params 536 first 1"))
    });
    drop(gpu);
    eventually("open", || {
        rm.take_log().iter().any(|line| line.contains("0x2080110b params 536 first 0"))
    });
}

#[test]
fn a_deaf_worker_does_not_hold_the_manager_up() {
    let rm = Fake::new(DRIVER);
    let mut gpu = gpu(&rm);
    let admissions: Vec<_> = (0..8).map(|_| gpu.admit(&spec(64 * MIB)).unwrap()).collect();
    let started = Instant::now();
    for _ in 0..200 {
        assert_eq!(gpu.usage().unwrap().vgpus.len(), 8);
        for admission in &admissions {
            gpu.set_gate(admission.spec.vgpu, true).unwrap();
        }
    }
    assert!(started.elapsed() < Duration::from_secs(10));
}

/// A ring in memory that a test plays the GPU with: entries are there, and fetched, as it says.
fn set_ring(memory: &Mapping, place: u64, get: u32, put: u32) {
    memory.store_u32(place * 512 + userd::GP_GET, get).unwrap();
    memory.store_u32(place * 512 + userd::GP_PUT, put).unwrap();
}

fn mapped(memory: &SharedMemory) -> Arc<Mapping> {
    memory.mapping.clone()
}

/// The page that a guest has for its doorbell.
fn doorbell_page(client: &NvidiaClient) -> Arc<Mapping> {
    let page = client.apertures().doorbell.as_ref().unwrap();
    Mapping::new(page.fd.as_fd(), page.offset, page.len, true).unwrap()
}

#[test]
fn a_guest_is_rung_for_and_has_no_doorbell_of_the_gpu_s() {
    let rm = Fake::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (_, mut client, memory, channels) = with_channels(&rm, &mut gpu);
    assert!(client.gpu().capabilities.contains(GpuCapabilities::NEED_WAKEUP));
    let page = doorbell_page(&client);
    // Others' channels, and those that there are not.
    for token in 0..100_000 {
        page.store_u32(doorbell::TOKEN, token).unwrap();
    }
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(rm.last_bell(), Some(0), "nobody has anything");
    for (place, channel) in channels.iter().enumerate() {
        set_ring(&memory.mapping, place as u64, 0, 1);
        eventually("a ring", || rm.last_bell() == Some(channel.token.0));
    }
    // One that has been quiet sleeps, and says so.
    let asleep = |place: u64| memory.mapping.load_u32(place * 512 + userd::NEED_WAKEUP).unwrap();
    eventually("it sleeps", || (0..3).all(|place| asleep(place) == 1));
    set_ring(&memory.mapping, 0, 1, 2);
    client.wake(channels[0].token).unwrap();
    assert_eq!(rm.last_bell(), Some(channels[0].token.0), "at once");
    eventually("it is awake", || (0..3).all(|place| asleep(place) == 0));
    let usage = client.usage().unwrap();
    assert!((1..=4).contains(&usage.polled_doorbells) && usage.wakeups == 1, "{usage:?}");
    // Nor does it need to be woken by a guest that thinks it has done so.
    eventually("it sleeps", || asleep(2) == 1);
    set_ring(&memory.mapping, 2, 1, 2);
    eventually("a ring", || rm.last_bell() == Some(channels[2].token.0));
    assert_eq!(rm.violations(), Vec::<String>::new());
}

#[test]
fn a_guest_whose_rings_change_all_the_time_is_rung_for_no_oftener_than_the_gpu_can_bear() {
    let rm = Fake::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (_, mut client, memory, _channels) = with_channels(&rm, &mut gpu);
    let (started, mut put) = (Instant::now(), 0);
    while started.elapsed() < Duration::from_millis(300) {
        put += 1;
        (0..3).for_each(|place| set_ring(&memory.mapping, place, 0, put % 64));
    }
    let polled = client.usage().unwrap().polled_doorbells;
    let most = started.elapsed().as_micros() as u64 / 3 + 3;
    assert!((10..=most).contains(&polled), "{polled} rings, at most {most}");
}

#[test]
fn memory_that_has_left_a_channel_is_not_looked_at_any_more() {
    let rm = Fake::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (_, mut client, memory, channels) = with_channels(&rm, &mut gpu);
    client.destroy_channel(channels[0].id).unwrap();
    memory.mapping.store_u32(userd::NEED_WAKEUP, 7).unwrap();
    set_ring(&memory.mapping, 0, 0, 1);
    client.wake(channels[0].token).unwrap();
    set_ring(&memory.mapping, 1, 0, 1);
    eventually("it sleeps", || memory.mapping.load_u32(512 + userd::NEED_WAKEUP) == Some(1));
    assert_eq!(memory.mapping.load_u32(userd::NEED_WAKEUP), Some(7));
    assert_eq!(rm.last_bell(), Some(channels[1].token.0));
    client.release(MemoryId(1)).unwrap();
    memory.mapping.store_u32(512 + userd::NEED_WAKEUP, 7).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(memory.mapping.load_u32(512 + userd::NEED_WAKEUP), Some(7));
}

#[test]
fn a_guest_that_is_trusted_with_it_has_the_gpu_s_own_doorbell() {
    let rm = Fake::new(DRIVER);
    let options = Options { direct_doorbell: true, ..OPTIONS };
    let mut gpu = NvidiaGpu::open(rm.clone(), fake::ADDRESS, options).unwrap();
    let (_, mut client, memory, channels) = with_channels(&rm, &mut gpu);
    assert!(!client.gpu().capabilities.contains(GpuCapabilities::NEED_WAKEUP));
    set_ring(&memory.mapping, 1, 0, 1);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(rm.last_bell(), Some(0), "it rings itself");
    // Where it is trapped, only what is new is rung for.
    client.wake(channels[0].token).unwrap();
    assert_eq!(rm.last_bell(), Some(0));
    client.wake(channels[1].token).unwrap();
    assert_eq!(rm.last_bell(), Some(channels[1].token.0));
}

#[test]
fn who_has_nothing_to_do_has_the_shortest_slice_while_others_work() {
    let rm = Fake::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (idle, _client, memory, channels) = with_channels(&rm, &mut gpu);
    let (busy, _other, other_memory, others) = with_channels(&rm, &mut gpu);
    for vgpu in [idle, busy] {
        gpu.set_timeslice(vgpu, Duration::from_millis(3)).unwrap();
    }
    set_ring(&mapped(&other_memory), 1, 0, 1);
    let slices = |channels: &[ChannelHandle]| -> Vec<u64> {
        channels.iter().filter_map(|channel| rm.slice_us(channel.token.0)).collect()
    };
    eventually("a short slice", || {
        gpu.usage().unwrap();
        slices(&channels) == [50, 50, 50]
    });
    assert_eq!(slices(&others)[1..], [3000, 3000], "who works has his own");
    // A kernel that runs for long, with nothing queued behind it.
    let own = u64::from(std::process::id());
    rm.log_turn(true, own, 1);
    eventually("his own slice while it runs", || slices(&channels) == [50, 3000, 3000]);
    rm.log_turn(false, own, 2);
    eventually("a short slice again", || {
        gpu.usage().unwrap();
        slices(&channels) == [50, 50, 50]
    });
    set_ring(&mapped(&memory), 1, 0, 1);
    eventually("his own slice", || slices(&channels) == [50, 3000, 3000]);
    gpu.set_timeslice(idle, Duration::from_millis(4)).unwrap();
    eventually("another slice", || slices(&channels) == [50, 4000, 4000]);
    assert_eq!(rm.violations(), Vec::<String>::new());
}

#[test]
fn a_ring_that_is_never_empty_is_no_work_where_the_others_come_round_without_it() {
    let rm = Fake::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (idle, _client, memory, channels) = with_channels(&rm, &mut gpu);
    let (_, _other, other_memory, _) = with_channels(&rm, &mut gpu);
    gpu.set_timeslice(idle, Duration::from_millis(3)).unwrap();
    set_ring(&memory.mapping, 1, 0, 1);
    let (ring, mut rounds) = (mapped(&other_memory), 0);
    let mut look = |gpu: &mut NvidiaGpu| {
        rounds += 1;
        set_ring(&ring, 1, rounds % 64, (rounds + 1) % 64);
        let report = gpu.usage().unwrap();
        let usage = report.vgpus.into_iter().find(|(vgpu, _)| *vgpu == idle).unwrap().1;
        (usage.runnable, rm.slice_us(channels[1].token.0))
    };
    eventually("it waits", || look(&mut gpu) == (true, Some(3000)));
    std::thread::sleep(Duration::from_millis(200));
    eventually("it still waits", || look(&mut gpu) == (true, Some(3000)));
    // Another process has one turn after the other.
    for at in 1..=4 {
        rm.log_turn(true, 1, at);
        rm.log_turn(false, 1, at);
    }
    eventually("it has nothing to do", || look(&mut gpu) == (false, Some(50)));
    set_ring(&memory.mapping, 1, 1, 2);
    eventually("it has", || look(&mut gpu) == (true, Some(3000)));
}

#[test]
fn copies_are_charged_while_they_can_go_on() {
    let rm = Fake::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (vgpu, _client, memory, channels) = with_channels(&rm, &mut gpu);
    let ring = mapped(&memory);
    let copied = |gpu: &mut NvidiaGpu| gpu.usage().unwrap().vgpus[0].1.copy_ns / 1_000_000;
    let mut rounds = 0;
    let mut copy_on = |gpu: &mut NvidiaGpu, ms: u64| {
        let start = copied(gpu);
        eventually("copies are charged", || {
            rounds += 1;
            set_ring(&ring, 0, rounds % 64, (rounds + 1) % 64);
            copied(gpu) >= start + ms
        });
    };
    copy_on(&mut gpu, 300);
    gpu.set_gate(vgpu, false).unwrap();
    eventually("closed", || channels.iter().all(|channel| !rm.may_run(channel.token.0)));
    let before = copied(&mut gpu);
    std::thread::sleep(Duration::from_millis(300));
    let charged = copied(&mut gpu) - before;
    assert!(charged < 150, "{charged} ms behind a closed gate");
    gpu.set_gate(vgpu, true).unwrap();
    copy_on(&mut gpu, 50);
    // One that faults, or waits for a semaphore.
    let before = copied(&mut gpu);
    std::thread::sleep(Duration::from_secs(1));
    let charged = copied(&mut gpu) - before;
    assert!(charged < 500, "{charged} ms without an entry fetched");
}

#[test]
fn a_kernel_without_an_end_is_told_and_no_other() {
    let rm = Fake::new(DRIVER);
    let hang = Some(Duration::from_millis(150));
    let options = Options { hang, ..OPTIONS };
    let mut gpu = NvidiaGpu::open(rm.clone(), fake::ADDRESS, options).unwrap();
    let started = Instant::now();
    let clock = || started.elapsed().as_nanos() as u64 + 1_000_000_000;
    let own = u64::from(std::process::id());
    rm.set_clock(clock());
    // A turn of before the channels were: its end was never logged.
    let (endless, mut client, memory, channels) = with_channels(&rm, &mut gpu);
    rm.log_turn(true, own, clock() - 900_000_000);
    set_ring(&mapped(&memory), 1, 1, 1);
    let (_, mut other, other_memory, others) = with_channels(&rm, &mut gpu);
    let other_ring = mapped(&other_memory);
    let mut rounds = 0;
    let mut play = |gpu: &mut NvidiaGpu| {
        rounds += 1;
        rm.set_clock(clock());
        // Whoever fetches goes on, however long its turn is.
        set_ring(&other_ring, 1, rounds % 64, (rounds + 1) % 64);
        let report = gpu.usage().unwrap();
        std::thread::sleep(Duration::from_millis(2));
        report.vgpus.iter().find(|(id, _)| *id == endless).unwrap().1.hang_resets
    };
    let until = Instant::now() + Duration::from_millis(500);
    while Instant::now() < until {
        assert_eq!(play(&mut gpu), 0, "not its own turn");
    }
    rm.log_turn(true, own, clock());
    let begun = Instant::now();
    eventually("reset", || play(&mut gpu) == 1);
    assert!(begun.elapsed() >= Duration::from_millis(149), "{:?}", begun.elapsed());
    let errors = |client: &mut NvidiaClient, channels: &[ChannelHandle]| -> Vec<u32> {
        channels.iter().map(|one| client.query_channel(one.id).unwrap().error).collect()
    };
    assert_eq!(errors(&mut client, &channels), [0, 43, 43], "copies go on");
    assert_eq!(errors(&mut other, &others), [0, 0, 0]);
}

#[test]
fn a_gate_does_not_wait_for_a_kernel_that_may_have_no_end() {
    let rm = Fake::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (vgpu, _client, memory, channels) = with_channels(&rm, &mut gpu);
    set_ring(&memory.mapping, 1, 1, 1);
    // The ring was seen long ago, and so was the beginning of the turn.
    std::thread::sleep(Duration::from_millis(150));
    rm.log_turn(true, u64::from(std::process::id()), 1000);
    rm.set_clock(200_000_000);
    gpu.set_gate(vgpu, false).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert!(channels.iter().all(|channel| rm.may_run(channel.token.0)));
    rm.log_turn(false, u64::from(std::process::id()), 200_000_000);
    eventually("closed", || channels.iter().all(|channel| !rm.may_run(channel.token.0)));
}

#[test]
fn a_gate_disables_each_channel_once_and_enables_it_once() {
    let rm = Fake::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (vgpu, mut client, memory, channels) = with_channels(&rm, &mut gpu);
    let all_run = |channels: &[ChannelHandle], run: bool| {
        channels.iter().all(|channel| rm.may_run(channel.token.0) == run)
    };
    for round in 0..3 {
        gpu.set_gate(vgpu, false).unwrap();
        eventually("closed", || all_run(&channels, false));
        if round == 1 {
            // What is made behind a closed gate waits there too.
            client.destroy_channel(channels[2].id).unwrap();
            let id = life::import(&mut client, &memory).unwrap();
            let late = client.create_channel(&life::channel(EngineKind::Compute, id, 0)).unwrap();
            assert!(!rm.may_run(late.token.0));
            gpu.set_gate(vgpu, true).unwrap();
            eventually("open", || rm.may_run(late.token.0) && all_run(&channels[..2], true));
            break;
        }
        gpu.set_gate(vgpu, true).unwrap();
        eventually("open", || all_run(&channels, true));
    }
    assert_eq!(rm.violations(), Vec::<String>::new());
}
