//! The node's GPUs as a ResourceSlice.
//!
//! A GPU is one device that can be allocated many times. Its capacities are what other vGPUs than
//! those of claims leave: the operator's own, for example. Those of claims are counted by the
//! scheduler.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Device, DeviceAttribute, DeviceCapacity,
    DeviceTaint,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use mdev_core::profile::MIN_VRAM;
use mdev_core::units::{GIB, MIB};
use vgpud_api::{Parent, ParentState, Stats};

use super::DRIVER;
use super::capacity::{CORE, VRAM};
use super::cluster::truncated;
use crate::vgpus::Purpose;

/// Share of a claim that asks for none, in percent.
const DEFAULT_CORE: u8 = 10;
/// Memory of a claim that asks for none, in bytes.
const DEFAULT_VRAM: u64 = GIB;
/// Longest string of an attribute, in bytes.
const MAX_STRING: usize = 64;

/// Longest name of a device, in bytes.
const MAX_NAME: usize = 63;

/// GPU of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Name of the parent.
    pub parent: String,
    /// Model.
    pub model: String,
    /// Backend.
    pub backend: String,
    /// Whether vGPUs can have a display head.
    pub display: bool,
    /// Whether programs can use vGPUs without a VM.
    pub programs: bool,
    /// Share of time that is left for claims, in percent.
    pub core: u8,
    /// Video memory that is left for claims, in bytes.
    pub vram_bytes: u64,
    /// Why no more vGPUs can start, in one word.
    pub taint: Option<&'static str>,
}

/// Returns the name of a parent's device: lower-case letters, digits and dashes.
pub fn device_name(parent: &str) -> String {
    let lower = parent.to_ascii_lowercase();
    let name: String =
        lower.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    let end = name.len().min(MAX_NAME);
    name[..end].trim_matches('-').to_owned()
}

/// Returns the GPUs that claims can share. GPUs without engines or with less memory than the
/// smallest vGPU are left to device plugins.
pub fn gpus(parents: &[Parent], stats: &Stats) -> Vec<Gpu> {
    let shareable = parents.iter().filter(|parent| {
        let engines = parent.capabilities.iter().any(|has| has == "copy" || has == "compute");
        engines && parent.vram_bytes >= MIN_VRAM
    });
    shareable.map(|parent| gpu(parent, stats)).collect()
}

fn gpu(parent: &Parent, stats: &Stats) -> Gpu {
    let foreign = stats
        .vgpus
        .iter()
        .filter(|vgpu| vgpu.parent == parent.name && !Purpose::Claim.has(vgpu.name.as_deref()));
    let (mut core, mut vram_bytes) = (100_u8, parent.vram_bytes);
    for vgpu in foreign {
        core = core.saturating_sub(vgpu.share_asked.unwrap_or_default());
        vram_bytes = vram_bytes.saturating_sub(vgpu.vram_bytes);
    }
    let has = |name: &str| parent.capabilities.iter().any(|has| has == name);
    Gpu {
        parent: parent.name.clone(),
        model: parent.model.clone(),
        backend: parent.backend.clone(),
        display: has("framebuffer"),
        programs: has("programs"),
        core,
        vram_bytes: vram_bytes / MIN_VRAM * MIN_VRAM,
        taint: match parent.state {
            ParentState::Ready => None,
            ParentState::Starting => Some("starting"),
            ParentState::Lost => Some("lost"),
            ParentState::Foreign => Some("foreign"),
        },
    }
}

/// Returns the GPUs after a query, and those of the query before that vgpud cannot describe any
/// more, which are lost.
pub fn merge(before: &[Gpu], now: Vec<Gpu>, parents: &[Parent]) -> Vec<Gpu> {
    let is_missing = |gpu: &&Gpu| {
        let exists = parents.iter().any(|parent| parent.name == gpu.parent);
        exists && !now.iter().any(|other| other.parent == gpu.parent)
    };
    let missing = before.iter().filter(is_missing);
    let lost: Vec<_> = missing.map(|gpu| Gpu { taint: Some("lost"), ..gpu.clone() }).collect();
    let mut all: Vec<_> = now.into_iter().chain(lost).collect();
    all.sort_by(|a, b| a.parent.cmp(&b.parent));
    all
}

/// Returns the devices of a node's slice.
pub fn devices(gpus: &[Gpu]) -> Vec<Device> {
    // A device without anything left cannot be described: its smallest request would not fit.
    gpus.iter().filter(|gpu| gpu.core > 0 && gpu.vram_bytes >= MIN_VRAM).map(device).collect()
}

