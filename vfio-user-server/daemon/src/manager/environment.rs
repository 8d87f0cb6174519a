//! What all parents and vGPUs of a manager share.

use super::cgroups::Cgroups;
use super::reserve::Reserve;
use super::run_dir::RunDir;
use super::watcher::Watcher;
use super::worker_users::WorkerUsers;
use vgpud_host::users::Account;

/// Run directory, process watcher and users of the manager.
#[derive(Debug)]
pub struct Environment {
    /// Run directory.
    pub run_dir: RunDir,
    /// Descriptors for the start of workers.
    pub reserve: Reserve,
    /// Watcher of workers, contexts and GPU processes.
    pub watcher: Watcher,
    /// User that GPU processes run as, if the manager is root.
    pub worker_user: Account,
    /// Users that workers run as, if the manager is root.
    pub worker_users: WorkerUsers,
    /// Control groups of workers and GPU processes.
    pub cgroups: Cgroups,
    /// Owner of vGPUs without the attribute `owner`.
    pub owner: Account,
}
