//! Messages of daemon, API and CLI about mistakes, caused in real programs.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::vgpuctl::{path as vgpuctl_path, run, vgpuctl};
use system_tests::{Vgpud, kill_process, vgpud};

use super::faults;

pub const NONE: &str = "4c1f0a5e-3b0e-4e57-8d1c-1f4d3c9e0000";
pub const RUNS: &str = "4c1f0a5e-3b0e-4e57-8d1c-1f4d3c9e0001";
const STOPPED: &str = "4c1f0a5e-3b0e-4e57-8d1c-1f4d3c9e0002";
const BOTH: &str = "4c1f0a5e-3b0e-4e57-8d1c-1f4d3c9e0003";

/// Returns all messages.
pub fn all() -> Result<Vec<String>> {
    static SAID: OnceLock<std::result::Result<Vec<String>, String>> = OnceLock::new();
    let said = SAID.get_or_init(|| {
        let parts = [
            by_the_api,
            by_the_cli,
            about_definitions,
            about_screens,
            by_a_daemon_that_is_none,
            at_the_start,
            faults::by_a_host_in_the_way,
            faults::by_a_host_without_threads,
            faults::by_a_terminal,
            faults::by_a_door,
            faults::by_workers,
            faults::by_the_web_console,
        ];
        let (mut said, mut wrong) = (Vec::new(), Vec::new());
        for part in parts {
            match part() {
                Ok(more) => said.extend(more),
                Err(error) => wrong.push(format!("{error:#}")),
            }
        }
        if wrong.is_empty() { Ok(said) } else { Err(wrong.join("\n")) }
    });
    said.clone().map_err(anyhow::Error::msg)
}

pub fn daemon() -> Result<Vgpud> {
    let vgpud =
        Vgpud::start_with(&["--parent", "soft:soft0,vram=2G", "--scripts-dir", "/nonexistent"])?;
    for (uuid, define, run) in [(RUNS, false, true), (STOPPED, true, false), (BOTH, true, true)] {
        vgpud.create(&json!({
            "uuid": uuid, "mdev_type": "SOFT-256MQ", "define": define, "run": run,
            "attrs": [{ "core": "40" }],
        }))?;
    }
    Ok(vgpud)
}

