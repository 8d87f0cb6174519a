//! systemd's protocols: notification, watchdog and socket activation. The test plays systemd.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::json;
use system_tests::{TIMEOUT, Vgpud, is_alive, kill_process, wait_for};

/// Notification socket of the service manager.
struct Notified(UnixDatagram);

impl Notified {
    fn listen(path: &Path) -> Result<Self> {
        let socket = UnixDatagram::bind(path)?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        Ok(Self(socket))
    }

    /// Waits for a message with a line that begins with `begin` and returns the rest of the line.
    fn wait(&self, begin: &str) -> Result<String> {
        let mut message = [0; 512];
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let len = self.0.recv(&mut message)?;
            let text = String::from_utf8_lossy(&message[..len]);
            if let Some(rest) = text.lines().find_map(|line| line.strip_prefix(begin)) {
                return Ok(rest.to_owned());
            }
            ensure!(Instant::now() < deadline, "Nothing begins with {begin:?}");
        }
    }
}

/// Creates folders of a manager that does not run.
fn stopped() -> Result<Vgpud> {
    let mut vgpud = Vgpud::start()?;
    vgpud.end(Signal::SIGTERM)?;
    Ok(vgpud)
}

/// A manager, killed when dropped.
struct Running(Child);

impl Running {
    fn id(&self) -> u32 {
        self.0.id()
    }

    /// Sends a signal and waits for a successful end.
    fn ends(mut self, signal: Signal) -> Result<()> {
        kill_process(self.id(), signal)?;
        ensure!(self.0.wait()?.success(), "vgpud failed");
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Errors mean that the process has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn vgpud_notifies_systemd_of_readiness_status_and_watchdog() -> Result<()> {
    let vgpud = stopped()?;
    let path = vgpud.run_dir().join("notify");
    let service = Notified::listen(&path)?;
    let mut command = vgpud.command()?;
    command.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "400000");
    let started = Instant::now();
    let child = Running(command.spawn()?);
    assert_eq!(service.wait("READY=")?, "1");
    let uuid = vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "run": true }))?;
    service.wait("STATUS=1 vGPU runs")?;
    for _ in 0..5 {
        service.wait("WATCHDOG=1")?;
    }
    // Messages wait in the socket while this test does not run.
    assert!(
        started.elapsed() >= Duration::from_millis(500),
        "watchdog messages come at half the interval"
    );
    let begun = Instant::now();
    // Only the manager's own messages count.
    for pid in vgpud.roles() {
        let environment = fs::read(format!("/proc/{pid}/environ"))?;
        let environment = String::from_utf8_lossy(&environment);
        assert!(!environment.contains("NOTIFY_SOCKET") && !environment.contains("WATCHDOG_USEC"));
    }
    // A stopped manager sends nothing; systemd would restart it.
    kill_process(child.id(), Signal::SIGSTOP)?;
    service.0.set_read_timeout(Some(Duration::from_millis(600)))?;
    let mut message = [0; 512];
    while service.0.recv(&mut message).is_ok() && begun.elapsed() < TIMEOUT {}
    assert!(begun.elapsed() < TIMEOUT, "watchdog messages continue");
    kill_process(child.id(), Signal::SIGCONT)?;
    service.0.set_read_timeout(Some(TIMEOUT))?;
    service.wait("WATCHDOG=1")?;
    vgpud.call("POST", &format!("/v1/vgpus/{uuid}/stop"), None)?;
    kill_process(child.id(), Signal::SIGUSR1)?;
    assert_eq!(service.wait("STOPPING=")?, "1");
    child.ends(Signal::SIGUSR1)
}

/// Starts a manager with a listening socket, as systemd does.
fn with_socket(vgpud: &Vgpud, socket: &UnixListener) -> Result<Running> {
    let inner = vgpud.command()?;
    let mut command = Command::new("sh");
    // LISTEN_PID must be the manager's own process id.
    command.args(["-c", "export LISTEN_FDS=1 LISTEN_PID=$$; exec \"$@\"", "sh"]);
    command.arg(inner.get_program()).args(inner.get_args());
    let fd = socket.as_raw_fd();
    // SAFETY: between fork and exec one system call is made, on a descriptor that stays open here.
    unsafe {
        command.pre_exec(move || {
            // dup2 onto itself keeps the close-on-exec flag, which must be cleared.
            let placed = if fd == 3 { libc::fcntl(3, libc::F_SETFD, 0) } else { libc::dup2(fd, 3) };
            if placed >= 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        });
    }
    Ok(Running(command.spawn().context("Cannot start vgpud")?))
}

#[test]
fn vgpud_serves_and_keeps_a_socket_from_systemd() -> Result<()> {
    let vgpud = stopped()?;
    let socket = UnixListener::bind(vgpud.api_socket())?;
    let inode = || Ok::<_, anyhow::Error>(fs::metadata(vgpud.api_socket())?.ino());
    let made = inode()?;
    // A request waits in the socket until the manager starts.
    let first = with_socket(&vgpud, &socket)?;
    let pid = vgpud.get("/v1/version")?["pid"].as_u64();
    assert_eq!(pid, Some(u64::from(first.id())));
    let uuid = vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "run": true }))?;
    let worker = vgpud.show(&uuid)?["pid"].as_u64().context("No worker")?;
    let worker = u32::try_from(worker)?;

    // The unit's stop ends the manager only: the worker stays, and the socket queues requests.
    first.ends(Signal::SIGUSR1)?;
    assert_eq!(inode()?, made, "the manager must not remove the socket");
    assert!(is_alive(worker));
    let second = with_socket(&vgpud, &socket)?;
    assert_eq!(vgpud.show(&uuid)?["pid"], worker, "the next manager has adopted the worker");
    second.ends(Signal::SIGTERM)?;
    wait_for("the worker has ended", || !is_alive(worker))?;
    assert_eq!(inode()?, made);
    Ok(())
}

#[test]
fn a_descriptor_that_is_no_listening_socket_is_refused() -> Result<()> {
    let vgpud = stopped()?;
    let listener = UnixListener::bind(vgpud.run_dir().join("other"))?;
    let client = std::os::unix::net::UnixStream::connect(vgpud.run_dir().join("other"))?;
    // A connected socket instead of a listening one.
    let wrong = UnixListener::from(std::os::fd::OwnedFd::from(client));
    let mut child = with_socket(&vgpud, &wrong)?;
    assert_eq!(child.0.wait()?.code(), Some(1));
    drop(listener);
    Ok(())
}
