//! What the scheduler has allocated to a claim.

use std::fmt;

use k8s_openapi::api::resource::v1::{
    DeviceAllocationConfiguration, DeviceAllocationResult, DeviceRequestAllocationResult,
    ResourceClaim,
};

use super::DRIVER;
use super::capacity::{Capacity, CapacityError};
use super::config::{ConfigError, VgpuConfig};

/// Largest number of devices of a claim.
const MAX_SHARES: usize = 32;

/// Claim as kubelet names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimRef {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID.
    pub uid: String,
}

impl fmt::Display for ClaimRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Part of a physical GPU that is allocated to a claim.
#[derive(Clone, Debug, PartialEq)]
pub struct Share {
    /// Request of the claim, without its subrequest.
    pub request: String,
    /// Request as allocated, for kubelet.
    pub allocated_request: String,
    /// Device of the node's pool.
    pub device: String,
    /// Distinguishes shares of the same device.
    pub share_id: String,
    /// Consumed capacity.
    pub capacity: Capacity,
    /// Settings.
    pub config: VgpuConfig,
}

/// Error of a claim that cannot be prepared.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// Another claim has the name now.
    #[error("Claim {0} was deleted and made anew; delete the pod that used the old one")]
    Replaced(String),
    /// No allocation.
    #[error(
        "Claim {0} is not allocated to this driver on node {1}; the scheduler has to allocate it"
    )]
    NotAllocated(String, String),
    /// Too many devices.
    #[error("Claim {0} has {1} devices; a claim can have at most 32")]
    TooMany(String, usize),
    /// Administrative access.
    #[error("Claim {0} asks for adminAccess, which vGPUs do not have; leave it out")]
    AdminAccess(String),
    /// Invalid capacity.
    #[error(transparent)]
    Capacity(#[from] CapacityError),
    /// Invalid parameters.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// Returns this driver's shares of a claim on a node.
pub fn shares(claim: &ResourceClaim, by: &ClaimRef, node: &str) -> Result<Vec<Share>, ClaimError> {
    if claim.metadata.uid.as_deref() != Some(by.uid.as_str()) {
        return Err(ClaimError::Replaced(by.to_string()));
    }
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let Some(devices) = allocation.and_then(|allocation| allocation.devices.as_ref()) else {
        return Err(ClaimError::NotAllocated(by.to_string(), node.to_owned()));
    };
    let own: Vec<_> = devices
        .results
        .iter()
        .flatten()
        .filter(|result| result.driver == DRIVER && result.pool == node)
        .collect();
    if own.is_empty() {
        return Err(ClaimError::NotAllocated(by.to_string(), node.to_owned()));
    }
    if own.len() > MAX_SHARES {
        return Err(ClaimError::TooMany(by.to_string(), own.len()));
    }
    if own.iter().any(|result| result.admin_access == Some(true)) {
        return Err(ClaimError::AdminAccess(by.to_string()));
    }
    own.into_iter().map(|result| share(result, devices)).collect()
}

fn share(
    result: &DeviceRequestAllocationResult,
    devices: &DeviceAllocationResult,
) -> Result<Share, ClaimError> {
    let request = result.request.split('/').next().unwrap_or_default().to_owned();
    let mut config = VgpuConfig::default();
    // Settings of the class come first: the claim's take precedence.
    for source in ["FromClass", "FromClaim"] {
        let entries = devices.config.iter().flatten().filter(|entry| entry.source == source);
        for entry in entries.filter(|entry| concerns(entry, &request, &result.request)) {
            let Some(opaque) = entry.opaque.as_ref().filter(|opaque| opaque.driver == DRIVER)
            else {
                continue;
            };
            config = config.overlaid(VgpuConfig::parse(&opaque.parameters.0)?);
        }
    }
    Ok(Share {
        capacity: Capacity::parse(&result.device, result.consumed_capacity.as_ref())?,
        allocated_request: result.request.clone(),
        device: result.device.clone(),
        share_id: result.share_id.clone().unwrap_or_default(),
        request,
        config,
    })
}

/// Returns whether an entry is for a request: one without requests is for all, and one for a
/// request is for its subrequests.
fn concerns(entry: &DeviceAllocationConfiguration, request: &str, allocated: &str) -> bool {
    let requests = entry.requests.as_deref().unwrap_or_default();
    requests.is_empty() || requests.iter().any(|name| name == request || name == allocated)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn by() -> ClaimRef {
        let [namespace, name, uid] = ["ns", "c1", "u1"].map(str::to_owned);
        ClaimRef { namespace, name, uid }
    }

    fn parse(devices: &Value) -> Result<Vec<Share>, ClaimError> {
        let claim = json!({
            "metadata": {"namespace": "ns", "name": "c1", "uid": "u1"},
            "spec": {}, "status": {"allocation": {"devices": devices}},
        });
        shares(&serde_json::from_value(claim).unwrap(), &by(), "n1")
    }

    fn result(request: &str) -> Value {
        json!({"driver": DRIVER, "pool": "n1", "device": "soft0", "request": request,
               "shareID": "s1", "consumedCapacity": {"core": "30", "vram": "1280Mi"}})
    }

    fn entry(source: &str, requests: &[&str], own: Value) -> Value {
        let mut parameters = own;
        parameters["apiVersion"] = json!("gpu.tessera.dev/v1alpha1");
        parameters["kind"] = json!("VgpuConfig");
        json!({"source": source, "requests": requests, "opaque": {"driver": DRIVER, "parameters": parameters}})
    }

    #[test]
    fn the_settings_of_a_request_are_those_of_class_and_claim() {
        let mut other = result("x");
        other["driver"] = json!("gpu.example.com");
        let mut elsewhere = result("x");
        elsewhere["pool"] = json!("n2");
        let found = parse(&json!({
            "results": [other, elsewhere, result("gpu"), result("vm/large")],
            "config": [
                entry("FromClaim", &["gpu"], json!({"mode": "soft"})),
                entry("FromClass", &[], json!({"mode": "hard", "display": true})),
                entry("FromClaim", &["vm"], json!({"limits": {"maxChannels": 4}})),
            ],
        }))
        .unwrap();
        let [gpu, vm] = found.as_slice() else { panic!("{found:?}") };
        assert_eq!((gpu.request.as_str(), gpu.share_id.as_str()), ("gpu", "s1"));
        assert_eq!((gpu.capacity.core, gpu.capacity.vram_bytes), (30, 1280 << 20));
        assert_eq!(gpu.config.attributes().unwrap(), [("mode", "soft".to_owned())]);
        assert_eq!((vm.request.as_str(), vm.allocated_request.as_str()), ("vm", "vm/large"));
        let attributes = [("mode", "hard".to_owned()), ("max_channels", "4".to_owned())];
        assert_eq!(
            (vm.config.attributes().unwrap(), vm.config.display()),
            (attributes.into(), true)
        );
    }

    #[test]
    fn claims_that_cannot_be_prepared_are_refused_in_one_line() {
        let error = |devices: Value| parse(&devices).unwrap_err().to_string();
        assert!(
            error(json!({"results": []})).contains(" is not allocated to this driver on node n1")
        );
        let many = vec![result("gpu"); 33];
        assert!(error(json!({"results": many})).ends_with(" devices; a claim can have at most 32"));
        let mut admin = result("gpu");
        admin["adminAccess"] = json!(true);
        assert!(
            error(json!({"results": [admin]})).contains("adminAccess, which vGPUs do not have")
        );
        let forged = entry("FromClaim", &[], json!({"owner": "0"}));
        let said = error(json!({"results": [result("gpu")], "config": [forged]}));
        assert!(said.contains("no VgpuConfig: unknown field `owner`"), "{said}");
        let claim = json!({"metadata": {"uid": "u2"}, "spec": {}});
        let said = shares(&serde_json::from_value(claim).unwrap(), &by(), "n1").unwrap_err();
        assert!(said.to_string().contains(" was deleted and made anew; delete the pod"));
    }
}
