//! Users and groups of the manager: from the command line, or the usual ones that exist on the
//! host.

use std::path::Path;
use std::str::FromStr;

use anyhow::{Context, bail};
use mdev_core::definition::Owner;
use mdev_core::untrusted::{TABLE, read_text};
use vgpud::api::access::{Group, Rules};
use vgpud_host::uid_range::UidRange;
use vgpud_host::users::{Account, Users};

use super::RunArgs;

/// Default group with read access.
const READERS: &str = "vgpu";
/// Default group with full access.
const ADMINS: &str = "vgpu-admin";
/// Default user of workers.
const WORKERS: &str = "vgpud";
/// Users that libvirt runs VMs as, on Debian and on Fedora.
const VM_USERS: [&str; 2] = ["libvirt-qemu", "qemu"];

/// Value of `--worker-uids`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerUids {
    /// Each worker has a user ID of this range.
    Range(UidRange),
    /// All workers run as one user.
    Shared,
}

impl FromStr for WorkerUids {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "shared" { Ok(Self::Shared) } else { text.parse().map(Self::Range) }
    }
}

/// Users and groups of the manager.
#[derive(Debug, PartialEq, Eq)]
pub struct AccessConfig {
    /// User of GPU processes.
    pub worker_user: Account,
    /// Users of workers. Without a range, workers run as `worker_user`.
    pub worker_uids: Option<UidRange>,
    /// Owner of vGPUs without the attribute `owner`.
    pub owner: Account,
    /// Permissions on the control socket.
    pub access: Rules,
}

impl AccessConfig {
    /// Resolves the command line's users and groups, or the defaults.
    pub fn of(args: &RunArgs, users: &Users) -> anyhow::Result<Self> {
        Self::resolve(Account::own(), args, users)
    }

    fn resolve(own: Account, args: &RunArgs, users: &Users) -> anyhow::Result<Self> {
        let named = |owner: &Owner| users.owner(owner).map_err(anyhow::Error::msg);
        let owner = match &args.owner {
            Some(owner) => named(owner).context("--owner")?,
            // Only root can change the owner of a socket.
            None if own.uid != 0 => own,
            None => VM_USERS.iter().find_map(|name| users.user(name)).unwrap_or(own),
        };
        if own.uid != 0 && owner.uid != own.uid {
            bail!("--owner: only root can give sockets to user {}; leave it out", owner.uid);
        }
        let worker_user = match &args.worker_user {
            Some(user) => named(user).context("--worker-user")?,
            None => users.user(WORKERS).unwrap_or(Account::NOBODY),
        };
        if worker_user.uid == 0 || worker_user.gid == 0 {
            bail!("--worker-user: workers must not be root, nor in its group; name another user");
        }
        // Without root, only the process' own user has access unless groups are named.
        let use_defaults = own.uid == 0;
        let access = Rules {
            own: own.uid,
            readers: group("--group", args.group.as_deref(), READERS, use_defaults, users)?,
            admins: group(
                "--admin-group",
                args.admin_group.as_deref(),
                ADMINS,
                use_defaults,
                users,
            )?,
        };
        let worker_uids = if own.uid == 0 {
            let uid_map = read_text(Path::new("/proc/self/uid_map"), TABLE).unwrap_or_default();
            worker_uids(args.worker_uids, users, &uid_map)?
        } else {
            None
        };
        Ok(Self { worker_user, worker_uids, owner, access })
    }
}

/// Returns the range of workers' users, in the user namespace with this `/proc/self/uid_map`. One
/// without the default range has no users to choose from.
fn worker_uids(
    chosen: Option<WorkerUids>,
    users: &Users,
    uid_map: &str,
) -> anyhow::Result<Option<UidRange>> {
    let range = match chosen {
        Some(WorkerUids::Shared) => return Ok(None),
        Some(WorkerUids::Range(range)) => range,
        None => UidRange::WORKERS,
    };
    range.check(users).map_err(anyhow::Error::msg).context("--worker-uids")?;
    if range.is_mapped(uid_map) {
        return Ok(Some(range));
    }
    if chosen.is_some() {
        bail!("--worker-uids: this container does not have user IDs {range}; name others");
    }
    log::warn!(
        "This container does not have user IDs {range}: all workers run as one user, and one that \
         a guest has compromised can disturb the others; name other user IDs by --worker-uids"
    );
    Ok(None)
}

