//! Errors of requests to vgpud. Each message is one line with the cause and the remedy.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use vgpud_api::{ErrorCode, ErrorDetail};
use vgpud_host::users::Users;

/// Group of the package whose members may read.
pub const READERS: &str = "vgpu";
/// Group of the package whose members may change vGPUs.
pub const ADMINS: &str = "vgpu-admin";

/// Error of a request to vgpud.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The request cannot be encoded.
    #[error("{0}")]
    Encode(String),
    /// No process accepts connections on the control socket.
    #[error(
        "Cannot reach vgpud at {}: {reason}; start it (`systemctl start vgpud`, or `vgpud run`), or name its \
         socket with --socket",
        socket.display()
    )]
    Unreachable {
        /// Path of the control socket.
        socket: PathBuf,
        /// Error of `connect`.
        reason: String,
    },
    /// vgpud runs, and its control socket was removed.
    #[error(
        "vgpud (process {pid}) runs, but its socket {} was deleted; restart it: `systemctl restart \
         vgpud.socket vgpud` (VMs continue)",
        socket.display()
    )]
    NoSocket {
        /// Path of the control socket.
        socket: PathBuf,
        /// Process ID of vgpud.
        pid: u32,
    },
    /// The user may not connect to the control socket.
    #[error(
        "User {user} may not use vgpud at {}; as root: `{}`, then log in again",
        socket.display(), usermod(&Users::read(), socket_group(socket), *user)
    )]
    PermissionDenied {
        /// Path of the control socket.
        socket: PathBuf,
        /// User ID of this process.
        user: u32,
    },
    /// The connection closed before a response. systemd accepts connections while vgpud starts.
    #[error(
        "vgpud at {} closed the connection without a response: vgpud did not start, or exited; see \
         its log (`journalctl -u vgpud`)",
        socket.display()
    )]
    Closed {
        /// Path of the control socket.
        socket: PathBuf,
    },
    /// The response is invalid or missing.
    #[error("vgpud at {} gave no valid response: {reason}; see its log", socket.display())]
    InvalidResponse {
        /// Path of the control socket.
        socket: PathBuf,
        /// Defect of the response.
        reason: String,
    },
    /// vgpud refused the request.
    #[error("{}", .0.message)]
    Refused(ErrorDetail),
    /// The vGPU does not exist.
    #[error(
        "There is no vGPU {0}; `vgpuctl list` and `vgpuctl list --defined` show the existing vGPUs"
    )]
    NoVgpu(String),
    /// The vGPU is on another parent than the named one.
    #[error("vGPU {vgpu} is on parent {parent}, not {named}; omit --parent, or name that parent")]
    OtherParent {
        /// UUID or name of the vGPU.
        vgpu: String,
        /// Named parent.
        named: String,
        /// Parent of the vGPU.
        parent: String,
    },
}

impl ClientError {
    /// Returns the code of vgpud's refusal, if vgpud refused the request.
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::Refused(detail) => Some(detail.code),
            _ => None,
        }
    }

    /// Returns true if the object does not exist.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::NoVgpu(_)) || self.code() == Some(ErrorCode::NotFound)
    }
}

/// Returns the group of a socket.
fn socket_group(socket: &Path) -> Option<u32> {
    fs::metadata(socket).ok().map(|about| about.gid())
}

/// Returns the command that gives a user access to a socket of this group. The package's group may
/// only read.
pub fn usermod(users: &Users, group: Option<u32>, user: u32) -> String {
    let group = match group {
        Some(gid) => users.group_name(gid).map_or_else(|| gid.to_string(), str::to_owned),
        None => READERS.to_owned(),
    };
    let groups = if group == READERS { format!("{READERS},{ADMINS}") } else { group };
    format!("usermod -aG {groups} {}", users.name(user).unwrap_or("USER"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_has_the_names_of_user_and_groups() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("etc")).unwrap();
        let write = |name: &str, text: &str| fs::write(root.path().join("etc").join(name), text);
        write("passwd", "root:x:0:0::/:\nalice:x:1000:1000::/:\n").unwrap();
        write("group", "root:x:0:\nvgpu:x:990:\ngpus:x:991:\n").unwrap();
        let users = Users::in_root(root.path());
        for (group, user, command) in [
            (Some(990), 1000, "usermod -aG vgpu,vgpu-admin alice"),
            (Some(991), 1000, "usermod -aG gpus alice"),
            (Some(5), 7, "usermod -aG 5 USER"),
            (None, 1000, "usermod -aG vgpu,vgpu-admin alice"),
        ] {
            assert_eq!(usermod(&users, group, user), command);
        }
    }
}
