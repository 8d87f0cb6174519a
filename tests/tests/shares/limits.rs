//! Limits besides engine time, and hangs: the daemon, guests over vfio-user sockets, and another
//! vGPU that must not be affected.

// Compared numbers are exact integers.
#![allow(clippy::float_cmp)]

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use mdev_core::abi::control::reg;
use mdev_core::abi::mailbox::Status;
use mdev_core::abi::notifier;
use mdev_core::gpu::{EngineKind, Pending};
use mdev_core::units::MIB;
use nix::sys::eventfd::EventFd;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::load::{share_while, verified, work};
use system_tests::ram::Ram;
use system_tests::vfio_user_guest::VfioUserGuest;
use system_tests::vgpuctl::{refused, vgpuctl, vgpuctl_json};
use system_tests::{Vgpud, wait_for};
use vgpu_guest::GuestError;
use vgpu_guest::channel::Channel;
use vgpu_guest::device::Device;
use vgpu_guest::memory::{Buffer, Home};
use vgpu_guest::pushbuffer::Methods;
use vgpu_guest::work::{self, Work, saxpy::Saxpy, spin::Spin};

fn start(vgpud: &Vgpud, attrs: &str) -> Result<String> {
    vgpuctl(vgpud, format!("start -p soft0 -t SOFT-256MQ {attrs}").trim_end())
}

/// Changes attributes of a running vGPU and keeps the others.
fn change(vgpud: &Vgpud, uuid: &str, attrs: &str) -> Result<()> {
    vgpuctl(vgpud, &format!("modify -u {uuid} --live {attrs}")).map(drop)
}

/// Attaches a guest with 64 MiB and an interrupt.
fn attach(vgpud: &Vgpud, uuid: &str) -> Result<(Device, EventFd)> {
    let platform = VfioUserGuest::attach(&vgpud.vfio_socket(uuid), Ram::new(64 * MIB, 64 * 1024)?)?;
    let interrupt = platform.interrupt()?;
    let device = Device::open(Box::new(platform))?;
    device.platform().write32(reg::INTR_ENABLE, Pending::CHANNEL_ERROR.bits());
    Ok((device, interrupt))
}

fn stats(vgpud: &Vgpud, uuid: &str) -> Result<Value> {
    // Statistics may be some milliseconds old.
    thread::sleep(Duration::from_millis(100));
    let stats = vgpuctl_json(vgpud, &format!("stats -u {uuid} --output json"))?;
    stats["vgpus"].get(0).cloned().context("It runs")
}

/// Returns a sample of `/metrics` with one label.
fn metric(vgpud: &Vgpud, name: &str, uuid: &str) -> Result<f64> {
    let text = String::from_utf8(vgpud.request("GET", "/metrics", None)?.1)?;
    let key = format!("tessera_vgpu_{name}{{vgpu=\"{uuid}\"}} ");
    let value = text.lines().find_map(|line| line.strip_prefix(&key));
    Ok(value.with_context(|| format!("{key} in {text}"))?.parse()?)
}

fn is_limit<T>(result: &Result<T, GuestError>) -> bool {
    matches!(result, Err(GuestError::Refused { status: Status::Limit, .. }))
}

fn endless(device: &Device) -> Result<(Spin, Methods)> {
    let spin = Spin::new(device, u32::MAX)?;
    let mut methods = Methods::new();
    spin.push(&mut methods);
    Ok((spin, methods))
}

/// Returns the error code of a channel that must have faulted.
fn fault(result: Result<(), GuestError>) -> Result<u32> {
    match result {
        Err(GuestError::Channel { code, .. }) => Ok(code),
        other => Err(anyhow::anyhow!("It was to fault, and {other:?}")),
    }
}

/// Checks that the guest got an interrupt for a channel error, and acknowledges the interrupt.
fn expect_interrupt(device: &Device, interrupt: &EventFd) -> Result<()> {
    wait_for("the guest is interrupted", || interrupt.read().is_ok())?;
    let status = device.platform().read32(reg::INTR_STATUS);
    device.platform().write32(reg::INTR_STATUS, status);
    let pending = Pending::from_bits_truncate(status);
    ensure!(pending.contains(Pending::CHANNEL_ERROR), "{pending:?}");
    Ok(())
}

