//! Probe for context switches on a real GPU.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipc::mem::Mapping;
use mdev_core::gpu::{EngineKind, Gpu};
use mdev_core::units::{GIB, MIB};
use nvidia_rm::KernelDriver;
use nvidia_rm::abi;
use nvidia_rm::numbers::{control, fb};
use nvidia_rm::rm::Rm;
use nvidia_rm::version::Layout;
use vendor_backends::conformance::{Driver, Pushbuffer};
use vendor_backends::nvidia::device::{Device, cards};
use vendor_backends::nvidia::observers::ctxsw_log::CtxswLog;
use vendor_backends::nvidia::observers::switch_probe::SwitchProbe;

use super::{client, gpu};

/// Opens the GPU as a client of its own, with the doorbell page.
fn device() -> (Arc<Device>, Arc<Mapping>) {
    let rm: Arc<dyn Rm> = Arc::new(KernelDriver);
    let layout = Layout::of(&rm.version().unwrap()).unwrap();
    let card = cards(&*rm).unwrap()[0].clone();
    let device = Arc::new(Device::open(rm, layout, &card).unwrap());
    let (usermode, rm_client) = (device.usermode().unwrap(), &device.rm_client);
    let node = rm_client.gpu_node();
    let fd = rm_client.aperture(&device.device, &usermode, node, 4096, 0).unwrap();
    // The page must outlive the mapping.
    std::mem::forget(usermode);
    (device, Mapping::new(fd.as_fd(), 0, 4096, true).unwrap())
}

fn free_kib(device: &Device) -> u32 {
    let mut info = abi::FbInfo { count: 1, ..Default::default() };
    info.list[0] = [fb::HEAP_FREE, 0];
    device.subdevice.control(control::FB_INFO, &mut info).unwrap();
    info.list[0][1]
}

/// Asks for the engine and waits until the probe has had it.
fn time_until_served(probe: &mut SwitchProbe) -> Duration {
    let started = Instant::now();
    let request = probe.request();
    while !probe.is_served(request) {
        assert!(started.elapsed() < Duration::from_secs(3) && probe.works(), "{probe:?}");
        std::thread::sleep(Duration::from_micros(50));
    }
    started.elapsed()
}

/// A copy of `mib` MiB of video memory in one launch.
fn one_copy(driver: &mut Driver, mib: u64) -> Pushbuffer {
    let vram = driver.map_vram(0, 9 * GIB);
    Pushbuffer::default().copy(vram, vram + 5 * GIB, (mib * MIB) as u32)
}

fn many_copies(driver: &Driver) -> Pushbuffer {
    let (from, to) = (driver.va(12 * MIB), driver.va(24 * MIB));
    (0..40).fold(Pushbuffer::default(), |push, _| push.copy(from, to, 8 << 20))
}

#[test]
fn work_that_ends_lets_the_probe_through_and_long_work_does_not() {
    let Some(mut gpu) = gpu() else { return };
    let (device, doorbell) = device();
    let mut log = CtxswLog::open(&device, doorbell.clone()).unwrap();
    let (free, started) = (free_kib(&device), Instant::now());
    let mut probe = SwitchProbe::new(&device, doorbell).unwrap();
    println!("opened in {:?}, {} KiB", started.elapsed(), free - free_kib(&device));
    for _ in 0..3 {
        println!("engine without work: {:?}", time_until_served(&mut probe));
    }
    let mut driver = Driver::new(client(&mut gpu, 10 * GIB));
    let mut ring = driver.ring(EngineKind::Compute);
    let records = |log: &mut CtxswLog, what: &str| {
        std::thread::sleep(Duration::from_millis(40));
        let records = log.read().unwrap();
        println!("{what}: {} records, {:?}", records.len(), log.engine_time);
        records.iter().rev().take(8).rev().for_each(|record| println!("    {record:?}"));
    };
    records(&mut log, "idle");
    println!("idle context: {:?}", time_until_served(&mut probe));
    records(&mut log, "after the idle context");
    println!("the probe itself resident: {:?}", time_until_served(&mut probe));
    records(&mut log, "after the probe itself");
    let push = one_copy(&mut driver, 4095);
    let started = Instant::now();
    let copied = driver.submit(&mut ring, push);
    std::thread::sleep(Duration::from_millis(2));
    let served = time_until_served(&mut probe);
    let done_then = driver.wait_for(copied, Duration::ZERO);
    let done = driver.wait_for(copied, Duration::from_secs(3));
    println!("one copy: served in {served:?}, {done_then}, {done} {:?}", started.elapsed());
    println!("{:?}", driver.client().query_channel(ring.id()));
    records(&mut log, "after one copy");
    let started = Instant::now();
    let pushes: Vec<_> = (0..60).map(|_| many_copies(&driver)).collect();
    let last = pushes.into_iter().map(|push| driver.submit(&mut ring, push)).last().unwrap();
    for _ in 0..5 {
        let served = time_until_served(&mut probe);
        let done = driver.wait_for(last, Duration::ZERO);
        println!("many copies: served in {served:?}, all done: {done} {:?}", started.elapsed());
        assert!(served < Duration::from_millis(100));
    }
    assert!(!driver.wait_for(last, Duration::ZERO), "the probe waits for a slice and not for all");
    assert!(driver.wait_for(last, Duration::from_secs(5)));
    println!("all copies done after {:?}", started.elapsed());
    records(&mut log, "after many copies");
}

#[test]
fn an_idle_vgpu_is_not_reset_while_another_one_copies() {
    let Some(mut gpu) = gpu() else { return };
    let mut idle = Driver::new(client(&mut gpu, GIB));
    let mut ring = idle.ring(EngineKind::Compute);
    idle.finish(&mut ring, Pushbuffer::default());
    let mut busy = Driver::new(client(&mut gpu, GIB));
    let mut copies = busy.ring(EngineKind::Copy);
    let started = Instant::now();
    while started.elapsed() < Duration::from_millis(1500) {
        let push = many_copies(&busy);
        let done = busy.submit(&mut copies, push);
        while !busy.wait_for(done, Duration::from_millis(2)) {
            gpu.usage().unwrap();
        }
    }
    println!("{:?}", gpu.usage());
    let status = idle.client().query_channel(ring.id()).unwrap();
    println!("{status:?}");
    idle.finish(&mut ring, Pushbuffer::default());
    assert_eq!(status.error, 0);
}
