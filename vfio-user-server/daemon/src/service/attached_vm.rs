//! The VM that uses a vGPU: whether there is one, and its description for an operator.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use mdev_core::ids::VgpuId;
use mdev_core::untrusted::{self, Aside, VALUE, any_line, read_start, read_text};
use nix::unistd::{Uid, User};
use tokio::sync::oneshot;

use super::Service;
use crate::manager::Result;
use crate::worker_protocol::WorkerStatus;
use crate::{blocking, worker_client};
use vgpud_api::{AttachedClient, ErrorCode, ErrorDetail};

/// Wait for the name of a VM.
const NAME_PATIENCE: Duration = Duration::from_millis(20);

/// Number of names that may be late at a time.
const MAX_LATE: usize = 8;

/// Longest name of a process, user or VM in a description, in characters.
const MAX_NAME: usize = 64;

/// Part of a command line that is searched for the name of a VM, in bytes. libvirt names it first.
const MAX_COMMAND_LINE: usize = 4 << 10;

/// State of a connected UNIX socket in `/proc/net/unix` (`SS_CONNECTED`).
const CONNECTED: &str = "03";

impl Service {
    /// Fails if a VM uses a vGPU, or if this is unknown.
    pub(super) async fn refuse_if_used(&self, id: VgpuId) -> Result<()> {
        let listed = self.call(move |manager| manager.show(id)).await?;
        if listed.foreign {
            // A worker of an unsupported version cannot be asked.
            let socket = PathBuf::from(listed.vgpu.socket.unwrap_or_default());
            return match blocking::run(move || is_connected(&socket)).await? {
                Ok(false) => Ok(()),
                Ok(true) => Err(ErrorDetail::new(
                    ErrorCode::InUse,
                    format!(
                        "vGPU {id} is used by a VM, and its worker is of another version of vgpud; shut that VM down first, or use --force"
                    ),
                )),
                Err(error) => Err(use_unknown(id, &error)),
            };
        }
        let Some(control) = listed.control else { return Ok(()) };
        let error = match worker_client::ask_status(&control).await {
            Ok(WorkerStatus { client: None, .. }) => return Ok(()),
            Ok(WorkerStatus { client: Some(vm), .. }) => {
                let name = self.names.of(id, vm.pid).await;
                let user = blocking::run(move || describe(vm, name)).await?;
                ErrorDetail::new(
                    ErrorCode::InUse,
                    format!("vGPU {id} is used by {user}; shut that VM down first, or use --force"),
                )
            }
            Err(error) => use_unknown(id, &error),
        };
        Err(error)
    }
}

fn use_unknown(id: VgpuId, error: &io::Error) -> ErrorDetail {
    ErrorDetail::new(
        ErrorCode::Unavailable,
        format!("Cannot tell whether a VM uses vGPU {id} ({error}); --force stops it"),
    )
}

/// Describes a VM: `process 815 ("qemu-system-x86") of user libvirt-qemu, VM "web1"`. The process
/// chooses both names.
fn describe(vm: AttachedClient, name: Option<String>) -> String {
    let AttachedClient { pid, uid } = vm;
    let command = read_text(Path::new(&format!("/proc/{pid}/comm")), VALUE);
    let command =
        command.map(|name| format!(" (\"{}\")", escaped(name.trim_end()))).unwrap_or_default();
    let user = User::from_uid(Uid::from_raw(uid)).ok().flatten();
    let user = user.map_or_else(|| uid.to_string(), |user| escaped(&user.name));
    let name = name.map(|name| format!(", VM \"{name}\"")).unwrap_or_default();
    format!("process {pid}{command} of user {user}{name}")
}

/// Names of the VMs that use vGPUs.
///
/// A VM can withhold its command line for as long as it likes, and is another process with each
/// connection. Each name is therefore read once, [`Aside`], and no second one of a vGPU while the
/// first is late. An answer goes without a name that is late.
#[derive(Debug)]
pub(super) struct VmNames {
    names: Mutex<HashMap<VgpuId, (i32, LateName)>>,
    aside: Aside,
}

/// Name of a VM, once it was read.
type LateName = Arc<OnceLock<Option<String>>>;

