//! Who may do what: on the control socket, on a vGPU's socket, and as a worker.
//!
//! It takes root to be somebody else: as another user these tests are skipped.

use std::fs;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::user::User;
use system_tests::vgpuctl::{Done, refused, vgpuctl};
use system_tests::{PATIENCE, Vgpud, kill_process, program, skipped, wait_for};
use vendor_backends::seqpacket::{MAX_PACKET, SeqPacket};

const STRANGER: User = User { uid: 61_234, gid: 61_234, groups: &[] };
const READERS: &str = "64242";
const READER: User = User { uid: 61_235, gid: 61_235, groups: &[61_300, 64_242] };
const ADMINS: &str = "64243";
const ADMIN: User = User { uid: 61_236, gid: 61_236, groups: &[64_242, 64_243] };
/// Whom a VM runs as; and another one's, who may well be in the same group.
const VM: User = User { uid: 62_000, gid: 62_001, groups: &[] };
const NEIGHBOUR: User = User { uid: 62_002, gid: 62_001, groups: &[] };

/// Whether this test can run; says so otherwise.
fn may_be_others() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        skipped("only root can be other users");
    }
    root
}

/// A manager in a folder that everybody may pass through.
fn vgpud(args: &[&str]) -> Result<Vgpud> {
    let vgpud = Vgpud::start_with(args)?;
    let folder = vgpud.run_dir();
    set_mode(folder.parent().context("It has a parent")?, 0o711)?;
    Ok(vgpud)
}

fn set_mode(path: &Path, mode: u32) -> Result<()> {
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(mode))?)
}

/// User, group and permissions.
fn owner(path: &Path) -> Result<(u32, u32, u32)> {
    let about = fs::metadata(path)?;
    Ok((about.uid(), about.gid(), about.mode() & 0o777))
}

fn transient(vgpud: &Vgpud) -> Result<String> {
    vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "run": true }))
}

fn vm_user(vgpud: &Vgpud, uuid: &str) -> Result<Value> {
    Ok(vgpud.show(uuid)?["vm"]["uid"].clone())
}

/// `vgpuctl` where everybody can run it.
fn vgpuctl_for_all(vgpud: &Vgpud) -> Result<PathBuf> {
    let copy = vgpud.run_dir().join("vgpuctl");
    if !copy.exists() {
        fs::copy(program("vgpuctl", "vgpuctl")?, &copy)?;
        set_mode(&copy, 0o755)?;
    }
    Ok(copy)
}

fn runs(user: User, vgpud: &Vgpud, line: &str) -> Result<Done> {
    let vgpuctl = vgpuctl_for_all(vgpud)?;
    let socket = vgpud.api_socket();
    let output = user.does(move || {
        let mut command = Command::new(vgpuctl);
        command.arg("--socket").arg(socket).args(line.split(' ')).current_dir("/");
        Ok(command.output()?)
    })?;
    Ok(Done {
        status: output.status.code().context("vgpuctl was killed")?,
        stdout: String::from_utf8(output.stdout)?,
        stderr: String::from_utf8(output.stderr)?,
    })
}

