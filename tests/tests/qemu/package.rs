//! The Debian package on a Debian with systemd: installed, used under the unit's restrictions,
//! removed, purged, installed again.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use lab::build::Profile;
use lab::checkers::Checkers;
use lab::deb::{self, Options};
use lab::guest::Output;
use lab::machine::Machine;
use lab::progress::Progress;
use serde_json::Value;
use system_tests::skipped;
use tempfile::TempDir;
use vgpud_host::uid_range::UidRange;

const TIMEOUT: Duration = Duration::from_secs(30);
const PACKAGE: &str = "/root/tessera.deb";
/// Highest exposure score of `systemd-analyze security`, in tenths: 0 is best, 100 worst.
const MOST_EXPOSURE: u32 = 26;

fn sh(machine: &Machine, script: &str) -> String {
    machine.sh(script).unwrap()
}

/// Runs a script that prints JSON.
fn json(machine: &Machine, script: &str) -> Value {
    serde_json::from_str(&sh(machine, script)).unwrap()
}

fn eventually(machine: &Machine, what: &str, script: &str) {
    let deadline = Instant::now() + TIMEOUT;
    while machine.run(script).unwrap().status != 0 {
        let log = || machine.run("journalctl -n 40 --no-pager -u vgpud").unwrap().stdout;
        assert!(Instant::now() < deadline, "not within {TIMEOUT:?}: {what}\n{}", log());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Builds the package and returns it with its folder, removed when dropped.
fn built() -> (TempDir, PathBuf) {
    let scratch = tempfile::tempdir().unwrap();
    let options = Options { out: scratch.path().to_owned(), profile: Profile::Dev };
    let package = deb::write(&options, &Progress::new()).unwrap();
    (scratch, package)
}

/// Returns one line of a process's status.
fn field(machine: &Machine, pid: &Value, name: &str) -> String {
    sh(machine, &format!("grep ^{name}: /proc/{pid}/status"))
        .split_whitespace()
        .nth(1)
        .unwrap()
        .into()
}

/// Follows README's "Attach your own VM" as an ordinary user, whose QEMU waits before it boots.
fn serves_an_ordinary_user(machine: &Machine) {
    let readme = include_str!("../../../README.md");
    let (_, section) = readme.split_once("## Attach your own VM\n").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let commands = section.lines().filter_map(|line| line.strip_prefix("    "));
    let commands: Vec<_> = commands.map(|line| line.split("  # ").next().unwrap().trim()).collect();
    let command = |start: &str| {
        let found = commands.iter().find(|command| command.starts_with(start));
        *found.unwrap_or_else(|| panic!("{start} is not in {commands:#?}"))
    };
    sh(machine, "getent group kvm > /dev/null || groupadd kvm; useradd --create-home alice");
    let alice = |line: &str| {
        machine.write("/home/alice/line", line).unwrap();
        // A login, without its session.
        let login = "setpriv --reuid alice --regid alice --init-groups --reset-env";
        machine.run(&format!("cd /home/alice && {login} sh ./line < /dev/null")).unwrap()
    };
    let before = alice("vgpuctl types");
    assert_eq!(before.status, 6, "she is in no group yet: {before:?}");
    sh(machine, command("usermod"));
    let doctor = alice(command("vgpuctl doctor"));
    assert!(!doctor.stdout.contains("permission"), "{doctor:?}");
    for start in ["vgpuctl types", "vgpuctl define", "vgpuctl start"] {
        let output = alice(command(start));
        assert_eq!(output.status, 0, "{start}: {output:?}");
    }
    // The disk is empty, and QEMU does not run it.
    let qemu = command("eval qemu-system-x86_64");
    let line = format!(
        "truncate -s 64M disk.qcow2; ({}) > qemu.log 2>&1 &\n",
        qemu.replace("-drive", "-S -display none -drive")
    );
    let started = alice(&line);
    assert_eq!(started.status, 0, "{started:?}");
    let attached = "vgpuctl list web1 --output json | grep -q '\"uid\": '$(id -u alice)";
    eventually(machine, "alice's VM is attached", attached);
    sh(machine, "pkill -u alice qemu-system");
    eventually(machine, "her VM has ended", "vgpuctl stop web1");
    assert_eq!(alice("vgpuctl undefine web1").status, 0);
}

#[test]
#[ignore = "starts a Debian machine: cargo lab test runs it"]
fn the_package_works_upgrades_purges_and_installs_again() {
    if let Some(reason) = Machine::impossible() {
        skipped(&format!("a Debian machine: {reason}"));
        return;
    }
    let (scratch, package) = built();
    completions_complete(scratch.path(), &package);
    let machine = Machine::start(&Progress::new()).unwrap();
    machine.install(&package, PACKAGE).unwrap();
    let install = format!("dpkg -i {PACKAGE}");

    // Installed: groups, folders, units; the daemon answers.
    sh(&machine, &install);
    for name in ["vgpu", "vgpu-admin", "vgpud"] {
        sh(&machine, &format!("getent group {name}"));
    }
    eventually(&machine, "vgpud runs", "systemctl is-active vgpud.service vgpud.socket");
    let modes = "stat -c '%a %U %G' /run/vgpud /run/vgpud/control.sock /var/lib/vgpud";
    assert_eq!(sh(&machine, modes), "711 root root\n660 root vgpu\n700 root root\n");
    sh(&machine, "systemd-analyze verify --man=no vgpud.service vgpud.socket");
    let exposure = sh(&machine, "systemd-analyze security --no-pager vgpud.service | tail -1");
    println!("{}", exposure.trim());
    let number = exposure.split_whitespace().find_map(|word| word.parse::<f64>().ok()).unwrap();
    assert!(number * 10.0 <= f64::from(MOST_EXPOSURE), "{exposure}");

    // Under the unit's restrictions: a vGPU for libvirt's user, in an unprivileged process.
    let uuid = sh(&machine, "vgpuctl define -t SOFT-256MQ --attr core=50").trim().to_owned();
    sh(&machine, &format!("vgpuctl start -u {uuid}"));
    let vgpu = json(&machine, "vgpuctl list --output json");
    let worker = vgpu[0]["pid"].clone();
    let owner = sh(&machine, &format!("stat -c %U /run/vgpud/vgpus/{uuid}/vfio.sock"));
    assert_eq!(owner.trim(), "libvirt-qemu");
    let user: u32 = field(&machine, &worker, "Uid").parse().unwrap();
    assert!(UidRange::WORKERS.contains(user), "the worker has a user of its own: {user}");
    let group = sh(&machine, "id -g vgpud");
    assert_eq!(field(&machine, &worker, "Gid"), group.trim());
    assert_eq!(field(&machine, &worker, "CapEff"), "0000000000000000");
    assert_eq!(field(&machine, &worker, "Seccomp"), "2", "filters apply to the worker");
    let protected = sh(&machine, &format!("cat /proc/{worker}/oom_score_adj"));
    assert_eq!(protected.trim(), "0", "the manager's protection is not the worker's");
    let groups = in_groups_of_their_own(&machine, &uuid);
    sh(&machine, &format!("vgpuctl modify -u {uuid} --live --attr core=20"));
    let log = sh(&machine, "journalctl --no-pager -u vgpud");
    for line in log.lines() {
        assert!(!line.contains(" WARN ") && !line.contains(" ERROR "), "{line}");
    }

    upgrades_under_a_running_vgpu(&machine, &install, &uuid, &worker, &groups);

    // The doctor reports only what this machine lacks.
    let Output { stdout, .. } = machine.run("vgpuctl doctor --output json").unwrap();
    let findings: Vec<Value> = serde_json::from_str(&stdout).unwrap();
    for finding in &findings {
        assert_ne!(finding["level"], "problem", "{finding}");
    }
    // Called as mdevctl.
    assert_eq!(sh(&machine, "lsvgpu"), sh(&machine, "vgpuctl list"));
    let documents = "cd /usr/share/doc/tessera && test -e README.md && test -e docs/console.md && \
                     test -e LICENSE-APACHE && test -e LICENSE-MIT";
    sh(&machine, &format!("test -e /usr/share/man/man1/lsvgpu.1.gz && {documents}"));
    // Manual pages exist and format without warnings.
    let pages = sh(&machine, "dpkg -L tessera | grep /man/ | grep -c '\\.gz$'");
    assert!(pages.trim().parse::<u32>().unwrap() >= 15, "{pages} pages");

    serves_an_ordinary_user(&machine);
    starts_again_after_a_mistake_in_its_settings(&machine);
    removes_purges_and_installs_again(&machine, &uuid, &install);
}

/// An upgrade brings workers of the new release, and no request is lost. A manager that is killed
/// is followed by one that adopts the worker.
fn upgrades_under_a_running_vgpu(
    machine: &Machine,
    install: &str,
    uuid: &str,
    worker: &Value,
    groups: &str,
) {
    let first = sh(machine, "systemctl show -P MainPID vgpud");
    sh(machine, install);
    let second = sh(machine, "systemctl show -P MainPID vgpud");
    assert_ne!(first, second, "an upgrade starts the new manager");
    let vgpu = json(machine, "vgpuctl list --output json");
    let upgraded = vgpu[0]["pid"].clone();
    assert_eq!(vgpu[0]["uuid"], uuid);
    assert_ne!(&upgraded, worker, "the package's script upgrades workers");
    let program = sh(machine, &format!("readlink /proc/{upgraded}/exe"));
    assert!(program.starts_with("/memfd:vgpud"), "{program}");
    let worker = upgraded;
    sh(machine, "kill -9 $(systemctl show -P MainPID vgpud)");
    let adopted = format!("vgpuctl list | grep -q {uuid}");
    eventually(machine, "vgpud is started again", &adopted);
    assert_eq!(json(machine, "vgpuctl list --output json")[0]["pid"], worker);
    assert_eq!(in_groups_of_their_own(machine, uuid), groups);
}

/// A mistake in the settings is in the doctor's findings, and `vgpud` starts once it is mended.
fn starts_again_after_a_mistake_in_its_settings(machine: &Machine) {
    let settings = "/etc/default/vgpud";
    sh(machine, &format!("cp {settings} /root/settings"));
    sh(
        machine,
        &format!("sed -i 's/soft:soft0/sofd:soft0/' {settings}; ! systemctl restart vgpud"),
    );
    // systemd's default limit is five starts in ten seconds.
    let tried = "test $(systemctl show -P NRestarts vgpud) -ge 7";
    eventually(machine, "vgpud is started again and again", tried);
    sh(machine, "systemctl is-active vgpud.socket");
    let Output { status, stdout, .. } = machine.run("vgpuctl doctor --output json").unwrap();
    let findings: Vec<Value> = serde_json::from_str(&stdout).unwrap();
    let about = findings.iter().find(|finding| finding["check"] == "vgpud").unwrap();
    let what = about["what"].as_str().unwrap();
    assert_eq!(status, 1, "{stdout}");
    assert!(what.contains("The last error in its log: vgpud: ") && what.contains("sofd"), "{what}");
    let waits = machine.run("timeout 8 vgpuctl types").unwrap();
    assert!(waits.stderr.contains("`vgpuctl doctor` shows the last error"), "{waits:?}");
    sh(machine, &format!("cp /root/settings {settings}"));
    eventually(machine, "vgpud answers", "timeout 1 vgpuctl types");
}

/// Returns the control groups in that of the service, which are those of its processes.
fn in_groups_of_their_own(machine: &Machine, uuid: &str) -> String {
    let service = "/sys/fs/cgroup/system.slice/vgpud.service";
    let groups = sh(machine, &format!("cd {service} && ls -d */"));
    assert_eq!(groups, format!("context-{uuid}/\ngpu-soft0/\nmanager/\nworker-{uuid}/\n"));
    for group in groups.lines() {
        let members = sh(machine, &format!("cat {service}/{group}cgroup.procs"));
        // A worker has an anchor.
        let expected = if group.starts_with("worker-") { 2 } else { 1 };
        assert_eq!(members.lines().count(), expected, "{group}: {members}");
    }
    groups
}

/// Removed: settings and definitions stay. Purged: they are gone, as is everything that ran.
/// Installed again: as new.
fn removes_purges_and_installs_again(machine: &Machine, uuid: &str, install: &str) {
    let hook = "/etc/libvirt/hooks/qemu.d/tessera";
    let rules = "/etc/apparmor.d/local/abstractions/libvirt-qemu";
    let abstractions = "/etc/apparmor.d/abstractions";
    sh(machine, &format!("mkdir -p {abstractions} && touch {abstractions}/libvirt-qemu"));
    sh(machine, &format!("vgpuctl libvirt install-hook && test -x {hook} && test -e {rules}"));
    sh(machine, "echo '# mine' >> /etc/default/vgpud");
    sh(machine, "dpkg -r tessera");
    sh(machine, &format!("test ! -e /usr/bin/vgpud && test -e /var/lib/vgpud/soft0/{uuid}"));
    sh(machine, &format!("test ! -e {hook} && test ! -e {rules}"));
    sh(machine, &format!("dpkg --force-confold -i {PACKAGE} && grep -q mine /etc/default/vgpud"));
    eventually(machine, "the definition is restored", &format!("vgpuctl list -d | grep -q {uuid}"));
    let drop_ins = "/etc/systemd/system/vgpud.service.d";
    sh(machine, &format!("mkdir -p {drop_ins} && touch {drop_ins}/parent-0000:3b:00.0.conf"));
    // A worker without a VM ends half a minute after its manager.
    sh(machine, &format!("vgpuctl start -u {uuid} || vgpuctl list | grep -q {uuid}"));
    sh(machine, "dpkg -r tessera && pgrep vgpu-worker");
    sh(machine, "dpkg -P tessera");
    let running = "pgrep -l 'vgpu|gpu-'; test -z \"$(pgrep 'vgpu|gpu-')\"";
    eventually(machine, "nothing runs", running);
    let left = "for path in /etc/default/vgpud /var/lib/vgpud /run/vgpud /usr/share/doc/tessera \
                /etc/systemd/system/vgpud.service.d \
                /usr/lib/systemd/system/vgpud.service; do test ! -e $path || echo $path; done";
    assert_eq!(sh(machine, left), "");
    sh(machine, install);
    eventually(machine, "vgpud answers", "vgpuctl types");
    assert_eq!(sh(machine, "vgpuctl list -d"), "");
}

/// Debian's packaging checkers. Findings must be fixed or overridden with a reason.
#[test]
#[ignore = "fetches Debian's checkers: cargo lab test runs it"]
fn debians_checkers_find_nothing() {
    if let Some(reason) = Checkers::impossible() {
        skipped(&format!("Debian's checkers of packages: {reason}"));
        return;
    }
    let (scratch, package) = built();
    let checkers = Checkers::open(&Progress::new()).unwrap();
    let name = package.file_name().unwrap().to_str().unwrap();
    let check = |what: &str, script: &str| {
        let Output { status, stdout, stderr } = checkers.run(scratch.path(), script).unwrap();
        assert_eq!((stdout.trim(), stderr.trim(), status), ("", "", 0), "{what}");
    };
    check(
        "lintian",
        &format!("lintian --allow-root --fail-on error,warning,info --display-info ./{name}"),
    );
    let pages = "dpkg-deb -x ./NAME /tmp/root && cd /tmp/root/usr/share/man && \
                 for page in man*/*.gz; do zcat $page > ${page%.gz}; done && rm man*/*.gz && \
                 mandoc -T lint -W warning man*/* && ls man1/lsvgpu.1 > /dev/null";
    check("mandoc", &pages.replace("NAME", name));
}

/// The AppArmor profile of a domain compiles with our rules and contains them. Kernels here do not
/// enforce it.
#[test]
#[ignore = "fetches Debian's checkers: cargo lab test runs it"]
fn the_apparmor_profile_of_a_domain_has_our_rules() {
    if let Some(reason) = Checkers::impossible() {
        skipped(&format!("AppArmor's compiler: {reason}"));
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let abstractions = scratch.path().join("etc/apparmor.d/abstractions");
    fs::create_dir_all(&abstractions).unwrap();
    fs::write(abstractions.join("libvirt-qemu"), "").unwrap();
    let vgpuctl = system_tests::vgpuctl::path().unwrap();
    let install = Command::new(vgpuctl)
        .args(["libvirt", "install-hook", "--root"])
        .arg(scratch.path())
        .output()
        .unwrap();
    assert!(install.status.success(), "{install:?}");
    let checkers = Checkers::open(&Progress::new()).unwrap();
    let compile = "cp -r /etc/apparmor.d /tmp/d && \
        cp -r etc/apparmor.d/local/abstractions /tmp/d/local/ && \
        sed s/LIBVIRT_TEMPLATE/libvirt-vm/ /tmp/d/libvirt/TEMPLATE.qemu > /tmp/d/vm && \
        apparmor_parser --base /tmp/d --skip-kernel-load --skip-cache /tmp/d/vm && \
        apparmor_parser --base /tmp/d --preprocess /tmp/d/vm";
    let Output { status, stdout, stderr } = checkers.run(scratch.path(), compile).unwrap();
    assert_eq!(status, 0, "{stderr}");
    let rules: Vec<_> = stdout.lines().map(str::trim).collect();
    for rule in ["/run/vgpud/vgpus/*/vfio.sock rw,", "/dev/nvidia[0-9]* rw,"] {
        assert!(rules.contains(&rule), "{rule} is not in the profile");
    }
    // libvirtd may run the hook, and the hook may run vgpuctl outside libvirtd's profile.
    let may = "grep -c -e '/etc/libvirt/hooks/\\*\\* rmix,' -e ' /usr/bin/\\* PUx,' \
        /etc/apparmor.d/usr.sbin.libvirtd";
    let Output { stdout, .. } = checkers.run(scratch.path(), may).unwrap();
    assert_eq!(stdout.trim(), "2", "libvirtd's profile lets hooks run");
}

/// Tests the package's completions in a real bash.
fn completions_complete(scratch: &Path, package: &Path) {
    let root = scratch.join("root");
    let unpack = Command::new("dpkg-deb").arg("-x").arg(package).arg(&root).status().unwrap();
    assert!(unpack.success());
    let script = root.join("usr/share/bash-completion/completions/vgpuctl");
    let complete = |words: &[&str]| {
        let line = words.join(" ");
        let body = format!(
            "source {}; COMP_WORDS=({line}); COMP_CWORD={}; COMP_LINE='{line}'; COMP_POINT={}; \
             _vgpuctl vgpuctl \"{}\" \"{}\"; echo \"${{COMPREPLY[@]}}\"",
            script.display(),
            words.len() - 1,
            line.len(),
            words[words.len() - 1],
            words[words.len() - 2],
        );
        let output = Command::new("bash").args(["--norc", "-c", &body]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(complete(&["vgpuctl", "doc"]).trim(), "doctor");
    let starts = complete(&["vgpuctl", "sta"]);
    assert!(starts.contains("start") && starts.contains("stats"), "{starts}");
    assert!(complete(&["vgpuctl", "start", "--o"]).contains("--owner"));
    assert_eq!(complete(&["vgpuctl", "scheduler", "--policy", "fix"]).trim(), "fixed-share");
    assert!(fs::metadata(root.join("usr/share/man/man8/vgpud.8.gz")).unwrap().len() > 500);
}
