//! Screens in a VNC viewer or a browser.

use std::collections::BTreeMap;

use mdev_core::ids::VgpuId;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// `Upgrade` header of the console's connection: RFB (RFC 6143).
pub const RFB_UPGRADE: &str = "rfb";

/// Request to view a vGPU's screen: `POST /v1/vgpus/{uuid}/console`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OpenConsole {
    /// QMP socket of the VM that is attached to the vGPU, for keyboard and pointer. Without this
    /// socket the screen is view-only.
    #[serde(default)]
    pub monitor: Option<String>,
}

/// Request for a session of the web console: `POST /v1/web`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OpenWeb {
    /// QMP sockets of VMs by vGPU. The session has keyboard and pointer for these vGPUs.
    #[serde(default)]
    #[schema(value_type = BTreeMap<String, String>)]
    pub monitors: BTreeMap<VgpuId, String>,
}

/// Address that opens the web console.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WebAddress {
    /// URL that opens one session, once, within five minutes.
    pub url: String,
}
