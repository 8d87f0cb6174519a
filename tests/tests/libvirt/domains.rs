//! libvirt hosts: Debian with systemd, the distribution's libvirt and QEMU, and domains with vGPUs.
//! QEMU runs as Debian's user for it. Debian's kernel in the guest finds the vGPU with its own
//! driver.

#![allow(clippy::unwrap_used)]

use std::time::Instant;

use crate::host::*;
use lab::build::Profile;
use lab::cleanup::is_running;
use lab::deb;
use lab::machine::Machine;
use lab::progress::Progress;
use serde_json::Value;
use system_tests::wait_for;

#[test]
#[ignore = "boots a Debian machine: run `cargo lab test`"]
fn every_machine_is_fresh_and_leaves_nothing() {
    let Some((host, ..)) = Host::bare() else { return };
    let first = host.machine;
    assert_eq!(first.sh("id -u; ls /sys/class/net; hostname").unwrap(), "0\nlo\ntessera-lab\n");
    assert_eq!(first.sh("systemctl is-active libvirtd.socket").unwrap(), "active\n");
    first.sh("touch /etc/mark").unwrap();
    assert_eq!(first.run("exit 7").unwrap().status, 7);
    assert_ne!(first.run("echo 1 > /proc/sys/vm/panic_on_oom").unwrap().status, 0);
    let second = Machine::start(&Progress::new()).unwrap();
    assert_eq!(second.run("test -e /etc/mark").unwrap().status, 1);
    let init = first.init();
    drop(first);
    // The kernel ends all processes of the machine with its first one, which takes a moment.
    wait_for("the machine's first process has ended", || !is_running(init)).unwrap();
    assert!(second.sh("true").is_ok(), "the other machine keeps running");
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_domains_vgpu_starts_and_stops_with_it() {
    let Some(host) = Host::new() else { return };
    host.define("vm1", "");
    let before = host.xml("vm1");
    let said = host.sh(&format!("vgpuctl libvirt attach vm1 --type {TYPE} --core 50"));
    assert!(
        said.starts_with("Domain 'vm1' has vGPU ") && said.ends_with("from its next start on\n"),
        "{said}"
    );
    let attached = host.xml("vm1");
    assert!(attached.contains("passwd='secret'"), "secrets are kept: {attached}");
    let again = host.sh(&format!("vgpuctl libvirt attach vm1 --type {TYPE} --core 50"));
    assert!(again.contains("already; nothing was changed"), "{again}");
    assert_eq!(host.xml("vm1"), attached);
    host.sh("virsh dumpxml --inactive vm1 > /tmp/vm1.xml && virt-xml-validate /tmp/vm1.xml domain");
    assert!(host.vgpus().is_empty(), "no vGPU exists before the domain starts");

    let mut guest = host.boot("vm1");
    uses_its_vgpu(&host, "vm1", &mut guest);
    let vgpus = host.vgpus();
    let vgpu = &vgpus[0];
    assert_eq!(vgpu["vm"]["uid"], QEMU_USER);
    assert_eq!((&vgpu["mdev_type"], &vgpu["live_attrs"][0]["core"]), (&TYPE.into(), &"50".into()));
    assert_eq!(vgpu["warnings"], serde_json::json!([]), "its memory is shared");
    // Only QEMU's user can use the socket.
    let socket = vgpu["socket"].as_str().unwrap();
    assert_eq!(host.sh(&format!("stat -c '%u %a' {socket}")), format!("{QEMU_USER} 600\n"));

    // Reset and reboot keep the vGPU.
    host.sh("virsh reset vm1");
    host.wait_boot("vm1", &mut guest);
    uses_its_vgpu(&host, "vm1", &mut guest);
    guest.start("reboot -f", LIMIT).unwrap();
    host.wait_boot("vm1", &mut guest);
    uses_its_vgpu(&host, "vm1", &mut guest);
    assert_eq!(host.vgpus()[0]["uuid"], vgpu["uuid"]);
    // A restart by libvirt keeps the vGPU.
    host.sh("systemctl restart libvirtd && virsh list");
    assert_eq!(host.vgpus()[0]["vm"]["pid"], vgpu["vm"]["pid"]);

    host.sh("virsh destroy vm1");
    host.eventually("a destroyed domain gives its vGPU back", || host.vgpus().is_empty());

    // A killed domain restarts with a new vGPU of the same name.
    drop(host.boot("vm1"));
    let pid = host.qemu("vm1");
    host.sh(&format!("kill -9 {pid}"));
    host.eventually("libvirt notices", || host.state("vm1") == "shut off");
    host.eventually("a killed domain gives its vGPU back", || host.vgpus().is_empty());
    // The same while libvirtd is down: libvirtd notices when it returns.
    host.sh("virsh start vm1");
    let pid = host.machine.read("/run/libvirt/qemu/vm1.pid");
    host.sh("systemctl stop libvirtd libvirtd.socket libvirtd-ro.socket libvirtd-admin.socket");
    host.sh(&format!("kill -9 {pid}"));
    assert_eq!(host.vgpus().len(), 1);
    host.sh("systemctl start libvirtd");
    host.eventually("a domain that ended unseen gives its vGPU back", || host.vgpus().is_empty());

    let mut guest = host.boot("vm1");
    uses_its_vgpu(&host, "vm1", &mut guest);
    assert_eq!(host.vgpus()[0]["uuid"], vgpu["uuid"]);
    guest.start("poweroff -f", LIMIT).unwrap();
    host.eventually("a domain that was shut down gives its vGPU back", || host.vgpus().is_empty());

    host.eventually("vm1 is shut off", || host.state("vm1") == "shut off");
    host.sh("vgpuctl libvirt detach vm1");
    assert_eq!(host.xml("vm1"), before);
    host.sh("virsh undefine vm1");
    assert_eq!(host.sh("ls /run/vgpud/libvirt"), "lock\n", "no record of the domain remains");
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn two_domains_share_a_gpu_and_a_third_is_refused() {
    let Some(host) = Host::new() else { return };
    for name in ["vm1", "vm2", "vm3"] {
        host.define(name, "");
        host.sh(&format!("vgpuctl libvirt attach {name} --type {TYPE} --core 30"));
    }
    let mut first = host.boot("vm1");
    let mut second = host.boot("vm2");
    uses_its_vgpu(&host, "vm1", &mut first);
    uses_its_vgpu(&host, "vm2", &mut second);
    let full = host.run("virsh start vm3");
    assert_ne!(full.status, 0);
    let said = "Domain 'vm3' cannot have its vGPU of type SOFT-256MQ: ";
    let line = full.stderr.lines().find(|line| line.contains(said));
    let line = line.unwrap_or_else(|| panic!("{full:?}"));
    assert!(line.contains("Not enough video memory"), "{line}");
    assert_eq!(host.vgpus().len(), 2, "a domain that could not start has no vGPU");

    // Two domains cannot share a defined vGPU, and the second one's failure does not affect the
    // first.
    host.sh("virsh destroy vm2; vgpuctl libvirt detach vm2; vgpuctl libvirt detach vm3");
    let uuid = host.sh(&format!("vgpuctl define -p soft0 -t {TYPE}"));
    let uuid = uuid.trim();
    for name in ["vm2", "vm3"] {
        host.sh(&format!("vgpuctl libvirt attach {name} -u {uuid} --core 40"));
    }
    let mut second = host.boot("vm2");
    uses_its_vgpu(&host, "vm2", &mut second);
    let taken = host.run("virsh start vm3");
    assert_ne!(taken.status, 0);
    assert!(taken.stderr.contains("of domain 'vm2'"), "{taken:?}");
    uses_its_vgpu(&host, "vm2", &mut second);
    let vgpus = host.vgpus();
    let vgpu = vgpus.iter().find(|vgpu| vgpu["uuid"] == uuid).unwrap();
    assert_eq!((&vgpu["state"], &vgpu["live_attrs"][0]["core"]), (&"running".into(), &"40".into()));
    host.sh("virsh destroy vm2");
    drop(host.boot("vm3"));
    uses_its_vgpu(&host, "vm1", &mut first);

    // A restart of the manager affects no domain.
    host.sh("systemctl kill --kill-whom=main -s KILL vgpud; systemctl reset-failed vgpud; systemctl start vgpud");
    host.eventually("vgpud answers", || host.run("vgpuctl types").status == 0);
    host.sh("virsh destroy vm3; virsh destroy vm1");
    host.eventually("all vGPUs are given back", || host.vgpus().is_empty());
}

#[test]
#[ignore = "boots a Debian machine: run `cargo lab test`"]
fn unsupported_domains_are_refused_in_one_line() {
    let Some(host) = Host::new() else { return };
    let attach = |domain: &str| format!("vgpuctl libvirt attach {domain} --type {TYPE}");
    refuses_wrong_arguments(&host, attach);
    // Huge pages are kept and become shared.
    host.define("huge", "<memoryBacking><hugepages/></memoryBacking>");
    let before = host.xml("huge");
    host.sh(&attach("huge"));
    let huge = host.xml("huge");
    assert!(huge.contains("<hugepages/>") && huge.contains("<access mode='shared'/>"), "{huge}");
    host.sh("vgpuctl libvirt detach huge");
    assert_eq!(host.xml("huge"), before);

    // Printing changes nothing; a running domain changes for its next start if requested.
    let before = host.xml("vm1");
    assert!(host.sh(&format!("{} --print-xml", attach("vm1"))).contains("vfio-user-pci"));
    assert_eq!(host.xml("vm1"), before);
    host.sh("virsh start vm1");
    host.refused(&attach("vm1"), 5, "Domain 'vm1' is running; shut it down first, or add --config");
    host.sh(&format!("{} --config", attach("vm1")));
    let updated = host.sh(&format!("{} --core 60 --config", attach("vm1")));
    assert!(updated.ends_with("from its next start on\n"), "{updated}");
    let xml = host.xml("vm1");
    assert!(xml.contains("core=\"60\"") && xml.matches("<tessera:vgpu ").count() == 1, "{xml}");
    host.sh("virsh destroy vm1");
    assert!(host.vgpus().is_empty());

    // Without vgpud, a domain with a vGPU fails to start with the reason; other domains start.
    host.define("vm2", "");
    host.sh("systemctl stop vgpud");
    let start = host.run("virsh start vm1");
    assert!(start.status != 0 && start.stderr.contains("Cannot reach vgpud at"), "{start:?}");
    host.sh("virsh start vm2");
    host.sh("systemctl start vgpud");
    host.eventually("vgpud answers", || host.run("vgpuctl types").status == 0);

    // A vGPU that the operator started is used and left running.
    let uuid = host.sh(&format!("vgpuctl define -p soft0 -t {TYPE}"));
    let uuid = uuid.trim();
    host.sh(&format!("vgpuctl libvirt detach vm1 && vgpuctl start -u {uuid}"));
    host.sh(&format!(
        "vgpuctl libvirt attach vm1 -u {uuid} && virsh start vm1 && virsh destroy vm1"
    ));
    host.eventually("the VM has gone", || host.vgpus()[0]["vm"].is_null());
    assert_eq!(host.vgpus()[0]["state"], "running");
    // After the vGPU is undefined, the start of its domain reports that.
    host.sh(&format!("vgpuctl stop -u {uuid} && vgpuctl undefine -u {uuid}"));
    let start = host.run("virsh start vm1");
    assert!(start.stderr.contains("it is not defined any more"), "{start:?}");
    // A domain with a vGPU cannot migrate.
    let move_in = "virsh dumpxml vm1 | vgpuctl libvirt hook vm1 migrate begin -";
    host.refused(move_in, 5, "cannot move to another host");
}

/// Wrong arguments of attach and detach, and domains whose memory cannot be shared.
fn refuses_wrong_arguments(host: &Host, attach: impl Fn(&str) -> String) {
    host.refused(&attach("none"), 4, "There is no domain 'none' at qemu:///system; `virsh");
    host.refused("vgpuctl libvirt attach none --type X", 4, "There is no domain");
    host.refused(&format!("{} -c qemu:///nowhere", attach("none")), 1, "Cannot reach libvirt at");
    host.refused(
        &format!(
            "mv /usr/bin/virsh /virsh; {}; s=$?; mv /virsh /usr/bin/virsh; exit $s",
            attach("x")
        ),
        1,
        "There is no virsh on this host; install",
    );
    host.define("vm1", "");
    host.refused(
        "vgpuctl libvirt attach vm1 --type X",
        4,
        "No parent offers type X; `vgpuctl types`",
    );
    host.refused(&format!("{} -p soft9", attach("vm1")), 4, "There is no parent soft9");
    host.refused(
        "vgpuctl libvirt attach vm1 -u 0e6c2a3c-2d3b-4c44-a8f4-1d80f3a5d00a",
        4,
        "There is no vGPU",
    );
    host.refused("vgpuctl libvirt detach vm1", 5, "has no vGPU from `vgpuctl libvirt attach`");
    for (backing, words) in [
        ("<memoryBacking><access mode='private'/></memoryBacking>", "no other process can map"),
        ("<memoryBacking><source type='anonymous'/></memoryBacking>", "no other process can map"),
    ] {
        host.define("private", backing);
        host.refused(&attach("private"), 5, words);
        host.sh("virsh undefine private");
    }
}

#[test]
#[ignore = "boots a Debian machine: run `cargo lab test`"]
fn a_vgpu_belongs_to_the_user_of_its_domain() {
    let Some(host) = Host::new() else { return };
    // libvirt's folder belongs to its own user; other users must be able to enter it.
    host.sh("virsh list && chmod 711 /var/lib/libvirt/qemu");
    let vm_of = |user: u32| {
        let name = format!("user{user}");
        let label = format!("<label>+{user}:+{user}</label>");
        host.define(
            &name,
            &format!("<seclabel type='static' model='dac' relabel='yes'>{label}</seclabel>"),
        );
        name
    };
    for user in [1234, 0] {
        let name = vm_of(user);
        host.sh(&format!("vgpuctl libvirt attach {name} --type {TYPE} && virsh start {name}"));
        host.eventually("QEMU is attached", || !host.vgpus()[0]["vm"].is_null());
        assert_eq!(host.vgpus()[0]["vm"]["uid"], user);
        host.sh(&format!("virsh destroy {name}"));
        host.eventually("the vGPU is given back", || host.vgpus().is_empty());
    }
    // A defined vGPU that was started for another user.
    let uuid = host.sh(&format!("vgpuctl define -p soft0 -t {TYPE}"));
    let uuid = uuid.trim();
    let name = vm_of(4321);
    host.sh(&format!("vgpuctl start -u {uuid} --owner 1234"));
    host.sh(&format!("vgpuctl libvirt attach {name} -u {uuid} && virsh start {name}"));
    host.eventually("QEMU is attached", || !host.vgpus()[0]["vm"].is_null());
    assert_eq!(host.vgpus()[0]["vm"]["uid"], 4321);
}

#[test]
#[ignore = "boots a Debian machine: run `cargo lab test`"]
fn node_devices_follow_libvirts_schema() {
    let Some(host) = Host::new() else { return };
    let uuid = host.sh(&format!("vgpuctl start -p soft0 -t {TYPE} --attr core=20"));
    let uuid = uuid.trim();
    let query = |path: &str| {
        host.sh(&format!("vgpuctl libvirt nodedev | xmllint --xpath \"{path}\" -"))
            .trim()
            .to_owned()
    };
    let types = "//device/capability[@type='pci']/capability[@type='mdev_types']/type";
    assert_eq!(query(&format!("string({types}[@id='{TYPE}']/availableInstances)")), "1");
    assert_eq!(query(&format!("string({types}[@id='{TYPE}']/deviceAPI)")), "vfio-pci");
    let mdev = "//device/capability[@type='mdev']";
    assert_eq!(query(&format!("string({mdev}/uuid)")), uuid);
    assert_eq!(query(&format!("string({mdev}/type/@id)")), TYPE);
    let names = host.sh("vgpuctl libvirt nodedev --list");
    let expected = format!("vgpud_soft0\nmdev_{}_soft0\n", uuid.replace('-', "_"));
    assert_eq!(names, expected);
    // Validated with libvirt's schema.
    for name in names.lines() {
        let validate = "virt-xml-validate /tmp/device.xml nodedev";
        host.sh(&format!("vgpuctl libvirt nodedev {name} > /tmp/device.xml && {validate}"));
    }
    host.refused("vgpuctl libvirt nodedev pci_0", 4, "There is no node device pci_0");
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn the_quick_start_alone_makes_a_domain_with_a_vgpu() {
    let Some((host, ..)) = Host::bare() else { return };
    host.define("vm1", "");
    let block = block(include_str!("../../../docs/libvirt.md"), "sh quick-start");
    let commands: Vec<_> =
        block.lines().map(|line| line.split(" # ").next().unwrap().trim()).collect();
    assert!(commands.len() < 10, "{commands:?}");
    // The first command builds programs and runs here, since the machine has no compiler. Its
    // results are put where the document says.
    assert_eq!(commands[0], "cargo lab deb");
    let out = tempfile::tempdir().unwrap();
    let options = deb::Options { out: out.path().to_owned(), profile: Profile::Dev };
    let package = deb::write(&options, &Progress::new()).unwrap();
    let name = package.file_name().unwrap().to_str().unwrap();
    host.machine.install(&package, &format!("/root/tessera/lab-out/{name}")).unwrap();
    let start = Instant::now();
    for command in &commands[1..] {
        let output = host.run(&format!("cd /root/tessera && {command}"));
        assert_eq!(output.status, 0, "{command}: {output:?}");
        if command.starts_with("vgpuctl stats") {
            assert!(output.stdout.contains("SOFT-1Q"), "{}", output.stdout);
        }
    }
    let mut guest = host.guest("vm1");
    host.wait_boot("vm1", &mut guest);
    uses_its_vgpu(&host, "vm1", &mut guest);
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "A domain with a vGPU by {} commands, {seconds:.0} s after the package",
        commands.len()
    );
    // Ten minutes are promised; two or three are the package's.
    assert!(seconds < 300.0, "{seconds}");
    let findings = host.run("vgpuctl doctor --output json").stdout;
    let findings: Vec<Value> = serde_json::from_str(&findings).unwrap();
    for finding in &findings {
        assert_ne!(finding["level"], "problem", "{finding}");
    }
    drop(guest);
    host.sh("virsh destroy vm1");
    takes_keys(&host, "vm1");
}

/// Returns a fenced block of a document.
fn block(document: &'static str, name: &str) -> &'static str {
    let (_, rest) = document.split_once(&format!("```{name}\n")).unwrap();
    rest.split_once("```").unwrap().0
}

/// Checks that the documented monitor of a domain can be used by the installed service, which
/// cannot override permissions.
fn takes_keys(host: &Host, name: &str) {
    let document = include_str!("../../../docs/console.md");
    host.sh(block(document, "sh keyboard"));
    let arguments = block(document, "xml keyboard").replace("vm1", name);
    let xml = host.xml(name);
    assert!(xml.contains("<qemu:commandline>"), "{xml}");
    let xml = xml.replacen("<qemu:commandline>", &arguments, 1);
    host.machine.write("/root/keys.xml", &xml).unwrap();
    host.sh(&format!("virsh define /root/keys.xml && virsh start {name}"));
    host.eventually("QEMU is attached", || host.vgpus().iter().any(|vgpu| !vgpu["vm"].is_null()));
    let vgpus = host.vgpus();
    let uuid = vgpus[0]["uuid"].as_str().unwrap();
    let view = format!("vgpuctl view {uuid} --monitor /run/vgpu-keys/{name}.sock --print");
    // It serves until it is ended.
    host.sh(&format!("({view} > /root/view.txt 2>&1 & echo $! > /root/view.pid)"));
    host.eventually("the screen is served", || !host.machine.read("/root/view.txt").is_empty());
    let said = host.machine.read("/root/view.txt");
    assert!(said.contains("vncviewer "), "{said}");
    host.sh("kill $(cat /root/view.pid)");
    host.refused(&view.replace(name, "other"), 5, "other.sock cannot be used");
}