fn group(
    option: &str,
    named: Option<&str>,
    default: &str,
    use_default: bool,
    users: &Users,
) -> anyhow::Result<Option<Group>> {
    let found = |name: &str| users.group(name).map(|gid| Group { name: name.to_owned(), gid });
    match named {
        None if use_default => Ok(found(default)),
        None => Ok(None),
        Some(name) => found(name).map(Some).with_context(|| {
            format!("{option}: there is no group {name:?}; make it: groupadd --system {name}")
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use clap::Parser;

    use super::super::{Cli, Role};
    use super::*;

    const ROOT: Account = Account { uid: 0, gid: 0 };

    fn args(line: &str) -> RunArgs {
        let line = ["vgpud", "run"].into_iter().chain(line.split_whitespace());
        let Role::Run(args) = Cli::try_parse_from(line).unwrap().role else { panic!("run") };
        *args
    }

    fn host(passwd: &str, group: &str) -> Users {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("etc")).unwrap();
        fs::write(root.path().join("etc/passwd"), passwd).unwrap();
        fs::write(root.path().join("etc/group"), group).unwrap();
        Users::in_root(root.path())
    }

    #[test]
    fn defaults_apply_where_they_exist() {
        let full = host(
            "root:x:0:0::/:\nlibvirt-qemu:x:64055:104::/:\nvgpud:x:990:990::/:\n",
            "vgpu:x:991:\nvgpu-admin:x:992:\n",
        );
        let config = AccessConfig::resolve(ROOT, &args(""), &full).unwrap();
        assert_eq!(config.owner, Account { uid: 64_055, gid: 104 });
        assert_eq!(config.worker_user, Account { uid: 990, gid: 990 });
        assert_eq!(config.access.readers.unwrap().gid, 991);
        assert_eq!(config.access.admins.unwrap().gid, 992);
        let bare = AccessConfig::resolve(ROOT, &args(""), &host("", "")).unwrap();
        assert_eq!((bare.owner, bare.worker_user), (ROOT, Account::NOBODY));
        assert_eq!(bare.access, Rules::default());
        // Without root, no default group has access.
        let own = Account { uid: 1000, gid: 1000 };
        let user = AccessConfig::resolve(own, &args(""), &full).unwrap();
        assert_eq!((user.owner, user.worker_uids), (own, None));
        let shared = AccessConfig::resolve(ROOT, &args("--worker-uids shared"), &full).unwrap();
        assert_eq!(shared.worker_uids, None);
        assert_eq!(user.access, Rules { own: 1000, ..Rules::default() });
    }

    #[test]
    fn unusable_users_and_groups_are_refused_with_a_remedy() {
        let bare = host("root:x:0:0::/:\nnews:x:9:9::/:\n", "root:x:0:\n");
        let own = Account { uid: 1000, gid: 1000 };
        for (own_account, line, part) in [
            (ROOT, "--group gpus", "make it: groupadd --system gpus"),
            (ROOT, "--admin-group gpus", "--admin-group: there is no group"),
            (ROOT, "--owner qemu", "--owner: There is no user \"qemu\""),
            (ROOT, "--worker-user root", "workers must not be root"),
            (ROOT, "--worker-user 5:0", "workers must not be root"),
            (ROOT, "--worker-uids 4-9", "contain those of news; name other"),
            (own, "--owner 107", "only root can give sockets"),
        ] {
            let error = format!(
                "{:#}",
                AccessConfig::resolve(own_account, &args(line), &bare).unwrap_err()
            );
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_container_without_the_users_of_workers_shares_one() {
        let users = Users::default();
        let host = "0 0 4294967295\n";
        assert_eq!(worker_uids(None, &users, host).unwrap(), Some(UidRange::WORKERS));
        let map = "0 100000 65536\n";
        assert_eq!(worker_uids(None, &users, map).unwrap(), None);
        let some = Some("4000-4999".parse().unwrap());
        assert!(worker_uids(some, &users, map).unwrap().is_some());
        let beyond = Some("70000-70999".parse().unwrap());
        let error = worker_uids(beyond, &users, map).unwrap_err().to_string();
        let refused = "this container does not have user IDs 70000-70999; name others";
        assert!(error.contains(refused), "{error}");
    }
}
