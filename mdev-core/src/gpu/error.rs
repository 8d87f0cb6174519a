//! Errors of GPU backends.

use std::io;

use super::ChannelSpecError;
use crate::ids::GpuVa;

/// Error of a GPU operation.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// An argument that is never valid.
    #[error("Invalid argument: {0}")]
    Invalid(&'static str),
    /// An address or length outside of its object.
    #[error("Out of range: {0}")]
    OutOfRange(&'static str),
    /// A mapping exists at the GPU virtual address.
    #[error("GPU virtual address {0} is mapped already")]
    Overlap(GpuVa),
    /// No such channel, mapping, memory or vGPU.
    #[error("Not found: {0}")]
    NotFound(&'static str),
    /// A limit of the vGPU type or of the GPU is reached.
    #[error("Limit reached: {0}")]
    Limit(&'static str),
    /// The operation is possible again after some time, in seconds at most.
    #[error("Try again later: {0}")]
    Later(&'static str),
    /// Free video memory is not contiguous.
    #[error("No contiguous {wanted_mib} MiB of video memory are free: {}", remedy(*.outlived_mib))]
    Fragmented {
        /// Requested MiB.
        wanted_mib: u32,
        /// MiB of stopped vGPUs that running VMs still map.
        outlived_mib: u32,
    },
    /// The backend does not implement the operation.
    #[error("Not supported by this GPU: {0}")]
    Unsupported(&'static str),
    /// The GPU process died, or the GPU fell off the bus.
    #[error("The GPU is lost: {0}")]
    Lost(String),
    /// Error of the operating system.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Returns the cause of a lack of contiguous video memory and its remedy.
fn remedy(outlived_mib: u32) -> String {
    if outlived_mib == 0 {
        return "restart other vGPUs of this GPU to close gaps, or choose a smaller type".into();
    }
    format!("VMs still map {outlived_mib} MiB of stopped vGPUs; shut these VMs down")
}

impl From<ChannelSpecError> for GpuError {
    fn from(error: ChannelSpecError) -> Self {
        use ChannelSpecError as E;
        match error {
            E::Engine => Self::Unsupported("channels of this engine"),
            E::GpfifoEntries => Self::Invalid("the number of GPFIFO entries"),
            E::GpfifoAlignment => Self::Invalid("the alignment of the GPFIFO"),
            E::UserdAlignment => Self::Invalid("the alignment of the USERD"),
            E::Vector => Self::Invalid("the interrupt vector"),
            E::GpfifoRange => Self::OutOfRange("GPFIFO"),
        }
    }
}
