//! Objects in the responses of the fake vgpud.

use serde_json::{Value, json};

pub const RUNNING: &str = "11111111-1111-4111-8111-111111111111";
pub const DEFINED: &str = "22222222-2222-4222-8222-222222222222";
pub const TRANSIENT: &str = "33333333-3333-4333-8333-333333333333";
pub const FAILED: &str = "44444444-4444-4444-8444-444444444444";
pub const ON_SCREEN: &str = "55555555-5555-4555-8555-555555555555";
pub const SCREEN: &str = "0000:3b:00.0";
pub const PROGRAMS: &str = "66666666-6666-4666-8666-666666666666";
pub const NONE: &str = "99999999-9999-4999-8999-999999999999";

/// Returns a vGPU on soft0.
fn vgpu(uuid: &str, mdev_type: &str, attrs: &Value, defined: bool, state: &str) -> Value {
    let running = state == "running";
    json!({
        "uuid": uuid, "parent": "soft0", "mdev_type": mdev_type, "start": "manual",
        "attrs": attrs, "defined": defined, "state": state, "reason": null,
        "socket": running.then(|| format!("/run/vgpud/vgpus/{uuid}/vfio.sock")),
        "pid": running.then_some(4711), "vm": null, "warnings": [],
    })
}

/// Returns vGPUs in all states.
pub fn vgpus() -> Value {
    let core = json!([{ "core": "80" }, { "doorbell": "trapped" }]);
    let mut running = vgpu(RUNNING, "SOFT-1Q", &core, true, "running");
    running["vm"] = json!({ "pid": 815, "uid": 107 });
    running["vm_name"] = json!("vm1");
    running["start"] = json!("auto");
    running["live_type"] = json!("SOFT-1Q");
    running["live_attrs"] = json!([{ "core": "70" }, { "priority": "high" }]);
    let mut defined = vgpu(DEFINED, "SOFT-256MC", &json!([]), true, "stopped");
    defined["parent"] = json!("soft1");
    let mut on_screen = vgpu(ON_SCREEN, "BOCHS-8MQ", &json!([]), true, "running");
    on_screen["parent"] = json!(SCREEN);
    on_screen["focus"] = json!(true);
    let named = json!([{ "core": "20" }, { "name": "web1" }]);
    let mut transient = vgpu(TRANSIENT, "SOFT-1Q", &named, false, "running");
    transient["name"] = json!("web1");
    transient["warnings"] = json!(["guest memory is not shared: use share=on"]);
    let mut failed = vgpu(FAILED, "SOFT-1Q", &json!([]), true, "failed");
    failed["reason"] = json!("The GPU is lost");
    json!([running, transient, failed, defined, on_screen])
}

/// Returns a vGPU with a socket for programs in the test's folder.
pub fn with_programs() -> Value {
    let mut vgpu = vgpu(PROGRAMS, "SOFT-1C", &json!([]), false, "running");
    vgpu["socket"] = json!("vfio.sock");
    vgpu
}

/// Returns the types of two parents.
pub fn types() -> Value {
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

/// Returns a parent without a physical screen.
pub fn parent(name: &str) -> Value {
    json!({
        "name": name, "backend": "soft", "model": "SOFT", "description": "Tessera software GPU",
        "state": "ready", "vram_bytes": 8_u64 << 30, "vram_free_bytes": 6_u64 << 30,
        "capabilities": ["compute"], "scheduler": "weighted", "pid": 4710, "running": 2,
    })
}

/// Returns a physical screen that shows [`ON_SCREEN`].
pub fn screen(rotate_seconds: Option<u64>) -> Value {
    json!({ "parent": SCREEN, "focus": ON_SCREEN, "rotate_seconds": rotate_seconds })
}

/// Returns a parent with a physical screen.
pub fn parent_with_screen() -> Value {
    let mut parent = parent(SCREEN);
    parent["backend"] = json!("vfio");
    parent["screen"] = screen(Some(10));
    parent
}

/// Returns what uses a vGPU with programs.
fn programs() -> Value {
    let process = |pid: i32, name: &str, bytes: u64| json!({ "pid": pid, "name": name, "vram_used_bytes": bytes });
    let processes = [process(816, "python3", 600 << 20), process(817, "", 0)];
    json!({ "vram_used_bytes": 700_u64 << 20, "processes": processes })
}

/// Returns statistics of two vGPUs, the second with programs.
pub fn stats() -> Value {
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
            "pid": 4711, "vm_pid": core.map(|_| 815), "vm_name": core.map(|_| "vm1"),
            "name": core.is_none().then_some("web1"),
            "programs": core.is_none().then(programs),
        })
    };
    let mut waiting = one(RUNNING, Some(80), 79.6);
    waiting["waits"] = json!(412);
    (waiting["wait_p50_us"], waiting["wait_p99_us"]) = (json!(820), json!(5120));
    json!({
        "vgpus": [waiting, one(TRANSIENT, None, 20.0)],
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

/// Returns the scheduler of a parent.
pub fn scheduler(parent: &str) -> Value {
    json!({
        "parent": parent, "policy": "weighted", "timeslice_us": 2083, "period_us": 10_000,
        "averaging": parent == "soft0", "averaging_factor": 33, "frequency": 480,
        "overcommit": false, "asked": 80, "left": 20,
    })
}

/// Returns a scheduler's log.
pub fn decisions() -> Value {
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

/// Returns the body of an error response.
pub fn refused(code: &str, message: &str) -> Value {
    json!({ "error": { "code": code, "message": message } })
}
