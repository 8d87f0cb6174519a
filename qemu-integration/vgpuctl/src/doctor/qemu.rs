//! Checks of installed QEMU versions.

use std::path::Path;
use std::process::Command;

use host_inventory::{Finding, HostFiles};

const CHECK: &str = "qemu";

/// Paths of QEMU in distributions.
const PATHS: [&str; 3] =
    ["usr/bin/qemu-system-x86_64", "usr/local/bin/qemu-system-x86_64", "usr/libexec/qemu-kvm"];

/// First version with a vfio-user client.
const MIN_VERSION: (u32, u32) = (10, 1);

const INSTALL: &str = "install QEMU 10.1 or newer; on Debian 13, which has 10.0, as root: \
    echo 'deb http://deb.debian.org/debian trixie-backports main' \
    > /etc/apt/sources.list.d/backports.list && apt update && \
    apt install -t trixie-backports qemu-system-x86";

/// Checks every installed QEMU.
pub fn check(host: &HostFiles) -> Vec<Finding> {
    let installed = PATHS.iter().filter(|path| host.has(path));
    let findings: Vec<_> = installed.map(|path| check_one(host, path)).collect();
    if findings.is_empty() {
        return vec![Finding::problem(CHECK, "There is no QEMU", INSTALL)];
    }
    findings
}

fn check_one(host: &HostFiles, path: &str) -> Finding {
    let program = host.path(path);
    let text = output(&program, &["--version"]);
    let Some((text, number)) = text.as_deref().and_then(version) else {
        return Finding::problem(CHECK, format!("/{path} does not run"), INSTALL);
    };
    if number < MIN_VERSION {
        let what =
            format!("QEMU {text} (/{path}) is older than 10.1 and does not support vfio-user");
        return Finding::problem(CHECK, what, INSTALL);
    }
    let devices = output(&program, &["-device", "help"]).unwrap_or_default();
    if !devices.contains("\"vfio-user-pci\"") {
        let what = format!("QEMU {text} (/{path}) is built without vfio-user-pci");
        return Finding::problem(
            CHECK,
            what,
            "install a QEMU whose `-device help` lists vfio-user-pci, for example Debian's",
        );
    }
    Finding::ok(CHECK, format!("QEMU {text} (/{path}) has vfio-user-pci"))
}

/// Parses the version in a text such as "QEMU emulator version 11.1.3 (Debian ...)".
fn version(text: &str) -> Option<(&str, (u32, u32))> {
    let version = text.split_once("version ")?.1.split_whitespace().next()?;
    let mut numbers = version.split('.').map(str::parse);
    Some((version, (numbers.next()?.ok()?, numbers.next()?.ok()?)))
}

/// Returns the output of a program, or `None` if the program fails.
fn output(program: &Path, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}
