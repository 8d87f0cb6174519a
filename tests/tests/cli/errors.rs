//! Every error message of CLI, API and daemon is read by a test.
//!
//! [`sources`] finds messages in the source code. [`provoke`] makes the real programs print
//! messages by mistakes, and [`faults`] by a broken environment. A message that neither prints and
//! no test names fails here with its place: add a case to `provoke`, or a test that reads it.
//! [`BEYOND`] lists messages that no test can cause, with the reason.

mod faults;
mod provoke;
mod sources;

use anyhow::Result;

/// Source files and folders with messages.
const CODE: [&str; 23] = [
    "cluster-integration/vgpu-kube/src",
    "qemu-integration/vgpuctl/src",
    "qemu-integration/integrate/src",
    "vfio-user-server/client/src",
    "vfio-user-server/daemon/src/blocking.rs",
    "vfio-user-server/daemon/src/console",
    "vfio-user-server/daemon/src/http.rs",
    "vfio-user-server/daemon/src/service",
    "vfio-user-server/daemon/src/web_console",
    "vfio-user-server/rfb/src",
    "vfio-user-server/daemon/src/api",
    "vfio-user-server/daemon/src/manager",
    "vfio-user-server/daemon/src/callouts",
    "vfio-user-server/daemon/src/main.rs",
    "vfio-user-server/daemon/src/run.rs",
    "vfio-user-server/daemon/src/systemd.rs",
    "vfio-user-server/host/src/command_line.rs",
    "vfio-user-server/host/src/uid_range.rs",
    "vfio-user-server/host/src/users.rs",
    "vfio-user-server/daemon/src/access_config.rs",
    "vfio-user-server/daemon/src/backend.rs",
    "mdev-core/src/definition",
    "mdev-core/src/definition.rs",
];

/// Beginnings of messages that no test reads, and the reason.
const BEYOND: &[(&str, &str)] = &[
    ("Cannot serve the web console", "a taken port is retried, and loopback fails in no other way"),
    ("Cannot wait for signals", "only a process without free descriptors cannot"),
    ("The manager waits for a process, and ends", "it takes a manager's thread that hangs"),
    ("kubelet refuses", "it goes to the log"),
    ("Cannot make a pipe", "only a process without free descriptors cannot"),
    ("QEMU did not finish in time", "it takes a QEMU that stops in the midst of a migration"),
    ("The file was not read", "it takes a panic"),
    ("libvirt passes no reply of QEMU", "virsh prints QEMU's reply"),
    ("The VM has no vGPU", "a VM is found by one of its vGPUs"),
    ("The VM of vGPU", "it takes a VM that does not answer for minutes"),
    ("Interrupted; the CUDA programs of the VM", "it takes a signal while the VM is at work"),
    ("vGPU {} still runs", "it takes a vgpud that ends with the program"),
    ("note: the domain was not restored, and cannot be", "virsh destroy does not fail"),
    ("note: the VM may be paused", "it takes a QEMU that ends at that moment"),
    ("QEMU does not give the transfer up", "it takes a QEMU that stops in the midst of a transfer"),
    ("QEMU's stream has ended", "it takes a pipe that fails"),
    ("its thread has failed", "it takes a panic"),
    (
        "It is not known whether the VM runs on the other host",
        "it takes a host that dies at a moment",
    ),
    ("The other host sends the parts of the VM in another", "only another program does"),
    ("QEMU does not read the VM", "QEMU's own reason comes first"),
    ("The saved vGPU is not in a regular file", "only another program passes one"),
    ("vgpud has gone", "its own reason comes first"),
    ("the worker passes too long a state", "only a worker that was compromised does"),
    ("the worker passes a part of its video memory", "only a worker that was compromised does"),
];

#[test]
fn every_message_is_read_by_a_test() -> Result<()> {
    let messages = sources::messages(&CODE)?;
    assert!(messages.len() > 100, "only {} messages found", messages.len());
    for (begin, _) in BEYOND {
        let there = messages.iter().any(|message| message.text.starts_with(begin));
        assert!(there, "{begin:?} matches no message any more: remove it from the list");
    }
    let said = provoke::all()?;
    let read = sources::read_by_tests()?;
    let mut unread = Vec::new();
    for message in &messages {
        let beyond = BEYOND.iter().any(|(begin, _)| message.text.starts_with(begin));
        let seen = said.iter().any(|line| message.is(line));
        let named = read.iter().any(|text| message.is_named_by(text));
        if !beyond && !seen && !named {
            unread.push(format!("{}: {:?}", message.place, message.text));
        }
    }
    assert!(
        unread.is_empty(),
        "{} of {} messages are read by no test; provoke them in tests/tests/cli/errors/provoke.rs, or read them \
         elsewhere:\n{}\n\nprinted messages:\n{}",
        unread.len(),
        messages.len(),
        unread.join("\n"),
        said.join("\n")
    );
    Ok(())
}

#[test]
fn every_message_is_one_line() -> Result<()> {
    for line in provoke::all()? {
        assert!(line.trim_end().lines().count() == 1, "{line}");
    }
    Ok(())
}

#[test]
fn no_message_repeats_its_cause() -> Result<()> {
    for line in provoke::all()? {
        let parts: Vec<_> = line.trim().split(": ").collect();
        let twice = parts.windows(2).find(|pair| pair[0] == pair[1]);
        assert!(twice.is_none(), "{line}");
        let errors = line.matches("(os error ").count();
        assert!(errors < 2, "two causes, or a repeated cause: {line}");
    }
    Ok(())
}
