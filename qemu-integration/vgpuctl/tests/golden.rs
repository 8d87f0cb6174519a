//! What each command asks of `vgpud` and prints, against files in `tests/golden`.
//!
//! The server here only plays back answers and notes requests: it is about what users and scripts read. That the
//! commands work is tested with the real daemon, in the workspace's `tests`.
//!
//! `UPDATE_GOLDEN=1 cargo test -p vgpuctl --test golden` writes the files anew.

#![allow(clippy::unwrap_used)]

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

const RUNNING: &str = "11111111-1111-4111-8111-111111111111";
const DEFINED: &str = "22222222-2222-4222-8222-222222222222";
const TRANSIENT: &str = "33333333-3333-4333-8333-333333333333";
const FAILED: &str = "44444444-4444-4444-8444-444444444444";
const ON_SCREEN: &str = "55555555-5555-4555-8555-555555555555";
const SCREEN: &str = "0000:3b:00.0";
const NONE: &str = "99999999-9999-4999-8999-999999999999";

type Requests = Arc<Mutex<Vec<String>>>;

fn vgpu(uuid: &str, mdev_type: &str, attrs: &Value, defined: bool, state: &str) -> Value {
    let running = state == "running";
    json!({
        "uuid": uuid, "parent": "soft0", "mdev_type": mdev_type, "start": "manual",
        "attrs": attrs, "defined": defined, "state": state, "reason": null,
        "socket": running.then(|| format!("/run/vgpud/vgpus/{uuid}/vfio.sock")),
        "pid": running.then_some(4711), "vm": null, "warnings": [],
    })
}

fn vgpus() -> Value {
    let core = json!([{ "core": "80" }, { "doorbell": "trapped" }]);
    let mut running = vgpu(RUNNING, "SOFT-1Q", &core, true, "running");
    running["vm"] = json!({ "pid": 815, "uid": 107 });
    running["start"] = json!("auto");
    running["live_type"] = json!("SOFT-1Q");
    running["live_attrs"] = json!([{ "core": "70" }, { "priority": "high" }]);
    let mut defined = vgpu(DEFINED, "SOFT-256MC", &json!([]), true, "stopped");
    defined["parent"] = json!("soft1");
    let mut on_screen = vgpu(ON_SCREEN, "BOCHS-8MQ", &json!([]), true, "running");
    on_screen["parent"] = json!(SCREEN);
    on_screen["focus"] = json!(true);
    let mut transient = vgpu(TRANSIENT, "SOFT-1Q", &json!([{ "core": "20" }]), false, "running");
    transient["warnings"] = json!(["guest memory is not shared: use share=on"]);
    let mut failed = vgpu(FAILED, "SOFT-1Q", &json!([]), true, "failed");
    failed["reason"] = json!("The GPU is lost");
    json!([running, transient, failed, defined, on_screen])
}

fn types() -> Value {
    let one = |name: &str, instances: u32, heads: u32, description: &str| {
        json!({
            "name": name, "description": description, "device_api": "vfio-user",
            "available_instances": instances, "max_instances": 8,
            "vram_bytes": 1_u64 << 30, "heads": heads,
        })
    };
    let q = "num_heads=1, framebuffer=1024M, max_resolution=1920x1200, max_instance=8";
    let c = "num_heads=0, framebuffer=1024M, max_instance=8";
    json!([
        { "parent": "soft0", "types": [one("SOFT-1Q", 6, 1, q), one("SOFT-1C", 6, 0, c)] },
        { "parent": "soft1", "types": [one("SOFT-1Q", 8, 1, q)] },
    ])
}

fn parent(name: &str) -> Value {
    json!({
        "name": name, "backend": "soft", "model": "SOFT", "description": "Tessera software GPU",
        "state": "ready", "vram_bytes": 8_u64 << 30, "vram_free_bytes": 6_u64 << 30,
        "capabilities": ["compute"], "scheduler": "weighted", "pid": 4710, "running": 2,
    })
}

fn screen(rotate_seconds: Option<u64>) -> Value {
    json!({ "parent": SCREEN, "focus": ON_SCREEN, "rotate_seconds": rotate_seconds })
}

