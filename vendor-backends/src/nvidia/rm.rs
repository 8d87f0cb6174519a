//! The way to the driver: three things that a kernel can do, and a fake too.

use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use mdev_core::gpu::GpuError;

use super::sys::abi::Call;
use super::sys::numbers::status;

/// A device node of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Node {
    /// `/dev/nvidiactl`.
    Control,
    /// `/dev/nvidiactl`, to be told of events by polling it.
    Event,
    /// `/dev/nvidiaN`.
    Gpu(u32),
}

/// One ioctl. A call that has parameters of its own behind a pointer names them here, and whoever carries it out fills
/// the pointer in: nobody else handles addresses.
#[derive(Debug)]
pub struct Request<'a> {
    /// `NV_ESC_*`.
    pub number: u8,
    /// For messages and traces.
    pub name: &'static str,
    /// The argument, in and out.
    pub argument: &'a mut [u8],
    /// Where in it the pointer to the parameters goes, and the parameters, in and out.
    pub params: Option<(usize, &'a mut [u8])>,
    /// Byte ranges of the argument that differ from run to run.
    pub volatile: &'static [(usize, usize)],
}

/// NVIDIA's resource manager: the kernel's, or a fake.
pub trait Rm: Send + Sync + fmt::Debug {
    /// The driver's version, such as `580.142`.
    fn version(&self) -> io::Result<String>;

    /// Opens a device node.
    fn open(&self, node: Node) -> io::Result<OwnedFd>;

    /// Carries out one ioctl.
    fn ioctl(&self, fd: BorrowedFd<'_>, request: &mut Request<'_>) -> io::Result<()>;
}

/// Why the driver did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum RmError {
    /// It said no.
    #[error("NVIDIA's driver refuses {what} with status {status:#x}")]
    Status {
        /// What was asked.
        what: String,
        /// `NV_STATUS`.
        status: u32,
    },
    /// The system call failed.
    #[error("{what}: {error}")]
    Os {
        /// What was asked.
        what: String,
        /// Why.
        error: io::Error,
    },
}

impl RmError {
    /// `NV_STATUS`, where there is one.
    pub fn status(&self) -> Option<u32> {
        match self {
            Self::Status { status, .. } => Some(*status),
            Self::Os { .. } => None,
        }
    }

    pub(super) fn os(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |error| Self::Os { what, error }
    }
}

impl From<RmError> for GpuError {
    fn from(error: RmError) -> Self {
        match error.status() {
            Some(status::GPU_IS_LOST) => Self::Lost(error.to_string()),
            Some(status::NO_MEMORY | status::INSUFFICIENT_RESOURCES) => {
                log::warn!("{error}");
                Self::Limit("memory or channels of the GPU")
            }
            _ => Self::Io(io::Error::other(error.to_string())),
        }
    }
}

/// Carries out one call whose argument is `argument`, with `params` behind its pointer.
pub fn call<C: Call>(
    rm: &dyn Rm,
    fd: BorrowedFd<'_>,
    argument: &mut C,
    params: Option<&mut [u8]>,
    what: &str,
) -> Result<(), RmError> {
    let params = C::POINTER.zip(params);
    let mut request = Request {
        number: C::NUMBER,
        name: C::NAME,
        argument: argument.as_mut_bytes(),
        params,
        volatile: C::VOLATILE,
    };
    let what =
        || if what.is_empty() { C::NAME.to_owned() } else { format!("{} ({what})", C::NAME) };
    rm.ioctl(fd, &mut request).map_err(|error| RmError::Os { what: what(), error })?;
    match argument.status() {
        status::OK => Ok(()),
        status => Err(RmError::Status { what: what(), status }),
    }
}
