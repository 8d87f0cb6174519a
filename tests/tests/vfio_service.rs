//! Physical devices as parents of the packaged service, as an operator has it: a Debian with an IOMMU, booted by systemd
//! in a VM, with nothing but the package and what the documents say. It is rebooted, and comes back as it was.
//!
//! It needs a VM, so it is `cargo lab test`'s and `cargo test --test vfio_service -- --ignored`'s.

#![allow(clippy::unwrap_used)]

mod nested;

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use lab::Lab;
use lab::booted::Booted;
use lab::build::Profile;
use lab::deb::{self, Options};
use lab::picture::Picture;
use lab::progress::Progress;
use lab::qemu::{Vm, VmSpec};
use lab::vfio;
use mdev_core::gpu::EngineKind;
use mdev_core::units::{KIB, MIB};
use serde_json::{Value, json};
use system_tests::ram::Ram;
use system_tests::skipped;
use system_tests::stranger::Stranger;
use vgpu_guest::channel::Channel;
use vgpu_guest::copy::linear;
use vgpu_guest::device::Device;
use vgpu_guest::fence::Patience;
use vgpu_guest::memory::Buffer;
use vgpu_guest::pushbuffer::Methods;

use nested::head::Head;
use nested::{DISPLAY, EDU, LIMIT, ok, refused};

const TEST: &str = "devices_are_parents_of_the_service_and_come_back_after_a_reboot";
/// The vGPUs of both devices, as they are defined.
const HEAD: &str = "11111111-1111-4111-8111-111111111111";
const ENGINE: &str = "22222222-2222-4222-8222-222222222222";
const RED: u32 = 0x00c0_4020;
/// Where the run inside says that it has drawn, and is told to end.
const DRAWN: &str = "/run/drawn";
const SEEN: &str = "/run/seen";
/// systemd's measure of what a service could still do, in tenths: no more than without physical devices.
const MOST_EXPOSURE: u32 = 26;