fn parent_with_screen() -> Value {
    let mut parent = parent(SCREEN);
    parent["backend"] = json!("vfio");
    parent["screen"] = screen(Some(10));
    parent
}

fn stats() -> Value {
    let one = |uuid: &str, core: Option<u8>, share: f64| {
        json!({
            "uuid": uuid, "parent": "soft0", "mdev_type": "SOFT-1Q", "share_asked": core,
            "state": "running", "vram_bytes": 1_u64 << 30, "share_entitled": core.unwrap_or(20),
            "share_cap": 100.0, "mode": "soft", "priority": "normal", "timeslice_us": 3200,
            "share_measured": share, "share_of_busy": share + 0.2, "runnable": true,
            "engine_ns": 12_345_678_901_u64, "wait_ns": 3_000_000_000_u64, "submissions": 1_000_000,
            "polled_doorbells": 999_990, "wakeups": 10, "preemptions": 77, "faults": 1,
            "engines": { "compute_ns": 10_000_000_000_u64, "copy_ns": 2_000_000_000_u64, "host_ns": 345_678_901 },
            "gated_ns": 500_000_000, "gate_closings": 12, "gate_cost_ns": 10_000_000, "throttled": 5,
            "slice_overruns": 2, "overrun_ns": 3_000_000, "stolen_ns": 100_000_000, "hang_resets": 1,
            "limits": {
                "channels": 32, "imported_bytes": 1_u64 << 42, "submissions_per_second": core.map(|_| 1000),
                "refresh_per_second": 60, "hang_timeout_ms": 60_000, "acquire_timeout_ms": null,
            },
            "channels": 2, "imported_bytes": 1_u64 << 30,
            "traps": { "config": 100, "display": 20, "memory": 0, "control": 3, "mailbox": 2, "doorbell": 0 },
            "pid": 4711, "vm_pid": core.map(|_| 815),
        })
    };
    json!({
        "vgpus": [one(RUNNING, Some(80), 79.6), one(TRANSIENT, None, 20.0)],
        "parents": [
            {
                "parent": "soft0", "window_ms": 1000, "busy": 99.6, "policy": "weighted", "ready": true,
                "vram_bytes": 8_u64 << 30, "vram_free_bytes": 6_u64 << 30,
            },
            {
                "parent": "soft1", "window_ms": 0, "busy": 0.0, "policy": "weighted", "ready": true,
                "vram_bytes": 4_u64 << 30, "vram_free_bytes": 4_u64 << 30,
            },
        ],
    })
}

fn scheduler(parent: &str) -> Value {
    json!({
        "parent": parent, "policy": "weighted", "timeslice_us": 2083, "period_us": 10_000,
        "averaging": parent == "soft0", "averaging_factor": 33, "frequency": 480,
        "overcommit": false, "asked": 80, "left": 20,
    })
}

fn decisions() -> Value {
    let one = |age_ms: u32, cause: &str, more: Value| {
        let mut one = json!({
            "age_ms": age_ms, "vgpu": RUNNING, "cause": cause, "engine_ns": 12_345_678_901_u64,
            "wait_ns": 3_000_000_000_u64, "owed_ns": -250_000,
        });
        one.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        one
    };
    json!([
        one(12_345, "started", json!({ "decision": "timeslice", "timeslice_us": 3200 })),
        one(9_000, "share", json!({ "decision": "cap", "time_us": 2500, "period_us": 10_000 })),
        one(8_000, "cap", json!({ "decision": "gate", "open": false })),
        one(12, "policy", json!({ "decision": "no_cap" })),
    ])
}

fn refused(code: &str, message: &str) -> Value {
    json!({ "error": { "code": code, "message": message } })
}

/// Why a screen is not to be seen, as vgpud says it.
fn no_screen(uuid: &str, body: &[u8]) -> (u16, Value) {
    match uuid {
        RUNNING if body.windows(8).any(|word| word == b"qmp.sock") => {
            (409, refused("conflict", "The monitor /qmp.sock cannot be used: Connection refused"))
        }
        RUNNING => (409, refused("no_room", "8 viewers look at vGPU X already; close one first")),
        TRANSIENT => (409, refused("conflict", "vGPU X has no display head; types that end in Q")),
        DEFINED => (409, refused("conflict", "vGPU X is not running")),
        _ => (404, refused("not_found", "There is no vGPU X; `vgpuctl list` names those")),
    }
}

