//! Messages of programs in a broken environment: a full disk, no descriptors or processes left,
//! hung workers, broken programs, unauthorized users.

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
use system_tests::{TIMEOUT, Vgpud, kill_process, skipped, vgpud, wait_for};

use super::provoke::{NONE, RUNS, daemon};

const OTHER_USER: User = User { uid: 61_234, gid: 61_234, groups: &[] };

/// Shell commands and parts of their messages: `$ctl` is vgpuctl, `$vgpud` is vgpud in its own
/// folders, `$dir` is an empty folder, the current one.
const LINES: &[(&str, &str)] = &[
    ("ulimit -n 4; exec $ctl list", "Cannot start: "),
    ("$ctl list > /dev/full", "Cannot write the output: "),
    ("$ctl list --dumpjson > /dev/full", "Cannot write the output: "),
    (
        "mkdir gone; cd gone; rmdir ../gone; $ctl view $runs --print --monitor x",
        "give an absolute path",
    ),
    ("mkdir gone; cd gone; rmdir ../gone; $ctl web --monitor $runs=x", "give an absolute path"),
    ("TMPDIR=/nonexistent XDG_RUNTIME_DIR=/nonexistent $ctl view $runs --print", "set TMPDIR"),
    ("$ctl view $runs --print --tcp=$taken", "name another port with --tcp=PORT"),
    (
        "echo '#!/nonexistent' > remote-viewer; chmod +x remote-viewer; \
         PATH=$dir DISPLAY=:99 $ctl view $runs --tcp",
        "use another viewer with --print",
    ),
    ("$ctl view", "Give VGPU or --uuid <VGPU>"),
    ("$ctl web --monitor x", "a monitor is VGPU=PATH"),
    ("$ctl vm receive web1 --monitor x --listen nowhere", "an address is HOST:PORT or unix:PATH"),
    ("$ctl libvirt hook vm1 prepare begin - < /", "Cannot read the XML of domain 'vm1'"),
    ("touch virsh; PATH=$dir $ctl libvirt detach vm1", "Cannot run virsh: "),
    ("$virsh running yes; PATH=$dir $ctl libvirt detach vm1", "Domain 'vm1' is running; shut it"),
    ("$virsh running no; PATH=$dir $ctl libvirt detach vm1", "has no definition that could be"),
    (
        "exec $bin gpu-process --parent soft:a --uid 1 --gid 1 --admin-fd 5 --startup-error-fd 6 5< /dev/null",
        "Bad --admin-fd: Descriptor 5 is no socket that listens; start `vgpud run`",
    ),
    ("$ctl strat", "There is no command \"strat\"; did you mean stats or start?"),
    (
        "$ctl stop -u a/b",
        "\"a/b\" is not a value of --uuid <VGPU>: give a vGPU's name, or its uuid",
    ),
    ("$ctl stop", "Give VGPU or --uuid <VGPU>; see `vgpuctl stop --help`"),
    ("$ctl view $runs --tcp 5901", "\"5901\" is an unexpected argument; see `vgpuctl view --help`"),
    (
        "$ctl libvirt attach vm1",
        "Give VGPU, --uuid <VGPU> or --type <TYPE>; see `vgpuctl libvirt attach --help`",
    ),
    ("TESSERA_CUDA_LIBRARY=none.so $ctl run -u $runs -- true", "none.so; correct TESSERA_CUDA_LIB"),
    (
        "touch 'a b.so'; TESSERA_CUDA_LIBRARY='a b.so' $ctl run -u $runs -- true",
        "the path has a space or a colon; move the library",
    ),
    (
        "set -- $ctl; cp $1 own; shift; ./own \"$@\" run -u $runs -- true",
        "beside vgpuctl, in ../lib/tessera or in /usr/lib/tessera; name its path in TESSERA_CUDA",
    ),
    ("$bin run --owner", "--owner <USER[:GROUP]> needs a value"),
    ("$bin strat", "There is no command \"strat\"; see `vgpud --help`"),
    ("ulimit -n 4; exec $vgpud", "Cannot reserve descriptors: "),
    ("ulimit -n 12; exec $vgpud", "Cannot start the I/O runtime: "),
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

/// Defines a `virsh` that knows one domain.
const VIRSH: &str = r#"virsh() { printf '#!/bin/sh\necho "State: '$1'"; echo "Persistent: '$2'"\n' > virsh
    chmod +x virsh; }; "#;

/// Runs the shell commands and returns their messages.
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

/// Returns a failing command's message without the program's name. A command that continues is
/// ended.
fn complaint(mut command: Command) -> Result<String> {
    let mut child = command.stderr(Stdio::piped()).spawn()?;
    let ended = wait_for("it fails", || child.try_wait().is_ok_and(|ended| ended.is_some()));
    if ended.is_err() {
        child.kill()?;
    }
    let status = child.wait()?;
    let mut text = String::new();
    child.stderr.take().context("No pipe")?.read_to_string(&mut text)?;
    ended?;
    ensure!(!status.success(), "it succeeds");
    let text = text.trim_start_matches("vgpuctl: ").trim_start_matches("vgpud: ");
    Ok(text.to_owned())
}