impl Default for VmNames {
    fn default() -> Self {
        Self { names: Mutex::default(), aside: Aside::new(MAX_LATE) }
    }
}

impl VmNames {
    /// Returns the name of the VM in process `pid`, which uses `vgpu`.
    pub async fn of(&self, vgpu: VgpuId, pid: i32) -> Option<String> {
        self.read_once(vgpu, pid, move || read_name(pid)).await
    }

    async fn read_once(
        &self,
        vgpu: VgpuId,
        pid: i32,
        read: impl FnOnce() -> Option<String> + Send + 'static,
    ) -> Option<String> {
        let (name, finished) = self.entry(vgpu, pid, read)?;
        if let Some(finished) = finished {
            // What is late is there for the next answer.
            let _ = tokio::time::timeout(NAME_PATIENCE, finished).await;
        }
        name.get().cloned().flatten()
    }

    /// Returns the name of a VM. If it has to be read, that begins, and the receiver is told the
    /// end. Returns nothing if too much is late.
    fn entry(
        &self,
        vgpu: VgpuId,
        pid: i32,
        read: impl FnOnce() -> Option<String> + Send + 'static,
    ) -> Option<(LateName, Option<oneshot::Receiver<()>>)> {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        match names.get(&vgpu) {
            Some((of, name)) if *of == pid => return Some((Arc::clone(name), None)),
            Some((_, name)) if name.get().is_none() => return None,
            _ => {}
        }
        let (name, (sender, finished)) = (LateName::default(), oneshot::channel());
        let target = Arc::clone(&name);
        let is_read = self.aside.run(move || {
            let _ = target.set(read());
            let _ = sender.send(());
        });
        is_read.then(|| {
            names.insert(vgpu, (pid, Arc::clone(&name)));
            (name, Some(finished))
        })
    }

    /// Forgets the VMs of other vGPUs than these.
    pub fn retain(&self, vgpus: &[VgpuId]) {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        names.retain(|vgpu, _| vgpus.contains(vgpu));
    }
}

/// Returns the name of the VM in a process, with unusual characters escaped.
fn read_name(pid: i32) -> Option<String> {
    vm_name(&command_line(pid).ok()?).map(|name| escaped(&name))
}

/// Returns the begin of a process's command line, with whole arguments only.
fn command_line(pid: i32) -> io::Result<Vec<u8>> {
    let mut line = read_start(Path::new(&format!("/proc/{pid}/cmdline")), MAX_COMMAND_LINE)?;
    if line.len() == MAX_COMMAND_LINE {
        let end = line.iter().rposition(|byte| *byte == 0);
        line.truncate(end.map_or(0, |last| last + 1));
    }
    Ok(line)
}

/// Returns the VM's name from QEMU's command line: `-name guest=web1,debug-threads=on`. libvirt
/// sets the domain's name.
fn vm_name(command_line: &[u8]) -> Option<String> {
    let mut arguments = command_line.split(|byte| *byte == 0);
    arguments.find(|argument| *argument == b"-name" || *argument == b"--name")?;
    let value = String::from_utf8_lossy(arguments.next()?).into_owned();
    let first = value.split(',').next().unwrap_or_default();
    let named = value.split(',').find_map(|part| part.strip_prefix("guest="));
    let name = named.or((!first.contains('=')).then_some(first))?;
    (!name.is_empty()).then(|| name.to_owned())
}

/// Escapes a name that a user chose.
pub(super) fn escaped(name: &str) -> String {
    untrusted::escaped(name, MAX_NAME)
}

