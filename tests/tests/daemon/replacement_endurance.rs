//! Many workers that die under VMs, and that are upgraded from another release.

use std::env;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use system_tests::raw_client::RawClient;
use system_tests::vcpu::Vcpu;
use system_tests::worker_deaths::worker;
use system_tests::{Vgpud, skipped};

use crate::replacement::{survive, survive_managers, wake_until};
use crate::worker_upgrade::{is_passed, start, upgrade};

/// Workers that are killed.
const KILLS: u32 = 1000;
/// Workers of another release that are upgraded.
const UPGRADES: u32 = 100;
/// Environment variable with the path of another release's `vgpud`.
const BEFORE: &str = "TESSERA_VGPUD_BEFORE";

#[test]
#[ignore = "takes some minutes: run `cargo lab test endurance`"]
fn a_thousand_workers_die_under_vms() -> Result<()> {
    let alone = survive(0, 20)?;
    let beside = survive(KILLS, 120)?;
    // The starts of processes take time of the CPUs, which the software GPU has as well.
    println!("the other VM: {:.1} % of its speed without deaths", beside / alone * 100.0);
    Ok(())
}

#[test]
#[ignore = "takes some minutes: run `cargo lab test endurance`"]
fn fifty_managers_and_workers_die_together() -> Result<()> {
    survive_managers(50)
}

#[test]
#[ignore = "takes some minutes: run `cargo lab test endurance`"]
fn a_hundred_workers_of_the_release_before_are_upgraded() -> Result<()> {
    let Some(before) = env::var_os(BEFORE) else {
        skipped(&format!("{BEFORE} is not set to the vgpud of another release"));
        return Ok(());
    };
    for number in 0..UPGRADES {
        let mut vgpud = Vgpud::start_of(Path::new(&before))?;
        let uuid = start(&vgpud)?;
        let mut vcpu = Vcpu::new(RawClient::attach(&vgpud.vfio_socket(&uuid)));
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let guest = scope.spawn(|| wake_until(&mut vcpu, &stop));
            let upgraded = upgrade_from_other_release(&mut vgpud, &uuid, number);
            stop.store(true, Ordering::Relaxed);
            guest.join().ok().context("The VM saw a wrong effect")?;
            upgraded
        })
        .with_context(|| format!("upgrade {number}"))?;
    }
    Ok(())
}

fn upgrade_from_other_release(vgpud: &mut Vgpud, uuid: &str, number: u32) -> Result<()> {
    thread::sleep(Duration::from_millis(u64::from(number * 7 % 20)));
    vgpud.end(Signal::SIGKILL)?;
    vgpud.use_this_release();
    vgpud.start_again()?;
    let before = worker(vgpud, uuid)?;
    let upgraded = &upgrade(vgpud, Some(uuid))?[0];
    let after = worker(vgpud, uuid)?;
    ensure!(upgraded["pid_before"] == before && upgraded["pid"] == after, "{upgraded}");
    ensure!(before != after && is_passed(after, true)?, "it has the program of this release");
    // The VM's accesses go on.
    thread::sleep(Duration::from_millis(20));
    Ok(())
}
