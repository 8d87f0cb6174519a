//! `vgpud` for its operator: vGPUs exist when reported, survive crashes, and leave nothing behind.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::{Vgpud, is_alive, kill_process, wait_for};

/// Starts a transient vGPU.
pub fn transient(vgpud: &Vgpud) -> Result<String> {
    vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "run": true }))
}

/// Returns the process id of a vGPU or a parent.
pub fn pid(value: &Value) -> Result<u32> {
    let pid = value["pid"].as_u64().with_context(|| format!("No process in {value}"))?;
    Ok(u32::try_from(pid)?)
}

/// Returns the state of a vGPU.
pub fn state(vgpud: &Vgpud, uuid: &str) -> Result<String> {
    Ok(vgpud.show(uuid)?["state"].as_str().unwrap_or_default().to_owned())
}

/// Connects as a VM and waits until the manager reports this process as the user of the vGPU.
pub fn attach(vgpud: &Vgpud, uuid: &str) -> Result<UnixStream> {
    let vm = UnixStream::connect(vgpud.vfio_socket(uuid))?;
    wait_for("a VM is attached", || {
        vgpud.show(uuid).is_ok_and(|vgpu| vgpu["vm"]["pid"] == std::process::id())
    })?;
    Ok(vm)
}

#[test]
fn types_have_the_format_that_consumers_parse() -> Result<()> {
    let vgpud = Vgpud::start_with(&["--parent", "soft:gpu,vram=2G"])?;
    let types = vgpud.get("/v1/types")?;
    let one = types[0]["types"].as_array().unwrap().iter().find(|t| t["name"] == "SOFT-1Q");
    let one = one.expect("SOFT-1Q");
    assert_eq!(types[0]["parent"], "gpu");
    assert_eq!(
        one["description"],
        "num_heads=1, framebuffer=1024M, max_resolution=1920x1200, max_instance=2"
    );
    assert_eq!((&one["available_instances"], &one["max_instances"]), (&json!(2), &json!(2)));
    transient(&vgpud)?;
    let types = vgpud.get("/v1/types")?;
    let one = types[0]["types"].as_array().unwrap().iter().find(|t| t["name"] == "SOFT-1Q");
    assert_eq!(one.expect("SOFT-1Q")["available_instances"], 1);
    let parent = &vgpud.get("/v1/parents")?[0];
    assert_eq!((&parent["state"], &parent["running"]), (&json!("ready"), &json!(1)));
    Ok(())
}

#[test]
fn a_vgpu_is_defined_started_stopped_and_undefined() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = "6b4e1a3c-6a3a-4a5e-8f5f-0d6c1c8f0001";
    let path = format!("/v1/vgpus/{uuid}");
    let definition = json!({
        "uuid": uuid, "mdev_type": "SOFT-1Q", "attrs": [{ "core": "80" }], "define": true,
    });
    assert_eq!(vgpud.create(&definition)?, uuid);
    let file = fs::read(vgpud.config_dir().join("soft0").join(uuid))?;
    let file: Value = serde_json::from_slice(&file)?;
    let expected =
        json!({ "mdev_type": "SOFT-1Q", "start": "manual", "attrs": [{ "core": "80" }] });
    assert_eq!(file, expected);
    assert_eq!(state(&vgpud, uuid)?, "stopped");

    let started = vgpud.call("POST", &format!("{path}/start"), None)?;
    assert_eq!(started["state"], "running");
    assert_eq!(started["socket"], vgpud.vfio_socket(uuid).to_str().unwrap());
    let worker = pid(&started)?;
    assert!(is_alive(worker));
    let again = vgpud.refused("POST", &format!("{path}/start"), None)?;
    assert_eq!((again.0, again.1.as_str()), (409, "conflict"));
    assert_eq!(vgpud.get("/v1/stats")?["vgpus"][0]["share_asked"], 80);

    vgpud.call("POST", &format!("{path}/stop"), None)?;
    assert!(!is_alive(worker));
    assert!(!vgpud.vgpu_dir(uuid).exists());
    assert_eq!(state(&vgpud, uuid)?, "stopped");
    vgpud.call("DELETE", &path, None)?;
    assert_eq!(vgpud.get("/v1/vgpus")?, json!([]));
    assert_eq!(vgpud.refused("GET", &path, None)?.0, 404);
    Ok(())
}