/// Returns whether a client is connected to the socket that listens at `path`, according to the
/// kernel.
fn is_connected(path: &Path) -> io::Result<bool> {
    let end = format!(" {}", path.display());
    // Columns: number, references, protocol, flags, type, state, inode, bound path.
    any_line(Path::new("/proc/net/unix"), |line| {
        line.ends_with(&end) && line.split_ascii_whitespace().nth(5) == Some(CONNECTED)
    })
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn vm_name_comes_from_qemu_s_command_line() {
        let line = |arguments: &[&str]| arguments.join("\0").into_bytes();
        for (arguments, name) in [
            (&["qemu", "-name", "guest=web1,debug-threads=on", "-S"][..], Some("web1")),
            (&["qemu", "-m", "1G", "-name", "web 2"], Some("web 2")),
            (&["qemu", "--name", "debug-threads=on,guest=c"], Some("c")),
            (&["qemu", "-name", "debug-threads=on"], None),
            (&["qemu", "-name"], None),
            (&["qemu"], None),
            (&[], None),
        ] {
            assert_eq!(vm_name(&line(arguments)).as_deref(), name, "{arguments:?}");
        }
    }

    #[test]
    fn a_command_line_is_read_up_to_the_limit() {
        let padding = |bytes: usize| "x".repeat(bytes);
        let run = |arguments: &[&str]| {
            let mut child = Command::new("sh");
            child.args(["-c", "echo; read x"]).args(arguments);
            let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
            // The kernel shows the arguments once the program runs.
            child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
            let pid = child.id().cast_signed();
            let found = (command_line(pid).unwrap(), read_name(pid));
            child.kill().unwrap();
            child.wait().unwrap();
            found
        };
        let (line, name) = run(&["-name", "web1", &padding(100 << 10), &padding(100 << 10)]);
        assert_eq!(line, b"sh\0-c\0echo; read x\0-name\0web1\0");
        assert_eq!(name.as_deref(), Some("web1"));
        // An argument that the limit cuts is no name.
        let before = MAX_COMMAND_LINE - b"sh\0-c\0echo; read x\0\0-name\0web".len();
        let (line, name) = run(&[&padding(before), "-name", "web1"]);
        assert!(line.ends_with(b"\0-name\0") && line.len() < MAX_COMMAND_LINE);
        assert_eq!(name, None);
    }

    #[test]
    fn a_name_that_is_late_delays_nothing_and_is_there_later() {
        const LATE: Duration = Duration::from_millis(600);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (names, vgpu) = (VmNames::default(), VgpuId(uuid::Uuid::nil()));
            let late = || {
                std::thread::sleep(LATE);
                Some("web1".to_owned())
            };
            let begun = std::time::Instant::now();
            assert_eq!(names.read_once(vgpu, 7, late).await, None);
            assert_eq!(names.read_once(vgpu, 7, || panic!("read again")).await, None);
            let another = names.read_once(vgpu, 8, || panic!("another one is late")).await;
            assert_eq!(another, None);
            assert!(begun.elapsed() < LATE, "{:?}", begun.elapsed());
            tokio::time::sleep(LATE * 2).await;
            let known = names.read_once(vgpu, 7, || panic!("read again")).await;
            assert_eq!(known.as_deref(), Some("web1"));
            // Another VM has the vGPU.
            let next = names.read_once(vgpu, 8, || Some("web2".to_owned())).await;
            assert_eq!(next.as_deref(), Some("web2"));
            names.retain(&[]);
            assert!(matches!(names.entry(vgpu, 8, || None), Some((_, Some(_)))), "forgotten");
        });
    }

    #[test]
    fn description_names_process_command_and_user() {
        // Its name is that of the thread here, which this test may choose.
        nix::sys::prctl::set_name(c"x\") of root").unwrap();
        let pid = nix::unistd::gettid().as_raw();
        let text = describe(AttachedClient { pid, uid: 0 }, Some("web1".to_owned()));
        let expected = "(\"x\\\") of root\") of user root, VM \"web1\"";
        assert_eq!(text, format!("process {pid} {expected}"));
        let gone = describe(AttachedClient { pid: i32::MAX, uid: 3_999_999_999 }, None);
        assert_eq!(gone, "process 2147483647 of user 3999999999");
        assert_eq!(escaped("a\u{1b}[2J\"b"), "a\\u{1b}[2J\\\"b");
    }

    #[test]
    fn connection_is_found_in_proc_net_unix() {
        let dir = tempfile::Builder::new().prefix("a b").tempdir().unwrap();
        let path = dir.path().join("vfio.sock");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(!is_connected(&path).unwrap());
        let client = std::os::unix::net::UnixStream::connect(&path).unwrap();
        let served = listener.accept().unwrap();
        assert!(is_connected(&path).unwrap() && !is_connected(&dir.path().join("sock")).unwrap());
        drop((client, served));
        assert!(!is_connected(&path).unwrap());
    }
}