fn by_the_api() -> Result<Vec<String>> {
    let mut vgpud = daemon()?;
    let mut said = Vec::new();
    let vgpu = |uuid: &str, more: &str| format!("/v1/vgpus/{uuid}{more}");
    let new = |more: Value| -> Option<Value> {
        let mut request = json!({ "mdev_type": "SOFT-256MC", "define": true });
        request.as_object_mut()?.extend(more.as_object()?.clone());
        Some(request)
    };
    let all = "/v1/vgpus".to_owned();
    let scheduler = "/v1/schedulers/soft0".to_owned();
    vgpud.call("PATCH", &scheduler, Some(&json!({ "overcommit": true })))?;
    vgpud
        .create(&json!({ "mdev_type": "SOFT-256MC", "run": true, "attrs": [{ "core": "90" }] }))?;
    for (method, path, body, expected) in [
        ("GET", "/v1/nothing".to_owned(), None, 404),
        ("PUT", all.clone(), None, 405),
        ("POST", all.clone(), Some(json!("x".repeat(100_000))), 413),
        ("POST", all.clone(), Some(json!({ "typo": 1 })), 400),
        ("GET", vgpu("x%20y", ""), None, 400),
        ("GET", vgpu("x", ""), None, 404),
        ("POST", all.clone(), Some(json!({})), 400),
        ("POST", all.clone(), Some(json!({ "define": true })), 400),
        ("POST", all.clone(), new(json!({ "parent": "nope" })), 404),
        ("POST", all.clone(), new(json!({ "uuid": STOPPED })), 409),
        ("POST", all.clone(), new(json!({ "uuid": RUNS, "define": false, "run": true })), 409),
        ("POST", all.clone(), new(json!({ "attrs": [{ "a": "1", "b": "2" }] })), 400),
        ("POST", all.clone(), new(json!({ "attrs": [{ "mode": "hard" }] })), 400),
        ("POST", all.clone(), new(json!({ "attrs": [{ "refresh": "0" }] })), 400),
        ("POST", all.clone(), new(json!({ "attrs": [{ "core": "1" }, { "core": "2" }] })), 400),
        ("POST", all, new(json!({ "mdev_type": "SOFT-2Q", "run": true })), 409),
        ("DELETE", vgpu(RUNS, ""), None, 409),
        ("DELETE", vgpu(NONE, ""), None, 404),
        ("POST", vgpu(RUNS, "/start"), None, 409),
        ("POST", vgpu(STOPPED, "/stop"), None, 409),
        ("GET", vgpu(STOPPED, "/screenshot"), None, 409),
        ("GET", vgpu(RUNS, "/screenshot"), None, 409),
        ("PATCH", vgpu(RUNS, ""), Some(json!({ "start": "auto" })), 409),
        ("PATCH", vgpu(STOPPED, ""), Some(json!({ "target": "live" })), 409),
        ("PATCH", vgpu(RUNS, ""), Some(json!({ "target": "live", "start": "auto" })), 400),
        ("PATCH", vgpu(RUNS, ""), Some(json!({ "live_attrs": [], "target": "live" })), 400),
        (
            "PATCH",
            vgpu(RUNS, ""),
            Some(
                json!({ "attrs": [{ "core": "40" }, { "doorbell": "trapped" }], "target": "live" }),
            ),
            409,
        ),
        ("POST", vgpu(RUNS, "/focus"), None, 409),
        ("POST", vgpu(STOPPED, "/focus"), None, 409),
        ("POST", "/v1/parents/soft0/rotation".into(), Some(json!({ "seconds": 5 })), 409),
        ("POST", "/v1/parents/soft9/rotation".into(), Some(json!({})), 404),
        ("POST", "/v1/parents/soft0/rotation".into(), Some(json!({ "seconds": 0 })), 400),
        ("PATCH", "/v1/schedulers/soft9".into(), Some(json!({})), 404),
        ("PATCH", scheduler.clone(), Some(json!({ "overcommit": false })), 409),
        ("PATCH", scheduler.clone(), Some(json!({ "averaging_factor": 0 })), 400),
        ("PATCH", scheduler.clone(), Some(json!({ "frequency": 9 })), 400),
        ("PATCH", scheduler, Some(json!({ "policy": "fair" })), 400),
    ] {
        let (status, code, message) = vgpud.refused(method, &path, body.as_ref())?;
        ensure!(status == expected, "{method} {path}: {status} {code} {message}");
        said.push(message);
    }

    said.extend(by_dying_processes(&vgpud)?);
    vgpud.end(Signal::SIGTERM)?;
    Ok(said)
}

