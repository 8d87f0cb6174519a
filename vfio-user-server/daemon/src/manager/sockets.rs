//! Folders and sockets of the run directory, with their owners and modes.
//!
//! All users can traverse the run directory and `vgpus`, and list neither. A vGPU's folder is open
//! to the group of the vGPU's owner, `vfio.sock` and `cuda.sock` to the owner alone. The folder's
//! mode is set last, so that a socket has its owner before it can be reached. The worker checks the
//! peer's credentials as well.
//!
//! A container gets the folder `clients` of its vGPU. It has links to the owner's two sockets and
//! nothing of the manager's, which root of a container without a user namespace could use.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use foreign_fds::ForeignSocket;
use ipc::seqpacket::SeqPacketListener;
use mdev_core::definition::{Attrs, Definition, Owner};
use mdev_core::ids::VgpuId;
use nix::sys::socket::{self, AddressFamily, Backlog, SockFlag, SockType, UnixAddr};

use super::Result;
use super::run_dir::RunDir;
use vgpud_api::{ErrorCode, ErrorDetail};
use vgpud_host::users::{Account, Users};

/// Attribute with the owner of a vGPU.
pub const OWNER: &str = "owner";

/// Returns the owner that a definition names, or `default`.
pub fn owner_of(definition: &Definition, default: Account) -> Result<Account> {
    let invalid = |what: String| ErrorDetail::new(ErrorCode::Invalid, what);
    let Some(text) = definition.attrs.get(OWNER) else { return Ok(default) };
    let owner: Owner = text.parse().map_err(|error| invalid(format!("owner: {error}")))?;
    let owner = Users::read().owner(&owner).map_err(|what| invalid(format!("owner: {what}")))?;
    check_owner(Account::own(), owner).map_err(invalid)
}

/// Owner of a vGPU that a request starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChosenOwner {
    /// Owner that the request names.
    pub named: Option<String>,
    /// User who sent the request, if the vGPU belongs to its caller by default.
    pub caller: Option<String>,
}

impl ChosenOwner {
    /// Sets the owner: the named one, else the definition's, else the caller.
    pub fn apply(&self, attrs: &mut Attrs) {
        let default = self.caller.as_ref().filter(|_| attrs.get(OWNER).is_none());
        if let Some(owner) = self.named.as_ref().or(default) {
            attrs.set(OWNER, owner);
        }
    }
}

/// Returns the owner, by name or number, of a vGPU that this user starts without naming one. Root's
/// vGPUs belong to the default owner, and so do all where vgpud cannot give sockets away.
pub fn owner_of_caller(caller: Option<u32>) -> Option<String> {
    let uid = caller.filter(|uid| *uid != 0 && Account::own().uid == 0)?;
    Some(Users::read().name(uid).map_or_else(|| uid.to_string(), str::to_owned))
}

/// Refuses an owner that the user `own` cannot change a file's owner to: only root can name another
/// user.
fn check_owner(own: Account, owner: Account) -> std::result::Result<Account, String> {
    if own.uid != 0 && owner.uid != own.uid {
        return Err(format!(
            "owner: vgpud runs as user {} and cannot give a socket to user {}; run it as root, or leave that out",
            own.uid, owner.uid
        ));
    }
    Ok(owner)
}

/// Creates a folder that other users can traverse and not list.
pub fn create_traversable_dir(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    fs::set_permissions(folder, Permissions::from_mode(0o711))
}

/// Creates a folder for this user alone.
pub fn create_private_dir(folder: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).recursive(true).create(folder)?;
    fs::set_permissions(folder, Permissions::from_mode(0o700))
}

/// Listens at a path for this user alone.
pub fn listen_privately(path: PathBuf) -> io::Result<SeqPacketListener> {
    let socket = SeqPacketListener::bind(&path)?;
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(socket)
}

/// Listening sockets of a vGPU.
#[derive(Debug)]
pub struct Sockets {
    /// For the VM.
    pub vfio: ForeignSocket,
    /// For the manager.
    pub control: SeqPacketListener,
    /// For CUDA programs, if the vGPU is for them, too.
    pub programs: Option<SeqPacketListener>,
    /// For the manager, to upgrade the worker.
    pub upgrade: SeqPacketListener,
}

/// Creates a vGPU's folder with its listening sockets, and with one for CUDA programs if `programs`
/// says so.
pub fn listen(
    run_dir: &RunDir,
    vgpu: VgpuId,
    owner: Account,
    programs: bool,
) -> io::Result<Sockets> {
    let folder = run_dir.vgpu(vgpu);
    create_private_dir(&folder)?;
    let control = listen_privately(run_dir.worker_socket(vgpu))?;
    let upgrade = listen_privately(run_dir.upgrade_socket(vgpu))?;
    let mut owned = vec![run_dir.vfio_socket(vgpu)];
    let vfio = OwnedFd::from(bind(&owned[0])?).into();
    let mut of_programs = None;
    if programs {
        owned.push(run_dir.cuda_socket(vgpu));
        of_programs = Some(SeqPacketListener::bind(&owned[1])?);
    }
    let clients = run_dir.clients(vgpu);
    create_traversable_dir(&clients)?;
    for path in &owned {
        fs::set_permissions(path, Permissions::from_mode(0o600))?;
        // Linking another user's socket takes a capability that the service does not have.
        link_into(&clients, path)?;
        if owner.uid != Account::own().uid {
            chown(path, Some(owner.uid), Some(owner.gid))?;
        }
    }
    if owner.uid != Account::own().uid {
        chown(&folder, None, Some(owner.gid))?;
        fs::set_permissions(&folder, Permissions::from_mode(0o710))?;
    }
    Ok(Sockets { vfio, control, programs: of_programs, upgrade })
}

