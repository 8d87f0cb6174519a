//! Errors of commands and their exit statuses.

use std::fmt::Display;

use mdev_core::ids::VgpuId;
use mdev_core::untrusted;
use vgpud_api::{ErrorCode, ErrorDetail};
use vgpud_client::ClientError;

/// Error of a command. The message is one line with the cause and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The command line is invalid.
    #[error("{0}")]
    Usage(String),
    /// A local operation failed, for example on a file.
    #[error("{0}")]
    Local(String),
    /// A request to vgpud failed.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// An object outside of vgpud does not exist.
    #[error("{0}")]
    NotFound(String),
    /// The command is not possible in the current state.
    #[error("{0}")]
    NotNow(String),
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
}

/// Prints a message to standard error, as one line. What a message quotes may come from a guest, a
/// file or another host.
pub fn say(message: impl Display) {
    eprintln!("vgpuctl: {}", untrusted::message(&message.to_string()));
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

    /// Creates an error as vgpud would answer it.
    pub fn refused(code: ErrorCode, message: String) -> Self {
        Self::Client(ClientError::Refused(ErrorDetail { code, message }))
    }

    /// Creates the error for a vGPU that does not exist.
    pub fn no_vgpu(vgpu: impl Display) -> Self {
        Self::Client(ClientError::NoVgpu(vgpu.to_string()))
    }

    /// Returns the exit status, as documented in `vgpuctl --help`.
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::Unsupported(_) => 2,
            Self::Local(_) | Self::LeftOut { .. } | Self::Found { .. } => 1,
            Self::Gone(_) | Self::NotFound(_) => 4,
            Self::NotNow(_) => 5,
            Self::Client(error) => client_status(error),
        }
    }
}

fn client_status(error: &ClientError) -> u8 {
    match error {
        ClientError::OtherParent { .. } => 2,
        ClientError::Encode(_) | ClientError::InvalidResponse { .. } => 1,
        ClientError::Unreachable { .. }
        | ClientError::NoSocket { .. }
        | ClientError::Closed { .. } => 3,
        ClientError::NoVgpu(_) => 4,
        ClientError::PermissionDenied { .. } => 6,
        ClientError::Refused(detail) => match detail.code {
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