#[test]
fn undefining_and_modifying_leave_a_running_vgpu_running() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = vgpud.create(&json!({ "mdev_type": "SOFT-1Q", "define": true, "run": true }))?;
    let path = format!("/v1/vgpus/{uuid}");
    let worker = pid(&vgpud.show(&uuid)?)?;
    let change = json!({ "mdev_type": "SOFT-2Q", "start": "auto", "attrs": [{ "core": "30" }] });
    vgpud.call("PATCH", &path, Some(&change))?;
    let stats = vgpud.get("/v1/stats")?;
    assert_eq!(
        (&stats["vgpus"][0]["mdev_type"], &stats["vgpus"][0]["share_asked"]),
        (&json!("SOFT-1Q"), &Value::Null)
    );
    vgpud.call("PATCH", &path, Some(&json!({ "attrs": [{ "core": "40" }], "target": "live" })))?;
    assert_eq!(vgpud.get("/v1/stats")?["vgpus"][0]["share_asked"], 40);
    assert_eq!(vgpud.show(&uuid)?["attrs"], json!([{ "core": "30" }]));
    vgpud.call("DELETE", &path, None)?;
    let vgpu = vgpud.show(&uuid)?;
    assert_eq!((pid(&vgpu)?, &vgpu["defined"]), (worker, &json!(false)));
    assert!(is_alive(worker));
    vgpud.call("POST", &format!("{path}/stop"), None)?;
    assert_eq!(vgpud.refused("GET", &path, None)?.0, 404);
    Ok(())
}

#[test]
fn mistakes_get_one_line_with_a_remedy() -> Result<()> {
    let vgpud = Vgpud::start_with(&["--parent", "soft:soft0,vram=1G"])?;
    let full = vgpud
        .create(&json!({ "mdev_type": "SOFT-1Q", "attrs": [{ "core": "80" }], "run": true }))?;
    let unknown = "/v1/vgpus/6b4e1a3c-6a3a-4a5e-8f5f-0d6c1c8f0002";
    for (method, path, body, status, code, part) in [
        (
            "POST",
            "/v1/vgpus",
            json!({ "mdev_type": "SOFT-9Q", "run": true }),
            404,
            "not_found",
            "it offers",
        ),
        (
            "POST",
            "/v1/vgpus",
            json!({ "mdev_type": "SOFT-1Q", "run": true }),
            409,
            "no_room",
            "stop a vGPU",
        ),
        ("POST", "/v1/vgpus", json!({ "mdev_type": "SOFT-1Q" }), 400, "invalid", "define"),
        ("POST", "/v1/vgpus", json!({ "define": true }), 400, "invalid", "mdev_type"),
        (
            "POST",
            "/v1/vgpus",
            json!({ "mdev_type": "SOFT-1Q", "define": true, "attrs": [{ "core": "101" }] }),
            400,
            "invalid",
            "1 to 100",
        ),
        (
            "POST",
            "/v1/vgpus",
            json!({ "mdev_type": "SOFT-1Q", "define": true, "attrs": [{ "a": "1", "b": "2" }] }),
            400,
            "invalid",
            "one member",
        ),
        (
            "POST",
            "/v1/vgpus",
            json!({ "mdev_type": "SOFT-1Q", "define": true, "parent": "../x" }),
            404,
            "not_found",
            "soft0",
        ),
        ("POST", "/v1/vgpus", json!({ "typo": 1 }), 400, "invalid", "typo"),
        ("POST", "/v1/vgpus", json!({ "uuid": "x" }), 400, "invalid", "UUID"),
        ("POST", "/v1/vgpus", json!("x".repeat(900_000)), 413, "too_large", "limit"),
        ("GET", unknown, Value::Null, 404, "not_found", "vgpuctl list"),
        ("POST", &format!("{unknown}/start"), Value::Null, 404, "not_found", "vgpuctl list"),
        ("POST", &format!("{unknown}/stop"), Value::Null, 404, "not_found", "vgpuctl list"),
        ("GET", &format!("{unknown}/screenshot"), Value::Null, 404, "not_found", "vgpuctl list"),
        (
            "GET",
            &format!("/v1/vgpus/{full}/screenshot"),
            Value::Null,
            409,
            "conflict",
            "set no mode",
        ),
        ("GET", "/v1/vgpus/x", Value::Null, 404, "not_found", "no vGPU named x"),
        ("GET", "/v1/vgpus/-x", Value::Null, 400, "invalid", "neither a UUID nor a name"),
        ("GET", "/v2", Value::Null, 404, "not_found", "openapi.json"),
        ("PUT", "/v1/vgpus", Value::Null, 405, "method_not_allowed", "PUT"),
    ] {
        let body = Some(&body).filter(|body| !body.is_null());
        let (got, got_code, message) = vgpud.refused(method, path, body)?;
        assert_eq!((got, got_code.as_str()), (status, code), "{method} {path}: {message}");
        assert!(message.contains(part), "{method} {path}: {message}");
        assert!(!message.contains('\n'), "{message}");
    }
    Ok(())
}