#[test]
fn groups_decide_who_may_look_and_who_may_change() -> Result<()> {
    if !may_be_others() {
        return Ok(());
    }
    let vgpud = vgpud(&["--group", READERS, "--admin-group", ADMINS])?;
    assert_eq!(owner(&vgpud.api_socket())?, (0, 64_242, 0o660));
    let uuid = transient(&vgpud)?;

    // Who is in no group does not get as far as to ask, and is told what is missing.
    let error = STRANGER.does(|| Ok(UnixStream::connect(vgpud.api_socket()).err()))?;
    assert_eq!(error.context("It connected")?.kind(), ErrorKind::PermissionDenied);
    let done = runs(STRANGER, &vgpud, "list")?;
    assert_eq!((done.status, done.stdout.as_str()), (6, ""));
    assert!(done.stderr.starts_with("vgpuctl: User 61234 may not use vgpud at"), "{done:?}");
    assert_eq!(done.stderr.trim_end().lines().count(), 1);

    // Whoever cannot attach a VM of theirs learns it with QEMU's arguments, and not from QEMU.
    let done = runs(READER, &vgpud, &format!("qemu-args -u {uuid}"))?;
    assert!(done.stderr.contains(" is for VMs of another user; for one of yours"), "{done:?}");
    assert_eq!((done.status, done.stderr.lines().count()), (0, 1));
    assert_eq!(
        runs(User { uid: 0, ..READER }, &vgpud, &format!("qemu-args -u {uuid}"))?.stderr,
        ""
    );

    // Those who may look see everything but guests' screens, and change nothing.
    for path in ["/v1/version", "/v1/parents", "/v1/vgpus", "/v1/stats", "/metrics"] {
        assert_eq!(READER.does(|| vgpud.request("GET", path, None))?.0, 200, "{path}");
    }
    let vgpu = format!("/v1/vgpus/{uuid}");
    for (method, path) in [
        ("POST", "/v1/vgpus"),
        ("PATCH", vgpu.as_str()),
        ("DELETE", &vgpu),
        ("POST", &format!("{vgpu}/stop")),
        ("PATCH", "/v1/schedulers/soft0"),
        ("GET", &format!("{vgpu}/screenshot")),
        ("POST", "/v1/no-such-path"),
    ] {
        let (status, code, message) = READER.does(|| vgpud.refused(method, path, None))?;
        assert_eq!((status, code.as_str()), (403, "forbidden"), "{method} {path}");
        assert_eq!(
            message,
            "User 61235 may look, not change; members of group 64243 may: \
             `usermod -aG 64243 USER`, then log in again"
        );
    }
    let done = runs(READER, &vgpud, &format!("stop -u {uuid} --force"))?;
    assert_eq!((done.status, done.stderr.lines().count()), (6, 1), "{done:?}");
    assert!(runs(READER, &vgpud, "list")?.stdout.contains(&uuid), "nothing was stopped");

    let done = runs(ADMIN, &vgpud, &format!("stop -u {uuid}"))?;
    assert_eq!(done.status, 0, "{done:?}");

    // A socket that somebody opened to all is not open to all.
    set_mode(&vgpud.api_socket(), 0o666)?;
    for path in ["/v1/version", "/v1/vgpus", "/metrics", "/nonsense"] {
        let (status, code, message) = STRANGER.does(|| vgpud.refused("GET", path, None))?;
        assert_eq!((status, code.as_str()), (403, "forbidden"));
        assert!(message.contains("members of group 64242 may"), "{message}");
    }
    Ok(())
}

#[test]
fn a_vgpus_socket_is_for_the_user_that_its_vm_runs_as() -> Result<()> {
    if !may_be_others() {
        return Ok(());
    }
    let vgpud = vgpud(&["--owner", "62000:62001"])?;
    let uuid = transient(&vgpud)?;
    let (folder, socket) = (vgpud.vgpu_dir(&uuid), vgpud.vfio_socket(&uuid));
    let control = folder.join("control.sock");
    assert_eq!(owner(&socket)?, (62_000, 62_001, 0o600));
    assert_eq!(owner(&folder)?, (0, 62_001, 0o710));
    assert_eq!(owner(&control)?, (0, 0, 0o600));
    assert_eq!(owner(&folder.join("run.json"))?, (0, 0, 0o600));
    for passage in [vgpud.run_dir(), vgpud.run_dir().join("vgpus")] {
        assert_eq!(owner(&passage)?.2, 0o711, "{}", passage.display());
    }
    assert_eq!(owner(&vgpud.run_dir().join("parents"))?.2, 0o700);

    let connect = |path: &Path| Ok(UnixStream::connect(path).map_err(|error| error.kind()));
    let vm = VM.does(|| connect(&socket))?;
    wait_for("the VM is attached", || {
        vm_user(&vgpud, &uuid).is_ok_and(|uid| uid == json!(VM.uid))
    })?;
    drop(vm);
    for (who, what) in [(NEIGHBOUR, &socket), (STRANGER, &socket), (VM, &control)] {
        let refused = who.does(|| connect(what))?.err();
        assert_eq!(refused, Some(ErrorKind::PermissionDenied), "{who:?} {}", what.display());
    }

    // What the filesystem lets through, the worker still looks at.
    set_mode(&socket, 0o666)?;
    set_mode(&control, 0o666)?;
    set_mode(&folder, 0o711)?;
    let mut cut_off = STRANGER.does(|| Ok(UnixStream::connect(&socket)?))?;
    cut_off.set_read_timeout(Some(PATIENCE))?;
    assert_eq!(cut_off.read(&mut [0; 16])?, 0, "the connection is closed at once");
    assert_eq!(vm_user(&vgpud, &uuid)?, Value::Null);
    let orders = STRANGER.does(|| Ok(SeqPacket::connect_with_timeout(&control, PATIENCE)?))?;
    let stop = json!({ "request": "stop" }).to_string();
    // It may be closed already.
    let _ = orders.send(stop.as_bytes(), &[]);
    assert!(orders.recv(&mut vec![0; MAX_PACKET]).is_ok_and(|answer| answer.is_none()));
    let vm = VM.does(|| connect(&socket))?;
    wait_for("the VM is attached", || {
        vm_user(&vgpud, &uuid).is_ok_and(|uid| uid == json!(VM.uid))
    })?;
    drop(vm);
    Ok(())
}

