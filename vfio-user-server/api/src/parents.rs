//! Physical GPUs and the vGPU types that they offer.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::PhysicalScreen;

/// State of a physical GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ParentState {
    /// The GPU accepts vGPUs.
    Ready,
    /// The GPU process is starting, for the first time or after a loss.
    Starting,
    /// The GPU process has ended. The manager retries with growing pauses.
    Lost,
    /// The GPU process belongs to another version of vgpud. It serves its current vGPUs and accepts
    /// no more.
    Foreign,
}

/// Physical GPU: element of `GET /v1/parents`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Parent {
    /// `soft0`, or a PCI address.
    pub name: String,
    /// Backend: `soft`, `nvidia` or `vfio`.
    pub backend: String,
    /// GPU model: the prefix of the names of the vGPU types.
    pub model: String,
    /// Human-readable description.
    pub description: String,
    /// State of the GPU.
    pub state: ParentState,
    /// Video memory available to vGPUs in total, in bytes.
    pub vram_bytes: u64,
    /// Video memory that no running vGPU occupies, in bytes.
    pub vram_free_bytes: u64,
    /// Capabilities of the backend in lower case: `vram_aperture`, `compute`, ...
    pub capabilities: Vec<String>,
    /// Scheduling policy in force.
    pub scheduler: String,
    /// Process ID of the GPU process, if the backend has one.
    pub pid: Option<u32>,
    /// Number of running vGPUs.
    pub running: u32,
    /// Physical screen, if the GPU has one.
    #[serde(default)]
    pub screen: Option<PhysicalScreen>,
}

/// vGPU types of a parent: element of `GET /v1/types`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ParentTypes {
    /// Name of the parent.
    pub parent: String,
    /// Types, ordered by size.
    pub types: Vec<TypeInfo>,
}

/// vGPU type with its current availability on one parent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TypeInfo {
    /// Name of the type: `SOFT-1Q`.
    pub name: String,
    /// `num_heads=1, framebuffer=1024M, max_resolution=1920x1200, max_instance=8`.
    pub description: String,
    /// Interface that a VM attaches to: always `vfio-user`.
    pub device_api: String,
    /// Number of further vGPUs of this type that can start now.
    pub available_instances: u32,
    /// Number of vGPUs of this type that fit on an empty parent.
    pub max_instances: u32,
    /// Video memory of one vGPU, in bytes.
    pub vram_bytes: u64,
    /// Display heads: 0 or 1.
    pub heads: u32,
}
