//! Physical devices through VFIO, in a host of its own: a VM with an emulated IOMMU, Debian's kernel and its vfio-pci.
//!
//! This boots a VM, so it is `cargo lab test`'s and `cargo test --test vfio -- --ignored`'s.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use lab::Lab;
use lab::progress::Progress;
use lab::qemu::Vm;
use lab::vfio;
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);
const DISPLAY: &str = "0000:00:02.0";
const EDU: &str = "0000:00:03.0";

/// Runs a command inside that is to succeed.
fn ok(vm: &mut Vm, command: &str) -> String {
    vm.guest.run(command, LIMIT).unwrap().success().unwrap().stdout
}

/// Runs one that is to fail; what it said, in one line.
fn refused(vm: &mut Vm, command: &str) -> String {
    let output = vm.guest.run(command, LIMIT).unwrap();
    assert_ne!(output.status, 0, "{command}: {}", output.stdout);
    assert_eq!(output.stderr.lines().count(), 1, "{command}: {}", output.stderr);
    output.stderr
}

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

    // The kernel's own driver has the display; nothing wants `edu`, which is neither a display nor an accelerator.
    let list = ok(&mut vm, "vgpuctl parents");
    assert!(
        list.contains(&format!("{DISPLAY}  1234:1111  VGA display, bochs-drm, IOMMU group")),
        "{list}"
    );
    assert!(!list.contains(EDU), "{list}");
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
    assert!(ok(&mut vm, "vgpuctl parents").contains("vgpuctl parents unbind 0000:00:02.0"));

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