#[test]
fn an_owner_is_the_definitions_unless_a_start_says_otherwise() -> Result<()> {
    if !may_be_others() {
        return Ok(());
    }
    let mut vgpud = vgpud(&[])?;
    let uuid = vgpuctl(&vgpud, "define -p soft0 -t SOFT-256MQ --attr owner=62010")?;
    let socket = vgpud.vfio_socket(&uuid);
    vgpuctl(&vgpud, &format!("start -u {uuid}"))?;
    assert_eq!(owner(&socket)?, (62_010, 62_010, 0o600));
    refused(&vgpud, &format!("modify -u {uuid} --attr owner=1 --live"), 5, "cannot change while")?;
    vgpuctl(&vgpud, &format!("stop -u {uuid}"))?;

    vgpuctl(&vgpud, &format!("start -u {uuid} --owner 62011:62012"))?;
    assert_eq!(owner(&socket)?, (62_011, 62_012, 0o600));
    let shown = vgpud.show(&uuid)?;
    assert_eq!(shown["attrs"], json!([{ "owner": "62010" }]), "the definition stays");
    assert_eq!(shown["live_attrs"], json!([{ "owner": "62011:62012" }]));
    // It outlives the worker, and the manager.
    let worker = |vgpud: &Vgpud| {
        let pid = vgpud.show(&uuid)?["pid"].as_u64().context("No worker")?;
        Ok::<_, anyhow::Error>(u32::try_from(pid)?)
    };
    let first = worker(&vgpud)?;
    kill_process(first, Signal::SIGKILL)?;
    wait_for("another worker", || worker(&vgpud).is_ok_and(|pid| pid != first))?;
    assert_eq!(owner(&socket)?, (62_011, 62_012, 0o600));
    vgpud.end(Signal::SIGKILL)?;
    vgpud.start_again()?;
    assert_eq!(vgpud.show(&uuid)?["live_attrs"], json!([{ "owner": "62011:62012" }]));
    vgpuctl(&vgpud, &format!("stop -u {uuid}"))?;

    refused(&vgpud, &format!("start -u {uuid} --owner no-such-user"), 2, "There is no user")?;
    refused(&vgpud, "start -t SOFT-256MQ --attr owner=a:b:c", 2, "USER or USER:GROUP")?;
    let transient = vgpuctl(&vgpud, "start -p soft0 -t SOFT-256MQ --owner 62013")?;
    assert_eq!(owner(&vgpud.vfio_socket(&transient))?, (62_013, 62_013, 0o600));
    Ok(())
}

#[test]
fn what_a_guest_could_take_over_is_nobody() -> Result<()> {
    if !may_be_others() {
        return Ok(());
    }
    let vgpud = vgpud(&["--worker-user", "62020:62021"])?;
    transient(&vgpud)?;
    let roles = vgpud.roles();
    assert_eq!(roles.len(), 2, "a worker and a software GPU");
    for pid in roles {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        };
        assert_eq!(field("Uid:").as_deref(), Some("62020 62020 62020 62020"));
        assert_eq!(field("Gid:").as_deref(), Some("62021 62021 62021 62021"));
        assert_eq!(field("Groups:").as_deref(), Some(""));
        assert_eq!(field("CapEff:").as_deref(), Some("0000000000000000"));
        assert_eq!(field("NoNewPrivs:").as_deref(), Some("1"));
        // One of its own user's processes may not look into it.
        let own = User { uid: 62_020, gid: 62_021, groups: &[] };
        let memory = format!("/proc/{pid}/mem");
        let looked = own.does(|| Ok(fs::File::open(memory).map_err(|error| error.kind()).err()))?;
        assert_eq!(looked, Some(ErrorKind::PermissionDenied));
    }
    Ok(())
}