async fn answer(
    State(requests): State<Requests>,
    method: Method,
    uri: Uri,
    body: Bytes,
) -> Response {
    let path = uri.path();
    if method != Method::GET {
        let body = String::from_utf8_lossy(&body).into_owned();
        requests.lock().unwrap().push(format!("{method} {path} {body}"));
    }
    let all = vgpus();
    let find =
        |uuid: &str| all.as_array().unwrap().iter().find(|vgpu| vgpu["uuid"] == uuid).cloned();
    let named = path.strip_prefix("/v1/vgpus/").unwrap_or_default();
    let uuid = named.split('/').next().unwrap_or_default();
    let (status, value) = match (method.as_str(), path) {
        ("GET", "/v1/types") => (200, types()),
        ("GET", "/v1/stats") => (200, stats()),
        ("GET", "/v1/schedulers") => (200, json!([scheduler("soft0"), scheduler("soft1")])),
        ("GET", "/v1/schedulers/soft0/log") => (200, decisions()),
        ("PATCH", "/v1/schedulers/soft0") if body.starts_with(b"{\"timeslice_us\":50,") => {
            (400, refused("invalid", "A time slice is 0.1 to 30 ms, not 0.05 ms"))
        }
        ("PATCH", "/v1/schedulers/soft0") => (200, scheduler("soft0")),
        ("GET", "/v1/parents") => {
            (200, json!([parent("soft0"), parent("soft1"), parent_with_screen()]))
        }
        ("POST", _) if path == format!("/v1/parents/{SCREEN}/rotation") => (200, screen(Some(20))),
        ("POST", "/v1/parents/soft0/rotation") => (
            409,
            refused(
                "conflict",
                "Parent soft0 has no physical screen, so its vGPUs cannot take turns on it",
            ),
        ),
        ("POST", _) if uuid == ON_SCREEN && path.ends_with("/focus") => {
            (200, json!({ "parent": SCREEN, "focus": ON_SCREEN, "switch_us": 210 }))
        }
        ("POST", _) if uuid == RUNNING && path.ends_with("/focus") => {
            (409, refused("conflict", "vGPU is on parent soft0, which has no physical screen"))
        }
        ("GET", "/v1/vgpus") => (200, all.clone()),
        ("GET", "/v1/version") => (
            200,
            json!({
                "version": "0.1.0", "api": "1", "pid": 1,
                "run_dir": "/run/vgpud", "config_dir": "/var/lib/vgpud",
            }),
        ),
        ("GET", _) if path.ends_with("/screenshot") => {
            return ([(header::CONTENT_TYPE, "image/png")], "PNG").into_response();
        }
        ("POST", _) if path.ends_with("/console") => no_screen(uuid, &body),
        ("POST", "/v1/vgpus") if String::from_utf8_lossy(&body).contains("101") => {
            (400, refused("invalid", "Attribute \"core\" is 1 to 100 hundredths, not \"101\""))
        }
        ("POST", "/v1/vgpus") => (201, find(TRANSIENT).unwrap()),
        ("POST", _) if uuid == RUNNING && path.ends_with("/stop") && !body.ends_with(b"true}") => {
            (409, refused("in_use", "vGPU is used by process 815 (qemu); shut that VM down first"))
        }
        _ => match find(uuid) {
            Some(_) if method == Method::DELETE || path.ends_with("/stop") => (204, Value::Null),
            Some(vgpu) => (200, vgpu),
            None => (404, refused("not_found", &format!("There is no vGPU {uuid}"))),
        },
    };
    (StatusCode::from_u16(status).unwrap(), axum::Json(value)).into_response()
}

/// Serves until the test ends.
fn serve(socket: &Path, requests: Requests) {
    let listener = std::os::unix::net::UnixListener::bind(socket).unwrap();
    listener.set_nonblocking(true).unwrap();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::UnixListener::from_std(listener).unwrap();
            let app = Router::new().fallback(answer).with_state(requests);
            axum::serve(listener, app).await.unwrap();
        });
    });
}

