//! Physical devices through VFIO, in a host of its own: a VM with an emulated IOMMU, Debian's kernel and its vfio-pci.
//!
//! This boots a VM, so it is `cargo lab test`'s and `cargo test --test vfio -- --ignored`'s.

#![allow(clippy::unwrap_used)]

mod nested;

use lab::Lab;
use lab::progress::Progress;
use lab::qemu::Vm;
use lab::vfio;
use mdev_core::ids::VgpuId;
use serde_json::Value;
use vendor_backends::vfio::device::{Device, DeviceError};
use vendor_backends::vfio::edu::{Direction, Edu};
use vendor_backends::vfio::host::Host;
use vendor_backends::vfio::window::Windows;

use nested::{DISPLAY, EDU, LIMIT, Nested, ok, refused};

fn driver(vm: &mut Vm, address: &str) -> String {
    let link = format!("readlink /sys/bus/pci/devices/{address}/driver || true");
    ok(vm, &link).trim().rsplit('/').next().unwrap_or_default().to_owned()
}

#[test]
#[ignore = "boots a VM: run `cargo lab test`"]
fn a_device_is_given_to_vfio_and_back() {
    let progress = Progress::new();
    let folder = tempfile::tempdir().unwrap();
    let (lab, programs) = Lab::open_with_host(&progress).unwrap();
    let vgpuctl = programs.find("vgpuctl").unwrap();
    let host = vfio::lab(&lab, &[vgpuctl], folder.path(), &progress).unwrap();
    let mut vm = Vm::boot(&host, &vfio::machine("host"), &folder.path().join("vm")).unwrap();

    // The kernel's own driver has the display; nothing wants `edu`, of which Tessera has a table.
    let list = ok(&mut vm, "vgpuctl parents");
    assert!(
        list.contains(&format!("{DISPLAY}  1234:1111  VGA display, bochs-drm, IOMMU group")),
        "{list}"
    );
    let bind = format!("vgpuctl parents bind {EDU}; then: vgpud run --parent vfio:{EDU}");
    assert!(list.contains(&format!("{EDU}  1234:11e8  device, no driver")), "{list}");
    assert!(list.contains(&bind), "{list}");
    let json = vm.guest.run_json("vgpuctl parents --output json | tr -d '\\n'", LIMIT).unwrap();
    assert_eq!(json[0]["driver"], Value::from("bochs-drm"));
    assert_eq!(json[0]["group_with"], Value::from(Vec::<Value>::new()));

    let text = refused(&mut vm, &format!("vgpuctl parents bind {DISPLAY}"));
    assert!(text.contains("modprobe vfio-pci"), "{text}");
    assert_eq!(driver(&mut vm, DISPLAY), "bochs-drm");
    ok(&mut vm, vfio::LOAD);

    let output = vm.guest.run("vgpuctl parents bind 0000:00:1f.9", LIMIT).unwrap();
    assert_eq!(output.status, 2);
    assert!(output.stderr.contains("is no PCI address"), "{}", output.stderr);
    let text = refused(&mut vm, "vgpuctl parents bind 0000:00:1e.0");
    assert!(text.contains("There is no PCI device 0000:00:1e.0"), "{text}");
    let text = refused(&mut vm, &format!("vgpuctl parents unbind {DISPLAY}"));
    assert!(text.contains("driven by bochs-drm"), "{text}");
    // Without privileges nothing changes.
    ok(&mut vm, "mkdir -p /etc && echo nobody:x:65534:65534::/:/bin/sh > /etc/passwd");
    let bind = format!("su -s /bin/sh nobody -c '/bin/vgpuctl parents bind {DISPLAY}'");
    let text = refused(&mut vm, &bind);
    assert!(text.contains("run this as root"), "{text}");
    assert_eq!(driver(&mut vm, DISPLAY), "bochs-drm");

    for address in [DISPLAY, EDU] {
        let text = ok(&mut vm, &format!("vgpuctl parents bind {address}"));
        assert!(text.starts_with(&format!("{address} is vfio-pci's now: /dev/vfio/")), "{text}");
        assert_eq!(driver(&mut vm, address), "vfio-pci");
        let file = text.trim().rsplit(' ').next().unwrap().to_owned();
        ok(&mut vm, &format!("test -c {file}"));
        // Once more is no mistake.
        ok(&mut vm, &format!("vgpuctl parents bind {address}"));
    }
    let list = ok(&mut vm, "vgpuctl parents");
    assert!(list.contains("vgpuctl parents unbind 0000:00:02.0"), "{list}");
    assert!(list.contains(&format!("Share it: vgpud run --parent vfio:{EDU}")), "{list}");

    let text = ok(&mut vm, &format!("vgpuctl parents unbind {DISPLAY}"));
    assert_eq!(text, format!("{DISPLAY} is back with bochs-drm\n"));
    assert!(ok(&mut vm, "cat /proc/fb").contains("bochs-drm"), "its screen is back too");
    let text = ok(&mut vm, &format!("vgpuctl parents unbind {EDU}"));
    assert!(text.contains("no driver"), "{text}");
    // And again: nothing of the first time is left.
    ok(&mut vm, &format!("vgpuctl parents bind {DISPLAY}"));
    ok(&mut vm, &format!("vgpuctl parents unbind {DISPLAY}"));
    vm.quit().unwrap();
}

