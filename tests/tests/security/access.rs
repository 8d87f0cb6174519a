//! Access control: control socket, vGPU sockets, and privileges of workers.
//!
//! The tests act as other users, which needs root; they are skipped otherwise.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ipc::seqpacket::{MAX_PACKET, SeqPacket};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::raw_client::RawClient;
use system_tests::user::User;
use system_tests::vgpuctl::{Done, path, refused, vgpuctl};
use system_tests::{TIMEOUT, Vgpud, kill_process, skipped, wait_for};
use vgpud_host::uid_range::UidRange;

const OTHER_USER: User = User { uid: 61_234, gid: 61_234, groups: &[] };
const READERS: &str = "64242";
const READER: User = User { uid: 61_235, gid: 61_235, groups: &[61_300, 64_242] };
const ADMINS: &str = "64243";
const ADMIN: User = User { uid: 61_236, gid: 61_236, groups: &[64_242, 64_243] };
/// Users of two VMs, in the same group.
const VM: User = User { uid: 62_000, gid: 62_001, groups: &[] };
const NEIGHBOUR: User = User { uid: 62_002, gid: 62_001, groups: &[] };

/// Returns whether this process can act as other users; reports a skipped test otherwise.
fn can_switch_users() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        skipped("only root can act as other users");
    }
    root
}

/// Starts a manager in a folder that all users may enter.
fn vgpud(args: &[&str]) -> Result<Vgpud> {
    let vgpud = Vgpud::start_with(args)?;
    let folder = vgpud.run_dir();
    set_mode(folder.parent().context("The path has no parent")?, 0o711)?;
    Ok(vgpud)
}

fn set_mode(path: &Path, mode: u32) -> Result<()> {
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(mode))?)
}

/// Returns user, group and permissions of a file.
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

/// Copies `vgpuctl` to where all users can run it.
fn vgpuctl_for_all(vgpud: &Vgpud) -> Result<PathBuf> {
    let copy = vgpud.run_dir().join("vgpuctl");
    if !copy.exists() {
        // Another process writes the copy: see `vgpud_host::test_util::write_executable`.
        let installed =
            Command::new("install").args(["-m", "755"]).arg(path()?).arg(&copy).status()?;
        ensure!(installed.success(), "Cannot install {}: {installed}", copy.display());
    }
    Ok(copy)
}

fn runs(user: User, vgpud: &Vgpud, line: &str) -> Result<Done> {
    let vgpuctl = vgpuctl_for_all(vgpud)?;
    let socket = vgpud.api_socket();
    let output = user.run(move || {
        let mut command = Command::new(vgpuctl);
        command.arg("--socket").arg(socket).args(line.split(' ')).current_dir("/");
        // A file that exists, for `run`.
        Ok(command.env("TESSERA_CUDA_LIBRARY", "/proc/self/exe").output()?)
    })?;
    Ok(Done {
        status: output.status.code().context("vgpuctl was killed")?,
        stdout: String::from_utf8(output.stdout)?,
        stderr: String::from_utf8(output.stderr)?,
    })
}

#[test]
fn programs_use_vgpus_of_their_user() -> Result<()> {
    if !can_switch_users() {
        return Ok(());
    }
    let vgpud = vgpud(&["--group", READERS, "--admin-group", ADMINS])?;
    let uuid = transient(&vgpud)?;
    let socket = vgpud.vgpu_dir(&uuid).join("cuda.sock");
    if !socket.exists() {
        fs::write(&socket, "")?;
        fs::set_permissions(&socket, fs::Permissions::from_mode(0o600))?;
    }
    let done = runs(READER, &vgpud, &format!("run -u {uuid} -- true"))?;
    assert!(done.stderr.contains(" belongs to another user; stop it, then: "), "{done:?}");
    assert_eq!((done.status, done.stderr.lines().count()), (5, 1));
    Ok(())
}

