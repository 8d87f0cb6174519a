//! The daemon's version.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Version and process of the manager: `GET /v1/version`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Version {
    /// Version of `vgpud`.
    pub version: String,
    /// Version of the API. An incompatible change increments this version.
    pub api: String,
    /// Process ID of the manager.
    pub pid: u32,
    /// The manager's `--run-dir`.
    pub run_dir: String,
    /// The manager's `--config-dir`.
    pub config_dir: String,
}