/// Messages for a user who may start no more processes.
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
    let text = if root { OTHER_USER.run(run) } else { run() };
    let text = text.context("vgpud without threads")?;
    ensure!(text.starts_with("Cannot start the manager's threads: "), "{text}");
    Ok(vec![text])
}

/// Messages of a `view` that cannot open a terminal, with few descriptors.
pub fn by_a_terminal() -> Result<Vec<String>> {
    let runs = daemon()?;
    let (mut master, mut slave) = (-1, -1);
    let none = std::ptr::null_mut();
    // SAFETY: both numbers are written; name, mode and size are null.
    let made = unsafe { libc::openpty(&raw mut master, &raw mut slave, none, null(), null()) };
    ensure!(made == 0, std::io::Error::last_os_error());
    // SAFETY: openpty has just created both descriptors.
    let (_master, slave) = unsafe { (OwnedFd::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) };
    for files in 8..16 {
        let mut command = Command::new(vgpuctl_path()?);
        command.arg("--socket").arg(runs.api_socket()).arg("top");
        command.stdin(slave.try_clone()?).stdout(slave.try_clone()?);
        // SAFETY: between fork and exec one system call is made.
        unsafe {
            command.pre_exec(move || Ok(setrlimit(Resource::RLIMIT_NOFILE, files, files)?));
        }
        // With fewer descriptors another operation fails first, in the end in a library.
        let text = complaint(command).with_context(|| format!("top with {files} descriptors"))?;
        if text.starts_with("Cannot use the terminal: ") {
            return Ok(vec![text]);
        }
    }
    anyhow::bail!("Opening the terminal never failed")
}

/// Starts `vgpuctl view` and returns it with the path of its socket.
fn view(runs: &Vgpud) -> Result<(Child, PathBuf)> {
    let mut command = Command::new(vgpuctl_path()?);
    command.arg("--socket").arg(runs.api_socket());
    command.args(["view", RUNS, "--print", "--output", "json"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().context("No pipe")?).read_line(&mut line)?;
    let says: Value = serde_json::from_str(&line)?;
    Ok((child, says["socket"].as_str().context("A socket")?.into()))
}

/// Messages about connections that are no viewers or belong to other users.
pub fn by_a_door() -> Result<Vec<String>> {
    let runs = daemon()?;
    let (mut child, socket) = view(&runs)?;
    // A connection that closes at once is not an error.
    drop(UnixStream::connect(&socket)?);
    let mut no_viewer = UnixStream::connect(&socket)?;
    no_viewer.write_all(b"Hello, world")?;
    let errors = BufReader::new(child.stderr.take().context("No pipe")?).lines();
    let (line, lines) = mpsc::channel();
    std::thread::spawn(move || errors.map_while(Result::ok).try_for_each(|text| line.send(text)));
    let next = || lines.recv_timeout(TIMEOUT).context("No message");
    let mut said = vec![next()?];
    ensure!(said[0].contains("Viewer refused: The client is not a VNC"), "{said:?}");
    if nix::unistd::geteuid().is_root() {
        let open = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode));
        open(socket.parent().context("A folder")?, 0o711)?;
        open(&socket, 0o666)?;
        let _connection = OTHER_USER.run(|| Ok(UnixStream::connect(&socket)?))?;
        said.push(next()?);
        ensure!(
            said[1].contains("user 61234 is neither root nor the user who runs the view"),
            "{said:?}"
        );
    } else {
        skipped("only root can be another user");
    }
    kill_process(child.id(), Signal::SIGTERM)?;
    ensure!(child.wait()?.success(), "the command ends in order");
    Ok(said)
}

/// Messages about hung workers and workers that cannot start.
pub fn by_workers() -> Result<Vec<String>> {
    let runs = daemon()?;
    let path = |uuid: &str, more: &str| format!("/v1/vgpus/{uuid}/{more}");
    let worker = runs.show(RUNS)?["pid"].as_u64().context("No worker")?;
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
                    // The process may have ended by itself.
                    let _ = kill_process(pid, Signal::SIGKILL);
                }
            }
        });
        let asked = json!({ "mdev_type": "SOFT-256MQ", "run": true });
        let refused = (0..20).find_map(|_| runs.refused("POST", "/v1/vgpus", Some(&asked)).ok());
        over.store(true, Ordering::Relaxed);
        refused
    });
    said.push(refused.context("The vGPU started every time")?.2);
    ensure!(said[2].contains(" did not start: Its worker died (signal: 9"), "{said:?}");
    Ok(said)
}

/// Messages about paths that only the client can resolve.
pub fn by_the_web_console() -> Result<Vec<String>> {
    let runs = Vgpud::start_with(&["--web", "127.0.0.1:0"])?;
    let asked = json!({ "monitors": { NONE: "qmp.sock" } });
    let (status, _, message) = runs.refused("POST", "/v1/web", Some(&asked))?;
    ensure!(status == 400 && message.contains("is not an absolute path; begin it with a slash"));
    Ok(vec![message])
}
