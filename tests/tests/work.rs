//! What a VM's work is promised, whatever happens to the manager meanwhile.

use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use mdev_core::units::MIB;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::Vgpud;
use system_tests::ram::Ram;
use system_tests::stranger::Stranger;
use vgpu_guest::bench::{self, Load, Measured};
use vgpu_guest::device::Device;

/// A vGPU that had or wanted the engine for this part of a time had work all the time. The rest is what the host took
/// from the engine, which counts for nobody.
const BUSY: f64 = 0.75;

/// A VM on a vGPU, working for some seconds; every result it gets is compared with the CPU's.
fn work(vgpud: &Vgpud, uuid: &str, seconds: u64) -> Result<JoinHandle<Result<Measured>>> {
    let ram = Ram::new(64 * MIB, 64 * MIB)?;
    let device = Device::open(Box::new(Stranger::attach(&vgpud.vfio_socket(uuid), ram)?))?;
    let load = Load { duration: Duration::from_secs(seconds), ..Load::default() };
    Ok(thread::spawn(move || Ok(bench::run(&device, &load)?)))
}

fn verified(work: JoinHandle<Result<Measured>>) -> Result<()> {
    let measured = work.join().ok().context("The work panicked")??;
    assert!(measured.verified > 0, "{measured:?}");
    Ok(())
}

/// Engine time, and time spent waiting for it, of each vGPU in the order of their names, in seconds.
fn used(vgpud: &Vgpud, uuids: &[String]) -> Result<Vec<(f64, f64)>> {
    let stats = vgpud.get("/v1/stats")?;
    let vgpus = stats["vgpus"].as_array().context("No statistics")?;
    let seconds = |value: &Value| value.as_f64().map(|ns| ns / 1e9);
    uuids
        .iter()
        .map(|uuid| {
            let one = vgpus.iter().find(|one| one["uuid"] == uuid.as_str());
            let one = one.context("No such vGPU")?;
            seconds(&one["engine_ns"]).zip(seconds(&one["wait_ns"])).context("No times")
        })
        .collect()
}

/// What part of the engine's time the first vGPU had while all of them wanted it, in percent.
///
/// A share is promised to a vGPU that has work. On a host whose CPUs are taken, a VM may not get to hand any in; such
/// moments do not count.
fn share(vgpud: &Vgpud, uuids: &[String]) -> Result<f64> {
    let (mut first, mut all, mut counted) = (0.0, 0.0, 0);
    for _ in 0..7 {
        let (begun, before) = (Instant::now(), used(vgpud, uuids)?);
        thread::sleep(Duration::from_millis(500));
        let after = used(vgpud, uuids)?;
        let wanted = begun.elapsed().as_secs_f64() * BUSY;
        let deltas: Vec<_> =
            after.iter().zip(&before).map(|(a, b)| (a.0 - b.0, a.1 - b.1)).collect();
        if deltas.iter().all(|(engine, wait)| engine + wait >= wanted) {
            first += deltas[0].0;
            all += deltas.iter().map(|(engine, _)| engine).sum::<f64>();
            counted += 1;
        }
        if counted == 4 {
            break;
        }
    }
    ensure!(counted > 0, "The VMs never wanted the engine at the same time");
    Ok(first * 100.0 / all)
}

fn with_core(vgpud: &Vgpud, core: &str) -> Result<String> {
    vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "attrs": [{ "core": core }], "run": true }))
}

fn change_core(vgpud: &Vgpud, uuid: &str, core: &str) -> Result<()> {
    let change = json!({ "attrs": [{ "core": core }], "target": "live" });
    vgpud.call("PATCH", &format!("/v1/vgpus/{uuid}"), Some(&change))?;
    Ok(())
}

#[test]
fn shares_hold_and_can_be_changed_while_vms_work() -> Result<()> {
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
fn work_goes_on_while_the_manager_is_killed_and_replaced() -> Result<()> {
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
