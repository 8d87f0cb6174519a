//! Errors of commands and their exit statuses.

use std::fmt::Display;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use mdev_core::ids::VgpuId;
use vgpud_api::{ErrorCode, ErrorDetail};
use vgpud_host::users::Users;

/// Groups of the package: members may read, or change.
pub const READERS: &str = "vgpu";
pub const ADMINS: &str = "vgpu-admin";

/// Error of a command. The message is one line with the cause and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The command line is invalid.
    #[error("{0}")]
    Usage(String),
    /// A local operation failed, for example on a file.
    #[error("{0}")]
    Local(String),
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
    /// An object outside of vgpud does not exist.
    #[error("{0}")]
    NotFound(String),
    /// The command is not possible in the current state.
    #[error("{0}")]
    NotNow(String),
    /// vgpud refused the request.
    #[error("{}", .0.message)]
    Refused(ErrorDetail),
    /// A command of mdevctl that vgpuctl does not implement.
    #[error("{0}")]
    Unsupported(&'static str),
    /// An import skipped definitions. The output has one line per definition.
    #[error("{left_out} of {total} definitions are left out; the lines above have the reasons")]
    LeftOut {
        /// Number of skipped definitions.
        left_out: usize,
        /// Number of definitions.
        total: usize,
    },
    /// The doctor found problems.
    #[error("{problems} of the findings above are problems: see their fixes")]
    Found {
        /// Findings, formatted for output.
        output: Vec<u8>,
        /// Number of findings that are problems.
        problems: usize,
    },
    /// The viewed vGPU was removed.
    #[error(
        "vGPU {0} is gone: it is neither running nor defined; `vgpuctl list` shows running vGPUs"
    )]
    Gone(VgpuId),
    /// The vGPU does not exist.
    #[error(
        "There is no vGPU {0}; `vgpuctl list` and `vgpuctl list --defined` show the existing vGPUs"
    )]
    NoVgpu(String),
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

impl Failure {
    /// Creates an error for a missing operating system resource.
    pub fn start(error: impl Display) -> Self {
        Self::Local(format!("Cannot start: {error}"))
    }

    /// Creates an error for output that cannot be written.
    pub fn output(error: impl Display) -> Self {
        Self::Local(format!("Cannot write the output: {error}"))
    }

    /// Returns the exit status, as documented in `vgpuctl --help`.
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::Unsupported(_) => 2,
            Self::Local(_)
            | Self::InvalidResponse { .. }
            | Self::LeftOut { .. }
            | Self::Found { .. } => 1,
            Self::Unreachable { .. } | Self::NoSocket { .. } | Self::Closed { .. } => 3,
            Self::NoVgpu(_) | Self::Gone(_) | Self::NotFound(_) => 4,
            Self::NotNow(_) => 5,
            Self::PermissionDenied { .. } => 6,
            Self::Refused(detail) => match detail.code {
                ErrorCode::Invalid => 2,
                ErrorCode::Forbidden => 6,
                ErrorCode::NotFound => 4,
                ErrorCode::Exists
                | ErrorCode::Conflict
                | ErrorCode::InUse
                | ErrorCode::NoRoom
                | ErrorCode::Callout => 5,
                _ => 1,
            },
        }
    }
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
