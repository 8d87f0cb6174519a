//! Physical devices through VFIO, in a VM that is the host: an emulated IOMMU, Debian's kernel and
//! vfio-pci.
//!
//! Devices are opened by their group in that VM, and through iommufd in another VM, whose kernel
//! the lab compiles in part.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

use host_inventory::PciHost;
use lab::Lab;
use lab::progress::Progress;
use lab::qemu::Vm;
use lab::vfio;
use mdev_core::ids::VgpuId;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::{Gid, Uid, chown, setegid, seteuid};
use serde_json::{Value, json};
use vendor_backends::vfio::access::Access;
use vendor_backends::vfio::device::{Device, DeviceError};
use vendor_backends::vfio::edu::{Direction, Edu};
use vendor_backends::vfio::window::Windows;

use crate::nested::{self, DISPLAY, EDU, LIMIT, Nested, ok, refused};

fn driver(vm: &mut Vm, address: &str) -> String {
    let link = format!("readlink /sys/bus/pci/devices/{address}/driver || true");
    ok(vm, &link).trim().rsplit('/').next().unwrap_or_default().to_owned()
}

#[test]
#[ignore = "boots a VM: run `cargo lab test`"]
fn a_device_is_bound_to_vfio_and_back() {
    let progress = Progress::new();
    let folder = tempfile::tempdir().unwrap();
    let (lab, programs) = Lab::open_with_host(&progress).unwrap();
    let vgpuctl = programs.find("vgpuctl").unwrap();
    let host = vfio::lab(&lab, &[vgpuctl], folder.path(), &progress).unwrap();
    let mut vm = Vm::boot(&host, &vfio::machine("host"), &folder.path().join("vm")).unwrap();

    // The kernel's driver has the display; no driver has `edu`, for which Tessera has a table.
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
    assert!(output.stderr.contains("is not a PCI address"), "{}", output.stderr);
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
        assert!(text.starts_with(&format!("{address} is bound to vfio-pci: /dev/vfio/")), "{text}");
        assert_eq!(driver(&mut vm, address), "vfio-pci");
        let file = text.trim().rsplit(' ').next().unwrap().to_owned();
        ok(&mut vm, &format!("test -c {file}"));
        // A repeated command succeeds.
        ok(&mut vm, &format!("vgpuctl parents bind {address}"));
    }
    let list = ok(&mut vm, "vgpuctl parents");
    assert!(list.contains("vgpuctl parents unbind 0000:00:02.0"), "{list}");
    assert!(list.contains(&format!("Share it: vgpud run --parent vfio:{EDU}")), "{list}");

    let text = ok(&mut vm, &format!("vgpuctl parents unbind {DISPLAY}"));
    assert_eq!(text, format!("{DISPLAY} is returned to bochs-drm\n"));
    assert!(ok(&mut vm, "cat /proc/fb").contains("bochs-drm"), "its screen is back too");
    let text = ok(&mut vm, &format!("vgpuctl parents unbind {EDU}"));
    assert!(text.contains("no driver"), "{text}");
    // A second round: the first round left nothing behind.
    ok(&mut vm, &format!("vgpuctl parents bind {DISPLAY}"));
    ok(&mut vm, &format!("vgpuctl parents unbind {DISPLAY}"));
    vm.quit().unwrap();
}

fn open(address: &str, iommufd: Option<bool>) -> Result<Device, DeviceError> {
    Device::open(&PciHost::default(), address.parse().unwrap(), iommufd)
}

fn vgpu(n: u128) -> VgpuId {
    VgpuId(uuid::Uuid::from_u128(n))
}

#[test]
#[ignore = "boots a VM: run `cargo lab test`"]
fn dma_reaches_only_the_vgpus_own_memory() {
    if nested::is_inside() {
        let none = open(EDU, Some(true)).unwrap_err().to_string();
        assert!(none.starts_with("The kernel has no /dev/iommu: `modprobe iommufd`"), "{none}");
        denied_to_others(Access::Group);
        return share_edu(Access::Group);
    }
    let mut inner = Nested::boot();
    inner.run(LIMIT);
    faulted(&mut inner);
    // All memory is available again after the first process has ended.
    inner.run(LIMIT);
    inner.vm.quit().unwrap();
}

/// Two functions of one device, which the IOMMU cannot distinguish.
const TWINS: [&str; 2] = ["0000:00:05.0", "0000:00:05.1"];

#[test]
#[ignore = "boots a VM: run `cargo lab test`"]
fn iommufd_is_used_if_the_kernel_has_it() {
    if nested::is_inside() {
        denied_to_others(Access::Iommufd);
        share_edu(Access::Iommufd);
        belongs_to_one_process_by_group();
        return share_edu(Access::Group);
    }
    let mut spec = nested::machine();
    spec.devices.extend([
        json!({ "driver": "edu", "addr": "0x5.0x0", "multifunction": true }),
        json!({ "driver": "secondary-vga", "addr": "0x5.0x1" }),
    ]);
    let Some(mut inner) = Nested::boot_with_iommufd(&spec) else { return };
    let list = ok(&mut inner.vm, "vgpuctl parents --output json");
    assert!(list.contains("\"character_device\": \"/dev/vfio/devices/vfio"), "{list}");
    // The unit's DeviceAllow names the device class as the kernel does.
    let names = ok(&mut inner.vm, "cat /proc/devices");
    assert!(names.lines().any(|line| line.ends_with(" vfio-dev")), "{names}");
    let [engine, display] = TWINS;
    let text = refused(&mut inner.vm, &format!("vgpuctl parents bind {engine}"));
    assert!(
        text.contains(&format!("with {display} (bochs-drm): give these to vfio-pci too")),
        "{text}"
    );
    for address in [display, engine] {
        let text = ok(&mut inner.vm, &format!("vgpuctl parents bind {address}"));
        assert!(text.contains(" and /dev/vfio/devices/vfio"), "{text}");
    }
    inner.run(LIMIT);
    faulted(&mut inner);
    inner.run(LIMIT);
    inner.vm.quit().unwrap();
}