#[test]
fn a_vgpu_in_use_is_stopped_only_with_force() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = transient(&vgpud)?;
    let _vm = attach(&vgpud, &uuid)?;
    let path = format!("/v1/vgpus/{uuid}/stop");
    let (status, code, message) = vgpud.refused("POST", &path, None)?;
    assert_eq!((status, code.as_str()), (409, "in_use"));
    assert!(message.contains(&format!("process {}", std::process::id())), "{message}");
    assert!(message.contains("force"), "{message}");
    vgpud.call("POST", &path, Some(&json!({ "force": true })))?;
    assert_eq!(vgpud.get("/v1/vgpus")?, json!([]));
    Ok(())
}

#[test]
fn vms_can_attach_one_after_another() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = transient(&vgpud)?;
    for _ in 0..5 {
        drop(attach(&vgpud, &uuid)?);
        wait_for("the VM has left", || vgpud.show(&uuid).is_ok_and(|vgpu| vgpu["vm"].is_null()))?;
    }
    Ok(())
}

#[test]
fn a_socket_is_ready_when_the_start_is_answered() -> Result<()> {
    let vgpud = Vgpud::start()?;
    for _ in 0..5 {
        let begun = Instant::now();
        let uuid = transient(&vgpud)?;
        UnixStream::connect(vgpud.vfio_socket(&uuid))?;
        println!("create to socket ready: {:?}", begun.elapsed());
    }
    Ok(())
}

#[test]
fn thirty_two_vgpus_run_on_one_parent_at_once() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let begun = Instant::now();
    let uuids = std::thread::scope(|scope| {
        let starting: Vec<_> = (0..32).map(|_| scope.spawn(|| transient(&vgpud))).collect();
        starting.into_iter().map(|thread| thread.join().unwrap()).collect::<Result<Vec<_>>>()
    })?;
    println!("32 vGPUs at once: {:?}", begun.elapsed());
    let vms: Vec<_> =
        uuids.iter().map(|uuid| UnixStream::connect(vgpud.vfio_socket(uuid))).collect();
    assert!(vms.iter().all(std::result::Result::is_ok));
    wait_for("all VMs are attached", || {
        let list = vgpud.get("/v1/vgpus").unwrap();
        let list = list.as_array().unwrap();
        list.len() == 32
            && list.iter().all(|vgpu| !vgpu["vm"].is_null() && vgpu["state"] == "running")
    })?;
    let (_, code, message) = vgpud.refused(
        "POST",
        "/v1/vgpus",
        Some(&json!({ "mdev_type": "SOFT-256MQ", "run": true })),
    )?;
    assert_eq!(code, "no_room", "{message}");
    let stats = vgpud.get("/v1/stats")?;
    assert_eq!(stats["vgpus"].as_array().unwrap().len(), 32);
    Ok(())
}

