//! Who gets how much of a DMA engine, through the manager: weights, caps, and limits besides time. QEMU's `edu`, whose
//! transfers take a tenth of a second and cannot be interrupted, in a VM that is a host.
//!
//! It boots a VM and runs itself inside it: `cargo lab test` and `cargo test --test vfio_shares -- --ignored` do.

#![allow(clippy::unwrap_used)]

mod nested;

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

use nested::guest::Guest;
use nested::{EDU, LONG, Nested};

/// Long enough that one transfer is less than half a point.
const WINDOW: Duration = Duration::from_secs(60);

#[test]
#[ignore = "boots a VM: run `cargo lab test`"]
fn is_shared_by_weights_and_caps_that_an_operator_gives_and_kept_to_limits() {
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
    let test = "is_shared_by_weights_and_caps_that_an_operator_gives_and_kept_to_limits";
    let told = host.run(test, LONG);
    print!("{told}");
    assert_eq!(host.faults(), 0);
    host.vm.quit().unwrap();
}

fn start(vgpud: &Vgpud, attrs: &[Value]) -> String {
    // A window is free again a moment after its vGPU has stopped.
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

/// Hundredths of all time that each has had: within 3 points of what it should.
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
    // Two of these may come at once; the others wait in the ring.
    let (started, methods) = (Instant::now(), Methods::new());
    for _ in 0..10 {
        one.channel.run(&methods).unwrap();
    }
    assert!(started.elapsed() >= Duration::from_secs(2), "{:?}", started.elapsed());
    assert!(counted(vgpud, &few)["throttled"].as_u64().unwrap() >= 7);
    // It may have one channel more, and no third.
    let second = Channel::new(&one.device, EngineKind::Compute).unwrap();
    let third = Channel::new(&one.device, EngineKind::Copy).unwrap_err();
    assert!(third.to_string().contains("Limit"), "{third}");
    drop(second);
    // One transfer with more than two seconds is over; several that have less each are not, nor is another vGPU's.
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
    // Its memory is more than it may have: the guest is refused.
    for uuid in [&few, &free] {
        vgpud.call("POST", &format!("/v1/vgpus/{uuid}/stop"), None).unwrap();
    }
    let small = start(vgpud, &limited[3..]);
    let refused = Guest::try_attach(vgpud, &small).err().unwrap();
    assert!(refused.to_string().contains("Limit"), "{refused}");
}
