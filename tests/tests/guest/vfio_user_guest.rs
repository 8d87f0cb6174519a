//! The guest runtime as a VM's process: the real daemon, a vfio-user socket, memory shared by
//! descriptor.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use mdev_core::gpu::EngineKind;
use mdev_core::units::MIB;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use system_tests::Vgpud;
use system_tests::ram::Ram;
use system_tests::vfio_user_guest::VfioUserGuest;
use vgpu_guest::GuestError;
use vgpu_guest::bench::{self, Load};
use vgpu_guest::channel::Channel;
use vgpu_guest::device::Device;
use vgpu_guest::fence::WaitPolicy;
use vgpu_guest::memory::{Buffer, Home};
use vgpu_guest::pushbuffer::Methods;
use vgpu_guest::work::{
    self, Work, copy::Copy, mandelbrot::Mandelbrot, saxpy::Saxpy, sgemm::Sgemm, spin::Spin,
};

fn start(vgpud: &Vgpud, attrs: &serde_json::Value) -> Result<String> {
    vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "attrs": attrs, "run": true }))
}

fn attach(vgpud: &Vgpud, uuid: &str) -> Result<Device> {
    let ram = Ram::new(64 * MIB, 64 * 1024)?;
    let platform = VfioUserGuest::attach(&vgpud.vfio_socket(uuid), ram)?;
    Ok(Device::open(Box::new(platform))?)
}

#[test]
fn every_job_works_over_the_socket() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = start(&vgpud, &json!([]))?;
    let device = attach(&vgpud, &uuid)?;
    let properties = device.properties();
    assert_eq!((properties.type_name().as_str(), properties.uuid()), ("SOFT-256MQ", uuid));
    let mut channel = Channel::new(&device, EngineKind::Compute)?;
    work::run(&Copy::new(&device, 4 * MIB)?, &mut channel)?;
    work::run(&Saxpy::new(&device, Home::Vram, 100_000)?, &mut channel)?;
    work::run(&Sgemm::new(&device, Home::Guest, 100)?, &mut channel)?;
    let surface = Buffer::scanout(&device, 0, 4096 * 768)?;
    work::run(&Mandelbrot::new(&device, surface, (1024, 768), 4096)?, &mut channel)?;
    Ok(())
}

#[test]
fn a_vgpu_serves_one_guest_after_another() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = start(&vgpud, &json!([]))?;
    for _ in 0..3 {
        let device = attach(&vgpud, &uuid)?;
        let secret = Buffer::vram(&device, MIB)?;
        let mut channel = Channel::new(&device, EngineKind::Compute)?;
        work::run(&Saxpy::new(&device, Home::Guest, 1000)?, &mut channel)?;
        secret.window().fill(0x5e);
        // The guest leaves an endless kernel running.
        let spin = Spin::new(&device, u32::MAX)?;
        let mut methods = Methods::new();
        spin.push(&mut methods);
        channel.submit(&methods)?;
    }
    let device = attach(&vgpud, &uuid)?;
    let vram = device.platform().vram().context("There should be video memory")?;
    let mut bytes = vec![0; vram.len() as usize];
    vram.read(0, &mut bytes);
    assert!(bytes.iter().all(|&byte| byte != 0x5e), "the previous guest's memory is readable");
    Ok(())
}

#[test]
fn waits_end_with_the_interrupt() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = start(&vgpud, &json!([]))?;
    let ram = Ram::new(64 * MIB, 64 * 1024)?;
    let platform = VfioUserGuest::attach_with_interrupts(&vgpud.vfio_socket(&uuid), ram)?;
    let device = Device::open(Box::new(platform))?;
    // A wait without an interrupt looks at the semaphore for the first time after a minute.
    let minute = Duration::from_secs(60);
    let policy = WaitPolicy {
        spin: Duration::ZERO,
        check_interval: minute,
        limit: minute,
        ..WaitPolicy::default()
    };
    let mut compute = Channel::new(&device, EngineKind::Compute)?;
    let mut copies = Channel::new(&device, EngineKind::Copy)?;
    compute.set_wait_policy(policy);
    copies.set_wait_policy(policy);
    let spin = Spin::new(&device, 200_000)?;
    let copy = Copy::new(&device, 4 * MIB)?;
    let begun = Instant::now();
    for _ in 0..20 {
        work::run(&spin, &mut compute)?;
        work::run(&copy, &mut copies)?;
    }
    assert!(begun.elapsed() < minute, "{:?}", begun.elapsed());
    Ok(())
}

/// Shares are measured in `shares/work.rs`, over one window for both guests.
#[test]
fn guests_that_work_together_take_no_exits() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let devices = ["80", "20"]
        .iter()
        .map(|core| attach(&vgpud, &start(&vgpud, &json!([{ "core": core }]))?))
        .collect::<Result<Vec<_>>>()?;
    let load = Load { duration: Duration::from_secs(4), ..Load::default() };
    let loads: Vec<_> = devices
        .into_iter()
        .map(|device| thread::spawn(move || bench::run(&device, &load)))
        .collect();
    for load in loads {
        let measured = load.join().expect("a load should not panic")?;
        assert!(measured.verified > 0, "{measured}");
        assert_eq!(measured.wakes_while_busy, 0, "{measured}");
    }
    Ok(())
}

#[test]
fn a_lost_gpu_is_an_error_and_not_a_hang() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = start(&vgpud, &json!([]))?;
    let device = attach(&vgpud, &uuid)?;
    let mut channel = Channel::new(&device, EngineKind::Compute)?;
    let limit = Duration::from_secs(5);
    channel.set_wait_policy(WaitPolicy { limit, ..WaitPolicy::default() });
    let spin = Spin::new(&device, u32::MAX)?;
    let mut methods = Methods::new();
    spin.push(&mut methods);
    let fence = channel.submit(&methods)?;
    kill(Pid::from_raw(vgpud.context(&uuid)?.cast_signed()), Signal::SIGKILL)?;
    let result = channel.wait(fence);
    assert!(matches!(result, Err(GuestError::Lost)), "{result:?}");
    Ok(())
}
