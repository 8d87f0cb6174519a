//! A world that is in the way: what the programs say where a disk is full, a host has nothing left, a worker stands still,
//! a program is broken, or somebody is not who they should be.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::ptr::null;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use anyhow::{Context, Result, ensure};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::user::User;
use system_tests::vgpuctl::path as vgpuctl_path;
use system_tests::{PATIENCE, Vgpud, kill_process, skipped, vgpud, wait_for};

use super::provoke::{NONE, RUNS, daemon};

const STRANGER: User = User { uid: 61_234, gid: 61_234, groups: &[] };

/// Shell lines: `$ctl` is vgpuctl, `$vgpud` is vgpud in folders of its own, `$dir` an empty folder that is the current one.
/// Each fails with words of its own.
const LINES: &[(&str, &str)] = &[
    ("ulimit -n 4; exec $ctl list", "Cannot start: "),
    ("$ctl list > /dev/full", "Cannot write the output: "),
    ("$ctl list --dumpjson > /dev/full", "Cannot write the output: "),
    (
        "mkdir gone; cd gone; rmdir ../gone; $ctl view $runs --print --monitor x",
        "give its whole path",
    ),
    ("mkdir gone; cd gone; rmdir ../gone; $ctl web --monitor $runs=x", "give its whole path"),
    ("TMPDIR=/nonexistent XDG_RUNTIME_DIR=/nonexistent $ctl view $runs --print", "set TMPDIR"),
    ("$ctl view $runs --print --tcp=$taken", "name another port with --tcp=PORT"),
    (
        "echo '#!/nonexistent' > remote-viewer; chmod +x remote-viewer; \
         PATH=$dir DISPLAY=:99 $ctl view $runs --tcp",
        "view with another: --print",
    ),
    ("$ctl view", "Name the vGPU: vgpuctl view UUID"),
    ("$ctl web --monitor x", "a monitor is UUID=PATH"),
    ("$ctl libvirt hook vm1 prepare begin - < /", "Cannot read the XML of domain 'vm1'"),
    ("touch virsh; PATH=$dir $ctl libvirt detach vm1", "Cannot run virsh: "),
    ("$virsh running yes; PATH=$dir $ctl libvirt detach vm1", "Domain 'vm1' is running; shut it"),
    ("$virsh running no; PATH=$dir $ctl libvirt detach vm1", "has no definition that could be"),
    (
        "exec $bin soft-gpu --name a --vram 1048576 --admin-fd 5 5< /dev/null",
        "Bad --admin-fd: Descriptor 5 is no socket that listens; start `vgpud run`",
    ),
    ("$ctl strat", "There is no command \"strat\"; did you mean stats or start?"),
    ("$ctl stop -u 1", "\"1\" is no value of --uuid <UUID>: a uuid is 32 hexadecimal digits"),
    ("$ctl stop", "Give --uuid <UUID>; see `vgpuctl stop --help`"),
    ("$ctl view $runs --tcp 5901", "\"5901\" is one word too many; see `vgpuctl view --help`"),
    (
        "$ctl libvirt attach vm1",
        "Give --uuid <UUID> or --type <TYPE>; see `vgpuctl libvirt attach --help`",
    ),
    ("$bin run --owner", "--owner <USER[:GROUP]> needs a value"),
    ("$bin strat", "There is no command \"strat\"; see `vgpud --help`"),
    ("ulimit -n 4; exec $vgpud", "Cannot reserve descriptors: "),
    ("ulimit -n 8; exec $vgpud", "Cannot start the I/O runtime: "),
    ("$bin man > /dev/full", "Cannot write the manual page: "),
    ("export LISTEN_PID=$$ LISTEN_FDS=x; exec $vgpud", "Cannot read LISTEN_FDS"),
    (
        "export LISTEN_PID=$$ LISTEN_FDS=2; exec $vgpud 3< /dev/null 4< /dev/null",
        "passes 2 sockets; pass the control socket alone",
    ),
    (
        "export LISTEN_PID=$$ LISTEN_FDS=1; exec $vgpud 3< /dev/null",
        "The service manager's socket is no UNIX socket to listen on",
    ),
];

/// A `virsh` that knows one domain.
const VIRSH: &str = r#"virsh() { printf '#!/bin/sh\necho "State: '$1'"; echo "Persistent: '$2'"\n' > virsh
    chmod +x virsh; }; "#;

