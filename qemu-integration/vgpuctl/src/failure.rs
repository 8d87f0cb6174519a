//! Errors of commands and their exit statuses.

use std::fmt::Display;
use std::path::PathBuf;

use mdev_core::ids::VgpuId;
use vgpud_api::{ErrorCode, ErrorDetail};

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
    /// The user may not connect to the control socket.
    #[error(
        "User {user} may not use vgpud at {}; add the user to the socket's group \
         (`stat -c %G {}` prints it): `usermod -aG GROUP USER`, then log in again",
        socket.display(), socket.display()
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
    NoVgpu(VgpuId),
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
            Self::Unreachable { .. } | Self::Closed { .. } => 3,
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
