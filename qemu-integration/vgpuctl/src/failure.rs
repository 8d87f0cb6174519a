//! What can go wrong, and the exit status that says so.

use std::fmt::Display;
use std::path::PathBuf;

use mdev_core::ids::VgpuId;
use vfio_user_server::api::model::{ErrorCode, ErrorDetail};

/// Why a command failed, in one line: what is wrong, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The command line makes no sense to us.
    #[error("{0}")]
    Usage(String),
    /// Something on this side: a file, the output.
    #[error("{0}")]
    Local(String),
    /// Nobody listens.
    #[error(
        "Cannot reach vgpud at {}: {reason}; start it (`systemctl start vgpud`, or `vgpud run`), or name its \
         socket with --socket",
        socket.display()
    )]
    Unreachable {
        /// Where.
        socket: PathBuf,
        /// Why not.
        reason: String,
    },
    /// Its socket is not for us.
    #[error(
        "User {user} may not use vgpud at {}: members of its group may (`stat -c %G {}` names it); \
         `usermod -aG GROUP USER`, then log in again",
        socket.display(), socket.display()
    )]
    NotForUs {
        /// Where.
        socket: PathBuf,
        /// Who we are.
        user: u32,
    },
    /// Somebody listens for it, and then nobody is there.
    #[error(
        "vgpud at {} closed the connection without an answer: it cannot start, or has ended; its log \
         says why (`journalctl -u vgpud`)",
        socket.display()
    )]
    Closed {
        /// Where.
        socket: PathBuf,
    },
    /// It listens, and its answer is none.
    #[error("vgpud at {} gave no answer that makes sense: {reason}; see its log", socket.display())]
    Nonsense {
        /// Where.
        socket: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Something that is not vgpud's is not there.
    #[error("{0}")]
    NotFound(String),
    /// Not in the state that something is in.
    #[error("{0}")]
    NotNow(String),
    /// It said no.
    #[error("{}", .0.message)]
    Refused(ErrorDetail),
    /// What mdevctl does and this does not.
    #[error("{0}")]
    NotHere(&'static str),
    /// Not all of a tree could be taken over. What became of each was printed.
    #[error("{left_out} of {of} definitions are left out; the lines above say why")]
    LeftOut {
        /// How many were not.
        left_out: usize,
        /// Of how many.
        of: usize,
    },
    /// The doctor found something: it has been printed.
    #[error("{problems} of the findings above must be mended: see their fixes")]
    Found {
        /// All that was found, as it is to be printed.
        output: Vec<u8>,
        /// What of it must be mended.
        problems: usize,
    },
    /// It was there when it began to be viewed.
    #[error(
        "vGPU {0} is gone: nobody has it running or defined; `vgpuctl list` shows what there is"
    )]
    Gone(VgpuId),
    /// There is none, or not where it was said to be.
    #[error("There is no vGPU {0}; `vgpuctl list` and `vgpuctl list --defined` show what there is")]
    NoVgpu(VgpuId),
}

impl Failure {
    /// The operating system gives this command less than it needs at all.
    pub fn start(error: impl Display) -> Self {
        Self::Local(format!("Cannot start: {error}"))
    }

    /// What there was to say could not be said.
    pub fn output(error: impl Display) -> Self {
        Self::Local(format!("Cannot write the output: {error}"))
    }

    /// The exit status, as `vgpuctl --help` documents it.
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::NotHere(_) => 2,
            Self::Local(_) | Self::Nonsense { .. } | Self::LeftOut { .. } | Self::Found { .. } => 1,
            Self::Unreachable { .. } | Self::Closed { .. } => 3,
            Self::NoVgpu(_) | Self::Gone(_) | Self::NotFound(_) => 4,
            Self::NotNow(_) => 5,
            Self::NotForUs { .. } => 6,
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