#[test]
fn groups_separate_readers_from_administrators() -> Result<()> {
    if !can_switch_users() {
        return Ok(());
    }
    let vgpud = vgpud(&["--group", READERS, "--admin-group", ADMINS])?;
    assert_eq!(owner(&vgpud.api_socket())?, (0, 64_242, 0o660));
    let uuid = transient(&vgpud)?;

    // A user in no group cannot connect, and the message names the missing group.
    let error = OTHER_USER.run(|| Ok(UnixStream::connect(vgpud.api_socket()).err()))?;
    assert_eq!(error.context("It connected")?.kind(), ErrorKind::PermissionDenied);
    let done = runs(OTHER_USER, &vgpud, "list")?;
    assert_eq!((done.status, done.stdout.as_str()), (6, ""));
    assert!(done.stderr.starts_with("vgpuctl: User 61234 may not use vgpud at"), "{done:?}");
    assert_eq!(done.stderr.trim_end().lines().count(), 1);

    // A VM that could not attach is reported with QEMU's arguments, before QEMU runs.
    let done = runs(READER, &vgpud, &format!("qemu-args -u {uuid}"))?;
    assert!(done.stderr.contains(" has another owner; to use it in your VM"), "{done:?}");
    assert_eq!((done.status, done.stderr.lines().count()), (0, 1));
    assert_eq!(
        runs(User { uid: 0, ..READER }, &vgpud, &format!("qemu-args -u {uuid}"))?.stderr,
        ""
    );

    // Readers see everything except screens, and change nothing.
    for path in ["/v1/version", "/v1/parents", "/v1/vgpus", "/v1/stats", "/metrics"] {
        assert_eq!(READER.run(|| vgpud.request("GET", path, None))?.0, 200, "{path}");
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
        let (status, code, message) = READER.run(|| vgpud.refused(method, path, None))?;
        assert_eq!((status, code.as_str()), (403, "forbidden"), "{method} {path}");
        assert_eq!(
            message,
            "User 61235 may read, not change; members of group 64243 may: \
             `usermod -aG 64243 USER`, then log in again"
        );
    }
    let done = runs(READER, &vgpud, &format!("stop -u {uuid} --force"))?;
    assert_eq!((done.status, done.stderr.lines().count()), (6, 1), "{done:?}");
    assert!(runs(READER, &vgpud, "list")?.stdout.contains(&uuid), "nothing was stopped");

    let done = runs(ADMIN, &vgpud, &format!("stop -u {uuid}"))?;
    assert_eq!(done.status, 0, "{done:?}");

    // Wider permissions of the socket file do not widen access.
    set_mode(&vgpud.api_socket(), 0o666)?;
    for path in ["/v1/version", "/v1/vgpus", "/metrics", "/nonsense"] {
        let (status, code, message) = OTHER_USER.run(|| vgpud.refused("GET", path, None))?;
        assert_eq!((status, code.as_str()), (403, "forbidden"));
        assert!(message.contains("members of group 64242 may"), "{message}");
    }
    Ok(())
}

