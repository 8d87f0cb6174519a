//! Checks of KVM, the GPUs of all backends and huge pages.

use host_inventory::SUPPORT;
use host_inventory::files::number_after as number;
use host_inventory::{Finding, HostFiles};

const KVM: &str = "kvm";
const PAGES: &str = "pages";

/// Runs the checks.
pub fn check(host: &HostFiles) -> Vec<Finding> {
    let mut findings = vec![kvm(host)];
    findings.extend(SUPPORT.check_host(host));
    findings.extend(pages(host));
    findings
}

fn kvm(host: &HostFiles) -> Finding {
    if !host.has("dev/kvm") {
        return Finding::warning(
            KVM,
            "There is no /dev/kvm: VMs are emulated and slow",
            "enable virtualization in the firmware, or nested virtualization on the outer host; then modprobe kvm_intel or kvm_amd",
        );
    }
    if !host.may_use("dev/kvm") {
        let what = format!("User {} may not use /dev/kvm", host.uid);
        return Finding::warning(KVM, what, "usermod -aG kvm USER, then log in again");
    }
    Finding::ok(KVM, "/dev/kvm is usable")
}

/// Checks that reserved huge pages are free.
fn pages(host: &HostFiles) -> Option<Finding> {
    let text = host.read("proc/meminfo")?;
    let (total, free) = (number(&text, "HugePages_Total:")?, number(&text, "HugePages_Free:")?);
    let size = number(&text, "Hugepagesize:").unwrap_or(2048) / 1024;
    match (total, free) {
        (0, _) => None,
        (_, 0) => Some(Finding::warning(
            PAGES,
            format!(
                "None of {total} huge pages of {size} MiB is free: a VM with hugetlb=on will not start"
            ),
            format!("reserve more (sysctl vm.nr_hugepages={}), or omit hugetlb", total * 2),
        )),
        _ => {
            Some(Finding::ok(PAGES, format!("{free} of {total} huge pages of {size} MiB are free")))
        }
    }
}
