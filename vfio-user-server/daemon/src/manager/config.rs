//! Configuration of the manager.

use std::path::PathBuf;

use crate::backend::ParentConfig;
use vgpud_host::uid_range::UidRange;
use vgpud_host::users::Account;

/// Configuration of the manager: its parents, and the users of what it starts.
#[derive(Clone, Debug)]
pub struct Config {
    /// Directory of definitions, scheduler settings and screen settings.
    pub config_dir: PathBuf,
    /// Parents.
    pub parents: Vec<ParentConfig>,
    /// User that GPU processes run as, if the manager is root.
    pub worker_user: Account,
    /// Users of workers, one for each, if the manager is root. Without a range, workers run as
    /// `worker_user`.
    pub worker_uids: Option<UidRange>,
    /// Owner of vGPUs without the attribute `owner`.
    pub owner: Account,
}
