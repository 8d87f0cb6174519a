//! A thousand workers that die under VMs.

use anyhow::Result;

use crate::replacement::{survive, survive_managers};

/// Workers that are killed.
const KILLS: u32 = 1000;
/// Part of its speed that the other VM keeps.
const KEPT: f64 = 0.95;

#[test]
#[ignore = "takes some minutes: run `cargo lab test endurance`"]
fn a_thousand_workers_die_under_vms() -> Result<()> {
    let alone = survive(0, 20)?;
    let beside = survive(KILLS, 120)?;
    println!("the other VM: {:.1} % of its speed without deaths", beside / alone * 100.0);
    assert!(beside >= alone * KEPT, "{beside} of {alone} units per second");
    Ok(())
}

#[test]
#[ignore = "takes some minutes: run `cargo lab test endurance`"]
fn fifty_managers_and_workers_die_together() -> Result<()> {
    survive_managers(50)
}
