//! Conditions in a claim's status: for each device of this driver, whether its vGPU works, and what
//! is wrong in one line.

use k8s_openapi::api::resource::v1::{
    AllocatedDeviceStatus, DeviceRequestAllocationResult, ResourceClaim,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::DRIVER;
use super::cluster::truncated;

/// Condition that Kubernetes documents for devices.
const READY: &str = "Ready";
/// Longest message, in bytes.
const MAX_MESSAGE: usize = 1000;

/// Whether a device's vGPU works.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Readiness {
    /// True if the vGPU runs.
    pub ready: bool,
    /// Reason in one word.
    pub reason: &'static str,
    /// What is wrong, or which vGPU runs.
    pub message: String,
}

/// Returns this driver's results of a claim's allocation on a node.
pub fn own<'a>(
    claim: &'a ResourceClaim,
    node: &str,
) -> impl Iterator<Item = &'a DeviceRequestAllocationResult> {
    let status = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let results = status.and_then(|allocation| allocation.devices.as_ref());
    let results = results.into_iter().flat_map(|devices| devices.results.iter().flatten());
    results.filter(move |result| result.driver == DRIVER && result.pool == node)
}

/// Returns the object that gives a claim these conditions by server-side apply; `None` if the claim
/// has them. A device for which `readiness` has none keeps its condition.
pub fn object(
    claim: &ResourceClaim,
    node: &str,
    readiness: impl Fn(&DeviceRequestAllocationResult) -> Option<Readiness>,
) -> Option<Value> {
    let (mut devices, mut is_changed) = (Vec::new(), false);
    for result in own(claim, node) {
        let before = condition(claim, result);
        let now = readiness(result).map(|now| updated(before, &now));
        is_changed |= now.is_some() && now.as_ref() != before;
        if let Some(condition) = now.or_else(|| before.cloned()) {
            devices.push(AllocatedDeviceStatus {
                conditions: Some(vec![condition]),
                device: result.device.clone(),
                driver: result.driver.clone(),
                pool: result.pool.clone(),
                share_id: result.share_id.clone(),
                ..AllocatedDeviceStatus::default()
            });
        }
    }
    let metadata = &claim.metadata;
    is_changed.then(|| {
        json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            // The UID keeps the conditions from a claim that was made anew.
            "metadata": { "namespace": metadata.namespace, "name": metadata.name, "uid": metadata.uid },
            "status": { "devices": devices },
        })
    })
}

/// Returns the condition that a device has.
fn condition<'a>(
    claim: &'a ResourceClaim,
    result: &DeviceRequestAllocationResult,
) -> Option<&'a Condition> {
    let devices = claim.status.as_ref().and_then(|status| status.devices.as_ref());
    let device = devices?.iter().find(|device| {
        device.driver == result.driver
            && device.pool == result.pool
            && device.device == result.device
            && device.share_id == result.share_id
    })?;
    device.conditions.as_ref()?.iter().find(|condition| condition.type_ == READY)
}

/// Returns a condition with the time of its last transition.
fn updated(before: Option<&Condition>, now: &Readiness) -> Condition {
    let status = if now.ready { "True" } else { "False" };
    let same = before.filter(|before| before.status == status);
    Condition {
        type_: READY.to_owned(),
        status: status.to_owned(),
        reason: now.reason.to_owned(),
        message: truncated(&now.message, MAX_MESSAGE).replace('\n', " "),
        last_transition_time: same
            .map_or_else(|| Time(Timestamp::now()), |before| before.last_transition_time.clone()),
        observed_generation: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(devices: &Value) -> ResourceClaim {
        let result = |driver: &str, pool: &str, share: &str| json!({ "driver": driver, "pool": pool, "device": "soft0", "request": "vgpu", "shareID": share });
        let results =
            [result(DRIVER, "n1", "a"), result(DRIVER, "n1", "b"), result("other", "n1", "c")];
        serde_json::from_value(json!({
            "metadata": { "namespace": "ns", "name": "c1", "uid": "u1" }, "spec": {},
            "status": { "allocation": { "devices": { "results": results } }, "devices": devices },
        }))
        .unwrap()
    }

    fn ready(ready: bool, message: &str) -> Readiness {
        Readiness { ready, reason: "Test", message: message.to_owned() }
    }

    #[test]
    fn each_own_device_has_a_condition_and_no_other() {
        let object = object(&claim(&json!([])), "n1", |_| Some(ready(true, "It runs"))).unwrap();
        let devices = object["status"]["devices"].as_array().unwrap();
        let shares: Vec<_> = devices.iter().map(|device| &device["shareID"]).collect();
        assert_eq!(shares, ["a", "b"]);
        assert_eq!(devices[0]["conditions"][0]["status"], "True");
        assert_eq!(object["metadata"]["uid"], "u1");
        assert_eq!(super::object(&claim(&json!([])), "n2", |_| Some(ready(true, ""))), None);
    }

    #[test]
    fn what_has_not_changed_is_not_written_and_stays() {
        let first = object(&claim(&json!([])), "n1", |_| Some(ready(true, "It runs"))).unwrap();
        let written = claim(&first["status"]["devices"]);
        assert_eq!(object(&written, "n1", |_| Some(ready(true, "It runs"))), None);
        let failed = |result: &DeviceRequestAllocationResult| {
            (result.share_id.as_deref() == Some("b")).then(|| ready(false, "It has\nfailed"))
        };
        let second = object(&written, "n1", failed).unwrap();
        let devices = &second["status"]["devices"];
        assert_eq!(devices[0], first["status"]["devices"][0]);
        assert_eq!(devices[1]["conditions"][0]["status"], "False");
        assert_eq!(devices[1]["conditions"][0]["message"], "It has failed");
    }
}
