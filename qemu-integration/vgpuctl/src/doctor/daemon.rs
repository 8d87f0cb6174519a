//! `vgpud`: running, reachable, with enough descriptors; the groups; libvirt's hook and confinement; what dead ones left.

use serde_json::Value;
use vfio_user_server::api::model::Version;

use super::Finding;
use super::host::Host;
use crate::failure::Failure;

const DAEMON: &str = "vgpud";
const GROUPS: &str = "groups";
const LIBVIRT: &str = "libvirt";
const STALE: &str = "stale";

const READERS: &str = "vgpu";
const ADMINS: &str = "vgpu-admin";

/// Workers have a descriptor for each piece of guest memory, and software GPUs for each of all of their guests.
const ENOUGH_FILES: u64 = 65_536;

/// All of them. `answer` is what the manager says when asked for its version.
pub fn check(host: &Host, answer: Result<Version, Failure>) -> Vec<Finding> {
    let runs = answer.is_ok();
    let mut findings = vec![reachable(answer)];
    findings.extend(files(host));
    findings.extend(groups(host));
    findings.extend(hook(host));
    findings.extend(confinement(host));
    findings.extend(stale(host, runs));
    findings
}

fn reachable(answer: Result<Version, Failure>) -> Finding {
    let own = env!("CARGO_PKG_VERSION");
    match answer {
        Ok(Version { version, pid, .. }) if version == own => {
            Finding::ok(DAEMON, format!("vgpud {version} answers (process {pid})"))
        }
        Ok(Version { version, .. }) => Finding::warning(
            DAEMON,
            format!("vgpud is version {version}, and vgpuctl {own}"),
            "systemctl restart vgpud (VMs go on)",
        ),
        Err(Failure::Unreachable { socket, reason }) => Finding::problem(
            DAEMON,
            format!("vgpud does not answer at {}: {reason}", socket.display()),
            "systemctl enable --now vgpud.socket vgpud.service, or run it: vgpud run",
        ),
        Err(Failure::NotForUs { user, .. }) => Finding::problem(
            DAEMON,
            format!("User {user} may not use vgpud"),
            format!(
                "usermod -aG {READERS} USER to look, {READERS},{ADMINS} to change; then log in again"
            ),
        ),
        Err(other) => Finding::problem(
            DAEMON,
            format!("vgpud cannot be asked: {other}"),
            "see its log: journalctl -u vgpud",
        ),
    }
}

/// The hard limit of that name of the manager's process, which those that it starts have too.
pub fn limit_of_vgpud(host: &Host, name: &str) -> Option<String> {
    let pid = host.read("run/vgpud/lock")?;
    let limits = host.read(&format!("proc/{}/limits", pid.trim()))?;
    let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.split_whitespace().nth(1)?.to_owned())
}

/// Open files that the manager's process may have.
fn files(host: &Host) -> Option<Finding> {
    let hard = limit_of_vgpud(host, "Max open files")?;
    let enough = hard == "unlimited" || hard.parse::<u64>().is_ok_and(|n| n >= ENOUGH_FILES);
    let what = format!("vgpud's processes may have {hard} files open");
    Some(if enough {
        Finding::ok(DAEMON, what)
    } else {
        let what = format!("{what}: too few for guests with much memory");
        let fix = "put LimitNOFILE=1048576 into the unit (systemctl edit vgpud), then restart it";
        Finding::warning(DAEMON, what, fix)
    })
}

fn groups(host: &Host) -> Vec<Finding> {
    let mut findings = Vec::new();
    for name in [READERS, ADMINS] {
        if host.users.group(name).is_none() {
            findings.push(Finding::warning(
                GROUPS,
                format!("There is no group {name}: root alone can use vgpud"),
                format!("groupadd --system {name}, then systemctl restart vgpud.socket vgpud"),
            ));
        }
    }
    let member = |name: &str| host.users.group(name).is_some_and(|gid| host.gids.contains(&gid));
    if findings.is_empty() && host.uid != 0 {
        findings.push(match (member(READERS), member(ADMINS)) {
            (true, true) => Finding::ok(GROUPS, format!("User {} may change vGPUs", host.uid)),
            (true, false) => Finding::ok(GROUPS, format!("User {} may look at vGPUs", host.uid)),
            (false, _) => Finding::problem(
                GROUPS,
                format!("User {} is not in group {READERS}", host.uid),
                format!("usermod -aG {READERS} USER, then log in again"),
            ),
        });
    }
    findings
}

fn hook(host: &Host) -> Option<Finding> {
    if !host.has("etc/libvirt/qemu.conf") {
        return None;
    }
    Some(if host.has("etc/libvirt/hooks/qemu.d/tessera") {
        Finding::ok(LIBVIRT, "libvirt's hook is installed")
    } else {
        Finding::warning(
            LIBVIRT,
            "libvirt is here without our hook: vGPUs are not started with their domains",
            "vgpuctl libvirt install-hook, as root; see docs/libvirt.md",
        )
    })
}

/// What AppArmor lets libvirt's QEMU reach.
fn confinement(host: &Host) -> Option<Finding> {
    let enforced = host.read("sys/module/apparmor/parameters/enabled")?;
    if !enforced.starts_with('Y') || !host.has("etc/apparmor.d/abstractions/libvirt-qemu") {
        return None;
    }
    let rules = host.read("etc/apparmor.d/local/abstractions/libvirt-qemu").unwrap_or_default();
    let mut rules = rules.lines().map(str::trim).filter(|line| !line.starts_with('#'));
    Some(if rules.any(|line| line.contains("/vgpus/*/vfio.sock")) {
        Finding::ok(LIBVIRT, "AppArmor lets QEMU reach its vGPU's socket")
    } else {
        Finding::problem(
            LIBVIRT,
            "AppArmor keeps libvirt's QEMU from its vGPU's socket: its VM will not start",
            "vgpuctl libvirt install-hook, as root, adds the rule; it counts from a VM's next start on",
        )
    })
}

/// Folders whose process is gone. A manager that runs clears them away itself.
fn stale(host: &Host, runs: bool) -> Vec<Finding> {
    if runs {
        return Vec::new();
    }
    let mut findings = Vec::new();
    for kind in ["vgpus", "parents"] {
        for name in host.names(&format!("run/vgpud/{kind}")) {
            let folder = format!("run/vgpud/{kind}/{name}");
            let run = host.read(&format!("{folder}/run.json"));
            let run: Value = serde_json::from_str(&run.unwrap_or_default()).unwrap_or_default();
            let pid = run["process"]["pid"].as_u64();
            if pid.is_some_and(|pid| host.has(&format!("proc/{pid}"))) {
                continue;
            }
            findings.push(Finding::warning(
                STALE,
                format!("/{folder} is left of a process that has ended"),
                "start vgpud: it clears that away, and starts again what ran",
            ));
        }
    }
    findings
}
