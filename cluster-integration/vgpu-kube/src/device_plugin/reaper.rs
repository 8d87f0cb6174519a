//! Stops vGPUs of pods that have ended.
//!
//! A device plugin is not told when a container ends. Kubelet lists the devices of its pods: a vGPU
//! whose device is not listed for a while is stopped, unless a client uses the vGPU.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::path::Path;
use std::time::Duration;

use mdev_core::ids::VgpuId;
use tokio::time::Instant;

use super::Context;
use super::devices::{Inventory, Resource};
use crate::grpc;
use crate::proto::podresources as api;
use crate::vgpus::Purpose;

/// Longest interval of queries to kubelet, while there are vGPUs.
const INTERVAL: Duration = Duration::from_secs(5);
/// Kubelet's socket for its pods' resources, in kubelet's folder.
const SOCKET: &str = "pod-resources/kubelet.sock";

/// Running vGPUs, and when kubelet last listed them, or they were first seen.
#[derive(Debug)]
pub struct Reaper {
    /// Time after which a vGPU that kubelet does not list is stopped.
    grace: Duration,
    last: Option<Instant>,
    seen: BTreeMap<VgpuId, Instant>,
}

impl Reaper {
    /// Creates a reaper. `grace` is the time after which a vGPU that kubelet does not list is
    /// stopped.
    pub fn new(grace: Duration) -> Self {
        Self { grace, last: None, seen: BTreeMap::new() }
    }

    /// Looks for vGPUs to stop, if it is time.
    pub async fn run<'a, I: Deref<Target = Inventory>>(
        &mut self,
        context: &Context,
        inventories: impl Iterator<Item = (&'a Resource, I)>,
    ) {
        let interval = INTERVAL.min(self.grace / 2);
        if self.last.is_some_and(|last| last.elapsed() < interval) {
            return;
        }
        self.last = Some(Instant::now());
        let devices: BTreeMap<_, _> = inventories
            .flat_map(|(resource, inventory)| {
                let name = resource.to_string();
                let ids = inventory
                    .0
                    .iter()
                    .map(|(id, device)| ((name.clone(), id.clone()), device.vgpu));
                ids.collect::<Vec<_>>()
            })
            .collect();
        let Ok(running) = context.vgpus.of(Purpose::Device).await else { return };
        self.seen.retain(|id, _| running.iter().any(|vgpu| vgpu.uuid == *id));
        if running.is_empty() {
            return;
        }
        let listed = match listed(&context.plugin_dir.join(SOCKET)).await {
            Ok(listed) => listed,
            Err(error) => {
                log::debug!("Kubelet does not list its pods' devices: {error:#}");
                // A kubelet that has just started does not list all of its pods.
                self.seen.clear();
                return;
            }
        };
        let used: Vec<_> = listed.iter().filter_map(|device| devices.get(device)).collect();
        for vgpu in running {
            if self.is_over(vgpu.uuid, used.contains(&&vgpu.uuid), Instant::now()) {
                log::info!("The pod of vGPU {} has ended: stopping the vGPU", vgpu.uuid);
                match context.vgpus.stop_unused(vgpu.uuid).await {
                    Ok(true) => context.metrics.count_reaped(),
                    Ok(false) => {}
                    Err(error) => log::warn!("Cannot stop vGPU {}: {error}", vgpu.uuid),
                }
            }
        }
    }

    /// Returns whether a running vGPU is no pod's any more.
    fn is_over(&mut self, id: VgpuId, is_listed: bool, now: Instant) -> bool {
        let seen = self.seen.entry(id).or_insert(now);
        if is_listed {
            *seen = now;
        }
        now.duration_since(*seen) > self.grace
    }
}

/// Returns the devices that kubelet's pods have: resource and ID.
async fn listed(socket: &Path) -> anyhow::Result<Vec<(String, String)>> {
    let channel = grpc::connect(socket).await?;
    let mut client = api::pod_resources_lister_client::PodResourcesListerClient::new(channel);
    let answer = client.list(api::ListPodResourcesRequest {}).await?.into_inner();
    let devices = answer.pod_resources.into_iter().flat_map(|pod| pod.containers);
    let devices = devices.flat_map(|container| container.devices);
    Ok(devices
        .flat_map(|devices| {
            let name = devices.resource_name;
            devices.device_ids.into_iter().map(move |id| (name.clone(), id))
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vgpu_is_over_when_its_pod_is_gone_or_never_came() {
        const GRACE: Duration = Duration::from_secs(30);
        let mut reaper = Reaper::new(GRACE);
        let (ended, never) = (crate::vgpus::id(&["ended"]), crate::vgpus::id(&["never"]));
        let now = Instant::now();
        let later = now + GRACE * 2;
        assert!(!reaper.is_over(never, false, now), "its pod may start");
        assert!(reaper.is_over(never, false, later));
        assert!(!reaper.is_over(ended, true, now));
        assert!(!reaper.is_over(ended, true, later));
        assert!(!reaper.is_over(ended, false, later + GRACE), "kubelet may have been restarted");
        assert!(reaper.is_over(ended, false, later + GRACE * 2));
    }
}
