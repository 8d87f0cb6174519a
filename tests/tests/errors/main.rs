//! Every error message of the CLI, the API and the daemon is read by a test.
//!
//! [`sources`] finds the messages in the sources; [`provoke`] makes the real programs say what it can. What nobody says
//! and no other test names fails here, with its place: add a case to `provoke`, or a test that reads it. [`BEYOND`] is for
//! what a test cannot bring about, with the reason.

mod provoke;
mod sources;

use anyhow::Result;

/// Where messages are.
const CODE: [&str; 10] = [
    "qemu-integration/vgpuctl/src",
    "vfio-user-server/src/api",
    "vfio-user-server/src/manager",
    "vfio-user-server/src/callouts",
    "vfio-user-server/src/main.rs",
    "vfio-user-server/src/users.rs",
    "vfio-user-server/src/who.rs",
    "vfio-user-server/src/backend.rs",
    "mdev-core/src/definition",
    "mdev-core/src/definition.rs",
];

/// Messages that no test reads, by how they begin, and why.
const BEYOND: &[(&str, &str)] = &[
    ("Cannot ask vgpud: ", "a request that cannot be written down: our own bug"),
    ("Cannot write the answer: ", "an answer that cannot be written down: our own bug"),
    ("Cannot write the XML: ", "XML that cannot be written down: our own bug"),
    ("Cannot start: ", "the host has no descriptors left for an I/O runtime"),
    ("none came within ", "takes a minute of silence"),
    ("The manager's thread panicked", "our own bug"),
    ("Cannot start the manager's thread", "the host has no threads left"),
    ("Cannot start the I/O runtime", "the host has no descriptors left"),
    ("Cannot handle signals", "the host has no descriptors left"),
    ("Cannot reserve descriptors", "the host has no descriptors left"),
    ("Cannot lock ", "a file system without locks"),
    ("The manager is shutting down", "a request in the last millisecond"),
    ("Which parent's screen is meant? ", "a host with two display adapters as parents"),
    ("There is no parent", "a vgpud without any: its command line always has one"),
    ("The worker speaks version ", "a worker of another release"),
    ("The worker's answer was unexpected", "a worker of another release"),
    ("The worker gave no video memory", "a worker that lies"),
    ("There is no backend ", "a worker of another release"),
    ("The connection to the GPU is missing", "a worker that somebody else started"),
    ("Cannot open the GPU ", "a GPU that is lost between admission and start"),
    ("The software GPU has ended", "a GPU whose socket is taken away"),
    ("Parent {} cannot keep attribute ", "a GPU without that capability: an NVIDIA one"),
    ("Parent {} cannot change \"max_channels\"", "a GPU without quotas: an NVIDIA one"),
    ("NVIDIA's driver has no GPU", "a host with NVIDIA's driver and no GPU"),
    ("Whether a VM uses vGPU ", "a worker that does not answer"),
    ("The worker does not say what is on its screen", "a worker that does not answer"),
    ("The screen cannot be read", "a worker that lies"),
    ("Cannot use the terminal: ", "a terminal that goes away"),
    ("vGPU {id} did not start: ", "a worker that dies before it answers"),
    ("Parent {name} has not started yet", "a GPU that takes long to start"),
    ("This process has no user here", "a process of another user namespace"),
    ("Name a type or a vGPU", "clap asks for one of them before"),
    ("Domain '{name}' has no definition", "a transient domain of libvirt"),
    ("Cannot read the XML of domain", "a standard input that cannot be read"),
    ("Cannot give {socket} to user", "a socket that goes away"),
    (
        "There is no group {text:?}, as which",
        "a libvirt whose QEMU has a group that the host has not",
    ),
    ("it has not started", "a GPU before its first start"),
    ("Cannot write the output", "a disk that fills while one line is written"),
];

/// Messages of commands that are young: read by no test yet. It is to become shorter.
const NOT_YET: &[&str] = &[
    "usermod -aG {READERS} USER to look, {READERS},{ADMINS} to change; then log in again",
    "vgpud cannot be asked: {other}",
    "see its log: journalctl -u vgpud",
    "vgpud's processes may have {hard} files open",
    "{what}: too few for guests with much memory",
    "The NVIDIA GPU {name} has no driver of NVIDIA's",
    "/{node} is not there: vgpud cannot reach the GPU",
    "QEMU {text} (/{place}) is older than 10.1 and knows no vfio-user",
    "{problems} of the findings above must be mended: see their fixes",
    "Cannot use the service manager's socket",
    "The service manager's sockets",
    "The service manager passes {} sockets; pass the control socket alone",
    "The service manager's socket",
    "What the service manager passes is no UNIX socket that listens: see ListenStream=",
    "There is no `vgpud run`",
    "Domain '{name}' is running",
    "Cannot run virsh: ",
    "owner: vgpud runs as user {}",
    "a monitor is UUID=PATH",
    "A viewer is gone: ",
    "Cannot handle signals: ",
    "Cannot make a socket: ",
    "Cannot start a viewer: ",
    "Name the vGPU: vgpuctl view UUID",
    "No such monitor: ",
    "vgpuctl: A viewer cannot connect: ",
    "{MOST_WRONG} wrong passwords",
    "no port is free",
    "user {who} is not the one who views",
    "The monitor {path} cannot be used",
    "{path:?} is not a whole path",
    "vGPU {} is not for user {}",
    "There is no user {user:?} or no group",
    "There is no user {text:?}, as whom",
];

#[test]
fn every_message_is_read_by_a_test() -> Result<()> {
    let messages = sources::messages(&CODE)?;
    assert!(messages.len() > 100, "too few to be all: {}", messages.len());
    let said = provoke::all()?;
    let read = sources::read_by_tests()?;
    let mut unread = Vec::new();
    for message in &messages {
        let beyond = BEYOND.iter().map(|(begin, _)| begin).chain(NOT_YET);
        let beyond = beyond.into_iter().any(|begin| message.text.starts_with(begin));
        let seen = said.iter().any(|line| message.is(line));
        let named = read.iter().any(|text| message.is_named_by(text));
        if !beyond && !seen && !named {
            unread.push(format!("{}: {:?}", message.place, message.text));
        }
    }
    assert!(
        unread.is_empty(),
        "{} of {} messages are read by no test; provoke them in tests/tests/errors/provoke.rs, or read them \
         elsewhere:\n{}\n\nwhat was said:\n{}",
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
        // Clap's own are of several lines: they show how a command line is to be.
        let own = !line.starts_with("error: ");
        assert!(!own || line.trim_end().lines().count() == 1, "{line}");
    }
    Ok(())
}
