//! Checks of `vgpud`, groups, libvirt's hook and confinement, and stale run directories.

use std::process::Command;

use mdev_core::untrusted::one_line;
use serde_json::Value;
use vgpud_api::Version;
use vgpud_host::users::Users;

use host_inventory::{Finding, HostFiles};
use vgpud_client::ClientError;
use vgpud_client::error::{ADMINS, READERS, usermod};

const DAEMON: &str = "vgpud";
const GROUPS: &str = "groups";
const LIBVIRT: &str = "libvirt";
const STALE: &str = "stale";

/// Minimum limit of open files. A worker has a descriptor for each range of guest memory; a GPU
/// process has one for each range of all guests.
const MIN_OPEN_FILES: u64 = 65_536;

/// Limit of a quoted line of the log, in characters.
const MAX_QUOTE: usize = 300;

/// Runs the checks. `answer` is the manager's response to a request for its version.
pub fn check(host: &HostFiles, answer: Result<Version, ClientError>) -> Vec<Finding> {
    let runs = answer.is_ok();
    let mut findings = vec![reachable(host, answer)];
    findings.extend(files(host));
    findings.extend(groups(host));
    findings.extend(hook(host));
    findings.extend(confinement(host));
    findings.extend(stale(host, runs));
    findings
}

fn reachable(host: &HostFiles, answer: Result<Version, ClientError>) -> Finding {
    let own = env!("CARGO_PKG_VERSION");
    match answer {
        Ok(Version { version, pid, .. }) if version == own => {
            Finding::ok(DAEMON, format!("vgpud {version} answers (process {pid})"))
        }
        Ok(Version { version, .. }) => Finding::warning(
            DAEMON,
            format!("vgpud has version {version}, but vgpuctl has {own}"),
            "systemctl restart vgpud (VMs keep running)",
        ),
        Err(
            failure @ (ClientError::Unreachable { .. }
            | ClientError::Closed { .. }
            | ClientError::InvalidResponse { .. }),
        ) => silent(host, &failure),
        Err(ClientError::PermissionDenied { user, .. }) => {
            let command = usermod(&Users::in_root(host.root()), None, user);
            Finding::problem(
                DAEMON,
                format!("User {user} may not use vgpud"),
                format!("{command}, as root ({READERS} alone to read); then log in again"),
            )
        }
        Err(other) => Finding::problem(
            DAEMON,
            format!("A request to vgpud failed: {other}"),
            "see its log: journalctl -u vgpud",
        ),
    }
}

/// Reports a manager that does not answer, with the last error of its log.
fn silent(host: &HostFiles, failure: &ClientError) -> Finding {
    let what = match failure {
        ClientError::Unreachable { socket, reason } => {
            format!("vgpud does not answer at {}: {reason}", socket.display())
        }
        other => other.to_string(),
    };
    match last_error(host) {
        Some(error) => Finding::problem(
            DAEMON,
            format!("{what}. The last error in its log: {error}"),
            "mend the cause, often in /etc/default/vgpud: systemd starts vgpud again each second",
        ),
        None => Finding::problem(
            DAEMON,
            what,
            "systemctl enable --now vgpud.socket vgpud.service, or run it: vgpud run; \
             its log: journalctl -u vgpud",
        ),
    }
}

/// Returns the last error in the service's log since the host's boot, if the caller may read it.
fn last_error(host: &HostFiles) -> Option<String> {
    let mut journal = Command::new(host.path("usr/bin/journalctl"));
    journal.args(["--quiet", "--no-pager", "--boot", "--unit=vgpud", "--identifier=vgpud"]);
    let output = journal.args(["--output=cat", "--lines=500"]).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut errors = text.lines().filter(|line| line.starts_with("vgpud: ") || is_error(line));
    Some(one_line(errors.next_back()?, MAX_QUOTE))
}

/// Returns whether the logger wrote a line at the level of errors: `[TIME ERROR MODULE] TEXT`.
fn is_error(line: &str) -> bool {
    line.starts_with('[') && line.split_whitespace().nth(1) == Some("ERROR")
}

/// Checks the limit of open files of the manager's process.
fn files(host: &HostFiles) -> Option<Finding> {
    let hard = host.limit_of_vgpud("Max open files")?;
    let enough = hard == "unlimited" || hard.parse::<u64>().is_ok_and(|n| n >= MIN_OPEN_FILES);
    let what = format!("vgpud's limit of open files is {hard}");
    Some(if enough {
        Finding::ok(DAEMON, what)
    } else {
        let what = format!("{what}, which is too low for guests with much memory");
        let fix = "set LimitNOFILE=1048576 in the unit (systemctl edit vgpud), then restart vgpud";
        Finding::warning(DAEMON, what, fix)
    })
}

fn groups(host: &HostFiles) -> Vec<Finding> {
    let users = Users::in_root(host.root());
    let mut findings = Vec::new();
    for name in [READERS, ADMINS] {
        if users.group(name).is_none() {
            findings.push(Finding::warning(
                GROUPS,
                format!("There is no group {name}: only root can use vgpud"),
                format!("groupadd --system {name}, then systemctl restart vgpud.socket vgpud"),
            ));
        }
    }
    let member = |name: &str| users.group(name).is_some_and(|gid| host.gids.contains(&gid));
    if findings.is_empty() && host.uid != 0 {
        findings.push(match (member(READERS), member(ADMINS)) {
            (true, true) => Finding::ok(GROUPS, format!("User {} may change vGPUs", host.uid)),
            (true, false) => Finding::ok(GROUPS, format!("User {} may view vGPUs", host.uid)),
            (false, _) => Finding::problem(
                GROUPS,
                format!("User {} is not in group {READERS}", host.uid),
                format!("{}, as root; then log in again", usermod(&users, None, host.uid)),
            ),
        });
    }
    findings
}

fn hook(host: &HostFiles) -> Option<Finding> {
    if !host.has("etc/libvirt/qemu.conf") {
        return None;
    }
    Some(if host.has("etc/libvirt/hooks/qemu.d/tessera") {
        Finding::ok(LIBVIRT, "libvirt's hook is installed")
    } else {
        Finding::warning(
            LIBVIRT,
            "libvirt is installed without Tessera's hook: vGPUs do not start with their domains",
            "vgpuctl libvirt install-hook, as root; see docs/libvirt.md",
        )
    })
}

/// Checks AppArmor's rules for libvirt's QEMU.
fn confinement(host: &HostFiles) -> Option<Finding> {
    let enforced = host.read("sys/module/apparmor/parameters/enabled")?;
    if !enforced.starts_with('Y') || !host.has("etc/apparmor.d/abstractions/libvirt-qemu") {
        return None;
    }
    let rules = host.read("etc/apparmor.d/local/abstractions/libvirt-qemu").unwrap_or_default();
    let mut rules = rules.lines().map(str::trim).filter(|line| !line.starts_with('#'));
    Some(if rules.any(|line| line.contains("/vgpus/*/vfio.sock")) {
        Finding::ok(LIBVIRT, "AppArmor lets QEMU use the sockets of vGPUs")
    } else {
        Finding::problem(
            LIBVIRT,
            "AppArmor denies libvirt's QEMU the sockets of vGPUs: VMs with a vGPU will not start",
            "vgpuctl libvirt install-hook, as root, adds the rule for the next start of a VM",
        )
    })
}

/// Finds run directories of exited processes. A running manager removes them itself.
fn stale(host: &HostFiles, runs: bool) -> Vec<Finding> {
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
                format!("/{folder} belongs to a process that has exited"),
                "start vgpud, which removes the folder and restarts the vGPUs",
            ));
        }
    }
    findings
}