#[test]
fn channel_and_memory_limits_hold_and_change_live() -> Result<()> {
    let mut vgpud = Vgpud::start()?;
    let uuid = start(&vgpud, "--attr max_channels=2 --attr max_pinned=32M")?;
    let (device, _interrupt) = attach(&vgpud, &uuid)?;
    let channel = || Channel::with_entries(&device, EngineKind::Copy, 8);
    assert!(is_limit(&channel()), "64 MiB of guest memory are more than 32");
    change(&vgpud, &uuid, "--attr max_pinned=64M")?;
    let (first, _second) = (channel()?, channel()?);
    assert!(is_limit(&channel()), "two channels are the most");
    let limited = stats(&vgpud, &uuid)?;
    assert_eq!((&limited["channels"], &limited["limits"]["channels"]), (&json!(2), &json!(2)));
    assert_eq!(limited["limits"]["imported_bytes"], 64 * MIB);
    assert_eq!(metric(&vgpud, "channels_limit", &uuid)?, 2.0);

    change(&vgpud, &uuid, "--attr max_channels=3")?;
    let _third = channel()?;
    change(&vgpud, &uuid, "--attr max_channels=1")?;
    first.check()?;
    drop(first);
    assert!(is_limit(&channel()), "existing channels stay and count");

    vgpud.end(Signal::SIGKILL)?;
    vgpud.start_again()?;
    assert_eq!(stats(&vgpud, &uuid)?["limits"]["channels"], 1, "the next manager knows the limit");
    assert!(is_limit(&channel()), "the limit is still in force");
    change(&vgpud, &uuid, "--attr max_channels=3")?;
    channel().map(drop)?;
    Ok(())
}

#[test]
fn submissions_are_rate_limited_and_none_is_lost() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = start(&vgpud, "--attr core=50")?;
    let (device, _interrupt) = attach(&vgpud, &uuid)?;
    let mut channel = Channel::new(&device, EngineKind::Copy)?;
    change(&vgpud, &uuid, "--attr submissions=40")?;
    let begun = Instant::now();
    for _ in 0..42 {
        channel.submit(&Methods::new())?;
    }
    channel.wait_idle()?;
    // The burst size is two.
    assert!(begun.elapsed() >= Duration::from_millis(999), "{:?}", begun.elapsed());
    let throttled = stats(&vgpud, &uuid)?;
    assert!(throttled["throttled"].as_u64() > Some(30), "{throttled}");
    assert_eq!(throttled["limits"]["submissions_per_second"], 40);
    // Without the attribute there is no limit; all submissions must complete.
    vgpuctl(&vgpud, &format!("modify -u {uuid} --live --delattr --index 1"))?;
    assert_eq!(stats(&vgpud, &uuid)?["limits"]["submissions_per_second"], Value::Null);
    for _ in 0..5000 {
        channel.submit(&Methods::new())?;
    }
    channel.wait_idle()?;
    assert_eq!(stats(&vgpud, &uuid)?["throttled"], throttled["throttled"]);
    Ok(())
}

#[test]
fn a_hung_kernel_is_reset_and_another_vgpu_keeps_its_share() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let hung = start(&vgpud, "--attr core=50 --attr hang_timeout=0.4")?;
    let good = start(&vgpud, "--attr core=50")?;
    let (device, interrupt) = attach(&vgpud, &hung)?;
    let mut other = Channel::new(&device, EngineKind::Compute)?;
    let neighbour = work(&vgpud, &good, 9)?;
    thread::sleep(Duration::from_millis(1500));
    let hangs = thread::spawn(move || -> Result<u64> {
        let begun = Instant::now();
        let mut rounds = 0;
        while begun.elapsed() < Duration::from_secs(4) {
            let mut channel = Channel::new(&device, EngineKind::Compute)?;
            let (_spin, methods) = endless(&device)?;
            let fence = channel.submit(&methods)?;
            ensure!(fault(channel.wait(fence))? == notifier::IDLE_TIMEOUT);
            expect_interrupt(&device, &interrupt)?;
            ensure!(channel.query()?.engine_ns >= 400_000_000, "engine time, not wall time");
            work::run(&Saxpy::new(&device, Home::Vram, 10_000)?, &mut other)?;
            rounds += 1;
        }
        Ok(rounds)
    });
    let measured = share_while(&vgpud, &[good.clone(), hung.clone()], 1)?;
    let rounds = hangs.join().ok().context("The hanging guest panicked")??;
    println!("{rounds} hangs; the other vGPU had {measured:.1} % of what both used");
    assert!(measured > 47.0, "the other vGPU lost its share: {measured:.1} of 50");
    verified(neighbour)?;
    let (counted, unharmed) = (stats(&vgpud, &hung)?, stats(&vgpud, &good)?);
    assert_eq!((&counted["hang_resets"], &counted["faults"]), (&json!(rounds), &json!(rounds)));
    assert_eq!((&unharmed["hang_resets"], &unharmed["faults"]), (&json!(0), &json!(0)));
    assert_eq!(metric(&vgpud, "hang_resets_total", &hung)?, rounds as f64);
    let engines = &counted["engines"];
    // Time that the host takes from the engine is not charged to a vGPU; the hang limit may include
    // some.
    assert!(engines["compute_ns"].as_u64() > Some(rounds * 300_000_000), "{counted}");
    Ok(())
}