/// Listens at a path and replaces a file there, which an earlier holder of the run directory's lock
/// left.
fn bind(path: &Path) -> io::Result<UnixListener> {
    remove_earlier(path)?;
    UnixListener::bind(path)
}

/// Connections that wait until the control socket accepts them. All users share them, so each one
/// costs an administrator time.
const CONTROL_BACKLOG: i32 = 128;

/// Listens at a path for this user and, if given, a group, and replaces a file there. The socket
/// has its group and mode before it accepts connections. A program that tries early is refused as
/// if nothing listened, and not as a user who lacks the permission.
pub fn listen_for_group(path: &Path, group: Option<u32>) -> io::Result<UnixListener> {
    remove_earlier(path)?;
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket::socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    socket::bind(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    share(path, group)?;
    socket::listen(&socket, Backlog::new(CONTROL_BACKLOG)?)?;
    Ok(socket.into())
}

fn remove_earlier(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Links a socket into a folder. A container that has the folder sees each later socket of this
/// name, and none of the manager's sockets.
fn link_into(folder: &Path, socket: &Path) -> io::Result<()> {
    let Some(name) = socket.file_name() else { return Err(io::ErrorKind::InvalidInput.into()) };
    let link = folder.join(name);
    remove_earlier(&link)?;
    fs::hard_link(socket, link)
}

/// Restricts a socket to this user and, if given, a group.
fn share(path: &Path, group: Option<u32>) -> io::Result<()> {
    // The owner changes before the mode, so that no other group has access in between.
    if let Some(gid) = group {
        chown(path, None, Some(gid))?;
    }
    let mode = if group.is_some() { 0o660 } else { 0o600 };
    fs::set_permissions(path, Permissions::from_mode(mode))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn sockets_of_a_vgpu_have_restricted_modes() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir::create(dir.path()).unwrap();
        let vgpu = VgpuId(uuid::Uuid::nil());
        let own = Account::own();
        let sockets = listen(&run_dir, vgpu, own, true).unwrap();
        assert_eq!(mode(&run_dir.vgpu(vgpu)), 0o700);
        assert_eq!(mode(&run_dir.vfio_socket(vgpu)), 0o600);
        assert_eq!(mode(&run_dir.worker_socket(vgpu)), 0o600);
        assert_eq!(mode(&run_dir.cuda_socket(vgpu)), 0o600);
        assert_eq!(mode(&run_dir.upgrade_socket(vgpu)), 0o600);
        assert_eq!((mode(run_dir.root()), mode(&run_dir.vgpus())), (0o711, 0o711));
        assert_eq!(mode(&run_dir.parents()), 0o700);
        let clients = run_dir.clients(vgpu);
        let names = super::super::run_dir::names(&clients);
        assert_eq!((mode(&clients), names), (0o711, vec!["cuda.sock".into(), "vfio.sock".into()]));
        UnixStream::connect(clients.join("vfio.sock")).unwrap();
        drop(sockets);
        let _again = listen(&run_dir, vgpu, own, true).unwrap();
        UnixStream::connect(clients.join("vfio.sock")).unwrap();
    }

    #[test]
    fn a_socket_that_accepts_has_its_group_and_mode() {
        let dir = tempfile::tempdir().unwrap();
        let tries = std::sync::Barrier::new(2);
        for name in 0..500 {
            let path = dir.path().join(name.to_string());
            let mode = std::thread::scope(|scope| {
                let connected = scope.spawn(|| {
                    tries.wait();
                    while UnixStream::connect(&path).is_err() {}
                    mode(&path)
                });
                tries.wait();
                let _listener = listen_for_group(&path, Some(Account::own().gid)).unwrap();
                connected.join().unwrap()
            });
            assert_eq!(mode, 0o660);
        }
    }

    #[test]
    fn owner_is_the_definitions_or_the_default() {
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
        let error =
            check_owner(Account { uid: 7, gid: 7 }, Account { uid: 8, gid: 8 }).unwrap_err();
        assert!(error.ends_with("user 8; run it as root, or leave that out"), "{error}");
        for (owner, part) in [("no-such-user-here", "There is no user"), ("a:b:c", "as in")] {
            let error = owner_of(&definition(Some(owner)), default).unwrap_err();
            assert!(error.message.contains(part), "{error}");
        }
    }

    #[test]
    fn the_named_owner_precedes_the_definitions_and_that_the_caller() {
        let chosen = |named: Option<&str>, defined: Option<&str>, caller: Option<&str>| {
            let text = |name: Option<&str>| name.map(str::to_owned);
            let mut attrs: Attrs =
                defined.map(|name| (OWNER.to_owned(), name.to_owned())).into_iter().collect();
            ChosenOwner { named: text(named), caller: text(caller) }.apply(&mut attrs);
            attrs.get(OWNER).map(str::to_owned)
        };
        assert_eq!(chosen(Some("a"), Some("b"), Some("c")).as_deref(), Some("a"));
        assert_eq!(chosen(None, Some("b"), Some("c")).as_deref(), Some("b"));
        assert_eq!(chosen(None, None, Some("c")).as_deref(), Some("c"));
        assert_eq!(chosen(None, None, None), None);
        assert_eq!((owner_of_caller(Some(0)), owner_of_caller(None)), (None, None));
    }
}