/// One command line, and all that came of it.
fn transcript(dir: &Path, requests: &Requests, line: &str) -> String {
    let words = [
        ("RUNNING", RUNNING),
        ("DEFINED", DEFINED),
        ("TRANSIENT", TRANSIENT),
        ("NONE", NONE),
        ("ON_SCREEN", ON_SCREEN),
    ];
    let full = words.iter().fold(line.to_owned(), |line, (word, uuid)| line.replace(word, uuid));
    let output = Command::new(env!("CARGO_BIN_EXE_vgpuctl"))
        .current_dir(dir)
        .args(if full.contains("--socket") { &[][..] } else { &["--socket", "vgpud.sock"] })
        .args(full.split(' ').filter(|word| !word.is_empty()))
        .output()
        .unwrap();
    let mut text = format!("$ vgpuctl {full}\n{}", String::from_utf8_lossy(&output.stdout));
    // mdevctl's JSON has no newline at its end.
    if !text.ends_with('\n') {
        text.push('\n');
    }
    for line in String::from_utf8_lossy(&output.stderr).lines() {
        let _ = writeln!(text, "stderr: {line}");
    }
    for request in requests.lock().unwrap().drain(..) {
        let _ = writeln!(text, "asked: {}", request.trim_end());
    }
    let _ = writeln!(text, "exit: {}\n", output.status.code().unwrap());
    text
}