#[test]
fn shares_that_do_not_fit_are_refused() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let with =
        |core: &str| json!({ "mdev_type": "SOFT-256MQ", "attrs": [{ "core": core }], "run": true });
    let first = vgpud.create(&with("80"))?;
    let (status, code, message) = vgpud.refused("POST", "/v1/vgpus", Some(&with("30")))?;
    assert_eq!((status, code.as_str()), (409, "no_room"), "{message}");
    vgpud.create(&with("20"))?;
    let live = json!({ "attrs": [{ "core": "90" }], "target": "live" });
    let (_, code, _) = vgpud.refused("PATCH", &format!("/v1/vgpus/{first}"), Some(&live))?;
    assert_eq!(code, "no_room");
    Ok(())
}

#[test]
fn autostart_vgpus_start_with_the_manager() -> Result<()> {
    let mut vgpud = Vgpud::start()?;
    let auto = json!({ "mdev_type": "SOFT-256MQ", "start": "auto", "define": true });
    let (a, b) = (vgpud.create(&auto)?, vgpud.create(&auto)?);
    let manual = vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "define": true }))?;
    vgpud.end(Signal::SIGTERM)?;
    vgpud.start_again()?;
    assert_eq!(state(&vgpud, &a)?, "running");
    assert_eq!(state(&vgpud, &b)?, "running");
    assert_eq!(state(&vgpud, &manual)?, "stopped");
    Ok(())
}

#[test]
fn sigterm_and_sigint_leave_nothing_behind() -> Result<()> {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut vgpud = Vgpud::start()?;
        let uuid = transient(&vgpud)?;
        let _vm = attach(&vgpud, &uuid)?;
        let roles = vgpud.roles();
        assert_eq!(roles.len(), 2, "a worker and a software GPU");
        assert!(vgpud.end(signal)?.success());
        assert!(roles.iter().all(|pid| !is_alive(*pid)), "{signal}");
        assert!(!vgpud.api_socket().exists() && !vgpud.vgpu_dir(&uuid).exists());
        assert_eq!(fs::read_dir(vgpud.run_dir().join("parents"))?.count(), 0);
    }
    Ok(())
}

#[test]
fn a_second_manager_is_refused_in_one_line() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let output = vgpud.command()?.output()?;
    assert_eq!(output.status.code(), Some(1));
    let line = String::from_utf8(output.stderr)?;
    let expected = format!("vgpud: A vgpud with pid {} manages", vgpud.pid().unwrap());
    assert!(line.starts_with(&expected) && line.trim_end().lines().count() == 1, "{line}");
    assert_eq!(vgpud.get("/v1/version")?["api"], "v1", "the first manager continues");
    Ok(())
}

#[test]
fn the_control_socket_is_private() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let mode = fs::metadata(vgpud.api_socket())?.permissions().mode();
    assert_eq!(mode & 0o7707, 0o600);
    Ok(())
}

#[test]
fn an_idle_manager_uses_almost_no_cpu() -> Result<()> {
    let vgpud = Vgpud::start()?;
    transient(&vgpud)?;
    let processes: Vec<_> = vgpud.roles().into_iter().chain(vgpud.pid()).collect();
    let used = || processes.iter().map(|pid| cpu_ticks(*pid)).sum::<u64>();
    std::thread::sleep(Duration::from_millis(500));
    let before = used();
    std::thread::sleep(Duration::from_secs(3));
    // A clock tick is 10 ms: 3 s of one core are 300 ticks.
    let ticks = used() - before;
    println!("idle: {ticks} ticks in 3 s");
    assert!(ticks <= 3, "an idle host costs {ticks} of 300 ticks");
    Ok(())
}

