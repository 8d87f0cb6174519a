//! A DMA engine shared by vGPUs: QEMU's `edu`, through VFIO, in a VM that is a host.
//!
//! Each test boots a VM and runs itself inside it: `cargo lab test` and `cargo test --test vfio_dma -- --ignored` do.

#![allow(clippy::unwrap_used)]

mod nested;

use std::thread;
use std::time::{Duration, Instant};

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
use vendor_backends::seqpacket::SeqPacketListener;
use vendor_backends::vfio;

use nested::guest::Guest;
use nested::{DISPLAY, EDU, LIMIT, LONG, Nested};

/// The largest copy of the suite has 1536 transfers.
const LARGEST: Duration = Duration::from_secs(160);

/// The engine, served from a thread.
fn serve() -> MediatedGpu {
    let hardware = vfio::open("edu", EDU.parse().unwrap(), vfio::Options::default()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("admin.sock");
    let listener = SeqPacketListener::bind(&path).unwrap();
    thread::spawn(move || server::run(hardware, LONG, &listener));
    MediatedGpu::connect(&path).unwrap()
}

/// A vGPU of it, as soon as there is a window: those of vGPUs that have just ended may still be in use.
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
                return (spec.vgpu, MediatedClient::open(admission.fd.unwrap()).unwrap());
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
fn keeps_what_the_conformance_suite_asks_of_copies() {
    if nested::is_inside() {
        let mut gpu = serve();
        return conformance::run_with(&mut || Box::new(admit(&mut gpu).1), 2 * LARGEST);
    }
    let mut host = Nested::boot_in_virtual_time();
    let told = host.run("keeps_what_the_conformance_suite_asks_of_copies", LONG);
    assert_eq!(told.matches("conformance: ").count(), 16, "{told}");
    assert_eq!(host.faults(), 0, "the device was told of nothing that is not mapped");
    host.vm.quit().unwrap();
}

#[test]
#[ignore = "boots a VM: run `cargo lab test`"]
fn keeps_what_the_suite_asks_for_by_iommufd_too() {
    if nested::is_inside() {
        let mut gpu = serve();
        return conformance::run_with(&mut || Box::new(admit(&mut gpu).1), 2 * LARGEST);
    }
    let Some(mut host) = Nested::boot_with_iommufd(&nested::in_virtual_time()) else { return };
    let told = host.run("keeps_what_the_suite_asks_for_by_iommufd_too", LONG);
    assert!(told.matches("conformance: ").count() >= 15, "{told}");
    assert_eq!(host.faults(), 0, "the device was told of nothing that is not mapped");
    host.vm.quit().unwrap();
}

#[test]
#[ignore = "boots a VM: run `cargo lab test`"]
fn is_opened_by_iommufd_and_given_back_whoever_dies() {
    if nested::is_inside() {
        return live_and_die();
    }
    let Some(mut host) = Nested::boot_with_iommufd(&nested::machine()) else { return };
    nested::ok(&mut host.vm, &format!("vgpuctl parents unbind {DISPLAY}"));
    let told = host.run("is_opened_by_iommufd_and_given_back_whoever_dies", LIMIT);
    assert!(told.contains(&format!("{EDU} is opened by iommufd")), "{told}");
    assert_eq!(host.faults(), 0);
    nested::ok(&mut host.vm, &format!("vgpuctl parents unbind {EDU}"));
    host.vm.quit().unwrap();
}

#[test]
#[ignore = "boots a VM: run `cargo lab test`"]
fn is_shared_by_time_slices_and_a_guest_reaches_its_own_memory_alone() {
    if nested::is_inside() {
        return share();
    }
    let mut host = Nested::boot_in_virtual_time();
    host.run("is_shared_by_time_slices_and_a_guest_reaches_its_own_memory_alone", LONG);
    assert_eq!(host.faults(), 0, "the device never saw it");
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
            driver.set_patience(LONG);
            driver.write(DATA, &vec![byte; 64 << 10]);
            let mut ring = driver.ring(EngineKind::Copy);
            // 32 transfers each, and more of them than the window has room for.
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
    // Memory that is not its own: not mapped, beyond its end, and what the other has at the same address.
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
fn is_a_parent_whose_vgpus_survive_the_manager_and_whose_end_gives_everything_back() {
    if nested::is_inside() {
        return live_and_die();
    }
    let mut host = Nested::boot();
    // Only one of the two is given back: the other's driver has it in this test.
    nested::ok(&mut host.vm, &format!("vgpuctl parents unbind {DISPLAY}"));
    let test = "is_a_parent_whose_vgpus_survive_the_manager_and_whose_end_gives_everything_back";
    host.run(test, LIMIT);
    assert_eq!(host.faults(), 0);
    // Somebody who may not have it is told so.
    nested::ok(&mut host.vm, "mkdir -p /etc && echo nobody:x:65534:65534::/:/bin/sh > /etc/passwd");
    let run = format!("vgpud run --run-dir /tmp/r --config-dir /tmp/c --parent vfio:{EDU}");
    let log = format!("su -s /bin/sh nobody -c 'timeout 4 /bin/{run}' 2>&1 || true");
    let log = nested::ok(&mut host.vm, &log);
    assert!(log.contains("No permission for /dev/vfio/"), "{log}");
    // Nobody has it any more: it can be given back, and taken again.
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
    let owner =
        u32::try_from(vgpud.get("/v1/parents").unwrap()[0]["pid"].as_u64().unwrap()).unwrap();
    let status = std::fs::read_to_string(format!("/proc/{owner}/status")).unwrap();
    assert!(status.contains("CapEff:\t0000000000000000"), "{status}");
    assert!(!status.contains("Uid:\t0\t"), "it is not root any more: {status}");

    // A second one cannot have the device, and says why; nor can the display be had from its driver.
    let display = format!("vfio:{DISPLAY}");
    let other = Vgpud::start_with(&["--parent", &parent, "--parent", &display]).unwrap();
    let told = |name: &str, what: &str| {
        let request = json!({ "parent": name, "mdev_type": "EDU-C", "run": true });
        let mut message = String::new();
        wait_for(what, || {
            message = other.refused("POST", "/v1/vgpus", Some(&request)).unwrap().2;
            message.contains(what)
        })
        .unwrap_or_else(|error| panic!("{error}: {message}"));
    };
    told(EDU, "Parent 0000:00:03.0 is not there: 0000:00:03.0 is in use by another process");
    told(
        DISPLAY,
        "is not there: 0000:00:02.0 is driven by bochs-drm: `vgpuctl parents bind 0000:00:02.0`",
    );
    drop(other);

    let start = || vgpud.create(&json!({ "mdev_type": "EDU-C", "run": true })).unwrap();
    let (a, b) = (start(), start());
    let (mut first, mut second) = (Guest::attach(&vgpud, &a), Guest::attach(&vgpud, &b));
    first.copy(0x1111).unwrap();
    second.copy(0x2222).unwrap();

    // Nothing of the device ever leaves its owner.
    for uuid in [&a, &b] {
        let fds = format!("/proc/{}/fd", vgpud.show(uuid).unwrap()["pid"]);
        for fd in std::fs::read_dir(fds).unwrap() {
            let link = std::fs::read_link(fd.unwrap().path()).unwrap_or_default();
            let link = link.to_string_lossy().into_owned();
            assert!(!link.contains("vfio") || link.ends_with("vfio.sock"), "{link}");
            assert!(!link.starts_with("/sys/"), "{link}");
        }
    }

    // The manager dies: guests go on, and the next one adopts the owner and the workers.
    vgpud.end(Signal::SIGKILL).unwrap();
    first.copy(0x3333).unwrap();
    vgpud.start_again().unwrap();
    assert_eq!(vgpud.get("/v1/parents").unwrap()[0]["pid"], owner);
    second.copy(0x4444).unwrap();

    // A worker dies: its window is free again, and the other goes on.
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

    // The owner dies: its vGPUs are lost, and the device is there for the next owner.
    kill_process(owner, Signal::SIGKILL).unwrap();
    assert!(first.copy(0x7777).is_err());
    wait_for("the parent is back", || {
        let parent = vgpud.get("/v1/parents").unwrap()[0].clone();
        parent["state"] == "ready" && parent["pid"] != owner
    })
    .unwrap();
    assert!(!is_alive(owner));
    assert_eq!(vgpud.show(&a).unwrap()["state"], "failed");
    drop((first, second));
    for uuid in [&a, &b] {
        vgpud.call("POST", &format!("/v1/vgpus/{uuid}/stop"), None).unwrap();
    }
    let c = vgpud.create(&json!({ "mdev_type": "EDU-C", "run": true })).unwrap();
    Guest::attach(&vgpud, &c).copy(0x8888).unwrap();
}