#[test]
#[ignore = "boots a VM: run `cargo lab test`"]
fn devices_are_parents_of_the_service_and_come_back_after_a_reboot() {
    if nested::is_inside() {
        return use_both();
    }
    if let Some(reason) = Booted::impossible() {
        skipped(&format!("a Debian that systemd boots in a VM: {reason}"));
        return;
    }
    let progress = Progress::new();
    let folder = tempfile::tempdir().unwrap();
    let options = Options { out: folder.path().to_owned(), profile: Profile::Dev };
    let package = deb::write(&options, &progress).unwrap();
    let lab = Lab::open(&progress).unwrap();
    let spec = VmSpec { memory_mib: 768, ..vfio::machine("host") };
    let program = std::env::current_exe().unwrap();
    let begun = Instant::now();
    let mut host =
        Booted::start(&lab, &spec, &package, &[&program], folder.path(), &progress).unwrap();
    println!("installed and booted in {:.1} s", begun.elapsed().as_secs_f64());
    let vm = &mut host.vm;
    eventually(vm, "the service runs", "systemctl is-active --quiet vgpud.service");

    // Without its file the service cannot map the display's memory, and says what can be done.
    ok(vm, &format!("vgpuctl parents bind --until-reboot {DISPLAY}"));
    let parents = format!("--parent vfio:{DISPLAY} --parent vfio:{EDU}");
    ok(vm, &format!("sed -i 's/--parent soft:soft0/& {parents}/' /etc/default/vgpud"));
    // Which devices a service may open is looked up then.
    ok(vm, "systemctl daemon-reload; systemctl restart vgpud");
    let start = format!("vgpuctl start -p {DISPLAY} -t BOCHS-8MQ");
    let text = refused(vm, &start);
    let told =
        format!("this service may not write its files in /sys: `vgpuctl parents bind {DISPLAY}`");
    assert!(text.contains(&told), "{text}");
    let list = ok(vm, "vgpuctl parents");
    assert!(list.contains("VGA display, vfio-pci until the next boot, IOMMU group"), "{list}");

    // As the documents say. For good, and the module that was not loaded is.
    let bound = ok(vm, &format!("vgpuctl parents bind {DISPLAY}"));
    let drop_in = format!("/etc/systemd/system/vgpud.service.d/parent-{DISPLAY}.conf");
    assert!(bound.contains(&format!("It is again after each boot: {drop_in}\n")), "{bound}");
    assert!(bound.contains("in force after `systemctl restart vgpud`"), "{bound}");
    ok(vm, &format!("vgpuctl parents bind {EDU}"));
    let list = ok(vm, "vgpuctl parents");
    assert!(list.contains("VGA display, vfio-pci after each boot, IOMMU group"), "{list}");
    ok(vm, "systemctl restart vgpud");
    both_are_ready(vm);
    ok(vm, &format!("vgpuctl define -u {HEAD} -p {DISPLAY} -t BOCHS-8MQ --auto"));
    ok(vm, &format!("vgpuctl define -u {ENGINE} -p {EDU} -t EDU-C --auto"));
    for uuid in [HEAD, ENGINE] {
        ok(vm, &format!("vgpuctl start -u {uuid}"));
    }
    work(vm, folder.path(), &program);
    least_privilege(vm);

    // The manager comes and goes under them.
    let owners = pids(vm);
    ok(vm, "systemctl restart vgpud");
    both_are_ready(vm);
    assert_eq!(pids(vm), owners, "the devices' processes go on");

    // After a reboot all of it is there, before anybody has logged in.
    let begun = Instant::now();
    let reboot = "systemctl reboot";
    vm.guest.start(reboot, LIMIT).unwrap();
    vm.wait_boot().unwrap();
    println!("rebooted in {:.1} s", begun.elapsed().as_secs_f64());
    both_are_ready(vm);
    let log = ok(vm, "journalctl -b --no-pager -o cat -u vgpud -u 'vgpu-parent@*'");
    assert!(!log.contains("Cannot start parent"), "each was bound before vgpud began: {log}");
    eventually(vm, "both vGPUs run", "test $(vgpuctl list | wc -l) = 2");
    work(vm, folder.path(), &program);

    // Given back: not while vgpud has it, and then for good.
    let text = refused(vm, &format!("vgpuctl parents unbind {DISPLAY}"));
    assert!(text.contains("is in use by a process"), "{text}");
    for uuid in [HEAD, ENGINE] {
        ok(vm, &format!("vgpuctl stop -u {uuid}"));
    }
    ok(vm, "sed -i 's/ --parent vfio:[0-9a-f:.]*//g' /etc/default/vgpud");
    ok(vm, "systemctl restart vgpud");
    let text = ok(vm, &format!("vgpuctl parents unbind {DISPLAY}"));
    assert_eq!(text, format!("{DISPLAY} is back with bochs-drm\n"));
    ok(vm, &format!("vgpuctl parents unbind {EDU}"));
    assert_eq!(ok(vm, "ls /etc/systemd/system | grep vgpud || true"), "", "nothing is left");
    let text = refused(vm, &format!("vgpuctl parents unbind {DISPLAY}"));
    assert!(text.contains("there is nothing to give back"), "{text}");
    assert_eq!(ok(vm, "dmesg | grep DMAR | grep -c fault || true").trim(), "0");
    host.vm.quit().unwrap();
}

fn eventually(vm: &mut Vm, what: &str, script: &str) {
    let deadline = Instant::now() + LIMIT;
    while vm.guest.run(script, LIMIT).unwrap().status != 0 {
        if Instant::now() > deadline {
            let log = "vgpuctl parents; vgpuctl list -v; journalctl -b -n 60 --no-pager -o cat -u vgpud -u 'vgpu-parent@*'";
            panic!("not within {LIMIT:?}: {what}\n{}", vm.guest.run(log, LIMIT).unwrap().stdout);
        }
        thread::sleep(Duration::from_millis(200));
    }
}

/// Types are there of parents that are.
fn both_are_ready(vm: &mut Vm) {
    eventually(
        vm,
        "both parents are ready",
        "vgpuctl types | grep -q BOCHS-8MQ && vgpuctl types | grep -q EDU-C",
    );
}

/// The processes that own the devices, and the vGPUs' workers.
fn pids(vm: &mut Vm) -> Vec<String> {
    let script = "pgrep -x 'gpu-0000:00:0.*|vgpu-worker' | sort -n";
    let pids: Vec<_> = ok(vm, script).lines().map(str::to_owned).collect();
    assert_eq!(pids.len(), 4, "{pids:?}");
    pids
}

