//! Watches vgpud: the node's GPUs, and failed vGPUs of claims.
//!
//! vgpud is asked over a local socket. Only changes go to the apiserver.

use std::collections::BTreeSet;
use std::time::Duration;

use mdev_core::ids::VgpuId;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval};
use vgpud_api::{Vgpu, VgpuState};
use vgpud_client::ClientError;

use super::claim::ClaimRef;
use super::conditions::Readiness;
use super::driver::Driver;
use super::slices::{self, Gpu};
use crate::device_plugin;
use crate::vgpus::Purpose;

/// Interval of queries.
const INTERVAL: Duration = Duration::from_secs(2);
/// Time without an answer after which the GPUs take no more claims. A restart of vgpud takes about
/// a second.
const SILENCE_LIMIT: Duration = Duration::from_secs(30);

/// Watches until the future is dropped.
pub async fn run(driver: &Driver, gpus: &watch::Sender<Vec<Gpu>>) {
    let mut last_answer = Instant::now();
    let mut failed = BTreeSet::new();
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let current = gpus.borrow().clone();
        match query(driver, &current).await {
            Ok((found, vgpus)) => {
                last_answer = Instant::now();
                set(driver, gpus, found);
                report(driver, &vgpus, &mut failed).await;
            }
            Err(error) => {
                log::debug!("vgpud does not answer: {error}");
                if last_answer.elapsed() > SILENCE_LIMIT {
                    let silent = |gpu: Gpu| Gpu { taint: Some("vgpud"), ..gpu };
                    set(driver, gpus, current.into_iter().map(silent).collect());
                }
            }
        }
    }
}

async fn query(driver: &Driver, before: &[Gpu]) -> Result<(Vec<Gpu>, Vec<Vgpu>), ClientError> {
    let parents = driver.vgpus.parents().await?;
    let stats = driver.vgpus.stats().await?;
    let found = slices::merge(before, slices::gpus(&parents, &stats), &parents);
    Ok((found, driver.vgpus.of(Purpose::Claim).await?))
}

fn set(driver: &Driver, gpus: &watch::Sender<Vec<Gpu>>, found: Vec<Gpu>) {
    let healthy = found.iter().filter(|gpu| gpu.taint.is_none()).count();
    driver.metrics.set_devices(healthy, found.len() - healthy);
    device_plugin::set(gpus, found);
}

/// Writes an event and a condition for each vGPU that has failed since the last query.
async fn report(driver: &Driver, vgpus: &[Vgpu], failed: &mut BTreeSet<VgpuId>) {
    let now: BTreeSet<_> =
        vgpus.iter().filter(|vgpu| vgpu.state == VgpuState::Failed).map(|vgpu| vgpu.uuid).collect();
    for vgpu in vgpus.iter().filter(|vgpu| now.contains(&vgpu.uuid)) {
        if failed.contains(&vgpu.uuid) {
            continue;
        }
        let records = driver.records.all().unwrap_or_default();
        let record = records.into_iter().find(|record| record.vgpus.contains(&vgpu.uuid));
        let reason = vgpu.reason.as_deref().unwrap_or("its worker ended");
        let note = format!(
            "vGPU {} on GPU {} has failed: {reason}; delete the pod, so that it gets another vGPU",
            vgpu.uuid, vgpu.parent
        );
        log::warn!("{note}");
        if let Some(record) = record {
            tell_claim(driver, &record.claim(), vgpu.uuid, &note).await;
        }
    }
    *failed = now;
}

/// Writes an event and a condition of a claim whose vGPU has failed.
async fn tell_claim(driver: &Driver, by: &ClaimRef, vgpu: VgpuId, note: &str) {
    const REASON: &str = "VgpuFailed";
    driver.cluster.warn_claim(by, REASON, note).await;
    let found = driver.cluster.claim(&by.namespace, &by.name).await;
    let Some(claim) = found.ok().flatten() else { return };
    if claim.metadata.uid.as_ref() != Some(&by.uid) {
        return;
    }
    let failed = || Readiness { ready: false, reason: REASON, message: note.to_owned() };
    let readiness = |result: &_| (driver.vgpu(by, result) == vgpu).then(failed);
    driver.cluster.set_conditions(&claim, &driver.node, readiness).await;
}
