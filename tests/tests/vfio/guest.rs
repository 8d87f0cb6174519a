//! A virtual machine on a shared DMA engine: QEMU, a stock kernel and the guest runtime, in a VM
//! that is the host, with QEMU's `edu` behind an emulated IOMMU.

#![allow(clippy::unwrap_used)]

use std::thread;
use std::time::{Duration, Instant};

use lab::qemu::{Vm, VmSpec, vgpu_device};
use lab::vfio;
use mdev_core::units::GIB;
use serde_json::json;
use system_tests::{Vgpud, wait_for};

use crate::nested::{self, EDU, LIMIT, Nested, ok};

/// A second engine with more address bits than the first. No register reports the number.
const WIDE: &str = "0000:00:04.0";
/// Address bits of the second engine.
const WIDE_BITS: u64 = 40;
/// Memory of the VM: more than a window of the first engine has with 28 bits.
const MEMORY_MIB: u32 = 96;

fn guest() -> VmSpec {
    VmSpec { memory_mib: MEMORY_MIB, counted_time: true, ..VmSpec::new("guest") }
}

#[test]
#[ignore = "boots a VM: run `cargo lab test`"]
fn a_vm_works_on_a_wide_engine_and_gets_an_error_on_a_narrow_one() {
    if nested::is_inside() {
        return drive();
    }
    let mask = (1_u64 << WIDE_BITS) - 1;
    let wide = json!({ "driver": "edu", "id": "wide", "addr": "0x4", "dma_mask": mask });
    let mut host = Nested::boot_with_guest(&guest(), vec![wide]);
    ok(&mut host.vm, &format!("vgpuctl parents bind {WIDE}"));
    let told = host.run(Duration::from_secs(240));
    print!("{told}");
    assert_eq!(host.faults(), 0, "not even while the address width is probed");
    host.vm.quit().unwrap();
}

/// Waits until the VM has found `count` devices of its kind.
fn seen(vm: &mut Vm, count: usize) {
    let started = Instant::now();
    loop {
        let list = ok(vm, "cat /sys/bus/pci/devices/*/class | grep -c 0x1200 || true");
        if list.trim().parse() == Ok(count) {
            return;
        }
        assert!(started.elapsed() < LIMIT, "{list}");
        thread::sleep(Duration::from_millis(200));
    }
}

fn drive() {
    let started = Instant::now();
    let lap = |what: &str| println!("{what}: after {:.1} s", started.elapsed().as_secs_f64());
    let parents = [EDU, WIDE].map(|address| format!("vfio:{address}"));
    let vgpud = Vgpud::start_with(&["--parent", &parents[0], "--parent", &parents[1]]).unwrap();
    wait_for("the parents are ready", || {
        vgpud.get("/v1/parents").is_ok_and(|all| {
            all.as_array().unwrap().iter().all(|parent| parent["state"] == "ready")
        })
    })
    .unwrap();
    let [narrow, wide] = [EDU, WIDE].map(|parent| {
        let request = json!({ "parent": parent, "mdev_type": "EDU-C", "run": true });
        vgpud.create(&request).unwrap()
    });
    let reach = |uuid: &str| {
        let stats = vgpud.get("/v1/stats").unwrap();
        let all = stats["vgpus"].as_array().unwrap();
        let vgpu = all.iter().find(|vgpu| vgpu["uuid"] == uuid).unwrap();
        vgpu["limits"]["imported_bytes"].as_u64().unwrap()
    };
    assert_eq!(reach(&narrow), GIB / 16, "28 bits make windows of 64 MiB");
    assert_eq!(reach(&wide), 64 * GIB, "40 bits make windows larger than VMs");
    lap("parents");

    let folder = tempfile::tempdir().unwrap();
    let mut vm = vfio::guest_inside(&guest(), folder.path()).unwrap();
    ok(&mut vm, "true");
    lap("VM");
    vm.plug(vgpu_device("narrow", &vgpud.vfio_socket(&narrow)), 0).unwrap();
    seen(&mut vm, 1);
    lap("first vGPU");
    // The manager has detected that the VM does not fit, before its guest does anything.
    let mut told = String::new();
    wait_for("a warning", || {
        told = vgpud.show(&narrow).unwrap()["warnings"].to_string();
        told.contains("MiB of each VM")
    })
    .unwrap_or_else(|error| panic!("{error}: {told}"));
    assert!(told.contains("the GPU reaches 64 MiB of each VM"), "{told}");
    assert!(told.contains("window=128M"), "{told}");
    let output = vm.guest.run("vgpu-guest copy --size 16K --linear", LIMIT).unwrap();
    assert!(output.status != 0 && output.stderr.contains("Limit"), "{output:?}");

    vm.plug(vgpu_device("wide", &vgpud.vfio_socket(&wide)), 1).unwrap();
    seen(&mut vm, 2);
    lap("second vGPU");
    let find = "for d in /sys/bus/pci/devices/*; do grep -q 0x1200 $d/class && echo ${d##*/}; done";
    let list = ok(&mut vm, find);
    let pci = list.split_whitespace().last().unwrap();
    let told = ok(&mut vm, &format!("vgpu-guest --pci {pci} info"));
    assert!(told.contains("EDU-C on edu DMA engine at 0000:00:04.0"), "{told}");
    for (job, checks) in [("copy --size 16K --linear", 2), ("factorial --n 1000", 1)] {
        let told = ok(&mut vm, &format!("vgpu-guest --pci {pci} {job}"));
        assert_eq!(told.matches("all right").count(), checks, "{told}");
        print!("{told}");
        lap(job);
    }
    // The guest has only that kernel, and reports that.
    let output = vm.guest.run(&format!("vgpu-guest --pci {pci} vadd --n 64"), LIMIT).unwrap();
    assert!(output.stderr.contains("This vGPU has no kernel vadd"), "{output:?}");
    let stats = vgpud.get("/v1/stats").unwrap();
    let all = stats["vgpus"].as_array().unwrap();
    let vgpu = all.iter().find(|vgpu| vgpu["uuid"] == wide.as_str()).unwrap();
    let used = |engine: &str| vgpu["engines"][engine].as_u64().unwrap();
    assert!(used("copy_ns") > 0 && used("compute_ns") > 0, "{vgpu}");
    assert_eq!(vgpud.show(&wide).unwrap()["warnings"], json!([]), "it fits");
    vm.quit().unwrap();
}
