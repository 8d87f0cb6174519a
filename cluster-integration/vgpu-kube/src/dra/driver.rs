//! Prepares and unprepares claims.
//!
//! | step | after a kill there |
//! | --- | --- |
//! | 1. record of the claim | the record names vGPUs that do not exist yet |
//! | 2. vGPUs | vGPUs without a file |
//! | 3. file for the container runtime | prepared |
//!
//! Unprepare goes backwards. Each step can be repeated, so that the next call (of kubelet,
//! which repeats it, or of [`super::reconcile`]) ends in the same state.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use mdev_core::ids::VgpuId;
use mdev_core::profile::{self, Series};
use tokio::sync::OwnedMutexGuard;
use vgpud_api::Parent;
use vgpud_client::ClientError;

use super::cdi::{self, CdiDir};
use super::claim::{self, ClaimError, ClaimRef, Share};
use super::cluster::{Cluster, ClusterError};
use super::conditions::Readiness;
use super::config::ConfigError;
use super::owner::{self, OwnerError};
use super::records::{Record, Records, is_uid};
use super::slices;
use crate::host::Libraries;
use crate::injection::Injection;
use crate::metrics::Metrics;
use crate::vgpus::{self, Purpose, Vgpus, WantedVgpu};

/// Error of a call of kubelet.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The claim's name is not from kubelet.
    #[error("The UID {0:?} of claim {1} has other characters than letters, digits and dashes")]
    Uid(String, String),
    /// The claim is gone.
    #[error("There is no claim {0}; delete the pod that uses it")]
    NoClaim(String),
    /// The claim cannot be prepared.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// The pod's user is not known.
    #[error(transparent)]
    Owner(#[from] OwnerError),
    /// The claim's settings are invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The device is gone.
    #[error("Node {1} has no GPU {0} any more; delete the pod, so that it gets another GPU")]
    NoDevice(String, String),
    /// vgpud.
    #[error(transparent)]
    Vgpud(#[from] ClientError),
    /// vgpud ended the vGPU at once.
    #[error("vGPU {0} does not run; see the log of vgpud (`journalctl -u vgpud`)")]
    NotRunning(VgpuId),
    /// The apiserver.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// A file.
    #[error("Cannot write the files of claim {0}: {1}; see --cdi-dir and --state-dir")]
    File(String, #[source] io::Error),
}

type Result<T> = std::result::Result<T, DriverError>;

/// Device of a prepared claim, for kubelet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// Request of the claim.
    pub request: String,
    /// Device of the node's pool.
    pub device: String,
    /// Name of the device for the container runtime.
    pub cdi_id: String,
}

/// Driver of a node.
#[derive(Debug)]
pub struct Driver {
    /// Name of the node, and of its pool of devices.
    pub node: String,
    /// Operations on vGPUs.
    pub vgpus: Vgpus,
    /// Requests to the apiserver.
    pub cluster: Cluster,
    /// Records of claims.
    pub records: Records,
    /// Files for the container runtime.
    pub cdi: CdiDir,
    /// Libraries for containers.
    pub libraries: Libraries,
    /// Counters.
    pub metrics: Metrics,
    /// One operation on a claim at a time.
    pub locks: Locks,
}

/// Locks by claim.
#[derive(Debug, Default)]
pub struct Locks(Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<()>>>>);

impl Locks {
    async fn lock(&self, uid: &str) -> OwnedMutexGuard<()> {
        let lock = {
            let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            all.retain(|_, lock| Arc::strong_count(lock) > 1);
            Arc::clone(all.entry(uid.to_owned()).or_default())
        };
        lock.lock_owned().await
    }
}

impl Driver {
    /// Starts the vGPUs of a claim and writes its file. The same claim gives the same vGPUs.
    pub async fn prepare(&self, by: &ClaimRef) -> Result<Vec<Prepared>> {
        check_uid(by)?;
        let _lock = self.locks.lock(&by.uid).await;
        let claim = self.cluster.claim(&by.namespace, &by.name).await?;
        let claim = claim.ok_or(DriverError::NoClaim(by.to_string()))?;
        let prepared = self.prepare_claim(&claim, by).await;
        let readiness = |result: &DeviceRequestAllocationResult| {
            Some(match &prepared {
                Ok(_) => Readiness {
                    ready: true,
                    reason: "Prepared",
                    message: format!("vGPU {} runs", self.vgpu(by, result)),
                },
                Err(error) => {
                    Readiness { ready: false, reason: "PrepareFailed", message: error.to_string() }
                }
            })
        };
        // A claim that was made anew under the name is not kubelet's.
        if claim.metadata.uid.as_ref() == Some(&by.uid) {
            self.cluster.set_conditions(&claim, &self.node, readiness).await;
        }
        prepared
    }

    /// Returns the vGPU of a device that is allocated to a claim.
    pub fn vgpu(&self, by: &ClaimRef, result: &DeviceRequestAllocationResult) -> VgpuId {
        self.vgpu_of(by, &result.device, result.share_id.as_deref().unwrap_or_default())
    }

    fn vgpu_of(&self, by: &ClaimRef, device: &str, share_id: &str) -> VgpuId {
        vgpus::id(&["claim", &by.uid, &self.node, device, share_id])
    }

    async fn prepare_claim(&self, claim: &ResourceClaim, by: &ClaimRef) -> Result<Vec<Prepared>> {
        let shares = claim::shares(claim, by, &self.node)?;
        let owner = owner::of(&by.name, &self.cluster.pods(claim).await?)?;
        let parents = self.vgpus.parents().await?;
        let wanted = shares
            .iter()
            .map(|share| self.wanted(by, share, owner, &parents))
            .collect::<Result<Vec<_>>>()?;
        let file = |error| DriverError::File(by.to_string(), error);
        let ids = wanted.iter().map(|wanted| wanted.id).collect();
        self.records.write(&Record::new(by, ids)).map_err(file)?;
        let mut devices = Vec::new();
        for (share, wanted) in shares.iter().zip(&wanted) {
            let vgpu = self.vgpus.ensure(wanted).await?;
            let injection = Injection::new(&vgpu, &share.request, &self.libraries);
            devices.push((wanted.id, injection.ok_or(DriverError::NotRunning(wanted.id))?));
        }
        self.cdi.write(&by.uid, &devices).map_err(file)?;
        let prepared = shares.into_iter().zip(&wanted).map(|(share, wanted)| Prepared {
            request: share.allocated_request,
            device: share.device,
            cdi_id: cdi::device_id(wanted.id),
        });
        Ok(prepared.collect())
    }

    /// Stops the vGPUs of a claim and removes its files. What is absent counts as removed.
    pub async fn unprepare(&self, by: &ClaimRef) -> Result<()> {
        check_uid(by)?;
        let _lock = self.locks.lock(&by.uid).await;
        let file = |error| DriverError::File(by.to_string(), error);
        let record = self.records.find(&by.uid);
        for vgpu in record.into_iter().flat_map(|record| record.vgpus) {
            self.vgpus.stop(vgpu).await?;
        }
        self.cdi.remove(&by.uid).map_err(file)?;
        self.records.remove(&by.uid).map_err(file)
    }

    /// Returns the vGPU of a share.
    fn wanted(
        &self,
        by: &ClaimRef,
        share: &Share,
        owner: u32,
        parents: &[Parent],
    ) -> Result<WantedVgpu> {
        let parent =
            parents.iter().find(|parent| slices::device_name(&parent.name) == share.device);
        let parent =
            parent.ok_or_else(|| DriverError::NoDevice(share.device.clone(), self.node.clone()))?;
        let display = share.config.display();
        let series = if display { Series::Workstation } else { Series::Compute };
        let mut attrs = vec![("core", share.capacity.core.to_string())];
        attrs.extend(share.config.attributes()?);
        Ok(WantedVgpu {
            id: self.vgpu_of(by, &share.device, &share.share_id),
            purpose: Purpose::Claim,
            parent: parent.name.clone(),
            mdev_type: profile::name(&parent.model, share.capacity.vram_bytes, series),
            owner,
            attrs,
        })
    }
}

fn check_uid(by: &ClaimRef) -> Result<()> {
    if is_uid(&by.uid) {
        return Ok(());
    }
    Err(DriverError::Uid(by.uid.clone(), by.to_string()))
}