#[test]
fn only_the_owner_can_use_a_vgpus_socket() -> Result<()> {
    if !can_switch_users() {
        return Ok(());
    }
    let vgpud = vgpud(&["--owner", "62000:62001"])?;
    let uuid = transient(&vgpud)?;
    let (folder, socket) = (vgpud.vgpu_dir(&uuid), vgpud.vfio_socket(&uuid));
    let [control, context] = ["control.sock", "context.sock"].map(|name| folder.join(name));
    assert_eq!(owner(&socket)?, (62_000, 62_001, 0o600));
    assert_eq!(owner(&folder)?, (0, 62_001, 0o710));
    assert_eq!(owner(&control)?, (0, 0, 0o600));
    assert_eq!(owner(&context)?, (0, 0, 0o600));
    assert_eq!(owner(&folder.join("run.json"))?, (0, 0, 0o600));
    for passage in [vgpud.run_dir(), vgpud.run_dir().join("vgpus")] {
        assert_eq!(owner(&passage)?.2, 0o711, "{}", passage.display());
    }
    assert_eq!(owner(&vgpud.run_dir().join("parents"))?.2, 0o700);

    let connect = |path: &Path| Ok(UnixStream::connect(path).map_err(|error| error.kind()));
    let vm = VM.run(|| connect(&socket))?;
    wait_for("the VM is attached", || {
        vm_user(&vgpud, &uuid).is_ok_and(|uid| uid == json!(VM.uid))
    })?;
    drop(vm);
    let refused = [(NEIGHBOUR, &socket), (OTHER_USER, &socket), (VM, &control), (VM, &context)];
    for (who, what) in refused {
        let refused = who.run(|| connect(what))?.err();
        assert_eq!(refused, Some(ErrorKind::PermissionDenied), "{who:?} {}", what.display());
    }

    // The worker checks its peer besides the file permissions.
    set_mode(&socket, 0o666)?;
    set_mode(&control, 0o666)?;
    set_mode(&folder, 0o711)?;
    RawClient::over(OTHER_USER.run(|| Ok(UnixStream::connect(&socket)?))?).is_closed();
    assert_eq!(vm_user(&vgpud, &uuid)?, Value::Null);
    let orders = OTHER_USER.run(|| Ok(SeqPacket::connect_with_timeout(&control, TIMEOUT)?))?;
    let stop = json!({ "request": "stop" }).to_string();
    // The worker may have closed the connection already.
    let _ = orders.send(stop.as_bytes(), &[]);
    assert!(orders.recv(&mut vec![0; MAX_PACKET]).is_ok_and(|answer| answer.is_none()));
    let vm = VM.run(|| connect(&socket))?;
    wait_for("the VM is attached", || {
        vm_user(&vgpud, &uuid).is_ok_and(|uid| uid == json!(VM.uid))
    })?;
    drop(vm);
    Ok(())
}

/// A vGPU's owner has its socket while it is the owner, and never its screen through vgpud.
#[test]
fn owner_of_a_display_sees_no_screen_and_loses_the_vgpu_with_the_next_owner() -> Result<()> {
    if !can_switch_users() {
        return Ok(());
    }
    let vgpud = vgpud(&["--group", READERS, "--admin-group", ADMINS, "--owner", "62000:62001"])?;
    let request = json!({ "mdev_type": "SOFT-256MQ", "run": false, "define": true });
    let uuid = vgpud.create(&request)?;
    let path = format!("/v1/vgpus/{uuid}");
    let start = |owner: &str| {
        let body = json!({ "owner": owner });
        vgpud.call("POST", &format!("{path}/start"), Some(&body))
    };
    start("62000:62001")?;
    let socket = vgpud.vfio_socket(&uuid);
    let kept = VM.run(|| Ok(UnixStream::connect(&socket)?))?;
    wait_for("the owner is attached", || {
        vm_user(&vgpud, &uuid).is_ok_and(|uid| uid == json!(VM.uid))
    })?;
    let screen = format!("{path}/screenshot");
    let owners = VM.run(|| Ok(vgpud.request("GET", &screen, None).is_ok()))?;
    ensure!(!owners, "the owner is in no group, and reads the screen through vgpud");
    vgpud.call("POST", &format!("{path}/stop"), Some(&json!({ "force": true })))?;
    RawClient::over(kept).is_closed();
    start("62100:62101")?;
    set_mode(&socket, 0o666)?;
    set_mode(&vgpud.vgpu_dir(&uuid), 0o711)?;
    // The worker cuts a former owner off, whatever the permissions are.
    RawClient::over(VM.run(|| Ok(UnixStream::connect(&socket)?))?).is_closed();
    Ok(())
}

