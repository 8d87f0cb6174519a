//! Writes the node's ResourceSlice: when its devices change, or when it was removed or changed by
//! another.

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, ResourcePool, ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::watch_object;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tokio_stream::StreamExt;
use uuid::Uuid;

use super::DRIVER;
use super::cluster::{Cluster, ClusterError, limited};
use super::slices::{self, Gpu};
use crate::metrics::Metrics;

/// Annotation with a digest of the devices. The apiserver may drop fields of features that are off,
/// so that what it stores cannot be compared with what was written.
const DIGEST: &str = "gpu.tessera.dev/digest";
/// Pause after a failed write, doubled with each failure.
const RETRY: Duration = Duration::from_secs(1);
/// Longest pause.
const MAX_RETRY: Duration = Duration::from_secs(60);
/// Pause after the apiserver dropped what makes a device shared: an administrator has to act.
const UNSUPPORTED_RETRY: Duration = Duration::from_secs(600);

/// Error of a write.
#[derive(Debug, thiserror::Error)]
enum PublishError {
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error(
        "The cluster shares no devices: it dropped allowMultipleAllocations; enable the feature \
         DRAConsumableCapacity (on by default from Kubernetes 1.36), or run vgpu-kube with --device-plugin"
    )]
    Unsupported,
}

/// Publisher of a node's slice.
#[derive(Debug)]
pub struct Publisher {
    /// Name of the node.
    pub node: String,
    /// Requests to the apiserver.
    pub cluster: Cluster,
    /// The node's GPUs.
    pub gpus: watch::Receiver<Vec<Gpu>>,
    /// Counters.
    pub metrics: Metrics,
    /// Whether the apiserver stores taints. Otherwise, GPUs that are not available are left out.
    pub stores_taints: bool,
}

/// Returns the name of a node's slice.
pub fn slice_name(node: &str) -> String {
    // Names have at most 253 bytes. A digest keeps long names apart.
    let end = node.len().min(180);
    if end == node.len() {
        return format!("{node}-{DRIVER}");
    }
    format!("{}-{}-{DRIVER}", node[..end].trim_end_matches(['-', '.']), digest(node.as_bytes()))
}

/// Returns whether a watched slice is one that this agent has replaced since.
fn is_older(watched: Option<&ResourceSlice>, stored: Option<&Option<ResourceSlice>>) -> bool {
    let (Some(watched), Some(Some(stored))) = (watched, stored) else { return false };
    watched.metadata.uid == stored.metadata.uid
        && watched.spec.pool.generation < stored.spec.pool.generation
}

fn digest(bytes: &[u8]) -> String {
    Uuid::new_v5(&Uuid::NAMESPACE_OID, bytes).to_string()
}

impl Publisher {
    /// Publishes until the future is dropped.
    pub async fn run(mut self) {
        let api = Api::<ResourceSlice>::all(self.cluster.client());
        let stream = watch_object(api.clone(), &slice_name(&self.node)).default_backoff();
        let mut stream = std::pin::pin!(stream);
        // Unknown until the first answer of the watch.
        let mut stored: Option<Option<ResourceSlice>> = None;
        let (mut retry, mut pause) = (Instant::now(), RETRY);
        loop {
            let mut devices = slices::devices(&self.gpus.borrow_and_update());
            devices.retain(|device| self.stores_taints || device.taints.is_none());
            let is_due =
                stored.as_ref().is_some_and(|stored| self.differs(stored.as_ref(), &devices));
            if is_due && retry <= Instant::now() {
                match self.write(&api, stored.clone().flatten(), devices).await {
                    Ok(slice) => (stored, pause) = (Some(slice), RETRY),
                    Err(error) => {
                        self.report(&error).await;
                        let after = match error {
                            PublishError::Unsupported => UNSUPPORTED_RETRY,
                            PublishError::Cluster(_) => pause,
                        };
                        retry = Instant::now() + after;
                        pause = (pause * 2).min(MAX_RETRY);
                    }
                }
                continue;
            }
            tokio::select! {
                event = stream.next() => match event {
                    Some(Ok(slice)) if is_older(slice.as_ref(), stored.as_ref()) => {}
                    Some(Ok(slice)) => stored = Some(slice),
                    Some(Err(error)) => log::debug!("The watch of the slice: {error}"),
                    None => return,
                },
                changed = self.gpus.changed() => if changed.is_err() { return },
                () = sleep_until(retry), if is_due => {}
            }
        }
    }