/// Returns the user and system time of a process in clock ticks.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = stat.rsplit_once(") ").map(|(_, rest)| rest.to_owned()).unwrap_or_default();
    fields.split(' ').skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum()
}

#[test]
fn a_screenshot_shows_what_the_guest_drew() -> Result<()> {
    const DISPLAY: u32 = 2;
    const FRAMEBUFFER: u32 = 0;
    let vgpud = Vgpud::start()?;
    let uuid = transient(&vgpud)?;
    let mut vm = vfio_user::Client::new(&vgpud.vfio_socket(&uuid))?;
    // DISPI registers: off, 64 by 48 pixels of 32 bits, on with a linear framebuffer.
    for (index, value) in [(4, 0_u16), (1, 64), (2, 48), (3, 32), (4, 0x41)] {
        vm.region_write(DISPLAY, 0x500 + 2 * index, &value.to_le_bytes())?;
    }
    // VGA attribute port: display not blanked.
    vm.region_write(DISPLAY, 0x400, &[0x20])?;
    let orange = 0x00ff_a500_u32.to_le_bytes();
    vm.region_write(FRAMEBUFFER, 0, &orange.repeat(64))?;
    let (status, png) = vgpud.request("GET", &format!("/v1/vgpus/{uuid}/screenshot"), None)?;
    assert_eq!(status, 200, "{}", String::from_utf8_lossy(&png));
    let mut reader = png::Decoder::new(std::io::Cursor::new(png)).read_info()?;
    let mut pixels = vec![1; reader.output_buffer_size().context("A size")?];
    let info = reader.next_frame(&mut pixels)?;
    assert_eq!((info.width, info.height), (64, 48));
    let (drawn, rest) = pixels.split_at(64 * 3);
    assert!(drawn.chunks(3).all(|pixel| pixel == [0xff, 0xa5, 0]));
    assert!(rest.iter().all(|byte| *byte == 0));
    Ok(())
}

#[test]
fn garbage_on_the_control_socket_is_refused() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let long = [b"GET /".as_slice(), &vec![b'x'; 1 << 20]].concat();
    for garbage in
        [&b"\0\xff\r\n\r\n"[..], b"POST /v1/vgpus HTTP/1.1\r\nContent-Length: -1\r\n\r\n", &long]
    {
        let mut socket = UnixStream::connect(vgpud.api_socket())?;
        // The daemon may close the connection before everything is written or read.
        let _ = socket.write_all(garbage);
        let mut answer = [0; 12];
        if socket.read_exact(&mut answer).is_ok() {
            assert_eq!(answer[..10], *b"HTTP/1.1 4");
        }
    }
    assert_eq!(vgpud.get("/v1/vgpus")?, json!([]));
    Ok(())
}

#[test]
fn readiness_is_notified_when_requests_are_answered() -> Result<()> {
    let mut vgpud = Vgpud::start()?;
    vgpud.end(Signal::SIGTERM)?;
    let path = vgpud.run_dir().join("notify");
    let socket = UnixDatagram::bind(&path)?;
    socket.set_read_timeout(Some(system_tests::TIMEOUT))?;
    let mut child = vgpud.command()?.env("NOTIFY_SOCKET", &path).spawn()?;
    let mut message = [0; 64];
    let len = socket.recv(&mut message)?;
    assert_eq!(message[..len].trim_ascii_end(), b"READY=1");
    vgpud.get("/v1/version")?;
    kill_process(child.id(), Signal::SIGTERM)?;
    assert!(child.wait()?.success());
    Ok(())
}
