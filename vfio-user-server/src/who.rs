//! Which users and groups the manager works with: as told, or those that are usual where they exist.

use anyhow::{Context, bail};
use mdev_core::definition::Owner;
use vfio_user_server::api::access::{Group, Rules};
use vfio_user_server::users::{Account, Users};

use super::RunArgs;

/// Members may look.
const READERS: &str = "vgpu";
/// Members may do everything.
const ADMINS: &str = "vgpu-admin";
/// Whom workers run as.
const WORKERS: &str = "vgpud";
/// Whom libvirt runs VMs as, on Debian and on Fedora.
const VMS: [&str; 2] = ["libvirt-qemu", "qemu"];

/// Everybody whom the command line can name.
#[derive(Debug, PartialEq, Eq)]
pub struct Who {
    /// Whom workers run as.
    pub worker_user: Account,
    /// Whom sockets of vGPUs belong to.
    pub owner: Account,
    /// Who may do what.
    pub access: Rules,
}

impl Who {
    /// Those that the command line names, or else the usual ones.
    pub fn of(args: &RunArgs, users: &Users) -> anyhow::Result<Self> {
        Self::seen_by(Account::own(), args, users)
    }

    fn seen_by(own: Account, args: &RunArgs, users: &Users) -> anyhow::Result<Self> {
        let named = |owner: &Owner| users.owner(owner).map_err(anyhow::Error::msg);
        let owner = match &args.owner {
            Some(owner) => named(owner).context("--owner")?,
            // Who is not root cannot give anything away.
            None if own.uid != 0 => own,
            None => VMS.iter().find_map(|name| users.user(name)).unwrap_or(own),
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
        // Who is not root can give a group only what it is in: nobody but itself is let in unasked.
        let usual = own.uid == 0;
        let access = Rules {
            own: own.uid,
            readers: group("--group", args.group.as_deref(), READERS, usual, users)?,
            admins: group("--admin-group", args.admin_group.as_deref(), ADMINS, usual, users)?,
        };
        Ok(Self { worker_user, owner, access })
    }
}

fn group(
    option: &str,
    given: Option<&str>,
    default: &str,
    usual: bool,
    users: &Users,
) -> anyhow::Result<Option<Group>> {
    let found = |name: &str| users.group(name).map(|gid| Group { name: name.to_owned(), gid });
    match given {
        None if usual => Ok(found(default)),
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
        let words = ["vgpud", "run"].into_iter().chain(line.split_whitespace());
        let Role::Run(args) = Cli::try_parse_from(words).unwrap().role else { panic!("run") };
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
    fn the_usual_users_and_groups_are_found_where_they_are() {
        let full = host(
            "root:x:0:0::/:\nlibvirt-qemu:x:64055:104::/:\nvgpud:x:990:990::/:\n",
            "vgpu:x:991:\nvgpu-admin:x:992:\n",
        );
        let who = Who::seen_by(ROOT, &args(""), &full).unwrap();
        assert_eq!(who.owner, Account { uid: 64_055, gid: 104 });
        assert_eq!(who.worker_user, Account { uid: 990, gid: 990 });
        assert_eq!(who.access.readers.unwrap().gid, 991);
        assert_eq!(who.access.admins.unwrap().gid, 992);
        let bare = Who::seen_by(ROOT, &args(""), &host("", "")).unwrap();
        assert_eq!((bare.owner, bare.worker_user), (ROOT, Account::NOBODY));
        assert_eq!(bare.access, Rules::default());
        // Who is not root keeps everything to itself.
        let own = Account { uid: 1000, gid: 1000 };
        let user = Who::seen_by(own, &args(""), &full).unwrap();
        assert_eq!(user.owner, own);
        assert_eq!(user.access, Rules { own: 1000, ..Rules::default() });
    }

    #[test]
    fn what_cannot_be_is_refused_with_what_to_do() {
        let bare = host("root:x:0:0::/:\n", "root:x:0:\n");
        let own = Account { uid: 1000, gid: 1000 };
        for (by, line, words) in [
            (ROOT, "--group gpus", "make it: groupadd --system gpus"),
            (ROOT, "--admin-group gpus", "--admin-group: there is no group"),
            (ROOT, "--owner qemu", "--owner: There is no user \"qemu\""),
            (ROOT, "--worker-user root", "workers must not be root"),
            (ROOT, "--worker-user 5:0", "workers must not be root"),
            (own, "--owner 107", "only root can give sockets"),
        ] {
            let error = format!("{:#}", Who::seen_by(by, &args(line), &bare).unwrap_err());
            assert!(error.contains(words), "{error}");
        }
    }
}
