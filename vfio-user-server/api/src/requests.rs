//! Request bodies that create, change, start and stop vGPUs.

use mdev_core::ids::VgpuId;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Attribute, StartPolicy};

/// Request to define a vGPU, start a transient vGPU, or both: `POST /v1/vgpus`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateVgpu {
    /// UUID of the vGPU; random if absent.
    #[schema(value_type = Option<String>, format = "uuid")]
    #[serde(default)]
    pub uuid: Option<VgpuId>,
    /// Physical GPU; if absent, the first GPU with this type and enough room.
    #[serde(default)]
    pub parent: Option<String>,
    /// vGPU type. Required, except for `define` of a running vGPU.
    #[serde(default)]
    pub mdev_type: Option<String>,
    /// Start policy of the definition.
    #[serde(default)]
    pub start: StartPolicy,
    /// Attributes, in order.
    #[serde(default)]
    #[schema(value_type = Vec<BTreeMap<String, String>>)]
    pub attrs: Vec<Attribute>,
    /// Writes a definition, which is on disk before the response.
    #[serde(default)]
    pub define: bool,
    /// Starts the vGPU now. Without `define` the vGPU is transient and disappears when stopped. A
    /// defined vGPU runs with the type and attributes of this request; its definition does not
    /// change.
    #[serde(default)]
    pub run: bool,
    /// Proceeds even if a callout script refuses.
    #[serde(default)]
    pub force: bool,
}

/// Request to remove a definition: `DELETE /v1/vgpus/{uuid}`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UndefineVgpu {
    /// Proceeds even if a callout script refuses.
    #[serde(default)]
    pub force: bool,
}

/// Target of a modification.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ModifyTarget {
    /// The definition: in force from the next start.
    #[default]
    Defined,
    /// The running vGPU: in force at once, until the vGPU stops. Only some attributes, such as
    /// `core`, can change.
    Live,
    /// The definition and the running vGPU.
    Both,
}

/// Request to change a vGPU: `PATCH /v1/vgpus/{uuid}`. Absent members stay unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ModifyVgpu {
    /// New vGPU type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mdev_type: Option<String>,
    /// New start policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<StartPolicy>,
    /// New list of attributes, in order; replaces the whole list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<BTreeMap<String, String>>>)]
    pub attrs: Option<Vec<Attribute>>,
    /// New attributes of the running vGPU, if they differ from `attrs`; only with target `both`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<BTreeMap<String, String>>>)]
    pub live_attrs: Option<Vec<Attribute>>,
    /// Target of the change.
    #[serde(default)]
    pub target: ModifyTarget,
    /// Proceeds even if a callout script refuses.
    #[serde(default)]
    pub force: bool,
}

/// Request to start a defined vGPU: `POST /v1/vgpus/{uuid}/start`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StartVgpu {
    /// Owner of the vGPU's socket: `USER` or `USER:GROUP`, by name or number. Overrides the
    /// attribute `owner`. Without both, the vGPU belongs to the user who sends the request, and
    /// root's to the manager's default owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Proceeds even if a callout script refuses.
    #[serde(default)]
    pub force: bool,
}

/// Request to stop a vGPU: `POST /v1/vgpus/{uuid}/stop`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StopVgpu {
    /// Proceeds even if a VM uses the vGPU (the VM sees a surprise removal) or a callout script
    /// refuses.
    #[serde(default)]
    pub force: bool,
}
