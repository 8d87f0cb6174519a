//! Driver calls: objects, memory, failures and supported versions.

use mdev_core::abi::compute;
use mdev_core::abi::mailbox::VA_START;
use mdev_core::gpu::{Backing, Client, ClientSpec, EngineKind, Gpu, GpuError, MapRequest};
use mdev_core::ids::GpuVa;
use mdev_core::profile;
use mdev_core::units::{GIB, MIB};
use nvidia_rm::fake_rm::{self, FakeRm};
use nvidia_rm::rm_recorder::RmRecorder;
use nvidia_rm::version::Layout;
use vendor_backends::conformance::{self, lifecycle};
use vendor_backends::nvidia::{NvidiaClient, NvidiaGpu, Options};

use super::{DRIVER, OPTIONS, client, gpu, ram, spec, try_client, with_channels};

#[test]
fn a_vgpu_works_on_every_supported_driver() {
    for layout in Layout::supported() {
        let rm = FakeRm::new(&format!("{}.10", layout.series));
        let mut gpu = gpu(&rm);
        let (_, mut client) = client(&rm, &mut gpu);
        lifecycle::run(&mut client).unwrap();
        drop(client);
        assert_eq!((rm.objects(), rm.violations()), (0, vec![]), "series {}", layout.series);
    }
}

#[test]
fn preemption_between_blocks_is_set_once_if_chosen() {
    let rm = FakeRm::new(DRIVER);
    let options = Options { preempt_blocks: true, ..OPTIONS };
    let mut gpu = NvidiaGpu::open(rm.clone(), fake_rm::ADDRESS, options).unwrap();
    let (_, _client, _memory, channels) = with_channels(&rm, &mut gpu);
    let calls = rm.take_log().iter().filter(|line| line.contains("0x20801210")).count();
    assert_eq!((calls, channels.len()), (1, 3), "one call for the compute group");
}

/// `tests/golden/nvidia-580.txt` is a recording on an H100 with driver 580.159.04 (`nvidia_hw`).
/// The queries of the class list and of the copy engines' capabilities were added to it by hand,
/// and the start of the address spaces.
#[test]
fn driver_calls_match_the_recording_of_a_real_driver() {
    let rm = FakeRm::new("580.159.04");
    // The option of the recording.
    let options = Options { direct_doorbell: true, ..OPTIONS };
    let mut gpu = NvidiaGpu::open(rm.clone(), fake_rm::ADDRESS, options).unwrap();
    let recorder = RmRecorder::new(rm.clone());
    let admission = gpu.admit(&spec(64 * MIB)).unwrap();
    let mut client =
        NvidiaClient::open(recorder.clone(), admission.fd.unwrap().into_trusted()).unwrap();
    lifecycle::run(&mut client).unwrap();
    drop(client);
    let golden = include_str!("../golden/nvidia-580.txt");
    for (number, (call, expected)) in recorder.lines().iter().zip(golden.lines()).enumerate() {
        assert_eq!(call, expected, "line {}", number + 1);
    }
    assert_eq!(recorder.lines().len(), golden.lines().count());
}

#[test]
fn an_unsupported_driver_or_a_missing_gpu_is_refused() {
    for version in ["565.57.01", "999.1"] {
        let rm = FakeRm::new(version);
        let error = NvidiaGpu::open(rm, fake_rm::ADDRESS, OPTIONS).unwrap_err().to_string();
        assert!(error.contains(version) && error.contains("580"), "{error}");
    }
    let error = NvidiaGpu::open(FakeRm::new(DRIVER), "0000:01:00.0", OPTIONS).unwrap_err();
    assert!(error.to_string().contains(fake_rm::ADDRESS), "the error lists the GPUs: {error}");
}

#[test]
fn a_failure_of_any_call_leaks_nothing() {
    let rm = FakeRm::new(DRIVER);
    let total = {
        let mut gpu = gpu(&rm);
        let before = rm.calls();
        let (_, mut client) = client(&rm, &mut gpu);
        lifecycle::run(&mut client).unwrap();
        drop(client);
        rm.calls() - before
    };
    assert!(total > 40, "{total} calls");
    for failing in 1..=total {
        let rm = FakeRm::new(DRIVER);
        let mut gpu = gpu(&rm);
        rm.fail_at(Some(rm.calls() + failing));
        let spec = spec(64 * MIB);
        if let Ok(mut client) = try_client(&rm, &mut gpu, &spec) {
            let result = lifecycle::run(&mut client);
            // After a failure, the client can be reset and used again.
            rm.fail_at(None);
            if result.is_err() {
                client.reset().unwrap();
            }
        }
        rm.fail_at(None);
        assert_eq!(rm.objects(), 0, "call {failing} of {total} failed: {:?}", rm.violations());
        gpu.evict(spec.vgpu).unwrap();
        let (_, mut client) = client(&rm, &mut gpu);
        lifecycle::run(&mut client).unwrap();
    }
}

#[test]
fn objects_are_freed_before_their_parents_and_memory() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (_, mut client) = client(&rm, &mut gpu);
    let memory = ram(MIB);
    let id = lifecycle::import(&mut client, &memory).unwrap();
    client
        .map(&MapRequest::new(GpuVa(VA_START), MIB, Backing::Guest { memory: id, offset: 0 }))
        .unwrap();
    let channel = client.create_channel(&lifecycle::channel_spec(EngineKind::Copy, id, 0)).unwrap();
    client.release(id).unwrap();
    assert_eq!(
        rm.violations(),
        Vec::<String>::new(),
        "the channel is freed before the memory of its USERD"
    );
    assert_ne!(client.query_channel(channel.id).unwrap().error, 0, "the channel reports an error");
    drop(client);
    assert_eq!((rm.objects(), rm.violations()), (0, vec![]));
}

#[test]
fn partitions_do_not_exceed_video_memory() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let total = gpu.describe().vram_bytes;
    assert!(total > 70 * GIB && total < fake_rm::VIDEO_MEMORY);
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
fn invalid_requests_are_refused() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    conformance::run_refusals(&mut || Box::new(client(&rm, &mut gpu).1));
    assert_eq!(rm.violations(), Vec::<String>::new());
}

/// While many vGPUs start at once, a driver is out of page tables for a moment.
#[test]
fn a_driver_without_memory_for_a_moment_is_asked_for_the_probe_again() {
    let objects = |refusals| {
        let rm = FakeRm::new(DRIVER);
        let mut gpu = gpu(&rm);
        rm.run_out_of_memory(compute::CLASS, refusals);
        let (_, mut client) = client(&rm, &mut gpu);
        let objects = rm.objects();
        rm.run_out_of_memory(compute::CLASS, 0);
        lifecycle::run(&mut client).unwrap();
        drop(client);
        assert_eq!((rm.objects(), rm.violations()), (0, vec![]));
        objects
    };
    let complete = objects(0);
    assert_eq!(objects(3), complete);
    assert!(objects(100) < complete, "without the probe, a vGPU works all the same");
}
