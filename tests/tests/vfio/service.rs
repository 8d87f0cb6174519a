//! Physical devices as parents of the packaged service: Debian with an IOMMU, booted by systemd in
//! a VM, set up with the package and the documented commands only, and rebooted.

#![allow(clippy::unwrap_used)]

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
use system_tests::vfio_user_guest::VfioUserGuest;
use vgpu_guest::channel::Channel;
use vgpu_guest::copy::linear;
use vgpu_guest::device::Device;
use vgpu_guest::fence::WaitPolicy;
use vgpu_guest::memory::Buffer;
use vgpu_guest::pushbuffer::Methods;

use crate::nested::head::Head;
use crate::nested::{self, DISPLAY, EDU, LIMIT, ok, refused};

/// vGPUs of both devices.
const HEAD: &str = "11111111-1111-4111-8111-111111111111";
const ENGINE: &str = "22222222-2222-4222-8222-222222222222";
const RED: u32 = 0x00c0_4020;
/// Files that synchronize the run inside: it has drawn; it may end.
const DRAWN: &str = "/run/drawn";
const SEEN: &str = "/run/seen";
/// Highest exposure score of `systemd-analyze security`, in tenths: the same as without physical
/// devices.
const MOST_EXPOSURE: u32 = 26;

#[test]
#[ignore = "boots a VM: run `cargo lab test`"]
fn devices_are_parents_of_the_service_before_and_after_a_reboot() {
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

    bind_as_documented(vm);
    work(vm, folder.path(), &program);
    least_privilege(vm);

    // vGPUs survive a restart of the manager.
    let owners = pids(vm);
    limited(vm);
    ok(vm, "systemctl restart vgpud");
    both_are_ready(vm);
    assert_eq!(pids(vm), owners, "the devices' processes are the same");
    let upgraded = ok(vm, "vgpuctl upgrade");
    assert_eq!(upgraded.matches(" follows process ").count(), 2, "{upgraded}");
    limited(vm);

    // After the reboot everything is back before any login.
    let begun = Instant::now();
    let reboot = "systemctl reboot";
    vm.guest.start(reboot, LIMIT).unwrap();
    vm.wait_boot().unwrap();
    println!("rebooted in {:.1} s", begun.elapsed().as_secs_f64());
    both_are_ready(vm);
    let log = ok(vm, "journalctl -b --no-pager -o cat -u vgpud -u 'vgpu-parent@*'");
    assert!(
        !log.contains("Cannot start parent"),
        "every device is bound before vgpud starts: {log}"
    );
    eventually(vm, "both vGPUs run", "test $(vgpuctl list | wc -l) = 2");
    work(vm, folder.path(), &program);

    release(vm);
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

/// Waits until both parents offer types.
fn both_are_ready(vm: &mut Vm) {
    eventually(
        vm,
        "both parents are ready",
        "vgpuctl types | grep -q BOCHS-8MQ && vgpuctl types | grep -q EDU-C",
    );
}

/// Returns the processes of the devices and the vGPUs' workers.
fn pids(vm: &mut Vm) -> Vec<String> {
    let script = "pgrep -x 'gpu-0000:00:0.*|vgpu-worker' | sort -n";
    let pids: Vec<_> = ok(vm, script).lines().map(str::to_owned).collect();
    assert_eq!(pids.len(), 4, "{pids:?}");
    pids
}

/// Each process is alone in a control group, or with its anchor, and workers have limits.
fn limited(vm: &mut Vm) {
    let groups = "/sys/fs/cgroup/system.slice/vgpud.service";
    let parents = format!("gpu-{DISPLAY}/\ngpu-{EDU}/\ngpu-soft0/\n");
    let workers = format!("worker-{HEAD}/\nworker-{ENGINE}/\n");
    let all = ok(vm, &format!("cd {groups} && ls -d */"));
    assert_eq!(all, format!("{parents}manager/\n{workers}"));
    for group in all.lines() {
        let members = ok(vm, &format!("cat {groups}/{group}cgroup.procs"));
        let expected = if group.starts_with("worker-") { 2 } else { 1 };
        assert_eq!(members.lines().count(), expected, "{group}: {members}");
    }
    // 512 MiB and the video memory.
    for (uuid, memory) in [(HEAD, (512 + 8) * MIB), (ENGINE, 512 * MIB)] {
        let limits = ok(vm, &format!("cd {groups}/worker-{uuid} && cat pids.max memory.max"));
        assert_eq!(limits, format!("64\n{memory}\n"));
    }
}

/// Lets guests use both vGPUs: pixels of one appear on the physical screen, seen from outside; the
/// physical engine copies bytes of the other.
fn work(vm: &mut Vm, folder: &Path, program: &Path) {
    let program = program.file_name().unwrap().to_string_lossy();
    let test = nested::this_test();
    let run = format!(
        "rm -f {DRAWN} {SEEN}; (TESSERA_INSIDE=1 /usr/local/bin/{program} --ignored --exact {test} --nocapture \
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

/// Runs both guests, inside.
fn use_both() {
    let socket = |uuid: &str| PathBuf::from(format!("/run/vgpud/vgpus/{uuid}/vfio.sock"));
    let ram = Ram::new(4 * MIB, 64 * KIB).unwrap();
    let device =
        Device::open(Box::new(VfioUserGuest::attach(&socket(ENGINE), ram).unwrap())).unwrap();
    let mut channel = Channel::new(&device, EngineKind::Copy).unwrap();
    channel.set_wait_policy(WaitPolicy { limit: LIMIT, ..WaitPolicy::default() });
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

/// The service's privileges do not grow; of `/sys` it may write one device's memory.
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

/// Binds both devices with the documented commands, and starts their vGPUs.
fn bind_as_documented(vm: &mut Vm) {
    // Without the drop-in the service cannot map the display's memory; the message names the
    // remedy.
    ok(vm, &format!("vgpuctl parents bind --until-reboot {DISPLAY}"));
    let parents = format!("--parent vfio:{DISPLAY} --parent vfio:{EDU}");
    ok(vm, &format!("sed -i 's/--parent soft:soft0/& {parents}/' /etc/default/vgpud"));
    // systemd evaluates DeviceAllow at the reload.
    ok(vm, "systemctl daemon-reload; systemctl restart vgpud");
    let start = format!("vgpuctl start -p {DISPLAY} -t BOCHS-8MQ");
    let text = refused(vm, &start);
    let told = format!(
        "this service may not write the device's files in /sys: run `vgpuctl parents bind {DISPLAY}`"
    );
    assert!(text.contains(&told), "{text}");
    let list = ok(vm, "vgpuctl parents");
    assert!(list.contains("VGA display, vfio-pci until the next boot, IOMMU group"), "{list}");

    // The documented commands: permanent, and the missing module is loaded.
    let bound = ok(vm, &format!("vgpuctl parents bind {DISPLAY}"));
    let drop_in = format!("/etc/systemd/system/vgpud.service.d/parent-{DISPLAY}.conf");
    assert!(
        bound.contains(&format!("The binding is repeated after each boot: {drop_in}\n")),
        "{bound}"
    );
    assert!(bound.contains("takes effect after `systemctl restart vgpud`"), "{bound}");
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
}

/// Gives both devices back.
fn release(vm: &mut Vm) {
    // Released: refused while vgpud uses the device, then permanent.
    let text = refused(vm, &format!("vgpuctl parents unbind {DISPLAY}"));
    assert!(text.contains("is in use by a process"), "{text}");
    for uuid in [HEAD, ENGINE] {
        ok(vm, &format!("vgpuctl stop -u {uuid}"));
    }
    ok(vm, "sed -i 's/ --parent vfio:[0-9a-f:.]*//g' /etc/default/vgpud");
    ok(vm, "systemctl restart vgpud");
    let text = ok(vm, &format!("vgpuctl parents unbind {DISPLAY}"));
    assert_eq!(text, format!("{DISPLAY} is returned to bochs-drm\n"));
    ok(vm, &format!("vgpuctl parents unbind {EDU}"));
    assert_eq!(ok(vm, "ls /etc/systemd/system | grep vgpud || true"), "", "nothing is left");
    let text = refused(vm, &format!("vgpuctl parents unbind {DISPLAY}"));
    assert!(text.contains("there is nothing to give back"), "{text}");
    assert_eq!(ok(vm, "dmesg | grep DMAR | grep -c fault || true").trim(), "0");
}
