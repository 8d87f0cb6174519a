//! Connection between the manager and a worker.

use std::time::{Duration, Instant};

use mdev_core::gpu::{Client, Gpu, Pending};
use mdev_core::units::MIB;
use nvidia_rm::fake_rm::{self, FakeRm};
use vendor_backends::nvidia::NvidiaGpu;

use super::{DRIVER, OPTIONS, client, eventually, gpu, spec, warnings, with_channels};

#[test]
fn the_worker_executes_the_managers_messages() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (vgpu, mut client, _memory, channels) = with_channels(&rm, &mut gpu);
    rm.take_log();
    let mut log = Vec::new();
    let mut await_call = |call: &str| {
        eventually(call, || {
            log.extend(rm.take_log());
            log.iter().any(|line| line.contains(call))
        });
        log.clear();
    };
    gpu.set_timeslice(vgpu, Duration::from_millis(3)).unwrap();
    await_call("0xa06c0103");
    gpu.set_gate(vgpu, false).unwrap();
    await_call("0x2080110b params 536 first 1");
    gpu.set_gate(vgpu, true).unwrap();
    await_call("0x2080110b params 536 first 0");
    gpu.reset_group(vgpu).unwrap();
    eventually("reset", || client.query_channel(channels[0].id).unwrap().error == 43);
    eventually("counters", || {
        let report = gpu.usage().unwrap();
        report.vgpus.iter().any(|(id, usage)| *id == vgpu && usage.hang_resets == 1)
    });

    // The next manager: the old connection ends, and the worker takes over the new one.
    let mut next = NvidiaGpu::open(rm.clone(), fake_rm::ADDRESS, OPTIONS).unwrap();
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
fn a_closed_gate_opens_when_the_manager_exits() {
    let rm = FakeRm::new(DRIVER);
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
fn an_unresponsive_worker_does_not_delay_the_manager() {
    let rm = FakeRm::new(DRIVER);
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

#[test]
fn a_worker_that_has_ended_is_no_warning() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (vgpu, worker) = client(&rm, &mut gpu);
    drop(worker);
    // As when the manager stops a vGPU: its scheduler may still have something to say.
    let logged = warnings::of(|| {
        gpu.set_timeslice(vgpu, Duration::from_millis(3)).unwrap();
        gpu.set_gate(vgpu, false).unwrap();
        gpu.usage().unwrap();
        gpu.evict(vgpu).unwrap();
    });
    assert!(logged.is_empty(), "{logged:?}");
}

#[test]
fn an_eviction_arrives_although_the_manager_has_not_read_all_messages() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (vgpu, mut client) = client(&rm, &mut gpu);
    // The worker's first message is not read.
    gpu.evict(vgpu).unwrap();
    eventually("eviction", || client.take_pending().contains(Pending::DEVICE_LOST));
}