fn device(gpu: &Gpu) -> Device {
    let string = |text: &str| {
        let text = truncated(text, MAX_STRING).to_owned();
        DeviceAttribute { string: Some(text), ..DeviceAttribute::default() }
    };
    let bool = |value| DeviceAttribute { bool: Some(value), ..DeviceAttribute::default() };
    let attributes = [
        ("model", string(&gpu.model)),
        ("backend", string(&gpu.backend)),
        ("parent", string(&gpu.parent)),
        ("display", bool(gpu.display)),
        ("programs", bool(gpu.programs)),
    ];
    let attributes = attributes.map(|(name, value)| (name.to_owned(), value)).into();
    let core = u64::from(gpu.core);
    let capacity: BTreeMap<_, _> = [
        (CORE.to_owned(), capacity(core, DEFAULT_CORE.into(), 1, ToString::to_string)),
        (
            VRAM.to_owned(),
            capacity(gpu.vram_bytes, DEFAULT_VRAM, MIN_VRAM, |bytes| mebibytes(*bytes)),
        ),
    ]
    .into();
    // A lost GPU takes its vGPUs with it: their pods can only be started again elsewhere, or later.
    let taint = gpu.taint.map(|why| DeviceTaint {
        key: format!("{DRIVER}/unavailable"),
        value: Some(why.to_owned()),
        effect: if why == "lost" { "NoExecute" } else { "NoSchedule" }.to_owned(),
        time_added: None,
    });
    Device {
        name: device_name(&gpu.parent),
        allow_multiple_allocations: Some(true),
        attributes: Some(attributes),
        capacity: Some(capacity),
        taints: taint.map(|taint| vec![taint]),
        ..Device::default()
    }
}

fn capacity(value: u64, default: u64, step: u64, text: fn(&u64) -> String) -> DeviceCapacity {
    let quantity = |number: u64| Quantity(text(&number));
    DeviceCapacity {
        value: quantity(value),
        request_policy: Some(CapacityRequestPolicy {
            default: Some(quantity(default.min(value))),
            valid_range: Some(CapacityRequestPolicyRange {
                min: quantity(step),
                max: Some(quantity(value)),
                step: Some(quantity(step)),
            }),
            valid_values: None,
        }),
    }
}

fn mebibytes(bytes: u64) -> String {
    if bytes.is_multiple_of(GIB) {
        format!("{}Gi", bytes / GIB)
    } else {
        format!("{}Mi", bytes / MIB)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::quantity;

    fn gpu(core: u8, vram_bytes: u64, taint: Option<&'static str>) -> Gpu {
        let [parent, model, backend] = ["0000:3B:00.0", "H100", "nvidia"].map(str::to_owned);
        Gpu { parent, model, backend, display: false, programs: true, core, vram_bytes, taint }
    }

    #[test]
    fn a_gpu_is_a_device_with_shares() {
        let device = &devices(&[gpu(100, 8 * GIB, Some("lost"))])[0];
        let found = serde_json::to_value(device).unwrap();
        let expected = serde_json::json!({
            "name": "0000-3b-00-0", "allowMultipleAllocations": true,
            "attributes": {
                "model": {"string": "H100"}, "backend": {"string": "nvidia"},
                "parent": {"string": "0000:3B:00.0"}, "display": {"bool": false}, "programs": {"bool": true},
            },
            "capacity": {
                "core": {"value": "100", "requestPolicy": {
                    "default": "10", "validRange": {"min": "1", "max": "100", "step": "1"}}},
                "vram": {"value": "8Gi", "requestPolicy": {
                    "default": "1Gi", "validRange": {"min": "256Mi", "max": "8Gi", "step": "256Mi"}}},
            },
            "taints": [{"key": "gpu.tessera.dev/unavailable", "value": "lost", "effect": "NoExecute"}],
        });
        assert_eq!(found, expected);
    }

    proptest! {
        #[test]
        fn published_capacities_are_valid(core in 0_u8..=100, vram in 0_u64..1 << 44) {
            let vram_bytes = vram / MIN_VRAM * MIN_VRAM;
            for device in devices(&[gpu(core, vram_bytes, None)]) {
                for (name, capacity) in device.capacity.unwrap() {
                    let number = |text: Option<&Quantity>| quantity::ceil(&text.unwrap().0).unwrap();
                    let policy = capacity.request_policy.unwrap();
                    let range = policy.valid_range.unwrap();
                    let value = number(Some(&capacity.value));
                    let (min, step) = (number(Some(&range.min)), number(range.step.as_ref()));
                    let default = number(policy.default.as_ref());
                    prop_assert_eq!(value, if name == CORE { core.into() } else { vram_bytes });
                    prop_assert_eq!(number(range.max.as_ref()), value);
                    // The apiserver demands these of a range.
                    prop_assert!(min <= default && default <= value, "{}", name);
                    prop_assert!((value - min).is_multiple_of(step) && (default - min).is_multiple_of(step));
                }
            }
        }

        #[test]
        fn names_of_devices_are_labels(parent in "\\PC{1,80}") {
            let name = device_name(&format!("a{parent}"));
            let valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            prop_assert!((1..=63).contains(&name.len()) && name.chars().all(valid));
            prop_assert!(!name.starts_with('-') && !name.ends_with('-'));
        }
    }
}
