//! Share settings that `vgpuctl` changes while VMs work.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use system_tests::Vgpud;
use system_tests::load::{Endless, share};
use system_tests::vgpuctl::{refused, vgpuctl, vgpuctl_json};

/// Tolerance of shares in percentage points, on a machine with other load.
const POINTS: f64 = 4.0;

fn start(vgpud: &Vgpud, attrs: &str) -> Result<String> {
    vgpuctl(vgpud, &format!("start -p soft0 -t SOFT-256MQ {attrs}"))
}

fn live(vgpud: &Vgpud, uuid: &str, attrs: &str) -> Result<()> {
    vgpuctl(vgpud, &format!("modify -u {uuid} --live {attrs}")).map(drop)
}

fn stats(vgpud: &Vgpud, uuid: &str) -> Result<Value> {
    let stats = vgpuctl_json(vgpud, &format!("stats -u {uuid} --output json"))?;
    stats["vgpus"].get(0).cloned().context("It runs")
}

/// Checks the first vGPU's part of what both use, after a change has taken effect.
fn expect(vgpud: &Vgpud, uuids: &[String], percent: f64, what: &str) -> Result<()> {
    thread::sleep(Duration::from_millis(400));
    let got = share(vgpud, uuids)?;
    println!("{what}: {got:.1} %");
    assert!((got - percent).abs() < POINTS, "{what}: {got:.1} %, not {percent}");
    Ok(())
}

#[test]
fn every_share_setting_changes_while_vms_work() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuids = ["60", "20"].map(|core| format!("--attr hang_timeout=off --attr core={core}"));
    let uuids = [start(&vgpud, &uuids[0])?, start(&vgpud, &uuids[1])?];
    let _first = Endless::start(&vgpud, &uuids[0])?;
    live(&vgpud, &uuids[0], "--attr mode=hard")?;
    thread::sleep(Duration::from_secs(1));
    let alone = stats(&vgpud, &uuids[0])?;
    assert!(alone["gated_ns"].as_u64() > Some(100_000_000), "gated while alone: {alone}");
    assert!(alone["gate_closings"].as_u64() > Some(10), "{alone}");

    live(&vgpud, &uuids[0], "--attr mode=soft")?;
    let _second = Endless::start(&vgpud, &uuids[1])?;
    expect(&vgpud, &uuids, 75.0, "60 against 20, the rest unclaimed")?;

    let policy = |arguments: &str| vgpuctl(&vgpud, &format!("scheduler -p soft0 {arguments}"));
    policy("--policy equal-share")?;
    expect(&vgpud, &uuids, 50.0, "equal shares")?;
    policy("--policy best-effort")?;
    live(&vgpud, &uuids[0], "--attr priority=high")?;
    live(&vgpud, &uuids[1], "--attr priority=normal")?;
    expect(&vgpud, &uuids, 80.0, "four times, by priority")?;

    policy("--policy weighted --timeslice 1")?;
    live(&vgpud, &uuids[0], "--attr priority=normal --attr core=10 --attr mode=hard")?;
    expect(&vgpud, &uuids, 10.0, "a hard cap beside a vGPU that takes the rest")?;
    let capped = stats(&vgpud, &uuids[0])?;
    assert_eq!((&capped["mode"], &capped["share_cap"]), (&json!("hard"), &json!(10.0)));

    live(&vgpud, &uuids[0], "--attr mode=soft --attr core=60 --attr timeslice=2")?;
    // All slices shrink with a slice of 2 ms.
    assert!(stats(&vgpud, &uuids[0])?["timeslice_us"].as_u64() <= Some(2000));
    let too_much = format!("modify -u {} --live --attr core=41", uuids[1]);
    refused(&vgpud, &too_much, 5, "40 of 100 left")?;
    policy("--overcommit on")?;
    live(&vgpud, &uuids[1], "--attr core=60")?;
    expect(&vgpud, &uuids, 50.0, "60 against 60 with overcommit")?;
    refused(&vgpud, "scheduler -p soft0 --overcommit off", 5, "by 20")?;
    let log = vgpuctl(&vgpud, "scheduler -p soft0 --log")?;
    for cause in ["policy", "share"] {
        assert!(log.contains(cause), "{log}");
    }
    for uuid in &uuids {
        assert_eq!(stats(&vgpud, uuid)?["faults"], 0, "the work continued without faults");
    }
    Ok(())
}
