//! Guests' work, and their shares, while settings change and managers die.

use std::thread;
use std::time::Duration;

use anyhow::Result;
use nix::sys::signal::Signal;
use serde_json::json;
use system_tests::Vgpud;
use system_tests::load::{share, verified, work};

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