#[test]
fn the_owner_comes_from_the_definition_unless_start_overrides_it() -> Result<()> {
    if !can_switch_users() {
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
    // The owner survives worker and manager.
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
fn a_vgpu_belongs_to_the_administrator_who_starts_it() -> Result<()> {
    if !can_switch_users() {
        return Ok(());
    }
    let mut vgpud =
        vgpud(&["--group", READERS, "--admin-group", ADMINS, "--owner", "62000:62001"])?;
    let start = |vgpud: &Vgpud, line: &str| -> Result<String> {
        let done = runs(ADMIN, vgpud, format!("start -t SOFT-256MQ {line}").trim_end())?;
        ensure!(done.status == 0, "{done:?}");
        Ok(done.stdout.trim().to_owned())
    };
    let owner_of =
        |vgpud: &Vgpud, uuid: &str| Ok::<_, anyhow::Error>(owner(&vgpud.vfio_socket(uuid))?.0);
    let own = start(&vgpud, "")?;
    assert_eq!(owner_of(&vgpud, &own)?, ADMIN.uid);
    let shown = vgpud.show(&own)?;
    assert_eq!(shown["live_attrs"], json!([{ "owner": ADMIN.uid.to_string() }]));
    // The caller's VM attaches, and no other user's does.
    let socket = vgpud.vfio_socket(&own);
    let connect =
        |user: User| user.run(|| Ok(UnixStream::connect(&socket).map_err(|error| error.kind())));
    let vm = connect(ADMIN)?;
    wait_for("the VM is attached", || {
        vm_user(&vgpud, &own).is_ok_and(|uid| uid == json!(ADMIN.uid))
    })?;
    drop(vm);
    assert_eq!(connect(VM)?.err(), Some(ErrorKind::PermissionDenied));
    let named = start(&vgpud, "--owner 62100")?;
    assert_eq!(owner_of(&vgpud, &named)?, 62_100);
    // Root's vGPUs belong to the default owner, and the owner in a definition is its author's
    // choice.
    assert_eq!(owner_of(&vgpud, &transient(&vgpud)?)?, 62_000);
    vgpud.call("POST", &format!("/v1/vgpus/{named}/stop"), None)?;
    let defined = vgpuctl(&vgpud, "define -p soft0 -t SOFT-256MQ --attr owner=62010")?;
    let plain = vgpuctl(&vgpud, "define -p soft0 -t SOFT-256MQ")?;
    for (uuid, uid) in [(&defined, 62_010), (&plain, ADMIN.uid)] {
        let done = runs(ADMIN, &vgpud, &format!("start -u {uuid}"))?;
        ensure!(done.status == 0, "{done:?}");
        assert_eq!(owner_of(&vgpud, uuid)?, uid);
    }
    assert_eq!(vgpud.show(&plain)?["attrs"], json!([]), "the definition stays");
    vgpud.end(Signal::SIGKILL)?;
    vgpud.start_again()?;
    assert_eq!(owner_of(&vgpud, &plain)?, ADMIN.uid, "the owner survives the manager");
    Ok(())
}

#[test]
fn workers_and_software_gpus_run_without_privileges() -> Result<()> {
    if !can_switch_users() {
        return Ok(());
    }
    let vgpud = vgpud(&["--worker-user", "62020:62021"])?;
    transient(&vgpud)?;
    let roles = vgpud.roles();
    assert_eq!(roles.len(), 2, "a worker and a software GPU");
    let mut software_gpus = 0;
    for pid in roles {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        };
        let user = User::of(pid)?;
        if user.uid == 62_020 {
            software_gpus += 1;
        } else {
            assert!(UidRange::WORKERS.contains(user.uid), "{user:?}");
        }
        let uids = [user.uid.to_string(), user.uid.to_string()].join(" ");
        assert_eq!(field("Uid:"), Some([uids.clone(), uids].join(" ")));
        assert_eq!(field("Gid:").as_deref(), Some("62021 62021 62021 62021"));
        assert_eq!(field("Groups:").as_deref(), Some(""));
        assert_eq!(field("CapEff:").as_deref(), Some("0000000000000000"));
        assert_eq!(field("NoNewPrivs:").as_deref(), Some("1"));
        // A process of the same user cannot read the worker's memory.
        let memory = format!("/proc/{pid}/mem");
        let looked = user.run(|| Ok(fs::File::open(memory).map_err(|error| error.kind()).err()))?;
        assert_eq!(looked, Some(ErrorKind::PermissionDenied));
    }
    assert_eq!(software_gpus, 1, "the software GPU is --worker-user");
    Ok(())
}