fn faulted(inner: &mut Nested) {
    let log = ok(&mut inner.vm, "dmesg | grep DMAR");
    assert!(log.contains("DMA Write") && log.contains("00:03.0"), "the IOMMU has faulted: {log}");
}

/// Another user can open a device if both of its files belong to the user, with at most the memory
/// that the user may lock.
fn denied_to_others(access: Access) {
    let device = PciHost::default().device(EDU.parse().unwrap()).unwrap();
    let files = match access {
        Access::Group => vec![format!("/dev/vfio/{}", device.iommu_group.unwrap())],
        Access::Iommufd => {
            vec!["/dev/iommu".to_owned(), device.character_device.unwrap().display().to_string()]
        }
    };
    let unprivileged = Some(Uid::from_raw(65534));
    for file in &files {
        let denied = as_unprivileged(|| open(EDU, None)).unwrap_err().to_string();
        assert!(denied.starts_with(&format!("No permission for {file}: run this as")), "{denied}");
        chown(file.as_str(), unprivileged, None).unwrap();
    }
    let (soft, hard) = getrlimit(Resource::RLIMIT_MEMLOCK).unwrap();
    setrlimit(Resource::RLIMIT_MEMLOCK, 64 << 10, hard).unwrap();
    let window = Windows::new(28, 1 << 20).take(vgpu(1)).unwrap();
    let locked = as_unprivileged(|| {
        let device = open(EDU, None)?;
        assert_eq!(device.access(), access);
        device.attach(window).map(drop)
    });
    let locked = locked.unwrap_err().to_string();
    setrlimit(Resource::RLIMIT_MEMLOCK, soft, hard).unwrap();
    let whose = match access {
        Access::Group => "this process may not lock so much",
        Access::Iommufd => "this user's processes together may not lock so much",
    };
    assert!(locked.contains(whose) && locked.contains("LimitMEMLOCK="), "{locked}");
    for file in &files {
        chown(file.as_str(), Some(Uid::from_raw(0)), None).unwrap();
    }
}

fn as_unprivileged<T>(body: impl FnOnce() -> T) -> T {
    setegid(Gid::from_raw(65534)).unwrap();
    seteuid(Uid::from_raw(65534)).unwrap();
    let result = body();
    seteuid(Uid::from_raw(0)).unwrap();
    setegid(Gid::from_raw(0)).unwrap();
    result
}

/// Processes cannot share functions of one IOMMU group.
fn belongs_to_one_process_by_group() {
    let [engine, display] = TWINS;
    let first = open(engine, None).unwrap();
    let second = open(display, None).unwrap_err();
    assert!(matches!(second, DeviceError::Shared { .. }), "{second}");
    let text = second.to_string();
    assert!(text.contains(&format!("with {engine}, which another process has")), "{text}");
    drop(first);
    let second = open(display, None).unwrap();
    assert_eq!(second.access(), Access::Iommufd);
    drop(second);
    // Without access to iommufd, the device is opened by its group, unless iommufd was requested.
    let away = Path::new("/dev/iommu-away");
    fs::rename("/dev/iommu", away).unwrap();
    assert_eq!(open(EDU, None).unwrap().access(), Access::Group);
    let none = open(EDU, Some(true)).unwrap_err();
    assert!(matches!(none, DeviceError::NoIommufd), "{none}");
    fs::rename(away, "/dev/iommu").unwrap();
}

fn share_edu(access: Access) {
    const UNMAPPED: u64 = 200 << 20;
    let iommufd = access == Access::Iommufd;
    let device = open(EDU, (!iommufd).then_some(false)).unwrap();
    assert_eq!(device.access(), access);
    for other in if iommufd { vec![false, true] } else { vec![false] } {
        let busy = open(EDU, Some(other)).unwrap_err();
        assert!(matches!(busy, DeviceError::Busy(..)), "{busy}");
        assert!(
            busy.to_string().contains("by another process: find it with `fuser -v /dev/vfio/"),
            "{busy}"
        );
    }
    let held = PciHost::default().unbind(EDU.parse().unwrap()).unwrap_err().to_string();
    assert!(held.contains("is in use by a process"), "{held}");
    // QEMU's IOMMU has 48 address bits, except for the interrupt range.
    let ranges = device.dma_ranges().unwrap();
    assert!(ranges.iter().any(|range| range.contains(&UNMAPPED)), "{ranges:x?}");
    assert!(!ranges.iter().any(|range| range.contains(&0xfee0_0000)), "{ranges:x?}");
    assert!(ranges.iter().all(|range| *range.end() < 1 << 48), "{ranges:x?}");
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

    // The device never gets addresses outside the vGPU's memory.
    for (address, len) in [(1 << 20, 4), ((1 << 20) - 4, 8), (u64::MAX, 1), (0, 0)] {
        let outside = edu.copy(Direction::FromDevice, &a.window, address, 0, len).unwrap_err();
        assert!(matches!(outside, DeviceError::Window(_)), "{outside}");
    }
    // The IOMMU also blocks unmapped addresses, including unmapped earlier ones.
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