/// What a shell can bring about.
pub fn by_a_host_in_the_way() -> Result<Vec<String>> {
    let runs = daemon()?;
    let taken = TcpListener::bind("127.0.0.1:0")?;
    let ctl = format!("{} --socket {}", vgpuctl_path()?.display(), runs.api_socket().display());
    let (mut said, mut wrong) = (Vec::new(), Vec::new());
    for (line, words) in LINES {
        let dir = tempfile::tempdir()?;
        let bin = vgpud()?.display().to_string();
        let here = dir.path().display();
        let line = [
            ("$ctl", ctl.clone()),
            ("$vgpud", format!("{bin} run --run-dir {here}/r --config-dir {here}/c")),
            ("$bin", bin),
            ("$dir", here.to_string()),
            ("$runs", RUNS.to_owned()),
            ("$taken", taken.local_addr()?.port().to_string()),
            ("$virsh", "virsh".to_owned()),
        ]
        .iter()
        .fold((*line).to_owned(), |line, (word, value)| line.replace(word, value));
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("{VIRSH}{line}")]).current_dir(dir.path());
        shell.env("RUST_LOG", "off").stdin(Stdio::null());
        match complaint(shell) {
            Ok(text) if text.contains(words) => said.push(text),
            other => wrong.push(format!("{line}: {other:?}, not {words:?}")),
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(said)
}

/// What a command that fails says, without its name. One that goes on is ended.
fn complaint(mut command: Command) -> Result<String> {
    let mut child = command.stderr(Stdio::piped()).spawn()?;
    let ended = wait_for("it fails", || child.try_wait().is_ok_and(|ended| ended.is_some()));
    if ended.is_err() {
        child.kill()?;
    }
    let status = child.wait()?;
    let mut text = String::new();
    child.stderr.take().context("It is piped")?.read_to_string(&mut text)?;
    ended?;
    ensure!(!status.success(), "it succeeds");
    let text = text.trim_start_matches("vgpuctl: ").trim_start_matches("vgpud: ");
    Ok(text.to_owned())
}

/// A user who may start nothing more.
pub fn by_a_host_without_threads() -> Result<Vec<String>> {
    let dir = tempfile::tempdir()?;
    let bin = dir.path().join("vgpud");
    fs::copy(vgpud()?, &bin)?;
    fs::set_permissions(dir.path(), Permissions::from_mode(0o777))?;
    let run = || {
        let mut command = Command::new(&bin);
        command.arg("run").arg("--run-dir").arg(dir.path().join("r"));
        command.arg("--config-dir").arg(dir.path().join("c")).current_dir("/");
        command.env("RUST_LOG", "off").stdin(Stdio::null());
        // SAFETY: between fork and exec one system call is made.
        unsafe {
            command.pre_exec(|| Ok(setrlimit(Resource::RLIMIT_NPROC, 0, 0)?));
        }
        complaint(command)
    };
    // Root has no such limit.
    let root = nix::unistd::geteuid().is_root();
    let text = if root { STRANGER.does(run) } else { run() };
    let text = text.context("vgpud without threads")?;
    ensure!(text.starts_with("Cannot start the manager's thread: "), "{text}");
    Ok(vec![text])
}

/// A host that has descriptors for all but the terminal.
pub fn by_a_terminal() -> Result<Vec<String>> {
    let runs = daemon()?;
    let (mut master, mut slave) = (-1, -1);
    let none = std::ptr::null_mut();
    // SAFETY: both numbers are written, and nothing else is read or written: there is no name, no mode, no size.
    let made = unsafe { libc::openpty(&raw mut master, &raw mut slave, none, null(), null()) };
    ensure!(made == 0, std::io::Error::last_os_error());
    // SAFETY: both descriptors have just been made for us.
    let (_master, slave) = unsafe { (OwnedFd::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) };
    for files in 8..16 {
        let mut command = Command::new(vgpuctl_path()?);
        command.arg("--socket").arg(runs.api_socket()).arg("top");
        command.stdin(slave.try_clone()?).stdout(slave.try_clone()?);
        // SAFETY: between fork and exec one system call is made.
        unsafe {
            command.pre_exec(move || Ok(setrlimit(Resource::RLIMIT_NOFILE, files, files)?));
        }
        // With less it is something else that cannot be, of a library's own in the end.
        let text = complaint(command).with_context(|| format!("top with {files} descriptors"))?;
        if text.starts_with("Cannot use the terminal: ") {
            return Ok(vec![text]);
        }
    }
    anyhow::bail!("The terminal could always be used")
}