fn open(address: &str) -> Result<Device, DeviceError> {
    Device::open(&Host::default(), address.parse().unwrap())
}

fn vgpu(n: u128) -> VgpuId {
    VgpuId(uuid::Uuid::from_u128(n))
}

#[test]
#[ignore = "boots a VM: run `cargo lab test`"]
fn dma_reaches_a_vgpus_own_memory_and_nothing_else() {
    if nested::is_inside() {
        return share_edu();
    }
    let mut inner = Nested::boot();
    inner.run("dma_reaches_a_vgpus_own_memory_and_nothing_else", LIMIT);
    let log = ok(&mut inner.vm, "dmesg | grep DMAR");
    assert!(log.contains("DMA Write") && log.contains("00:03.0"), "the IOMMU has faulted: {log}");
    // It is not used up: all of it again, after the first process is gone.
    inner.run("dma_reaches_a_vgpus_own_memory_and_nothing_else", LIMIT);
    inner.vm.quit().unwrap();
}

fn share_edu() {
    const UNMAPPED: u64 = 200 << 20;
    let device = open(EDU).unwrap();
    let busy = open(EDU).unwrap_err();
    assert!(matches!(busy, DeviceError::Busy(..)), "{busy}");
    let refused = device.map(0, 0, 4096).unwrap_err();
    assert!(matches!(refused, DeviceError::NotMapped { .. }), "{refused}");

    let edu = Edu::new(device).unwrap();
    assert_eq!(edu.factorial(10).unwrap(), 3_628_800);
    let mut windows = Windows::new(edu.device().family().dma_bits.unwrap(), 1 << 20);
    let [a, b] = [1, 2].map(|n| windows.take(vgpu(n)).unwrap());
    let [a, b] = [a, b].map(|window| edu.device().attach(window).unwrap());
    let mine: Vec<u8> = (0..512_u32).map(|n| (n * 7 + 1) as u8).collect();
    a.memory.write(0x3000, &mine).unwrap();
    let theirs = [0x5a; 512];
    b.memory.write(0x3000, &theirs).unwrap();
    edu.copy(Direction::ToDevice, &a.window, 0x3000, 0x100, 512).unwrap();
    edu.copy(Direction::FromDevice, &a.window, 0x8000, 0x100, 512).unwrap();
    let mut got = [0; 512];
    a.memory.read(0x8000, &mut got).unwrap();
    assert_eq!(&got[..], &mine[..]);

    // What is not its own memory does not get to the device.
    for (address, len) in [(1 << 20, 4), ((1 << 20) - 4, 8), (u64::MAX, 1), (0, 0)] {
        let outside = edu.copy(Direction::FromDevice, &a.window, address, 0, len).unwrap_err();
        assert!(matches!(outside, DeviceError::Window(_)), "{outside}");
    }
    // And if something did, the IOMMU would not let it through: neither nobody's address, nor one given back.
    edu.transfer(Direction::FromDevice, UNMAPPED, 0x4_0100, 512).unwrap();
    let gone = b.window.iova;
    b.memory.read(0x3000, &mut got).unwrap();
    assert_eq!(got, theirs);
    let memory = b.memory.clone();
    drop(b);
    edu.transfer(Direction::FromDevice, gone + 0x3000, 0x4_0100, 512).unwrap();
    memory.read(0x3000, &mut got).unwrap();
    assert_eq!(got, theirs);
}
