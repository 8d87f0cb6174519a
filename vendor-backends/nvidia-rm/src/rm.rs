//! Access to NVIDIA's resource manager (RM): its version, its device nodes and its ioctls.

use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use mdev_core::gpu::GpuError;

use crate::abi::Call;
use crate::numbers::status;

/// A device node of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Node {
    /// `/dev/nvidiactl`.
    Control,
    /// `/dev/nvidiactl`, opened to poll for events.
    Event,
    /// `/dev/nvidiaN`.
    Gpu(u32),
}

/// Request for one ioctl. The implementation of [`Rm`] fills in the pointer to the parameters, so
/// no other code handles addresses.
#[derive(Debug)]
pub struct Request<'a> {
    /// Number of the ioctl (`NV_ESC_*`).
    pub number: u8,
    /// Name for messages and recordings.
    pub name: &'static str,
    /// Argument, in and out.
    pub argument: &'a mut [u8],
    /// Offset of the pointer in the argument, and the parameters behind it, in and out.
    pub params: Option<(usize, &'a mut [u8])>,
    /// Byte ranges of the argument that differ between runs.
    pub volatile: &'static [(usize, usize)],
}

/// NVIDIA's resource manager: the kernel driver, or a fake.
pub trait Rm: Send + Sync + fmt::Debug {
    /// Returns the driver's version, such as `580.142`.
    fn version(&self) -> io::Result<String>;

    /// Opens a device node.
    fn open(&self, node: Node) -> io::Result<OwnedFd>;

    /// Carries out one ioctl.
    fn ioctl(&self, fd: BorrowedFd<'_>, request: &mut Request<'_>) -> io::Result<()>;
}

/// Error of a driver call.
#[derive(Debug, thiserror::Error)]
pub enum RmError {
    /// The driver refused the call.
    #[error("The NVIDIA driver refused {call} with status {status:#x}")]
    Status {
        /// Name of the call.
        call: String,
        /// `NV_STATUS`.
        status: u32,
    },
    /// The system call failed.
    #[error("{call}: {error}")]
    Os {
        /// Name of the call.
        call: String,
        /// Error of the system call.
        error: io::Error,
    },
}

impl RmError {
    /// Returns the `NV_STATUS` of a refused call.
    pub fn status(&self) -> Option<u32> {
        match self {
            Self::Status { status, .. } => Some(*status),
            Self::Os { .. } => None,
        }
    }

    /// Adds what the call was about to its name.
    #[must_use]
    pub fn about(mut self, detail: std::fmt::Arguments<'_>) -> Self {
        let (Self::Status { call, .. } | Self::Os { call, .. }) = &mut self;
        *call = format!("{call} ({detail})");
        self
    }

    /// Returns whether the driver has no object with the handle that the call named.
    pub fn is_not_found(&self) -> bool {
        self.status() == Some(status::OBJECT_NOT_FOUND)
    }

    /// Returns whether the driver had no memory, or none of another resource.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self.status(), Some(status::NO_MEMORY | status::INSUFFICIENT_RESOURCES))
    }

    /// Maps the error of opening a device node.
    pub fn open(error: io::Error) -> Self {
        Self::Os { call: "NVIDIA driver".into(), error }
    }
}

impl From<RmError> for GpuError {
    fn from(error: RmError) -> Self {
        match error.status() {
            Some(status::GPU_IS_LOST) => Self::Lost(error.to_string()),
            _ if error.is_out_of_memory() => {
                log::warn!("{error}");
                Self::Limit("memory or channels of the GPU")
            }
            _ => Self::Io(io::Error::other(error.to_string())),
        }
    }
}

/// Carries out a call with `argument`, and with `params` behind its pointer. `detail` extends the
/// name of the call in errors.
pub fn call<C: Call>(
    rm: &dyn Rm,
    fd: BorrowedFd<'_>,
    argument: &mut C,
    params: Option<&mut [u8]>,
    detail: &str,
) -> Result<(), RmError> {
    let params = C::POINTER.zip(params);
    let mut request = Request {
        number: C::NUMBER,
        name: C::NAME,
        argument: argument.as_mut_bytes(),
        params,
        volatile: C::VOLATILE,
    };
    let call = || match detail {
        "" => C::NAME.to_owned(),
        detail => format!("{} ({detail})", C::NAME),
    };
    rm.ioctl(fd, &mut request).map_err(|error| RmError::Os { call: call(), error })?;
    match argument.status() {
        status::OK => Ok(()),
        status => Err(RmError::Status { call: call(), status }),
    }
}
