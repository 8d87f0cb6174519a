//! `vgpu-guest` beside other adapters and other tools in the VM.

use lab::Lab;
use lab::initramfs;
use lab::picture::Picture;
use lab::qemu::vgpu_device;
use lab::shared_folder::{self, SharedFolder};
use serde_json::json;

use crate::bench::{A, Bench, LIMIT, job};

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_picture_has_the_mode_of_the_vgpus_screen_beside_another_adapter() {
    let bench = Bench::new();
    let socket = bench.vgpu(A);
    let mut spec = bench.spec("adapters");
    let mut vgpu = vgpu_device("vgpu0", &socket);
    vgpu["addr"] = json!("0x10");
    spec.devices = vec![json!({ "driver": "bochs-display", "addr": "0x2" }), vgpu];
    let mut vm = bench.boot(&spec);
    let mode = "cat /sys/bus/pci/devices/0000:00:02.0/graphics/fb0/virtual_size";
    let other = vm.guest.run(mode, LIMIT).unwrap().success().unwrap().stdout;
    assert_ne!(other.trim(), "1280,1024", "the first framebuffer has the vGPU's mode");
    let drawn = job(&mut vm, "mandelbrot");
    assert_eq!((&drawn["width"], &drawn["height"]), (&json!(1280), &json!(1024)));
    let screen = bench.host.folder().join("screen.png");
    bench.host.screenshot(A, &screen).unwrap();
    Picture::read(&screen).unwrap().check_mandelbrot().unwrap();

    let doctor = vm.guest.run("vgpu-guest doctor", LIMIT).unwrap().success().unwrap().stdout;
    for part in [
        "ok       device   The vGPU 0000:00:10.0 has its driver bochs-drm\n",
        "warning  device   The adapter 0000:00:02.0 is a display too",
    ] {
        assert!(doctor.contains(part), "{doctor}");
    }
    // A display without its driver has no mode.
    vm.guest.run("echo 0000:00:10.0 > /sys/bus/pci/drivers/bochs-drm/unbind", LIMIT).unwrap();
    let refused = vm.guest.run("vgpu-guest mandelbrot", LIMIT).unwrap();
    let reason = "The vGPU 0000:00:10.0 has no framebuffer: load its display driver";
    assert!(refused.status == 1 && refused.stderr.contains(reason), "{refused:?}");
    vm.quit().unwrap();
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn info_works_beside_another_tool_and_jobs_name_that_tool() {
    let bench = Bench::new();
    let socket = bench.vgpu(A);
    let mut vm = bench.boot(&bench.spec("beside").with_vgpu(&socket));
    let spin = "(vgpu-guest --json spin --seconds 8 > /tmp/spin; echo $? >> /tmp/spin) \
                > /dev/null 2>&1 & while ! grep -q FLOCK /proc/locks; do sleep 0.1; done; \
                pidof vgpu-guest";
    let pid = vm.guest.run(spin, LIMIT).unwrap().success().unwrap().stdout;
    for _ in 0..3 {
        assert_eq!(job(&mut vm, "info")["uuid"], A);
    }
    let refused = vm.guest.run("vgpu-guest vadd", LIMIT).unwrap();
    let reason = format!("is in use by process {} (\"vgpu-guest\"); wait for its end", pid.trim());
    assert!(refused.status == 1 && refused.stderr.contains(&reason), "{refused:?}");
    // The first tool has verified its work, which a reset of the vGPU would have ended.
    let wait = "while [ $(wc -l < /tmp/spin) -lt 2 ]; do sleep 0.1; done; tail -n 1 /tmp/spin";
    assert_eq!(vm.guest.run(wait, LIMIT).unwrap().stdout.trim(), "0");
    job(&mut vm, "vadd --n 10000");
    vm.quit().unwrap();
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn programs_of_this_machine_run_in_a_vm_that_cannot_change_its_files() {
    let bench = Bench::new();
    let socket = bench.vgpu(A);
    let initramfs = bench.host.folder().join("shared.cpio");
    let files = initramfs::extra(&shared_folder::files(&bench.lab.root.kernel)).unwrap();
    let archives = [std::fs::read(&bench.lab.initramfs).unwrap(), files];
    initramfs::write(&initramfs, &archives).unwrap();
    let lab = Lab { initramfs, ..bench.lab.clone() };
    let mut spec = bench.spec("shared").with_vgpu(&socket);
    spec.folder = Some(SharedFolder::read_only("/".as_ref()));
    spec.cpu = "max";
    let mut vm = lab::qemu::Vm::boot(&lab, &spec, &bench.host.folder().join("vm")).unwrap();
    let mut run = |command: &str| vm.guest.run(command, LIMIT).unwrap();
    let mounted = run(&shared_folder::mount_root("/machine"));
    assert!(mounted.status == 0, "{mounted:?}");

    let mine = std::fs::read_to_string("/etc/os-release").unwrap();
    let seen = run("chroot /machine /bin/cat /etc/os-release").success().unwrap().stdout;
    assert_eq!(seen, mine);
    let name = run("chroot /machine /bin/sh -c 'uname -r; echo x > /tmp/own && cat /tmp/own'");
    let kernel = bench.lab.root.kernel.release().unwrap();
    assert_eq!(name.success().unwrap().stdout, format!("{kernel}\nx\n"), "it runs in the VM");
    let kept = bench.host.folder().join("kept");
    std::fs::write(&kept, "mine").unwrap();
    run("umount /machine/tmp").success().unwrap();
    let path = kept.display();
    assert_eq!(run(&format!("cat /machine{path}")).success().unwrap().stdout, "mine");
    for command in [
        format!("echo theirs > /machine{path}"),
        format!("rm /machine{path}"),
        format!("mount -o remount,rw /machine; echo theirs > /machine{path}"),
    ] {
        assert_ne!(run(&command).status, 0, "{command}");
        assert_eq!(std::fs::read_to_string(&kept).unwrap(), "mine", "{command}");
    }
    job(&mut vm, "vadd --n 10000");
    vm.quit().unwrap();
}
