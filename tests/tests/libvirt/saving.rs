//! Domains of libvirt that are saved and restored with their vGPUs, and are not saved without.

#![allow(clippy::unwrap_used)]

use crate::host::*;
use serde_json::Value;

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_domain_with_a_vgpu_is_not_saved_by_virsh() {
    let Some(host) = Host::new() else { return };
    host.define("vm1", "");
    let attached = host.run(&format!("vgpuctl libvirt attach vm1 --type {TYPE}"));
    let note = "note: domain 'vm1': virsh refuses to save it while it has a vGPU";
    assert!(attached.status == 0 && attached.stderr.contains(note), "{attached:?}");
    let mut guest = host.boot("vm1");
    uses_its_vgpu(&host, "vm1", &mut guest);
    for save in [
        "managedsave vm1",
        "save vm1 /srv/vms/saved",
        "snapshot-create-as vm1 --name s \
                  --memspec /srv/vms/memory --no-metadata",
    ] {
        let refused = host.run(&format!("virsh {save}"));
        assert!(
            refused.status != 0 && refused.stderr.contains("use-vgpuctl-vm-save"),
            "{save}: {refused:?}"
        );
        assert_eq!(host.state("vm1"), "running");
    }
    uses_its_vgpu(&host, "vm1", &mut guest);
    drop(guest);
    host.sh("virsh destroy vm1");

    // Without the guard, libvirt saves the domain. The hook refuses to start from that state.
    let xml = host.xml("vm1");
    let lines: Vec<_> = xml.lines().collect();
    let guard = |at: usize| lines.get(at).is_some_and(|line| line.contains("use-vgpuctl-vm-save"));
    let kept = (0..lines.len()).filter(|at| !guard(*at) && !guard(*at + 1)).map(|at| lines[at]);
    host.machine.write("/root/plain.xml", &kept.collect::<Vec<_>>().join("\n")).unwrap();
    host.sh("virsh define /root/plain.xml");
    drop(host.boot("vm1"));
    host.sh("virsh managedsave vm1");
    let start = host.run("virsh start vm1");
    let reason = "Domain 'vm1' was saved with a vGPU";
    assert!(start.status != 0 && start.stderr.contains(reason), "{start:?}");
    assert_eq!(host.state("vm1"), "shut off");
    host.sh("virsh managedsave-remove vm1");
    let mut guest = host.boot("vm1");
    uses_its_vgpu(&host, "vm1", &mut guest);
}

/// Starts jobs in the guest, one after the other, each of which checks its result.
const WORK: &str = "(while :; do for job in 'sgemm --n 96' 'vadd --n 200000' 'copy --size 8'; do \
                    vgpu-guest $job > /tmp/last 2>&1 || cat /tmp/last >> /tmp/bad; \
                    echo $job >> /tmp/done; done; done) > /dev/null 2>&1 &";

/// Waits until the guest has finished further jobs, all of them right.
fn works(host: &Host, guest: &mut lab::guest::Guest) {
    let mut done = |what: &str| {
        let lines = guest.run(what, LIMIT).unwrap().stdout;
        lines.trim().parse::<u32>().unwrap_or(0)
    };
    let before = done("wc -l < /tmp/done");
    host.eventually("the guest works", || done("wc -l < /tmp/done") > before + 2);
    assert_eq!(done("cat /tmp/bad 2> /dev/null | wc -l"), 0);
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_domain_is_saved_and_restored_with_its_vgpu() {
    let Some(host) = Host::new() else { return };
    host.define("vm1", "");
    host.sh(&format!("vgpuctl libvirt attach vm1 --type {TYPE}"));
    let definition = host.xml("vm1");
    let saved = "/srv/vms/vm1.vm";
    host.refused(&format!("vgpuctl vm save --domain vm1 -o {saved}"), 5, "'vm1' is not running");
    host.refused(&format!("vgpuctl vm save --domain none -o {saved}"), 4, "no domain 'none'");
    let mut guest = host.boot("vm1");
    uses_its_vgpu(&host, "vm1", &mut guest);
    guest.run(WORK, LIMIT).unwrap().success().unwrap();
    works(&host, &mut guest);

    // A snapshot and a failed save leave the domain running, and virsh still refuses.
    host.sh(&format!("vgpuctl vm save --domain vm1 -o {saved} --keep-running"));
    let output = host.run("vgpuctl vm save --domain vm1 -o /dev/full/x");
    assert_ne!(output.status, 0);
    assert_eq!(host.state("vm1"), "running");
    works(&host, &mut guest);
    let refused = host.run("virsh save vm1 /srv/vms/plain");
    assert!(refused.stderr.contains("use-vgpuctl-vm-save"), "{refused:?}");
    host.refused(&format!("vgpuctl vm restore --domain vm1 -i {saved}"), 5, "runs already");

    let said = host.sh(&format!("vgpuctl vm save --domain vm1 -o {saved} --output json"));
    let said: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(host.sh(&format!("stat -c '%s %a' {saved}")), format!("{} 600\n", said["bytes"]));
    host.eventually("the domain has ended", || host.state("vm1") == "shut off");
    host.eventually("its vGPU is given back", || host.vgpus().is_empty());
    drop(guest);

    host.refused(
        &format!("vgpuctl vm restore --domain vm2 -i {saved}"),
        2,
        "The file has domain 'vm1', and not 'vm2'",
    );
    assert_eq!(host.state("vm1"), "shut off");
    host.sh(&format!("vgpuctl vm restore --domain vm1 -i {saved} --paused"));
    assert_eq!(host.state("vm1"), "paused");
    assert!(host.sh("virsh list").contains("vm1"));
    host.sh("virsh resume vm1");
    let mut guest = host.guest("vm1");
    works(&host, &mut guest);
    assert_eq!(host.vgpus()[0]["warnings"], serde_json::json!([]));
    // It is a domain like before: libvirt finds it again, refuses plain saves, and ends it.
    host.sh("systemctl restart libvirtd && virsh list");
    assert_eq!(host.state("vm1"), "running");
    let refused = host.run("virsh managedsave vm1");
    assert!(refused.stderr.contains("use-vgpuctl-vm-save"), "{refused:?}");
    assert_eq!(host.xml("vm1"), definition);
    // It is saved and restored again.
    host.sh(&format!("vgpuctl vm save --domain vm1 -o {saved}"));
    host.sh(&format!("vgpuctl vm restore --domain vm1 -i {saved}"));
    let mut guest = host.guest("vm1");
    works(&host, &mut guest);
    host.sh("virsh destroy vm1");
    host.eventually("its vGPU is given back", || host.vgpus().is_empty());
    // A file whose vGPU cannot start leaves the domain shut off.
    host.sh("systemctl stop vgpud");
    host.refused(&format!("vgpuctl vm restore --domain vm1 -i {saved}"), 3, "Cannot reach vgpud");
    assert_eq!(host.state("vm1"), "shut off");
}
