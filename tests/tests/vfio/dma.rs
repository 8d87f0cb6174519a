//! A DMA engine shared by vGPUs: QEMU's `edu` through VFIO, in a VM that is the host.

#![allow(clippy::unwrap_used)]

use std::thread;
use std::time::{Duration, Instant};

use ipc::seqpacket::SeqPacketListener;
use mdev_core::abi::mailbox::VA_START;
use mdev_core::abi::notifier;
use mdev_core::gpu::{ClientSpec, EngineKind, Gpu, GpuError};
use mdev_core::ids::VgpuId;
use mdev_core::units::MIB;
use nix::sys::signal::Signal;
use serde_json::json;
use system_tests::{Vgpud, is_alive, kill_process, wait_for};
use vendor_backends::conformance::{self, Driver, Pushbuffer};
use vendor_backends::mediator::{MediatedClient, MediatedGpu, server};
use vendor_backends::vfio;

use crate::nested::guest::Guest;
use crate::nested::{self, DISPLAY, EDU, LIMIT, LONG, Nested};

/// Time of the suite's largest copy, which has 1536 transfers.
const LARGEST: Duration = Duration::from_secs(160);

/// Serves the engine from a thread.
fn serve() -> MediatedGpu {
    let hardware = vfio::open("edu", EDU.parse().unwrap(), vfio::Options::default()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("admin.sock");
    let listener = SeqPacketListener::bind(&path).unwrap();
    thread::spawn(move || server::run(hardware, LONG, &listener));
    MediatedGpu::connect(&path).unwrap()
}

/// Admits a vGPU when a window is free: windows of vGPUs that have just ended may still be in use.
fn admit(gpu: &mut MediatedGpu) -> (VgpuId, MediatedClient) {
    let spec = ClientSpec {
        vgpu: VgpuId::random(),
        vram_bytes: 0,
        framebuffer_bytes: 0,
        max_channels: 16,
        max_import_bytes: 64 * MIB,
    };
    let started = Instant::now();
    loop {
        match gpu.admit(&spec) {
            Ok(admission) => {
                return (
                    spec.vgpu,
                    MediatedClient::open(admission.fd.unwrap().into_trusted()).unwrap(),
                );
            }
            Err(GpuError::Limit(_)) if started.elapsed() < LIMIT => {
                thread::sleep(Duration::from_millis(50));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
#[ignore = "boots a VM: run `cargo lab test`"]
fn edu_passes_the_conformance_suite_for_copies() {
    if nested::is_inside() {
        let mut gpu = serve();
        return conformance::run_with(&mut || Box::new(admit(&mut gpu).1), 2 * LARGEST);
    }
    let mut host = Nested::boot_in_virtual_time();
    let told = host.run(LONG);
    assert_eq!(told.matches("conformance: ").count(), 19, "{told}");
    assert_eq!(host.faults(), 0, "the device got no unmapped address");
    host.vm.quit().unwrap();
}

#[test]
#[ignore = "boots a VM: run `cargo lab test`"]
fn edu_passes_the_conformance_suite_through_iommufd() {
    if nested::is_inside() {
        let mut gpu = serve();
        return conformance::run_with(&mut || Box::new(admit(&mut gpu).1), 2 * LARGEST);
    }
    let Some(mut host) = Nested::boot_with_iommufd(&nested::in_virtual_time()) else { return };
    let told = host.run(LONG);
    assert!(told.matches("conformance: ").count() >= 18, "{told}");
    assert_eq!(host.faults(), 0, "the device got no unmapped address");
    host.vm.quit().unwrap();
}

#[test]
#[ignore = "boots a VM: run `cargo lab test`"]
fn a_device_opened_through_iommufd_is_released_after_any_death() {
    if nested::is_inside() {
        return live_and_die();
    }
    let Some(mut host) = Nested::boot_with_iommufd(&nested::machine()) else { return };
    nested::ok(&mut host.vm, &format!("vgpuctl parents unbind {DISPLAY}"));
    let told = host.run(LIMIT);
    assert!(told.contains(&format!("{EDU} is opened through iommufd")), "{told}");
    assert_eq!(host.faults(), 0);
    nested::ok(&mut host.vm, &format!("vgpuctl parents unbind {EDU}"));
    host.vm.quit().unwrap();
}

#[test]
#[ignore = "boots a VM: run `cargo lab test`"]
fn time_slices_hold_and_a_guest_reaches_only_its_own_memory() {
    if nested::is_inside() {
        return share();
    }
    let mut host = Nested::boot_in_virtual_time();
    host.run(LONG);
    assert_eq!(host.faults(), 0, "the device never got the address");
    host.vm.quit().unwrap();
}

fn share() {
    const DATA: u64 = 12 * MIB;
    const WINDOW: Duration = Duration::from_secs(60);
    let mut gpu = serve();
    let mut guests: Vec<_> = [(30, 0x11), (10, 0x22)]
        .into_iter()
        .map(|(slice, byte): (u64, u8)| {
            let (id, client) = admit(&mut gpu);
            gpu.set_timeslice(id, Duration::from_millis(slice)).unwrap();
            let mut driver = Driver::new(Box::new(client));
            driver.set_timeout(LONG);
            driver.write(DATA, &vec![byte; 64 << 10]);
            let mut ring = driver.ring(EngineKind::Copy);
            // 32 transfers each: more than fit into the window.
            for _ in 0..60 {
                let (from, to) = (driver.va(DATA), driver.va(DATA + MIB));
                driver.submit(&mut ring, Pushbuffer::default().copy(from, to, 64 << 10));
            }
            (id, driver, ring, byte)
        })
        .collect();
    let used = |gpu: &mut MediatedGpu| {
        let report = gpu.usage().unwrap();
        [0, 1].map(|n: usize| {
            let id = guests[n].0;
            report.vgpus.iter().find(|(other, _)| *other == id).unwrap().1.engine_ns
        })
    };
    let before = used(&mut gpu);
    thread::sleep(WINDOW);
    let after = used(&mut gpu);
    let [first, second] = [0, 1].map(|n: usize| (after[n] - before[n]) as f64);
    let share = 100.0 * first / (first + second);
    println!("shares of 75/25 came out as {share:.1}/{:.1}", 100.0 - share);
    assert!((share - 75.0).abs() < 2.0, "{share:.1} %");
    let busy = (first + second) / WINDOW.as_nanos() as f64;
    assert!(busy > 0.95, "the engine is busy: {busy:.3}");
    for (_, driver, _, byte) in &guests {
        let copied = driver.read(DATA + MIB, 64 << 10);
        assert!(copied.iter().all(|got| got == byte), "each has its own bytes");
    }
    // Foreign memory: unmapped, beyond the end, and the other vGPU's memory at the same address.
    let (_, driver, ring, _) = guests.pop().unwrap();
    let mut driver = driver;
    driver.destroy(ring);
    for bad in [VA_START + (1 << 36), driver.va(48 * MIB), 0x400_0000] {
        let mut ring = driver.ring(EngineKind::Copy);
        let (from, to) = (driver.va(DATA), driver.va(DATA + MIB));
        driver.submit(&mut ring, Pushbuffer::default().copy(bad, to, 64));
        assert_eq!(driver.expect_fault(&ring).error, notifier::MMU_FAULT, "{bad:#x}");
        driver.destroy(ring);
        let mut ring = driver.ring(EngineKind::Copy);
        driver.submit(&mut ring, Pushbuffer::default().copy(from, bad, 64));
        assert_eq!(driver.expect_fault(&ring).error, notifier::MMU_FAULT, "{bad:#x}");
        driver.destroy(ring);
    }
    let mut ring = driver.ring(EngineKind::Copy);
    let (from, to) = (driver.va(DATA), driver.va(DATA + 2 * MIB));
    driver.finish(&mut ring, Pushbuffer::default().copy(from, to, 64));
    assert_eq!(driver.read(DATA + 2 * MIB, 64), [0x22; 64]);
}

#[test]
#[ignore = "boots a VM: run `cargo lab test`"]
fn vgpus_survive_the_manager_and_a_dead_gpu_process_releases_everything() {
    if nested::is_inside() {
        return live_and_die();
    }
    let mut host = Nested::boot();
    // Only one of the two devices is released: the kernel's driver gets the other in this test.
    nested::ok(&mut host.vm, &format!("vgpuctl parents unbind {DISPLAY}"));
    host.run(LIMIT);
    assert_eq!(host.faults(), 0);
    // A user without permission gets an error.
    nested::ok(&mut host.vm, "mkdir -p /etc && echo nobody:x:65534:65534::/:/bin/sh > /etc/passwd");
    let run = format!("vgpud run --run-dir /tmp/r --config-dir /tmp/c --parent vfio:{EDU}");
    let log = format!("su -s /bin/sh nobody -c 'timeout 4 /bin/{run}' 2>&1 || true");
    let log = nested::ok(&mut host.vm, &log);
    assert!(log.contains("No permission for /dev/vfio/"), "{log}");
    // The device is unused: it can be unbound and bound again.
    nested::ok(&mut host.vm, &format!("vgpuctl parents unbind {EDU}"));
    nested::ok(&mut host.vm, &format!("vgpuctl parents bind {EDU}"));
    host.vm.quit().unwrap();
}

fn live_and_die() {
    let parent = format!("vfio:{EDU}");
    let mut vgpud = Vgpud::start_with(&["--parent", &parent]).unwrap();
    wait_for("the parent is ready", || {
        vgpud.get("/v1/parents").is_ok_and(|all| all[0]["state"] == "ready")
    })
    .unwrap();
    let one = vgpud.get("/v1/types").unwrap()[0]["types"][0].clone();
    assert_eq!((&one["name"], &one["available_instances"]), (&json!("EDU-C"), &json!(3)));
    let gpu_process =
        u32::try_from(vgpud.get("/v1/parents").unwrap()[0]["pid"].as_u64().unwrap()).unwrap();
    let status = std::fs::read_to_string(format!("/proc/{gpu_process}/status")).unwrap();
    assert!(status.contains("CapEff:\t0000000000000000"), "{status}");
    assert!(!status.contains("Uid:\t0\t"), "the GPU process runs as root: {status}");

    is_exclusive(&parent);

    let start = || vgpud.create(&json!({ "mdev_type": "EDU-C", "run": true })).unwrap();
    let (a, b) = (start(), start());
    let (mut first, mut second) = (Guest::attach(&vgpud, &a), Guest::attach(&vgpud, &b));
    first.copy(0x1111).unwrap();
    second.copy(0x2222).unwrap();

    keeps_descriptors_in_the_gpu_process(&vgpud, [&a, &b]);

    // The manager dies: guests continue, and the next manager adopts the GPU process and the
    // workers.
    vgpud.end(Signal::SIGKILL).unwrap();
    first.copy(0x3333).unwrap();
    vgpud.start_again().unwrap();
    assert_eq!(vgpud.get("/v1/parents").unwrap()[0]["pid"], gpu_process);
    second.copy(0x4444).unwrap();

    // A worker dies: its window becomes free, and the other vGPU continues.
    let worker = u32::try_from(vgpud.show(&a).unwrap()["pid"].as_u64().unwrap()).unwrap();
    kill_process(worker, Signal::SIGKILL).unwrap();
    second.copy(0x5555).unwrap();
    let mut again = None;
    wait_for("a fresh worker", || {
        let shown = vgpud.show(&a).unwrap();
        again = shown["pid"].as_u64().filter(|pid| *pid != u64::from(worker));
        again.is_some() && shown["state"] == "running"
    })
    .unwrap();
    drop(first);
    let mut first = Guest::attach(&vgpud, &a);
    first.copy(0x6666).unwrap();

    // The GPU process dies: its vGPUs are lost, and the next GPU process gets the device.
    kill_process(gpu_process, Signal::SIGKILL).unwrap();
    assert!(first.copy(0x7777).is_err());
    wait_for("the parent is back", || {
        let parent = vgpud.get("/v1/parents").unwrap()[0].clone();
        parent["state"] == "ready" && parent["pid"] != gpu_process
    })
    .unwrap();
    assert!(!is_alive(gpu_process));
    assert_eq!(vgpud.show(&a).unwrap()["state"], "failed");
    drop((first, second));
    for uuid in [&a, &b] {
        vgpud.call("POST", &format!("/v1/vgpus/{uuid}/stop"), None).unwrap();
    }
    let c = vgpud.create(&json!({ "mdev_type": "EDU-C", "run": true })).unwrap();
    Guest::attach(&vgpud, &c).copy(0x8888).unwrap();
}

/// A second manager gets neither the device nor a display that its driver has.
fn is_exclusive(parent: &str) {
    let display = format!("vfio:{DISPLAY}");
    let other = Vgpud::start_with(&["--parent", parent, "--parent", &display]).unwrap();
    let told = |name: &str, what: &str| {
        let request = json!({ "parent": name, "mdev_type": "EDU-C", "run": true });
        let mut message = String::new();
        wait_for(what, || {
            message = other.refused("POST", "/v1/vgpus", Some(&request)).unwrap().2;
            message.contains(what)
        })
        .unwrap_or_else(|error| panic!("{error}: {message}"));
    };
    told(EDU, "Parent 0000:00:03.0 is unavailable: 0000:00:03.0 is in use by another process");
    told(
        DISPLAY,
        "is unavailable: 0000:00:02.0 is driven by bochs-drm: bind it to vfio-pci with \
         `vgpuctl parents bind 0000:00:02.0`",
    );
    drop(other);
}

/// Workers hold no descriptors of the device.
fn keeps_descriptors_in_the_gpu_process(vgpud: &Vgpud, uuids: [&str; 2]) {
    for uuid in uuids {
        let fds = format!("/proc/{}/fd", vgpud.show(uuid).unwrap()["pid"]);
        for fd in std::fs::read_dir(fds).unwrap() {
            let link = std::fs::read_link(fd.unwrap().path()).unwrap_or_default();
            let link = link.to_string_lossy().into_owned();
            assert!(!link.contains("vfio") || link.ends_with("vfio.sock"), "{link}");
            assert!(!link.starts_with("/sys/"), "{link}");
        }
    }
}
