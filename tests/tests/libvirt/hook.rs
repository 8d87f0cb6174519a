//! libvirt's hook without libvirt: the same calls with the same XML. `domains` tests libvirt's real
//! calls.

#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::{Command, Stdio};

use system_tests::Vgpud;
use system_tests::vgpuctl::Done;

const A: &str = "0e6c2a3c-2d3b-4c44-a8f4-1d80f3a5d00a";
const TYPE: &str = "SOFT-256MQ";

/// Returns a domain with one vGPU; without `settings` the vGPU must be defined already.
fn domain(name: &str, vgpu: &str, settings: &str) -> String {
    let (uid, gid) = (nix::unistd::geteuid(), nix::unistd::getegid());
    format!(
        "<domain type='kvm'><name>{name}</name><uuid>uuid-of-{name}</uuid><metadata>\
         <t:vgpus xmlns:t='urn:tessera:domain:1'><t:vgpu uuid='{vgpu}' {settings}/></t:vgpus></metadata>\
         <seclabel type='dynamic' model='dac'><label>+{uid}:+{gid}</label></seclabel></domain>"
    )
}

/// Calls the hook as libvirt does.
fn hook(vgpud: &Vgpud, name: &str, operation: &str, xml: &str) -> Done {
    let mut command = Command::new(system_tests::vgpuctl::path().unwrap());
    command.arg("--socket").arg(vgpud.api_socket()).args(["libvirt", "hook", name]);
    command.args(operation.split(' ')).arg("-");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(xml.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    Done {
        status: output.status.code().unwrap(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Calls the hook, which must succeed without output: libvirt expects none.
fn done(vgpud: &Vgpud, name: &str, operation: &str, xml: &str) {
    let Done { status, stdout, stderr } = hook(vgpud, name, operation, xml);
    assert_eq!((status, stdout.as_str(), stderr.as_str()), (0, "", ""), "{operation}");
}

fn refused(vgpud: &Vgpud, name: &str, operation: &str, xml: &str, words: &str) {
    let done = hook(vgpud, name, operation, xml);
    assert_ne!(done.status, 0, "{done:?}");
    assert!(done.stderr.contains(words) && done.stderr.lines().count() == 1, "{done:?}: {words}");
}

fn running(vgpud: &Vgpud) -> Vec<String> {
    let vgpus = vgpud.get("/v1/vgpus").unwrap();
    let running = vgpus.as_array().unwrap().iter().filter(|vgpu| vgpu["state"] == "running");
    running.map(|vgpu| vgpu["uuid"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_vgpu_is_made_for_its_domain_and_goes_with_it() {
    let vgpud = Vgpud::start().unwrap();
    let xml = domain("vm1", A, &format!("type='{TYPE}' core='40'"));
    done(&vgpud, "vm1", "prepare begin", &xml);
    assert_eq!(vgpud.show(A).unwrap()["live_attrs"][0]["core"], "40");
    done(&vgpud, "vm1", "start begin", &xml);
    let socket = vgpud.vfio_socket(A).metadata().unwrap();
    assert_eq!(socket.uid(), nix::unistd::geteuid().as_raw());
    assert_eq!(socket.permissions().mode() & 0o077, 0, "only the owner can connect");
    for operation in ["started begin", "reconnect begin", "stopped end", "anything new"] {
        done(&vgpud, "vm1", operation, &xml);
    }
    assert_eq!(running(&vgpud), [A]);
    // An end that libvirt did not report: the next start makes a new vGPU.
    let pid = vgpud.show(A).unwrap()["pid"].clone();
    done(&vgpud, "vm1", "prepare begin", &xml);
    assert_ne!(vgpud.show(A).unwrap()["pid"], pid);
    done(&vgpud, "vm1", "release end", &xml);
    assert!(running(&vgpud).is_empty());
    done(&vgpud, "vm1", "release end", &xml);
}

#[test]
fn no_domain_takes_another_ones_vgpu() {
    let vgpud = Vgpud::start().unwrap();
    let own = format!("type='{TYPE}'");
    let (first, second) = (domain("vm1", A, &own), domain("vm2", A, &own));
    done(&vgpud, "vm1", "prepare begin", &first);
    refused(&vgpud, "vm2", "prepare begin", &second, "it was started for domain 'vm1'");
    // libvirt calls this also after a failed start.
    done(&vgpud, "vm2", "release end", &second);
    assert_eq!(running(&vgpud), [A]);
    // A vGPU that was stopped by hand belongs to no domain.
    vgpud.call("POST", &format!("/v1/vgpus/{A}/stop"), None).unwrap();
    done(&vgpud, "vm2", "prepare begin", &second);
    done(&vgpud, "vm1", "release end", &first);
    assert_eq!(running(&vgpud), [A]);
    done(&vgpud, "vm2", "release end", &second);
    assert!(running(&vgpud).is_empty());
}

#[test]
fn one_that_its_operator_started_is_left_running() {
    let vgpud = Vgpud::start().unwrap();
    let request = serde_json::json!({ "uuid": A, "mdev_type": TYPE, "define": true, "run": true });
    vgpud.create(&request).unwrap();
    let xml = domain("vm1", A, "");
    for operation in ["prepare begin", "start begin", "release end"] {
        done(&vgpud, "vm1", operation, &xml);
    }
    assert_eq!(running(&vgpud), [A]);
    vgpud.call("POST", &format!("/v1/vgpus/{A}/stop"), None).unwrap();
    done(&vgpud, "vm1", "prepare begin", &xml);
    assert_eq!(running(&vgpud), [A]);
    done(&vgpud, "vm1", "release end", &xml);
    assert!(running(&vgpud).is_empty());
    vgpud.call("DELETE", &format!("/v1/vgpus/{A}"), None).unwrap();
    refused(
        &vgpud,
        "vm1",
        "prepare begin",
        &xml,
        "it is not defined any more; define it, or detach it",
    );
}

#[test]
fn one_that_is_for_another_user_is_refused() {
    if !nix::unistd::geteuid().is_root() {
        return system_tests::skipped("only root can give sockets to others");
    }
    let vgpud = Vgpud::start().unwrap();
    let attrs = serde_json::json!([{ "owner": "62000" }]);
    let request = serde_json::json!({ "uuid": A, "mdev_type": TYPE, "run": true, "attrs": attrs });
    vgpud.create(&request).unwrap();
    let xml = domain("vm1", A, "").replace("+0:+0", "+62001:+62001");
    done(&vgpud, "vm1", "prepare begin", &xml);
    let words = " is not owned by user 62001, who runs the QEMU of domain 'vm1'; stop the vGPU, and start it with";
    refused(&vgpud, "vm1", "start begin", &xml, words);
    done(&vgpud, "vm1", "release end", &xml);
    assert_eq!(running(&vgpud), [A], "its operator started it");
}

#[test]
fn what_cannot_be_started_says_why_in_one_line() {
    let vgpud = Vgpud::start_with(&["--parent", "soft:soft0,vram=256M"]).unwrap();
    let own = format!("type='{TYPE}'");
    done(&vgpud, "vm1", "prepare begin", &domain("vm1", A, &own));
    let b = A.replace("00a", "00b");
    let full = "Domain 'vm2' cannot have its vGPU of type SOFT-256MQ: ";
    refused(&vgpud, "vm2", "prepare begin", &domain("vm2", &b, &own), full);
    refused(&vgpud, "vm2", "prepare begin", &domain("vm2", &b, "type='X'"), "X");
    refused(
        &vgpud,
        "vm1",
        "migrate begin",
        &domain("vm1", A, &own),
        "cannot move to another host by virsh",
    );
    let saved =
        "was saved with a vGPU, whose contents a saved state does not have; to start it anew";
    done(&vgpud, "vm1", "restore begin", &domain("vm1", A, &own));
    refused(&vgpud, "vm1", "prepare begin", &domain("vm1", A, &own), saved);
    let broken = domain("vm1", A, &own).replace("</domain>", "");
    refused(
        &vgpud,
        "vm1",
        "prepare begin",
        &broken,
        "Domain 'vm1' cannot be read: Not well-formed XML",
    );
    assert_eq!(running(&vgpud), [A]);
}

#[test]
fn domains_without_a_vgpu_never_wait_for_us() {
    let mut vgpud = Vgpud::start().unwrap();
    vgpud.end(nix::sys::signal::Signal::SIGTERM).unwrap();
    for xml in ["<domain type='kvm'><name>vm1</name></domain>", "", "<domain", "\u{fffd}"] {
        for operation in ["prepare begin", "start begin", "release end", "migrate begin"] {
            done(&vgpud, "vm1", operation, xml);
        }
    }
    let xml = domain("vm1", A, &format!("type='{TYPE}'"));
    refused(&vgpud, "vm1", "prepare begin", &xml, "Cannot reach vgpud at");
}
