//! Screens of VMs without a display driver: UEFI's own driver, and the BIOS with a ROM.

use std::time::Duration;

use lab::initramfs;
use lab::ovmf::Ovmf;
use lab::picture::Picture;
use lab::progress::Progress;
use lab::qemu::{Vm, VmSpec, vgpu_device};
use serde_json::json;

use crate::bench::{A, Bench, LIMIT, eventually};

/// Saves the vGPU's screen, if it is on.
fn screen(bench: &Bench) -> Option<Picture> {
    let file = bench.host.folder().join("screen.png");
    bench.host.screenshot(A, &file).ok()?;
    Some(Picture::read(&file).unwrap())
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn uefi_draws_on_the_vgpu_before_any_system_starts() {
    let bench = Bench::new();
    let socket = bench.host.start_vgpu(A, "SOFT-1Q", None).unwrap();
    let uefi = Some(Ovmf::open(&Progress::new()).unwrap());
    let spec = VmSpec { uefi, with_kernel: false, ..bench.spec("uefi").with_vgpu(&socket) };
    let vm = Vm::start(bench.lab, &spec, &bench.host.folder().join("uefi")).unwrap();
    let mut size = (0, 0);
    eventually("the firmware draws", || {
        let drawn = screen(&bench).filter(|picture| !picture.is_all(0));
        size = drawn.map_or((0, 0), |picture| (picture.width, picture.height));
        size != (0, 0)
    });
    assert_eq!(size, (1920, 1200), "the type's largest mode");
    vm.quit().unwrap();
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_kernel_without_a_display_driver_writes_on_the_firmwares_screen() {
    let bench = Bench::new();
    let socket = bench.vgpu(A);
    // A kernel without modules has the driver of UEFI's screen alone.
    let mut lab = bench.lab.clone();
    lab.root.kernel.modules = "/nowhere".into();
    lab.initramfs = bench.host.folder().join("plain.cpio");
    initramfs::write(&lab.initramfs, &[initramfs::archive(&lab.root.kernel, &[]).unwrap()])
        .unwrap();
    let uefi = Some(Ovmf::open(&Progress::new()).unwrap());
    let spec = VmSpec { uefi, ..bench.spec("plain").with_vgpu(&socket) };
    let mut vm = Vm::boot(&lab, &spec, &bench.host.folder().join("plain")).unwrap();
    let name = vm.guest.run("cat /sys/class/graphics/fb0/name", LIMIT).unwrap().stdout;
    assert_eq!(name.trim(), "EFI VGA");
    eventually("a console", || screen(&bench).is_some_and(|picture| picture.check_text().is_ok()));
    vm.quit().unwrap();
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn the_bios_writes_on_a_vgpu_with_a_rom() {
    let bench = Bench::new();
    let socket = bench.vgpu(A);
    let start = |name: &str, rom: Option<&str>| {
        let mut vgpu = vgpu_device("vgpu0", &socket);
        if let Some(rom) = rom {
            vgpu["romfile"] = json!(rom);
        }
        let mut spec = VmSpec { with_kernel: false, ..bench.spec(name) };
        spec.devices.push(vgpu);
        Vm::start(bench.lab, &spec, &bench.host.folder().join(name)).unwrap()
    };
    let vm = start("rom", Some("vgabios-bochs-display.bin"));
    eventually("the BIOS writes", || {
        screen(&bench).is_some_and(|picture| picture.check_text().is_ok())
    });
    vm.quit().unwrap();
    eventually("the vGPU is free", || bench.host.vgpu(A).unwrap()["vm"].is_null());
    let vm = start("plain", None);
    std::thread::sleep(Duration::from_secs(8));
    assert!(screen(&bench).is_none(), "a vGPU without a ROM shows no BIOS");
    vm.quit().unwrap();
}
