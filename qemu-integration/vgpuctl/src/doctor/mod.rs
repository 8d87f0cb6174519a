//! `doctor`: what on this host stands between a VM and its vGPU, and how to mend it.
//!
//! Each check looks at files below a root, so that a test can build a host that is wrong in just one way, and says in
//! [`Finding`]s what it saw. It changes nothing.
//!
//! * [`host`]: the host: its files, processes and programs, and who asks
//! * [`qemu`]: is there a QEMU that can attach a vGPU
//! * [`vms`]: do the VMs that run let the GPU reach their memory
//! * [`devices`]: KVM, NVIDIA's driver, devices under vfio-pci, huge pages
//! * [`daemon`]: `vgpud`: running, reachable, with enough descriptors; groups; libvirt's hook and confinement; what dead ones left

mod daemon;
mod devices;
mod host;
mod qemu;
#[cfg(test)]
mod tests;
mod vms;

use std::fmt::Write as _;

use serde::Serialize;
use vfio_user_server::api::model::Version;

use crate::cli::{Doctor, Output};
use crate::client::Client;
use crate::failure::Failure;
use crate::mdevctl::pretty;
use host::Host;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Works, or will not for some.
    Warning,
    /// Does not work.
    Problem,
}

/// What a check saw.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Which check: a word that does not change.
    pub check: &'static str,
    /// How bad it is.
    pub level: Level,
    /// What was seen, in one line.
    pub what: String,
    /// What to do about it, in one line; nothing where all is well.
    pub fix: Option<String>,
}

impl Finding {
    fn ok(check: &'static str, what: impl Into<String>) -> Self {
        Self { check, level: Level::Ok, what: what.into(), fix: None }
    }

    fn warning(check: &'static str, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { check, level: Level::Warning, what: what.into(), fix: Some(fix.into()) }
    }

    fn problem(check: &'static str, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { check, level: Level::Problem, what: what.into(), fix: Some(fix.into()) }
    }
}

/// `doctor`
pub async fn doctor(client: &Client, args: Doctor) -> Result<Vec<u8>, Failure> {
    let host = Host::new(args.root);
    let answer = client.get::<Version>("/v1/version").await;
    let findings = examine(&host, answer);
    let output = match args.output {
        Output::Json => pretty(&findings)?,
        Output::Text => text(&findings).into_bytes(),
    };
    let problems = findings.iter().filter(|one| one.level == Level::Problem).count();
    if problems == 0 { Ok(output) } else { Err(Failure::Found { output, problems }) }
}

/// All checks.
fn examine(host: &Host, answer: Result<Version, Failure>) -> Vec<Finding> {
    let mut findings = qemu::check(host);
    findings.extend(devices::check(host));
    findings.extend(vms::check(host));
    findings.extend(daemon::check(host, answer));
    findings
}

fn text(findings: &[Finding]) -> String {
    let mut text = String::new();
    for Finding { check, level, what, fix } in findings {
        let level = match level {
            Level::Ok => "ok",
            Level::Warning => "warning",
            Level::Problem => "PROBLEM",
        };
        // A String takes whatever is written to it.
        let _ = writeln!(text, "{level:<8} {check:<8} {what}");
        if let Some(fix) = fix {
            let _ = writeln!(text, "{:17} fix: {fix}", "");
        }
    }
    text
}
