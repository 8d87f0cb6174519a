//! Devices of each resource, and their health.
//!
//! A type has as many devices as vGPUs of it fit on an empty parent. Types share the parent's
//! memory and time, also with vGPUs of claims and of the operator: those devices for which both are
//! left are healthy, besides those in use.

use std::collections::BTreeMap;
use std::fmt;

use mdev_core::ids::VgpuId;
use vgpud_api::{Parent, ParentState, ParentTypes, Scheduler, VgpuState};
use vgpud_client::ClientError;

use super::Context;
use crate::vgpus;

/// Domain of the resources' names.
pub const DOMAIN: &str = "tessera.io";
/// Longest ID of a device, in bytes.
const MAX_ID: usize = 63;

/// Resource of Kubernetes: a vGPU type in lower case, `tessera.io/soft-1q`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Resource {
    mdev_type: String,
}

impl Resource {
    /// Returns the resource of a vGPU type.
    pub fn of(mdev_type: &str) -> Self {
        Self { mdev_type: mdev_type.to_owned() }
    }

    /// Returns the vGPU type.
    pub fn mdev_type(&self) -> &str {
        &self.mdev_type
    }

    /// Returns the name of the plugin's socket.
    pub fn socket(&self) -> String {
        format!("tessera-{}.sock", self.mdev_type.to_ascii_lowercase())
    }
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{DOMAIN}/{}", self.mdev_type.to_ascii_lowercase())
    }
}

/// Device of a resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Physical GPU.
    pub parent: String,
    /// UUID of its vGPU.
    pub vgpu: VgpuId,
    /// Least share of the GPU's time in percent: the part of the memory that the type has.
    pub core: u32,
    /// Whether a container can use it.
    pub healthy: bool,
}

/// Devices of a resource by their IDs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory(pub BTreeMap<String, Device>);

impl Inventory {
    /// Returns the inventory with all devices unhealthy.
    #[must_use]
    pub fn unhealthy(&self) -> Self {
        let mut all = self.clone();
        all.0.values_mut().for_each(|device| device.healthy = false);
        all
    }
}

/// Queries the devices of all resources.
pub async fn inventories(context: &Context) -> Result<BTreeMap<Resource, Inventory>, ClientError> {
    let parents = context.vgpus.parents().await?;
    let types = context.vgpus.types().await?;
    let running = context.vgpus.of(vgpus::Purpose::Device).await?;
    let states = running.iter().map(|vgpu| (vgpu.uuid, vgpu.state)).collect();
    let schedulers = context.vgpus.schedulers().await?;
    let parents: Vec<_> =
        parents.into_iter().map(|parent| with_time(parent, &schedulers)).collect();
    Ok(assess(&context.node, &parents, &types, &states))
}

/// Parent, and the share of its time that further vGPUs can ask for, in percent.
type WithTime = (Parent, u32);

fn with_time(parent: Parent, schedulers: &[Scheduler]) -> WithTime {
    let own = schedulers.iter().find(|scheduler| scheduler.parent == parent.name);
    let limited = own.filter(|scheduler| !scheduler.overcommit);
    (parent, limited.map_or(u32::MAX, |scheduler| scheduler.left.into()))
}

/// Returns the devices of all resources of a node, by the states of the running vGPUs.
fn assess(
    node: &str,
    parents: &[WithTime],
    types: &[ParentTypes],
    states: &BTreeMap<VgpuId, VgpuState>,
) -> BTreeMap<Resource, Inventory> {
    let mut all = BTreeMap::<Resource, Inventory>::new();
    for on in types {
        let parent = parents.iter().find(|(parent, _)| parent.name == on.parent);
        let ready = parent.is_some_and(|(parent, _)| parent.state == ParentState::Ready);
        let time = parent.map_or(0, |(_, time)| *time);
        for offered in &on.types {
            let resource = Resource::of(&offered.name);
            let core = 100_u32.checked_div(offered.max_instances).unwrap_or_default().max(1);
            let mut left = offered.available_instances.min(time / core);
            let mut devices = BTreeMap::new();
            for number in 0..offered.max_instances {
                let name = format!("{}-{number}", on.parent.replace([':', '/'], "-"));
                let vgpu = vgpus::id(&["device", node, &resource.to_string(), &name]);
                let healthy = match states.get(&vgpu) {
                    Some(state) => ready && *state != VgpuState::Failed,
                    None if left > 0 => {
                        left -= 1;
                        ready
                    }
                    None => false,
                };
                if name.len() <= MAX_ID {
                    devices.insert(name, Device { parent: on.parent.clone(), vgpu, core, healthy });
                }
            }
            all.entry(resource).or_default().0.extend(devices);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use vgpud_api::TypeInfo;

    use super::*;

    fn parent(state: ParentState) -> Parent {
        let text = r#"{"name":"soft0","backend":"soft","model":"SOFT","description":"",
            "state":"ready","vram_bytes":8,"vram_free_bytes":8,"capabilities":[],"scheduler":"",
            "pid":null,"running":0}"#;
        Parent { state, ..serde_json::from_str(text).unwrap() }
    }

    fn types(available: u32) -> Vec<ParentTypes> {
        let offered = TypeInfo {
            name: "SOFT-1Q".into(),
            description: String::new(),
            device_api: "vfio-user".into(),
            available_instances: available,
            max_instances: 4,
            vram_bytes: 1 << 30,
            heads: 1,
        };
        vec![ParentTypes { parent: "soft0".into(), types: vec![offered] }]
    }

    fn healthy(
        state: ParentState,
        available: u32,
        states: &BTreeMap<VgpuId, VgpuState>,
    ) -> Vec<bool> {
        healthy_with_time(state, available, 100, states)
    }

    fn healthy_with_time(
        state: ParentState,
        available: u32,
        time: u32,
        states: &BTreeMap<VgpuId, VgpuState>,
    ) -> Vec<bool> {
        let all = assess("n1", &[(parent(state), time)], &types(available), states);
        assert_eq!(all.keys().map(ToString::to_string).collect::<Vec<_>>(), ["tessera.io/soft-1q"]);
        let devices = &all[&Resource::of("SOFT-1Q")].0;
        assert!(devices.values().all(|device| device.core == 25));
        devices.values().map(|device| device.healthy).collect()
    }

    #[test]
    fn devices_with_memory_left_are_healthy() {
        let none = BTreeMap::new();
        assert_eq!(healthy(ParentState::Ready, 4, &none), [true; 4]);
        assert_eq!(healthy(ParentState::Ready, 1, &none), [true, false, false, false]);
        assert_eq!(healthy(ParentState::Lost, 4, &none), [false; 4]);
        let short_of_time = healthy_with_time(ParentState::Ready, 4, 74, &none);
        assert_eq!(short_of_time, [true, true, false, false], "each has 25 % of the time");
        assert_eq!(healthy_with_time(ParentState::Ready, 4, u32::MAX, &none), [true; 4]);
        let used = vgpus::id(&["device", "n1", "tessera.io/soft-1q", "soft0-2"]);
        let running = [(used, VgpuState::Running)].into();
        assert_eq!(healthy(ParentState::Ready, 1, &running), [true, false, true, false]);
        let failed = [(used, VgpuState::Failed)].into();
        assert_eq!(healthy(ParentState::Ready, 1, &failed), [true, false, false, false]);
    }
}
