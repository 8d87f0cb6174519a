//! `doctor`: checks of this host, with a fix for each problem.
//!
//! Checks read files below a root directory, so that tests can create hosts with one defect each.
//! Checks return [`Finding`]s and change nothing.
//!
//! * [`qemu`]: installed QEMU versions and their vfio-user support
//! * [`vms`]: memory and CPU models of running VMs with vGPUs
//! * [`devices`]: KVM, the GPUs of all backends, huge pages
//! * [`daemon`]: `vgpud`, groups, libvirt's hook and confinement, stale run directories

mod daemon;
mod devices;
mod qemu;
#[cfg(test)]
mod tests;
mod vms;

use std::time::Duration;

use host_inventory::{Finding, HostFiles, finding};
use vgpud_api::Version;

use crate::cli::{Doctor, Output};
use crate::failure::Failure;
use crate::mdevctl::pretty;
use vgpud_client::{Client, ClientError};

/// Timeout of the request to vgpud. systemd accepts connections for a vgpud that cannot start.
const ANSWER_LIMIT: Duration = Duration::from_secs(3);

/// Runs `doctor`.
pub async fn doctor(client: &Client, args: Doctor) -> Result<Vec<u8>, Failure> {
    let host = HostFiles::new(args.root);
    let answer = client.with_limit(ANSWER_LIMIT).get::<Version>("/v1/version").await;
    let findings = examine(&host, answer);
    let output = match args.output {
        Output::Json => pretty(&findings)?,
        Output::Text => finding::text(&findings).into_bytes(),
    };
    let problems = finding::problems(&findings);
    if problems == 0 { Ok(output) } else { Err(Failure::Found { output, problems }) }
}

/// Runs all checks.
fn examine(host: &HostFiles, answer: Result<Version, ClientError>) -> Vec<Finding> {
    let mut findings = qemu::check(host);
    findings.extend(devices::check(host));
    findings.extend(vms::check(host));
    findings.extend(daemon::check(host, answer));
    findings
}
