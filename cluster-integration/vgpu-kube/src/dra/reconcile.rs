//! Makes vGPUs and files match the live claims: at the start of the agent, and rarely afterwards.
//!
//! Kubelet unprepares claims by itself, and repeats that after failures. What is left to do are
//! claims that vanished while kubelet was not there to see it, vGPUs that were lost, and leftovers.

use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;

use super::claim::{self, ClaimRef};
use super::driver::{Driver, DriverError};
use crate::vgpus::Purpose;

/// Interval of later runs. Each costs a request to the apiserver for each claim that is prepared on
/// this node.
const INTERVAL: Duration = Duration::from_secs(600);
/// Pause after a failed run, doubled with each failure up to [`INTERVAL`].
const RETRY: Duration = Duration::from_secs(2);

/// Runs for the life of the agent.
pub async fn run(driver: &Driver) {
    let mut retry = RETRY;
    loop {
        match once(driver).await {
            Ok(()) => {
                retry = RETRY;
                tokio::time::sleep(INTERVAL).await;
            }
            Err(error) => {
                log::warn!("Cannot check the prepared claims, trying again in {retry:?}: {error}");
                tokio::time::sleep(retry).await;
                retry = (retry * 2).min(INTERVAL);
            }
        }
    }
}

/// Checks all claims once. A claim that cannot be checked does not keep the others from it.
pub async fn once(driver: &Driver) -> Result<(), DriverError> {
    let file = |error| DriverError::File("on this node".to_owned(), error);
    let mut result = Ok(());
    for record in driver.records.all().map_err(file)? {
        if let Err(error) = check(driver, &record.claim()).await {
            result = Err(error);
        }
    }
    let kept = driver.records.all().map_err(file)?;
    for uid in driver.cdi.claims().map_err(file)? {
        if !kept.iter().any(|record| record.uid == uid) {
            driver.cdi.remove(&uid).map_err(file)?;
            log::info!("Removed the file of claim {uid}, which is not prepared");
        }
    }
    for vgpu in driver.vgpus.of(Purpose::Claim).await? {
        let is_kept = |record: &super::records::Record| record.vgpus.contains(&vgpu.uuid);
        // A claim may have been prepared meanwhile.
        let is_leftover =
            !kept.iter().any(is_kept) && !driver.records.all().map_err(file)?.iter().any(is_kept);
        if is_leftover && driver.vgpus.stop_unused(vgpu.uuid).await? {
            log::info!("Stopped vGPU {}, whose claim is gone", vgpu.uuid);
            driver.metrics.count_reaped();
        }
    }
    driver.metrics.set_claims(kept.len());
    result
}

/// Unprepares a claim that is over, and prepares a live one again: what is there stays.
async fn check(driver: &Driver, by: &ClaimRef) -> Result<(), DriverError> {
    let found = driver.cluster.claim(&by.namespace, &by.name).await?;
    if is_live(found.as_ref(), by, &driver.node) {
        return driver.prepare(by).await.map(drop);
    }
    log::info!("Claim {by} is over: unpreparing it");
    driver.unprepare(by).await
}

/// Returns whether a pod of this node may use a claim.
fn is_live(found: Option<&ResourceClaim>, by: &ClaimRef, node: &str) -> bool {
    let Some(found) = found else { return false };
    let status = found.status.as_ref();
    let reserved = status.and_then(|status| status.reserved_for.as_ref());
    reserved.is_some_and(|pods| !pods.is_empty())
        // Other errors are for the claim's pod to see.
        && !matches!(
            claim::shares(found, by, node),
            Err(claim::ClaimError::Replaced(_) | claim::ClaimError::NotAllocated(..))
        )
}