#[test]
fn commands_ask_and_print_what_they_always_did() {
    let dir = tempfile::tempdir().unwrap();
    let requests = Requests::default();
    serve(&dir.path().join("vgpud.sock"), Arc::clone(&requests));
    fs::write(
        dir.path().join("vgpu.json"),
        r#"{ "mdev_type": "SOFT-1Q", "start": "auto", "attrs": [{ "core": "60" }] }"#,
    )
    .unwrap();
    fs::write(dir.path().join("bad.json"), "{ \"start\": \"auto\" }").unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut wrong = Vec::new();
    for (name, lines) in CASES {
        let got: String =
            lines.iter().map(|line| transcript(dir.path(), &requests, line)).collect();
        let file = golden.join(format!("{name}.txt"));
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            fs::write(&file, &got).unwrap();
        }
        let expected = fs::read_to_string(&file).unwrap_or_default();
        if got != expected {
            wrong.push(format!("{}:\nexpected\n{expected}\ngot\n{got}", file.display()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(fs::read(dir.path().join("screen.png")).unwrap(), b"PNG");
}

const CASES: &[(&str, &[&str])] = &[
    (
        "types",
        &[
            "types",
            "types -p soft1",
            "types --dumpjson",
            "types -p soft1 --output json",
            "types -p soft9",
        ],
    ),
    ("list", &["list", "list -d", "list -v", "list -d -v -p soft1", "list -u NONE"]),
    (
        "list-json",
        &[
            "list --dumpjson",
            "list -d --dumpjson -u RUNNING",
            "list -d --dumpjson -u NONE",
            "list -p soft1 -d --output json",
        ],
    ),
    (
        "stats",
        &[
            "stats",
            "stats -p soft1",
            "stats -v",
            "stats -u TRANSIENT",
            "stats -u TRANSIENT --output json",
            "stats -u DEFINED",
            "stats -p soft9",
            "top",
        ],
    ),
    (
        "scheduler",
        &[
            "scheduler",
            "scheduler -p soft1 --output json",
            "scheduler -p soft9",
            "scheduler -p soft0 --log",
            "scheduler -p soft0 --log --output json",
            "scheduler -p soft0 --policy equal-share --overcommit on",
            "scheduler -p soft0 --timeslice 0.5 --period 5",
            "scheduler -p soft0 --timeslice 0.05",
            "scheduler -p soft0 --frequency 480 --averaging-factor 33",
            "scheduler --policy fixed-share",
        ],
    ),
    (
        "define",
        &[
            "define -p soft0 -t SOFT-1Q",
            "define -u NONE -t SOFT-1Q -a --attr core=80",
            "define -p soft0 --jsonfile vgpu.json",
            "define -u TRANSIENT",
            "define -t SOFT-1Q --attr core=101",
            "define -p soft0 --jsonfile bad.json",
            "define -p soft0 --jsonfile missing.json",
        ],
    ),
    (
        "undefine",
        &[
            "undefine -u DEFINED",
            "undefine -u DEFINED -p soft0",
            "undefine -u DEFINED --output json",
            "undefine -u NONE",
        ],
    ),
    (
        "focus",
        &[
            "focus",
            "focus --output json",
            "focus -p soft0",
            "focus -p soft9",
            "focus ON_SCREEN",
            "focus -u ON_SCREEN --output json",
            "focus RUNNING",
            "focus NONE",
            "focus --rotate 20",
            "focus --rotate off -p 0000:3b:00.0 --output json",
            "focus --rotate 5 -p soft0",
            "focus --rotate soon",
            "focus --help",
        ],
    ),
    (
        "modify",
        &[
            "modify -u RUNNING --attr core=60 --live",
            "modify -u RUNNING --attr core=60 --attr x=y",
            "modify -u RUNNING --addattr core --value 60 -i 0",
            "modify -u RUNNING --delattr",
            "modify -u RUNNING --delattr -i 2",
            "modify -u DEFINED -a -t SOFT-2C",
            "modify -u RUNNING --jsonfile vgpu.json",
            "modify -u RUNNING --jsonfile vgpu.json -l -d",
            "modify -u NONE -m",
            "modify -u RUNNING -p soft1 -m",
            "modify -u DEFINED -a --output json",
        ],
    ),
    (
        "start",
        &[
            "start -u DEFINED",
            "start -u DEFINED --output json",
            "start -u DEFINED -t SOFT-1Q",
            "start -u NONE",
            "start -p soft0 -t SOFT-1Q --attr core=20",
            "start -u NONE -p soft0 -t SOFT-1Q",
            "start -p soft0 --jsonfile vgpu.json",
        ],
    ),
    (
        "stop",
        &[
            "stop -u TRANSIENT",
            "stop -u RUNNING",
            "stop -u RUNNING --force",
            "stop -u TRANSIENT --output json",
            "stop -u NONE",
        ],
    ),
    (
        "screenshot",
        &[
            "screenshot -u RUNNING -o screen.png",
            "screenshot -u RUNNING -o screen.png --output json",
            "screenshot -u RUNNING -o - --output json",
            "screenshot -u RUNNING -o none/screen.png",
        ],
    ),
    (
        "qemu-args",
        &[
            "qemu-args -u RUNNING",
            "qemu-args -u RUNNING --memory 4G --machine q35 --id vgpu0 --output json",
            "qemu-args -u RUNNING --device",
            "qemu-args -u DEFINED -- qemu-system-x86_64 -m 512 -M pc disk.img",
            "qemu-args -u RUNNING -- qemu-system-x86_64 -object memory-backend-ram,id=m,size=1G -M pc,memory-backend=m",
        ],
    ),
    (
        "view",
        &[
            "view --help",
            "view",
            "view RUNNING",
            "view -u RUNNING --monitor /qmp.sock --print",
            "view TRANSIENT --output json",
            "view DEFINED --tcp",
            "view NONE",
            "view RUNNING -u RUNNING",
            "view screen",
            "view RUNNING --tcp=high",
        ],
    ),
    ("web", &["web --help", "web --monitor RUNNING", "web --monitor x=/qmp.sock"]),
    (
        "libvirt-xml",
        &["libvirt-xml -u RUNNING", "libvirt-xml -u RUNNING --output json", "libvirt-xml -u NONE"],
    ),
    (
        "libvirt-nodedev",
        &[
            "libvirt nodedev --list",
            "libvirt nodedev vgpud_soft1",
            "libvirt nodedev",
            "libvirt nodedev --list --output json",
            "libvirt nodedev vgpud_soft1 --output json",
            "libvirt nodedev pci_0",
        ],
    ),
    (
        "libvirt-install-hook",
        &[
            "libvirt install-hook --root root --output json",
            "libvirt install-hook --root vgpu.json",
        ],
    ),
    ("unreachable", &["--socket nowhere.sock list", "--socket vgpu.json list"]),
];
