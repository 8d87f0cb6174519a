//! Is there a QEMU that can attach a vGPU?

use super::Finding;
use super::host::{Host, output};

const CHECK: &str = "qemu";

/// Where distributions put it.
const PLACES: [&str; 3] =
    ["usr/bin/qemu-system-x86_64", "usr/local/bin/qemu-system-x86_64", "usr/libexec/qemu-kvm"];

/// The first with a vfio-user client.
const OLDEST: (u32, u32) = (10, 1);

const INSTALL: &str =
    "install QEMU 10.1 or newer; on Debian 13: apt install -t trixie-backports qemu-system-x86";

/// Every QEMU that is there; at least one must do.
pub fn check(host: &Host) -> Vec<Finding> {
    let there = PLACES.iter().filter(|place| host.has(place));
    let findings: Vec<_> = there.map(|place| one(host, place)).collect();
    if findings.is_empty() {
        return vec![Finding::problem(CHECK, "There is no QEMU", INSTALL)];
    }
    findings
}

fn one(host: &Host, place: &str) -> Finding {
    let program = host.path(place);
    let said = output(&program, &["--version"]);
    let Some((text, number)) = said.as_deref().and_then(version) else {
        return Finding::problem(CHECK, format!("/{place} does not run"), INSTALL);
    };
    if number < OLDEST {
        let what = format!("QEMU {text} (/{place}) is older than 10.1 and knows no vfio-user");
        return Finding::problem(CHECK, what, INSTALL);
    }
    let devices = output(&program, &["-device", "help"]).unwrap_or_default();
    if !devices.contains("\"vfio-user-pci\"") {
        let what = format!("QEMU {text} (/{place}) is built without vfio-user-pci");
        return Finding::problem(
            CHECK,
            what,
            "install a QEMU whose `-device help` has vfio-user-pci, as Debian's has",
        );
    }
    Finding::ok(CHECK, format!("QEMU {text} (/{place}) has vfio-user-pci"))
}

/// "QEMU emulator version 11.1.3 (Debian ...)"
fn version(text: &str) -> Option<(&str, (u32, u32))> {
    let version = text.split_once("version ")?.1.split_whitespace().next()?;
    let mut numbers = version.split('.').map(str::parse);
    Some((version, (numbers.next()?.ok()?, numbers.next()?.ok()?)))
}
