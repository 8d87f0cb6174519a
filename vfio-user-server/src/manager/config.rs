//! What `vgpud run` is told.

use std::path::PathBuf;

use crate::api::access::Rules;
use crate::backend::ParentConfig;
use crate::console::web::access::Address;
use crate::users::Account;

/// Where the manager works, and which physical GPUs it shares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Sockets and locks.
    pub run_dir: PathBuf,
    /// Definitions.
    pub config_dir: PathBuf,
    /// Callout scripts that packages bring; the host's own are in the folder of definitions.
    pub scripts_dir: PathBuf,
    /// The physical GPUs.
    pub parents: Vec<ParentConfig>,
    /// Whom workers and software GPUs run as, where the manager is root.
    pub worker_user: Account,
    /// Whom the socket of a vGPU belongs to that does not say.
    pub owner: Account,
    /// Who may do what on the control socket.
    pub access: Rules,
    /// Where the web console is served.
    pub web: Option<Address>,
}
