//! Guests' work, and their shares, while settings change and managers die.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::load::{Endless, share, verified, work};
use system_tests::{Vgpud, kill_process, wait_for};

fn with_core(vgpud: &Vgpud, core: &str) -> Result<String> {
    vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "attrs": [{ "core": core }], "run": true }))
}

fn change_core(vgpud: &Vgpud, uuid: &str, core: &str) -> Result<()> {
    let change = json!({ "attrs": [{ "core": core }], "target": "live" });
    vgpud.call("PATCH", &format!("/v1/vgpus/{uuid}"), Some(&change))?;
    Ok(())
}

#[test]
fn shares_hold_and_change_while_vms_work() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuids = [with_core(&vgpud, "80")?, with_core(&vgpud, "20")?];
    let works = uuids.iter().map(|uuid| work(&vgpud, uuid, 10)).collect::<Result<Vec<_>>>()?;
    thread::sleep(Duration::from_millis(1500));
    let measured = share(&vgpud, &uuids)?;
    println!("80/20: {measured:.1}");
    assert!((measured - 80.0).abs() < 4.0, "80/20: {measured:.1}");
    change_core(&vgpud, &uuids[0], "30")?;
    change_core(&vgpud, &uuids[1], "70")?;
    thread::sleep(Duration::from_millis(500));
    let measured = share(&vgpud, &uuids)?;
    println!("30/70: {measured:.1}");
    assert!((measured - 30.0).abs() < 4.0, "30/70: {measured:.1}");
    works.into_iter().try_for_each(verified)
}

#[test]
fn shares_hold_after_the_gpu_process_was_replaced() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let create = |core: &str| {
        let attrs = json!([{ "core": core }, { "hang_timeout": "off" }]);
        vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "attrs": attrs, "run": true }))
    };
    let uuids = [create("80")?, create("20")?];
    let _endless = [Endless::start(&vgpud, &uuids[0])?, Endless::start(&vgpud, &uuids[1])?];
    let gpu = vgpud.gpu_process()?;
    kill_process(gpu, Signal::SIGKILL)?;
    wait_for("another GPU process runs", || {
        let parent = vgpud.get("/v1/parents").unwrap_or_default();
        parent[0]["state"] == "ready" && parent[0]["pid"] != gpu
    })?;
    let mut last = 0.0;
    let held = wait_for("the share", || {
        last = share(&vgpud, &uuids).unwrap_or_default();
        (last - 80.0_f64).abs() < 3.0
    });
    held.with_context(|| format!("{last:.1} % for 80 %"))
}

#[test]
fn work_continues_while_the_manager_is_killed_and_replaced() -> Result<()> {
    let mut vgpud = Vgpud::start()?;
    let uuids = [with_core(&vgpud, "75")?, with_core(&vgpud, "25")?];
    let works = uuids.iter().map(|uuid| work(&vgpud, uuid, 7)).collect::<Result<Vec<_>>>()?;
    thread::sleep(Duration::from_secs(1));
    vgpud.end(Signal::SIGKILL)?;
    thread::sleep(Duration::from_millis(500));
    vgpud.start_again()?;
    thread::sleep(Duration::from_secs(1));
    let measured = share(&vgpud, &uuids)?;
    println!("75/25 under the next manager: {measured:.1}");
    assert!((measured - 75.0).abs() < 4.0, "{measured:.1}");
    works.into_iter().try_for_each(verified)
}

/// Returns the statistics of one vGPU.
fn stats(vgpud: &Vgpud, uuid: &str) -> Result<Value> {
    let stats = vgpud.get("/v1/stats")?;
    let vgpus = stats["vgpus"].as_array().context("No statistics")?;
    vgpus.iter().find(|one| one["uuid"] == uuid).cloned().context("No such vGPU")
}

#[test]
fn a_vgpu_waits_as_long_as_its_neighbour_has_a_slice() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let create = |core: &str| {
        let attrs = json!([{ "core": core }, { "hang_timeout": "off" }]);
        vgpud.create(&json!({ "mdev_type": "SOFT-256MC", "attrs": attrs, "run": true }))
    };
    let uuids = [create("80")?, create("20")?];
    let first = Endless::start(&vgpud, &uuids[0])?;
    let second = Endless::start(&vgpud, &uuids[1])?;
    for (uuid, neighbour) in [(&uuids[0], &uuids[1]), (&uuids[1], &uuids[0])] {
        let mut last = String::new();
        // The host may take the engine's CPU for a while.
        wait_for("the median wait is the neighbour's slice", || {
            let (Ok(one), Ok(other)) = (stats(&vgpud, uuid), stats(&vgpud, neighbour)) else {
                return false;
            };
            let number = |stats: &Value, name: &str| stats[name].as_f64().unwrap_or_default();
            let slice = number(&other, "timeslice_us");
            let [count, p50, p99] =
                ["waits", "wait_p50_us", "wait_p99_us"].map(|name| number(&one, name));
            last =
                format!("{count} waits, p50 {p50} us, p99 {p99} us, beside slices of {slice} us");
            // Buckets are a quarter wide at most, and a slice ends up to a chunk of work late.
            count > 10.0 && p50 <= p99 && p50 > slice * 0.6 && p50 < slice * 1.25 + 500.0
        })
        .with_context(|| last.clone())?;
        println!("{last}");
    }
    let metrics = String::from_utf8(vgpud.request("GET", "/metrics", None)?.1)?;
    for (uuid, quantile) in uuids.iter().flat_map(|uuid| [(uuid, "0.5"), (uuid, "0.99")]) {
        let sample = format!(
            "tessera_vgpu_wait_quantile_seconds{{quantile=\"{quantile}\",vgpu=\"{uuid}\"}} "
        );
        assert!(metrics.contains(&sample), "{sample}: {metrics}");
    }
    drop(second);
    wait_for("a vGPU alone on the GPU does not wait", || {
        stats(&vgpud, &uuids[0]).is_ok_and(|one| {
            one["waits"] == 0 && one["wait_p50_us"].is_null() && one["runnable"] == true
        })
    })?;
    drop(first);
    Ok(())
}