#[test]
fn waiting_for_a_semaphore_times_out_if_configured() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let (patient, hurried) = (start(&vgpud, "")?, start(&vgpud, "--attr acquire_timeout=0.5")?);
    let mut waiting = Vec::new();
    for uuid in [&patient, &hurried] {
        let (device, interrupt) = attach(&vgpud, uuid)?;
        let flag = Buffer::guest(&device, 4096)?;
        let mut channel = Channel::new(&device, EngineKind::Copy)?;
        let mut methods = Methods::new();
        methods.acquire(flag.va(), 1);
        let fence = channel.submit(&methods)?;
        waiting.push((device, interrupt, flag, channel, fence));
    }
    let (device, interrupt, _flag, channel, fence) = waiting.pop().context("Two")?;
    let mut other = Channel::new(&device, EngineKind::Compute)?;
    assert_eq!(fault(channel.wait(fence))?, notifier::SEMAPHORE_TIMEOUT);
    expect_interrupt(&device, &interrupt)?;
    work::run(&Saxpy::new(&device, Home::Guest, 10_000)?, &mut other)?;
    assert_eq!(stats(&vgpud, &hurried)?["hang_resets"], 1);
    assert_eq!(metric(&vgpud, "hang_resets_total", &hurried)?, 1.0);

    let (_device, interrupt, flag, channel, fence) = waiting.pop().context("One")?;
    channel.check()?;
    flag.window().write32(0, 1);
    channel.wait(fence)?;
    assert!(interrupt.read().is_err(), "no interrupt without an error");
    assert_eq!(stats(&vgpud, &patient)?["hang_resets"], 0);
    Ok(())
}

#[test]
fn screen_readouts_are_limited_to_the_refresh_rate() -> Result<()> {
    const DISPLAY: u32 = 2;
    let vgpud = Vgpud::start()?;
    let uuid = start(&vgpud, "--attr refresh=4")?;
    assert_eq!(stats(&vgpud, &uuid)?["limits"]["refresh_per_second"], 4);
    let mut vm = vfio_user::Client::new(&vgpud.vfio_socket(&uuid))?;
    // DISPI registers: off, 64 by 48 pixels of 32 bits, on with a linear framebuffer. VGA attribute
    // port: display not blanked.
    for (index, value) in [(4, 0_u16), (1, 64), (2, 48), (3, 32), (4, 0x41)] {
        vm.region_write(DISPLAY, 0x500 + 2 * index, &value.to_le_bytes())?;
    }
    vm.region_write(DISPLAY, 0x400, &[0x20])?;
    let picture = || -> Result<()> {
        let (status, body) = vgpud.request("GET", &format!("/v1/vgpus/{uuid}/screenshot"), None)?;
        ensure!(status == 200, "{}", String::from_utf8_lossy(&body));
        Ok(())
    };
    let begun = Instant::now();
    for _ in 0..4 {
        picture()?;
    }
    assert!(begun.elapsed() >= Duration::from_millis(750), "{:?}", begun.elapsed());
    // Concurrent viewers share a picture, so that twelve wait no longer than one.
    change(&vgpud, &uuid, "--attr refresh=1")?;
    let begun = Instant::now();
    thread::scope(|scope| {
        let viewers: Vec<_> = (0..12).map(|_| scope.spawn(picture)).collect();
        viewers.into_iter().try_for_each(|viewer| viewer.join().ok().context("A viewer")?)
    })?;
    assert!(begun.elapsed() < Duration::from_secs(9), "12 pictures: {:?}", begun.elapsed());
    Ok(())
}

#[test]
fn out_of_range_limits_are_refused_in_one_line() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = start(&vgpud, "")?;
    for (attr, is) in [
        ("submissions=0", "1 to 10000000 a second"),
        ("refresh=241", "1 to 240 a second"),
        ("hang_timeout=0", "0.01 to 86400 seconds, or off"),
        ("acquire_timeout=forever", "0.01 to 86400 seconds, or off"),
        ("max_channels=0", "1 to 65536"),
        ("max_pinned=1", "1M to 1024G"),
    ] {
        refused(&vgpud, &format!("modify -u {uuid} --live --attr {attr}"), 2, is)?;
    }
    refused(&vgpud, &format!("modify -u {uuid} --live --attr doorbell=trapped"), 5, "stop it first")
}
