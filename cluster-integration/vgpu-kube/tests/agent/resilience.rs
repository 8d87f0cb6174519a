//! Kills of agent and vgpud: no vGPU, file or record leaks, and running vGPUs continue.

use std::time::Duration;

use anyhow::Result;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::bed::{Bed, claim_path, eventually};

/// Number of kills of each process.
const KILLS: u8 = 20;

#[tokio::test]
async fn kills_between_prepare_and_unprepare_leak_nothing() -> Result<()> {
    let mut bed = Bed::start(&["--dra"]).await?;
    for kill in 0..KILLS {
        let claim = bed.put_claim(&format!("c{kill}"), 10 + kill, "256Mi", &Value::Null);
        let prepared = bed.prepare(&claim).await?;
        assert_eq!(prepared.error, "");
        let before = bed.vgpus()?;
        bed.end_agent(Signal::SIGKILL)?;
        bed.vgpud.end(Signal::SIGKILL)?;
        bed.vgpud.start_again()?;
        bed.start_agent()?;
        let again = bed.prepare(&claim).await?;
        assert_eq!(again, prepared, "kill {kill}");
        let after = bed.vgpus()?;
        assert_eq!((&before[0]["uuid"], &before[0]["pid"]), (&after[0]["uuid"], &after[0]["pid"]));
        assert_eq!(bed.unprepare(&claim).await?, "");
        assert_eq!(bed.left()?, (0, 0, 0), "kill {kill}");
    }
    Ok(())
}

#[tokio::test]
async fn kills_within_prepare_leak_nothing() -> Result<()> {
    let mut bed = Bed::start(&["--dra"]).await?;
    for kill in 0..KILLS {
        let name = format!("c{kill}");
        let claim = bed.put_claim(&name, 10, "256Mi", &Value::Null);
        bed.dra().await?;
        let prepare = bed.prepare(&claim);
        // A prepare takes some 50 ms.
        let _ = tokio::time::timeout(Duration::from_millis(u64::from(kill) * 4), prepare).await;
        bed.end_agent(Signal::SIGKILL)?;
        // The pod is deleted before the agent is back, and kubelet has lost its records.
        bed.api.delete(&claim_path(&name));
        bed.start_agent()?;
        eventually("nothing is left", async || bed.left().is_ok_and(|left| left == (0, 0, 0)))
            .await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_vgpu_that_was_lost_is_made_anew_for_its_live_claim() -> Result<()> {
    let mut bed = Bed::start(&["--dra"]).await?;
    let claim = bed.put_claim("c1", 10, "256Mi", &Value::Null);
    let prepared = bed.prepare(&claim).await?;
    assert_eq!(prepared.error, "");
    let uuid = bed.vgpus()?[0]["uuid"].clone();
    bed.end_agent(Signal::SIGTERM)?;
    // As after a restart of the host, but for the agent's records.
    bed.vgpud.end(Signal::SIGTERM)?;
    std::fs::remove_dir_all(bed.cdi())?;
    bed.vgpud.start_again()?;
    assert_eq!(bed.vgpus()?.len(), 0);
    bed.start_agent()?;
    eventually("the vGPU and its file", async || bed.left().is_ok_and(|left| left == (1, 1, 1)))
        .await?;
    assert_eq!(bed.vgpus()?[0]["uuid"], uuid);
    Ok(())
}
