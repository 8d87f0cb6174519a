//! A thousand workers that die under VMs.

use anyhow::Result;

use crate::replacement::{survive, survive_managers};

/// Workers that are killed.
const KILLS: u32 = 1000;

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
