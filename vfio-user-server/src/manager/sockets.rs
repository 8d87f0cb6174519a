//! Sockets, and whom they belong to.
//!
//! Anybody may pass through the run directory and its `vgpus`, and list neither. What is in a vGPU's folder is reached
//! by the group of the vGPU's owner, and its `vfio.sock` by the owner alone. A folder is opened last of all, so that
//! nobody connects to a socket before it has its owner. (The worker looks at who connects as well.)

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::os::unix::net::UnixListener;
use std::path::Path;

use mdev_core::definition::{Definition, Owner};
use mdev_core::ids::VgpuId;
use vendor_backends::seqpacket::SeqPacketListener;

use super::Result;
use super::folders::Folders;
use crate::api::model::{ErrorCode, ErrorDetail};
use crate::users::{Account, Users};

/// The attribute that says whom a vGPU's socket belongs to.
pub const OWNER: &str = "owner";

/// Whom the socket of a vGPU belongs to: as its definition says, or `default`.
pub fn owner_of(definition: &Definition, default: Account) -> Result<Account> {
    let invalid = |what: String| ErrorDetail::new(ErrorCode::Invalid, what);
    let Some(text) = definition.attrs.get(OWNER) else { return Ok(default) };
    let owner: Owner = text.parse().map_err(|error| invalid(format!("owner: {error}")))?;
    let owner = Users::read().owner(&owner).map_err(|what| invalid(format!("owner: {what}")))?;
    given_by(Account::own(), owner).map_err(invalid)
}

/// Whom something of a user's can belong to: root gives to anybody, and others to nobody else.
fn given_by(own: Account, owner: Account) -> std::result::Result<Account, String> {
    if own.uid != 0 && owner.uid != own.uid {
        return Err(format!(
            "owner: vgpud runs as user {} and cannot give a socket to user {}; run it as root, or leave that out",
            own.uid, owner.uid
        ));
    }
    Ok(owner)
}

/// Makes a folder that others may pass through, and not list.
pub fn passage(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    fs::set_permissions(folder, Permissions::from_mode(0o711))
}

/// Makes a folder that is for this user alone.
pub fn closed(folder: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).recursive(true).create(folder)?;
    fs::set_permissions(folder, Permissions::from_mode(0o700))
}

/// Makes a vGPU's folder with both of its sockets, which listen: the VM's, and the manager's.
pub fn listen(
    folders: &Folders,
    vgpu: VgpuId,
    owner: Account,
) -> io::Result<(OwnedFd, SeqPacketListener)> {
    let folder = folders.vgpu(vgpu);
    closed(&folder)?;
    let control = SeqPacketListener::bind(&folders.worker_socket(vgpu))?;
    fs::set_permissions(folders.worker_socket(vgpu), Permissions::from_mode(0o600))?;
    let path = folders.vfio_socket(vgpu);
    let vfio = bind(&path)?;
    fs::set_permissions(&path, Permissions::from_mode(0o600))?;
    if owner.uid != Account::own().uid {
        chown(&path, Some(owner.uid), Some(owner.gid))?;
        chown(&folder, None, Some(owner.gid))?;
        fs::set_permissions(&folder, Permissions::from_mode(0o710))?;
    }
    Ok((vfio.into(), control))
}

/// Listens at a path. What is there is an earlier process's: whoever holds the run directory's lock owns it.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    UnixListener::bind(path)
}

/// Lets a group connect to a socket of ours besides ourselves.
pub fn share(path: &Path, group: Option<u32>) -> io::Result<()> {
    // In this order, so that no other group ever may.
    if let Some(gid) = group {
        chown(path, None, Some(gid))?;
    }
    let mode = if group.is_some() { 0o660 } else { 0o600 };
    fs::set_permissions(path, Permissions::from_mode(mode))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_vgpus_sockets_are_its_owners_and_ours() {
        let dir = tempfile::tempdir().unwrap();
        let folders = Folders::create(dir.path()).unwrap();
        let vgpu = VgpuId(uuid::Uuid::nil());
        let own = Account::own();
        let sockets = listen(&folders, vgpu, own).unwrap();
        assert_eq!(mode(&folders.vgpu(vgpu)), 0o700);
        assert_eq!(mode(&folders.vfio_socket(vgpu)), 0o600);
        assert_eq!(mode(&folders.worker_socket(vgpu)), 0o600);
        assert_eq!((mode(folders.root()), mode(&folders.vgpus())), (0o711, 0o711));
        assert_eq!(mode(&folders.parents()), 0o700);
        drop(sockets);
        listen(&folders, vgpu, own).unwrap();
    }

    #[test]
    fn an_owner_is_the_definitions_or_the_default() {
        let definition = |owner: Option<&str>| Definition {
            mdev_type: "SOFT-1Q".into(),
            start: mdev_core::definition::Start::Manual,
            attrs: owner.map(|owner| (OWNER.to_owned(), owner.to_owned())).into_iter().collect(),
        };
        let default = Account { uid: 7, gid: 8 };
        assert_eq!(owner_of(&definition(None), default), Ok(default));
        let own = Account::own();
        let named = format!("{}:9", own.uid);
        assert_eq!(
            owner_of(&definition(Some(&named)), default),
            Ok(Account { uid: own.uid, gid: 9 })
        );
        let given = given_by(Account { uid: 7, gid: 7 }, Account { uid: 8, gid: 8 }).unwrap_err();
        assert!(given.ends_with("user 8; run it as root, or leave that out"), "{given}");
        for (owner, words) in [("no-such-user-here", "There is no user"), ("a:b:c", "as in")] {
            let error = owner_of(&definition(Some(owner)), default).unwrap_err();
            assert!(error.message.contains(words), "{error}");
        }
    }
}