    /// Returns whether a slice has to be written.
    fn differs(&self, stored: Option<&ResourceSlice>, devices: &[Device]) -> bool {
        match stored {
            None => !devices.is_empty(),
            Some(slice) => {
                let annotations = slice.metadata.annotations.as_ref();
                let own = annotations.and_then(|all| all.get(DIGEST));
                own != Some(&self.digest(devices))
            }
        }
    }

    fn digest(&self, devices: &[Device]) -> String {
        digest(&serde_json::to_vec(&(&self.node, devices)).unwrap_or_default())
    }

    /// Writes the slice, or removes it if there are no devices. Returns the stored slice.
    async fn write(
        &mut self,
        api: &Api<ResourceSlice>,
        stored: Option<ResourceSlice>,
        devices: Vec<Device>,
    ) -> Result<Option<ResourceSlice>, PublishError> {
        let (shared, tainted) = (!devices.is_empty(), devices.iter().any(|d| d.taints.is_some()));
        let slice = self.slice(stored.as_ref(), devices).await?;
        self.metrics.count_publication();
        let written = match stored {
            Some(_) => {
                let name = slice_name(&self.node);
                limited(api.replace(&name, &PostParams::default(), &slice)).await?
            }
            None => limited(api.create(&PostParams::default(), &slice)).await?,
        };
        // The next write leaves out what cannot be tainted.
        let mut kept = written.spec.devices.iter().flatten();
        self.stores_taints &= !tainted || kept.any(|device| device.taints.is_some());
        let mut kept = written.spec.devices.iter().flatten();
        if shared && !kept.all(|device| device.allow_multiple_allocations == Some(true)) {
            // Otherwise, the scheduler would give a whole GPU to each claim.
            limited(api.delete(&slice_name(&self.node), &DeleteParams::default())).await?;
            return Err(PublishError::Unsupported);
        }
        log::info!("Published {} GPUs", written.spec.devices.iter().flatten().count());
        Ok(Some(written))
    }

    async fn slice(
        &self,
        stored: Option<&ResourceSlice>,
        devices: Vec<Device>,
    ) -> Result<ResourceSlice, ClusterError> {
        let annotations = [(DIGEST.to_owned(), self.digest(&devices))].into();
        let metadata = match stored {
            Some(stored) => {
                ObjectMeta { annotations: Some(annotations), ..stored.metadata.clone() }
            }
            None => ObjectMeta {
                name: Some(slice_name(&self.node)),
                annotations: Some(annotations),
                owner_references: self.owner().await?.map(|owner| vec![owner]),
                ..ObjectMeta::default()
            },
        };
        let generation = stored.map_or(0, |stored| stored.spec.pool.generation);
        Ok(ResourceSlice {
            metadata,
            spec: ResourceSliceSpec {
                driver: DRIVER.to_owned(),
                node_name: Some(self.node.clone()),
                pool: ResourcePool {
                    name: self.node.clone(),
                    generation: generation.saturating_add(1),
                    resource_slice_count: 1,
                },
                devices: Some(devices),
                ..ResourceSliceSpec::default()
            },
        })
    }

    /// Returns a reference to the node: the slice goes with it.
    async fn owner(&self) -> Result<Option<OwnerReference>, ClusterError> {
        let api = Api::<Node>::all(self.cluster.client());
        let node = limited(api.get_opt(&self.node)).await?;
        Ok(node.map(|node| OwnerReference {
            api_version: "v1".into(),
            kind: "Node".into(),
            name: self.node.clone(),
            uid: node.metadata.uid.unwrap_or_default(),
            ..OwnerReference::default()
        }))
    }

    async fn report(&self, error: &PublishError) {
        log::warn!("Cannot publish the node's GPUs: {error}");
        self.cluster.warn_node(&self.node, "PublishFailed", &error.to_string()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_slices_are_short_and_distinct() {
        assert_eq!(slice_name("n1"), "n1-gpu.tessera.dev");
        let long = ["a".repeat(253), format!("{}b", "a".repeat(252))].map(|node| slice_name(&node));
        assert!(long[0] != long[1] && long.iter().all(|name| name.len() <= 253), "{long:?}");
    }
}