/// `vgpuctl view`, which says on which socket.
fn view(runs: &Vgpud) -> Result<(Child, PathBuf)> {
    let mut command = Command::new(vgpuctl_path()?);
    command.arg("--socket").arg(runs.api_socket());
    command.args(["view", RUNS, "--print", "--output", "json"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().context("It is piped")?).read_line(&mut line)?;
    let says: Value = serde_json::from_str(&line)?;
    Ok((child, says["socket"].as_str().context("A socket")?.into()))
}

/// Somebody at the door who is no viewer, or not ours.
pub fn by_a_door() -> Result<Vec<String>> {
    let runs = daemon()?;
    let (mut child, socket) = view(&runs)?;
    // Who only looks whether there is a door is no trouble.
    drop(UnixStream::connect(&socket)?);
    let mut no_viewer = UnixStream::connect(&socket)?;
    no_viewer.write_all(b"Hello, world")?;
    let errors = BufReader::new(child.stderr.take().context("It is piped")?).lines();
    let (line, lines) = mpsc::channel();
    std::thread::spawn(move || errors.map_while(Result::ok).try_for_each(|text| line.send(text)));
    let next = || lines.recv_timeout(PATIENCE).context("It says nothing");
    let mut said = vec![next()?];
    ensure!(said[0].contains("A viewer is turned away: What has connected is no VNC"), "{said:?}");
    if nix::unistd::geteuid().is_root() {
        let open = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode));
        open(socket.parent().context("A folder")?, 0o711)?;
        open(&socket, 0o666)?;
        let _stranger = STRANGER.does(|| Ok(UnixStream::connect(&socket)?))?;
        said.push(next()?);
        ensure!(said[1].contains("user 61234 is not the one who views"), "{said:?}");
    } else {
        skipped("only root can be another user");
    }
    kill_process(child.id(), Signal::SIGTERM)?;
    ensure!(child.wait()?.success(), "it ends as it should");
    Ok(said)
}

/// Workers that stand still, and those that cannot live.
pub fn by_workers() -> Result<Vec<String>> {
    let runs = daemon()?;
    let path = |uuid: &str, more: &str| format!("/v1/vgpus/{uuid}/{more}");
    let worker = runs.show(RUNS)?["pid"].as_u64().context("It has a worker")?;
    let worker = u32::try_from(worker)?;
    kill_process(worker, Signal::SIGSTOP)?;
    let stop = runs.refused("POST", &path(RUNS, "stop"), None);
    let screen = runs.refused("GET", &path(RUNS, "screenshot"), None);
    kill_process(worker, Signal::SIGCONT)?;
    let mut said = vec![stop?.2, screen?.2];
    let there = runs.roles();
    let over = AtomicBool::new(false);
    let refused = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                for pid in runs.roles().into_iter().filter(|pid| !there.contains(pid)) {
                    // It may have ended by itself.
                    let _ = kill_process(pid, Signal::SIGKILL);
                }
            }
        });
        let asked = json!({ "mdev_type": "SOFT-256MQ", "run": true });
        let refused = (0..20).find_map(|_| runs.refused("POST", "/v1/vgpus", Some(&asked)).ok());
        over.store(true, Ordering::Relaxed);
        refused
    });
    said.push(refused.context("It started each time")?.2);
    ensure!(said[2].contains(" did not start: Its worker died (signal: 9"), "{said:?}");
    Ok(said)
}

/// Paths that mean something only to who asks.
pub fn by_the_web_console() -> Result<Vec<String>> {
    let runs = Vgpud::start_with(&["--web", "127.0.0.1:0"])?;
    let asked = json!({ "monitors": { NONE: "qmp.sock" } });
    let (status, _, message) = runs.refused("POST", "/v1/web", Some(&asked))?;
    ensure!(status == 400 && message.contains("is not a whole path; begin it with a slash"));
    Ok(vec![message])
}