/// Guests use both vGPUs: one's pixels are seen on the physical screen, from outside; the other's bytes are moved by the
/// physical engine.
fn work(vm: &mut Vm, folder: &Path, program: &Path) {
    let program = program.file_name().unwrap().to_string_lossy();
    let run = format!(
        "rm -f {DRAWN} {SEEN}; (TESSERA_INSIDE=1 /usr/local/bin/{program} --ignored --exact {TEST} --nocapture \
         > /run/guests.log 2>&1; echo $? > /run/ended) > /dev/null 2>&1 & \
         n=0; until [ -e {DRAWN} ] || [ $n -gt 600 ]; do n=$((n+1)); sleep 0.1; done; [ -e {DRAWN} ] || cat /run/guests.log"
    );
    assert_eq!(ok(vm, &run), "");
    let file = folder.join("screen.png");
    let name = file.to_string_lossy();
    let arguments = json!({ "device": "display", "head": 0, "filename": name, "format": "png" });
    vm.qmp.execute("screendump", &arguments).unwrap();
    let picture = Picture::read(&file).unwrap();
    assert_eq!((picture.width, picture.height, picture.is_all(RED)), (640, 480, true));
    ok(vm, &format!("touch {SEEN}"));
    eventually(vm, "the guests have ended", "test -e /run/ended");
    assert_eq!(ok(vm, "cat /run/ended; rm /run/ended").trim(), "0");
}

/// Inside: both guests.
fn use_both() {
    let socket = |uuid: &str| PathBuf::from(format!("/run/vgpud/vgpus/{uuid}/vfio.sock"));
    let ram = Ram::new(4 * MIB, 64 * KIB).unwrap();
    let device = Device::open(Box::new(Stranger::attach(&socket(ENGINE), ram).unwrap())).unwrap();
    let mut channel = Channel::new(&device, EngineKind::Copy).unwrap();
    channel.set_patience(Patience { limit: LIMIT, ..Patience::default() });
    let [from, to] = [0, 1].map(|_| Buffer::guest(&device, 4 * KIB).unwrap());
    from.store(0, &[0x1234_5678_u32; 1024]);
    let mut methods = Methods::new();
    linear(&mut methods, to.va(), from.va(), 4 * KIB);
    channel.run(&methods).unwrap();
    assert_eq!(to.load::<u32>(0, 1024), [0x1234_5678; 1024]);

    let mut head = Head::attach(&socket(HEAD));
    head.draw(640, 480, RED);
    fs::write(DRAWN, "").unwrap();
    let deadline = Instant::now() + LIMIT;
    while !fs::exists(SEEN).unwrap() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(20));
    }
}

/// The service can do no more than before; what it may write of `/sys` is one device's memory.
fn least_privilege(vm: &mut Vm) {
    for (unit, most) in [("vgpud.service", MOST_EXPOSURE), ("vgpu-parent@0000:00:02.0.service", 10)]
    {
        let exposure = ok(vm, &format!("systemd-analyze security --no-pager {unit} | tail -1"));
        println!("{unit}: {}", exposure.trim());
        let number = exposure.split_whitespace().find_map(|word| word.parse::<f64>().ok()).unwrap();
        assert!(number * 10.0 <= f64::from(most), "{exposure}");
    }
    let units = "vgpud.service vgpud.socket /usr/lib/systemd/system/vgpu-parent@.service";
    ok(vm, &format!("systemd-analyze verify --man=no {units}"));
    let look = format!(
        "for f in /sys/bus/pci/devices/{DISPLAY}/* /sys/bus/pci/devices/{EDU}/* /sys/bus/pci/drivers_probe \
         /sys/power/state /sys/module/vfio/uevent; do if [ -f $f -a -w $f ]; then echo ${{f##*/}}; fi; done"
    );
    let writable = format!("nsenter -m -t $(systemctl show -P MainPID vgpud) sh -c '{look}'");
    assert_eq!(ok(vm, &writable), "resource0\nresource0_wc\n");
    let processes: Value = serde_json::from_str(&ok(vm, "vgpuctl list --output json")).unwrap();
    assert_eq!(processes.as_array().unwrap().len(), 2);
    for pid in pids(vm) {
        let status = ok(vm, &format!("cat /proc/{pid}/status"));
        assert!(status.contains("CapEff:\t0000000000000000"), "{status}");
        assert!(
            status.contains("NoNewPrivs:\t1\n") && status.contains("Seccomp:\t2\n"),
            "{status}"
        );
    }
}
