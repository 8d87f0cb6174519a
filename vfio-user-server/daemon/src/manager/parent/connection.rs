//! Connection of a parent to its GPU.

use std::fmt;
use std::time::Instant;

use mdev_core::gpu::{Gpu, GpuError};

use super::Parent;
use crate::manager::Result;
use crate::spawn::Process;
use vgpud_api::{ErrorCode, ErrorDetail};

/// Explanation for a GPU process of an unsupported version.
const FOREIGN: &str = "the process of its GPU is of another version of vgpud; running VMs continue and no vGPU can start: shut the VMs down and stop their vGPUs, and vgpud replaces the process";

/// Connection to a GPU.
pub enum Connection {
    /// The GPU is not open. It is opened again at `retry_at`.
    Closed { retry_at: Option<Instant>, reason: Option<String> },
    /// The GPU is open. Backends without a GPU process have no `process`.
    Ready { gpu: Box<dyn Gpu>, process: Option<Process>, since: Instant },
    /// The GPU process is of an unsupported version. It continues for its VMs.
    Foreign { process: Process, since: Instant },
}

impl Default for Connection {
    fn default() -> Self {
        Self::Closed { retry_at: None, reason: None }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed { reason, .. } => write!(f, "Closed({reason:?})"),
            Self::Ready { process, .. } => write!(f, "Ready({process:?})"),
            Self::Foreign { process, .. } => write!(f, "Foreign({process:?})"),
        }
    }
}

impl Connection {
    /// Returns the GPU process.
    pub fn process(&self) -> Option<&Process> {
        match self {
            Self::Closed { .. } => None,
            Self::Ready { process, .. } => process.as_ref(),
            Self::Foreign { process, .. } => Some(process),
        }
    }

    /// Returns the process ID of the GPU process.
    pub fn pid(&self) -> Option<u32> {
        self.process().map(Process::pid)
    }

    /// Returns when the GPU is to be opened again.
    pub fn retry_at(&self) -> Option<Instant> {
        match self {
            Self::Closed { retry_at, .. } => *retry_at,
            _ => None,
        }
    }

    /// Takes the reason out for which the GPU is not open.
    pub fn take_reason(&mut self) -> Option<String> {
        match self {
            Self::Closed { reason, .. } => reason.take(),
            _ => None,
        }
    }

    /// Returns since when the GPU is open, or the foreign process known.
    pub fn since(&self) -> Option<Instant> {
        match self {
            Self::Closed { .. } => None,
            Self::Ready { since, .. } | Self::Foreign { since, .. } => Some(*since),
        }
    }

    /// Takes the GPU process out.
    pub fn into_process(self) -> Option<Process> {
        match self {
            Self::Closed { .. } => None,
            Self::Ready { process, .. } => process,
            Self::Foreign { process, .. } => Some(process),
        }
    }
}

fn unavailable(name: &str, reason: &str) -> String {
    format!("Parent {name} is unavailable: {reason}; it is being started again, try in a moment")
}

/// Converts a GPU's error to the API's.
fn error_detail(error: &GpuError) -> ErrorDetail {
    let code = match error {
        GpuError::Lost(_) | GpuError::Io(_) => ErrorCode::Unavailable,
        GpuError::Limit(_) | GpuError::Later(_) | GpuError::Fragmented { .. } => ErrorCode::NoRoom,
        GpuError::NotFound(_) => ErrorCode::NotFound,
        _ => ErrorCode::Internal,
    };
    ErrorDetail::new(code, error)
}

impl Parent {
    /// Returns true while the GPU is open and takes vGPUs.
    pub fn is_ready(&self) -> bool {
        matches!(self.connection, Connection::Ready { .. })
    }

    /// Returns true while the GPU process is of an unsupported version.
    pub fn is_foreign(&self) -> bool {
        matches!(self.connection, Connection::Foreign { .. })
    }

    /// Explains why the GPU cannot be called.
    pub(super) fn unavailable(&self) -> ErrorDetail {
        let name = self.name();
        let what = match &self.connection {
            Connection::Foreign { .. } => format!("Parent {name}: {FOREIGN}"),
            Connection::Closed { reason: Some(reason), .. } => unavailable(name, reason),
            _ => unavailable(name, "starting"),
        };
        ErrorDetail::new(ErrorCode::Unavailable, what)
    }

    /// Refuses a request while the GPU is not open.
    pub(super) fn require_ready(&self) -> Result<()> {
        if self.is_ready() { Ok(()) } else { Err(self.unavailable()) }
    }

    /// Calls the GPU. An error that reports the loss of the GPU is handled as a loss.
    pub(super) fn call_gpu<T>(
        &mut self,
        call: impl FnOnce(&mut dyn Gpu) -> std::result::Result<T, GpuError>,
    ) -> Result<T> {
        let Connection::Ready { gpu, .. } = &mut self.connection else {
            return Err(self.unavailable());
        };
        call(gpu.as_mut()).map_err(|error| {
            if let GpuError::Lost(reason) = &error {
                self.lose(reason);
            }
            error_detail(&error)
        })
    }
}
