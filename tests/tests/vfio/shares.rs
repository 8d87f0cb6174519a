//! Shares of a DMA engine through the manager: weights, caps, and limits besides time. The engine
//! is QEMU's `edu`, with transfers of a tenth of a second that cannot be interrupted.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use mdev_core::abi::notifier;
use mdev_core::gpu::EngineKind;
use serde_json::{Value, json};
use system_tests::{Vgpud, wait_for};
use vgpu_guest::GuestError;
use vgpu_guest::channel::Channel;
use vgpu_guest::pushbuffer::Methods;

use crate::nested::guest::Guest;
use crate::nested::{self, EDU, LONG, Nested};

/// Long enough that one transfer is less than half a percentage point.
const WINDOW: Duration = Duration::from_secs(60);

#[test]
#[ignore = "boots a VM: run `cargo lab test`"]
fn weights_caps_and_limits_hold_on_a_dma_engine() {
    if nested::is_inside() {
        let vgpud = Vgpud::start_with(&["--parent", &format!("vfio:{EDU}")]).unwrap();
        wait_for("the parent is ready", || {
            vgpud.get("/v1/parents").is_ok_and(|all| all[0]["state"] == "ready")
        })
        .unwrap();
        let core = |core: &str| vec![json!({ "core": core })];
        let hard = |part: &str| vec![json!({ "core": part }), json!({ "mode": "hard" })];
        shares(&vgpud, "weights", &[(core("80"), 80.0), (core("20"), 20.0)]);
        shares(
            &vgpud,
            "caps, and nothing more for either",
            &[(hard("30"), 30.0), (hard("20"), 20.0)],
        );
        shares(
            &vgpud,
            "a cap beside one that takes the rest",
            &[(hard("25"), 25.0), (vec![], 75.0)],
        );
        return limits(&vgpud);
    }
    let mut host = Nested::boot_in_virtual_time();
    let told = host.run(LONG);
    print!("{told}");
    assert_eq!(host.faults(), 0);
    host.vm.quit().unwrap();
}

fn start(vgpud: &Vgpud, attrs: &[Value]) -> String {
    // A window becomes free a moment after its vGPU has stopped.
    let request = json!({ "mdev_type": "EDU-C", "run": true, "attrs": attrs });
    let mut uuid = None;
    wait_for("a window", || {
        uuid = vgpud.create(&request).ok();
        uuid.is_some()
    })
    .unwrap();
    uuid.unwrap()
}

fn counted(vgpud: &Vgpud, uuid: &str) -> Value {
    let stats = vgpud.get("/v1/stats").unwrap();
    let all = stats["vgpus"].as_array().unwrap();
    all.iter().find(|vgpu| vgpu["uuid"] == uuid).unwrap().clone()
}

/// Measures each vGPU's percentage of all time, and checks it to within 3 points.
fn shares(vgpud: &Vgpud, what: &str, wanted: &[(Vec<Value>, f64)]) {
    let stop = Arc::new(AtomicBool::new(false));
    let uuids: Vec<String> = wanted.iter().map(|(attrs, _)| start(vgpud, attrs)).collect();
    let loads: Vec<_> = uuids
        .iter()
        .map(|uuid| {
            let (mut guest, stop) = (Guest::attach(vgpud, uuid), Arc::clone(&stop));
            thread::spawn(move || guest.keep_busy(&stop))
        })
        .collect();
    let used = || -> Vec<f64> {
        let one = |uuid: &String| counted(vgpud, uuid)["engine_ns"].as_f64().unwrap();
        uuids.iter().map(one).collect()
    };
    thread::sleep(Duration::from_secs(5));
    let (before, started) = (used(), Instant::now());
    thread::sleep(WINDOW);
    let (after, elapsed) = (used(), started.elapsed().as_nanos() as f64);
    let parts = after.iter().zip(&before).map(|(after, before)| 100.0 * (after - before) / elapsed);
    for (part, (_, want)) in parts.zip(wanted) {
        println!("{what}: {part:.1} of {want}");
        assert!((part - want).abs() < 3.0, "{what}: {part:.1} instead of {want}");
    }
    stop.store(true, Ordering::SeqCst);
    for load in loads {
        load.join().unwrap();
    }
    for uuid in uuids {
        vgpud.call("POST", &format!("/v1/vgpus/{uuid}/stop"), None).unwrap();
    }
}

fn limits(vgpud: &Vgpud) {
    let limited = [
        json!({ "submissions": "4" }),
        json!({ "hang_timeout": "2" }),
        json!({ "max_channels": "2" }),
        json!({ "max_pinned": "1M" }),
    ];
    let (few, free) = (start(vgpud, &limited[..3]), start(vgpud, &[]));
    let (mut one, mut other) = (Guest::attach(vgpud, &few), Guest::attach(vgpud, &free));
    // The burst size is two; other submissions wait in the ring.
    let (started, methods) = (Instant::now(), Methods::new());
    for _ in 0..10 {
        one.channel.run(&methods).unwrap();
    }
    assert!(started.elapsed() >= Duration::from_secs(2), "{:?}", started.elapsed());
    assert!(counted(vgpud, &few)["throttled"].as_u64().unwrap() >= 7);
    // One further channel is allowed, and no third.
    let second = Channel::new(&one.device, EngineKind::Compute).unwrap();
    let third = Channel::new(&one.device, EngineKind::Copy).unwrap_err();
    assert!(third.to_string().contains("Limit"), "{third}");
    drop(second);
    // A transfer of more than two seconds ends the channel; several shorter ones do not, nor does
    // another vGPU's.
    other.copy_often(0x1111, 3).unwrap();
    one.copy_often(0x2222, 6).unwrap();
    let long = one.copy_for(20 << 12).unwrap_err();
    assert!(matches!(long, GuestError::Channel { code: notifier::IDLE_TIMEOUT, .. }), "{long}");
    other.copy_for(20 << 12).unwrap();
    let (hung, fine) = (counted(vgpud, &few), counted(vgpud, &free));
    assert_eq!((&hung["hang_resets"], &fine["hang_resets"]), (&json!(1), &json!(0)));
    assert_eq!(hung["limits"]["hang_timeout_ms"], json!(2000));
    assert_eq!(fine["limits"]["hang_timeout_ms"], Value::Null, "each transfer ends by itself");
    drop((one, other));
    // The guest's memory exceeds its limit, so the guest is refused.
    for uuid in [&few, &free] {
        vgpud.call("POST", &format!("/v1/vgpus/{uuid}/stop"), None).unwrap();
    }
    let small = start(vgpud, &limited[3..]);
    let refused = Guest::try_attach(vgpud, &small).err().unwrap();
    assert!(refused.to_string().contains("Limit"), "{refused}");
}
