//! What `vgpud run` is told.

use std::path::PathBuf;

use crate::backend::ParentConfig;
use crate::spawn::User;

/// Where the manager works, and which physical GPUs it shares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Sockets and locks.
    pub run_dir: PathBuf,
    /// Definitions.
    pub config_dir: PathBuf,
    /// The physical GPUs.
    pub parents: Vec<ParentConfig>,
    /// Whom workers run as that must not be root, where the manager is.
    pub worker_user: User,
}
