//! Physical screens and the vGPUs that they show.

use mdev_core::ids::VgpuId;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Physical screen of a GPU, which shows one vGPU at a time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PhysicalScreen {
    /// Physical GPU.
    pub parent: String,
    /// vGPU on the screen. The screen is dark if absent, or while this vGPU has no picture.
    #[schema(value_type = Option<String>, format = "uuid")]
    pub focus: Option<VgpuId>,
    /// Time that the rotation shows each vGPU, in seconds; absent without a rotation.
    pub rotate_seconds: Option<u64>,
}

/// Result of focusing a vGPU on its parent's screen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Focused {
    /// Physical GPU.
    pub parent: String,
    /// vGPU that is now on the screen.
    #[schema(value_type = String, format = "uuid")]
    pub focus: VgpuId,
    /// Time to program the screen, in microseconds.
    pub switch_us: u64,
}

/// Request to start or end a rotation: `POST /v1/parents/{parent}/rotation`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Rotate {
    /// Time to show each vGPU, in seconds: 1 to 86400. If absent, the rotation ends and the current
    /// vGPU stays.
    #[serde(default)]
    pub seconds: Option<u64>,
}