fn by_dying_processes(vgpud: &Vgpud) -> Result<Vec<String>> {
    let start = format!("/v1/vgpus/{STOPPED}/start");
    let mut said = Vec::new();
    // A worker's folder that cannot be created, and a worker that never answers.
    let folder = vgpud.vgpu_dir(STOPPED);
    fs::write(&folder, "in the way")?;
    said.push(vgpud.refused("POST", &start, None)?.2);
    fs::remove_file(&folder)?;

    // A GPU process that dies repeatedly is restarted with growing delays.
    let lost = "is unavailable:";
    for _ in 0..50 {
        for pid in vgpud.roles() {
            let name = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
            if name.starts_with(b"gpu-") {
                let _ = kill_process(pid, Signal::SIGKILL);
            }
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
        let answer = vgpud.request("POST", &start, None)?;
        let message = String::from_utf8_lossy(&answer.1).into_owned();
        if message.contains(lost) {
            let value: Value = serde_json::from_str(&message)?;
            said.push(value["error"]["message"].as_str().context("A message")?.to_owned());
            break;
        }
        let _ = vgpud.request("POST", &format!("/v1/vgpus/{STOPPED}/stop"), None)?;
    }
    Ok(said)
}

fn by_the_cli() -> Result<Vec<String>> {
    let vgpud = daemon()?;
    let bad = vgpud.run_dir().join("bad.json");
    fs::write(&bad, "{}")?;
    let bad = bad.display();
    let mut said = Vec::new();
    for (line, status) in [
        ("define -t SOFT-1Q --attr core".to_owned(), 2),
        ("scheduler --timeslice soon".into(), 2),
        ("import --parent soft0".into(), 2),
        ("define".into(), 2),
        ("stop -u 1".into(), 4),
        ("stop a/b".into(), 2),
        (format!("modify -u {BOTH} --delattr --index 7"), 2),
        (format!("modify -u {BOTH} --addattr core --value 1"), 2),
        (format!("modify -u {BOTH} -p soft9 --auto"), 2),
        (format!("start -u {STOPPED} -t SOFT-1Q"), 2),
        (format!("start -u {STOPPED} --attr core=1"), 2),
        (format!("start -u {NONE}"), 4),
        (format!("define -p soft0 --jsonfile {bad}"), 2),
        ("define -p soft0 --jsonfile /nonexistent".into(), 1),
        ("types -p soft9".into(), 4),
        ("top -p soft0".into(), 2),
        (format!("stats -u {STOPPED}"), 5),
        (format!("screenshot -u {NONE} -o /dev/null"), 4),
        (format!("focus {RUNS}"), 5),
        ("focus --rotate 5".into(), 5),
        ("focus -p soft9".into(), 4),
        (
            format!(
                "qemu-args -u {RUNS} -- qemu -object memory-backend-ram,id=m,size=1G -M pc,memory-backend=m"
            ),
            2,
        ),
        ("start-parent-mdevs soft0".into(), 2),
        ("import /nonexistent".into(), 4),
        (format!("import {bad}"), 1),
        ("qemu-args --memory lots".into(), 2),
    ] {
        let done = run(&vgpud, &line)?;
        ensure!(done.status == status, "{line}: {done:?}, expected {status}");
        said.push(done.stderr.trim_start_matches("vgpuctl: ").to_owned());
    }
    let tree = vgpud.run_dir().join("tree");
    fs::create_dir_all(tree.join("soft0"))?;
    let text = r#"{"mdev_type":"SOFT-256MQ","start":"auto","attrs":[{"assign_adapter":"5"}]}"#;
    fs::write(tree.join("soft0").join(NONE), text)?;
    let done = run(&vgpud, &format!("import {}", tree.display()))?;
    ensure!(done.status == 1, "{done:?}");
    said.extend([done.stdout, done.stderr]);
    let mut nowhere = Command::new(vgpuctl_path()?);
    let output = nowhere.args(["--socket", "/nonexistent", "list"]).output()?;
    ensure!(output.status.code() == Some(3), "{output:?}");
    said.push(String::from_utf8(output.stderr)?);
    let mut virsh = Command::new(vgpuctl_path()?);
    virsh.arg("--socket").arg(vgpud.api_socket()).env("PATH", "/nonexistent");
    let output = virsh.args(["libvirt", "attach", "web1", "-u", STOPPED]).output()?;
    ensure!(!output.status.success(), "{output:?}");
    said.push(String::from_utf8(output.stderr)?);
    Ok(said)
}

/// Files that are no definitions: `list` continues, and the log names them.
fn about_definitions() -> Result<Vec<String>> {
    use mdev_core::definition::Store;
    let dir = tempfile::tempdir()?;
    let store = Store::open(dir.path())?;
    let mut said = Vec::new();
    let good = br#"{"mdev_type":"SOFT-1Q"}"#;
    for parent in ["a", "b"] {
        fs::create_dir(dir.path().join(parent))?;
        fs::write(dir.path().join(parent).join(NONE), good)?;
    }
    fs::write(dir.path().join("a/notes"), "")?;
    fs::write(dir.path().join("a").join(RUNS), "{\"mdev_type\":\"\"}")?;
    fs::write(dir.path().join("a").join(STOPPED), " ".repeat(70_000))?;
    fs::create_dir(dir.path().join("b").join(RUNS))?;
    symlink("nowhere", dir.path().join("a").join(BOTH))?;
    said.extend(store.scan()?.problems.into_iter().map(|problem| problem.error.to_string()));
    ensure!(said.len() == 6, "{said:?}");
    let definition = mdev_core::definition::Definition::from_json(good)?;
    let vgpu = NONE.parse()?;
    let refused =
        store.save("../x", vgpu, &definition).err().context("The request was not refused")?;
    said.push(refused.to_string());
    Ok(said)
}

/// Invalid screens that a worker could report.
fn about_screens() -> Result<Vec<String>> {
    use mdev_core::device::Scanout;
    use vgpud::console::screenshot::render;
    let good = Scanout {
        enabled: true,
        width: 64,
        height: 48,
        stride: 256,
        bits_per_pixel: 32,
        offset: 0,
        big_endian: false,
    };
    let wrong = [
        Scanout { width: 0, ..good },
        Scanout { stride: 255, ..good },
        Scanout { offset: u64::MAX, ..good },
        Scanout { bits_per_pixel: 31, ..good },
    ];
    let mut said = Vec::new();
    for scanout in wrong {
        let refused = render(&scanout, tempfile::tempfile()?.into()).err();
        said.push(refused.context("The request was not refused")?.to_string());
    }
    Ok(said)
}

/// Messages about a server that is not vgpud.
fn by_a_daemon_that_is_none() -> Result<Vec<String>> {
    let dir = tempfile::tempdir()?;
    let socket = dir.path().join("socket");
    let listener = UnixListener::bind(&socket)?;
    let answers = [
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        "HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
        "what do you want?\r\n\r\n",
        "",
    ];
    let thread = std::thread::spawn(move || -> Result<()> {
        for answer in answers {
            let (mut client, _) = listener.accept()?;
            let _ = client.read(&mut [0; 4096])?;
            client.write_all(answer.as_bytes())?;
        }
        Ok(())
    });
    let mut said = Vec::new();
    for answer in answers {
        let output =
            Command::new(vgpuctl_path()?).arg("--socket").arg(&socket).arg("list").output()?;
        let status = if answer.is_empty() { 3 } else { 1 };
        ensure!(output.status.code() == Some(status), "{output:?}");
        said.push(String::from_utf8(output.stderr)?.trim_start_matches("vgpuctl: ").to_owned());
    }
    thread.join().map_err(|_| anyhow::anyhow!("The fake daemon panicked"))??;
    Ok(said)
}

/// Messages of a daemon that cannot start.
fn at_the_start() -> Result<Vec<String>> {
    let dir = tempfile::tempdir()?;
    let path = |name: &str| dir.path().join(name).display().to_string();
    fs::write(dir.path().join("file"), "")?;
    for (folder, taken) in [("r1", "lock"), ("r2", "control.sock")] {
        fs::create_dir_all(dir.path().join(folder).join(taken).join("x"))?;
    }
    fs::create_dir(dir.path().join("r3"))?;
    fs::write(dir.path().join("r3/vgpus"), "")?;
    let (good, config) = (path("good"), path("config"));
    let file = path("file");
    let mut said = Vec::new();
    let runs = daemon()?;
    let busy = runs.run_dir().display().to_string();
    for args in [
        vec!["--run-dir", &file, "--config-dir", &config],
        vec!["--run-dir", &good, "--config-dir", &file],
        vec!["--run-dir", &path("r1"), "--config-dir", &config],
        vec!["--run-dir", &path("r2"), "--config-dir", &config],
        vec!["--run-dir", &path("r3"), "--config-dir", &config],
        vec!["--run-dir", &busy, "--config-dir", &config],
        vec!["--run-dir", &path(&"x".repeat(100)), "--config-dir", &config],
        vec!["--parent", "soft:a", "--parent", "soft:a"],
        vec!["--parent", "soft:a/b"],
        vec!["--parent", "soft:a,speed=1"],
        vec!["--parent", "soft:a,vram=much"],
        vec!["--parent", "soft"],
        vec!["--parent", "voodoo:a"],
        vec!["--parent", "nvidia:0000:3b:00.0,speed=1"],
        vec!["--parent", "nvidia:gpu0"],
        vec!["--parent", "vfio:0000:00:02.0,speed=1"],
        vec!["--parent", "nvidia:0000:3b:00.0,hang=1"],
        vec!["--parent", "soft:scripts.d"],
        vec!["--worker-user", "root"],
        vec!["--worker-uids", "9-4"],
        vec!["--owner", "a:b:c"],
        vec!["--admin-group", "no-such-group"],
    ] {
        let mut command = Command::new(vgpud()?);
        command.arg("run").args(&args);
        if !args.contains(&"--run-dir") {
            // The command ends even if it is not refused.
            command.args(["--run-dir", &file, "--config-dir", &config]);
        }
        command.env("RUST_LOG", "off").stdin(Stdio::null());
        let output = command.output()?;
        ensure!(!output.status.success(), "{args:?}: {output:?}");
        said.push(String::from_utf8(output.stderr)?.trim_start_matches("vgpud: ").to_owned());
    }
    let uuid = vgpuctl(&runs, "define -p soft0 -t SOFT-256MQ")?;
    ensure!(!uuid.is_empty(), "the first command continues");
    Ok(said)
}
