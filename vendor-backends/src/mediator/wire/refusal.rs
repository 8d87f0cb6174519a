//! Reasons of refusals.

use std::io;

use mdev_core::gpu::{ChannelSpecError, GpuError};
use mdev_core::ids::GpuVa;
use serde::{Deserialize, Serialize};

/// Reason of a refusal, in a form that fits into a packet. [`GpuError`] has the messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// An unexpected or malformed request.
    Message,
    /// An unsupported protocol version.
    Version,
    /// An address or length that is zero or not a multiple of the page size.
    Alignment,
    /// A missing file descriptor, or one of the wrong kind.
    Descriptor,
    /// An invalid GPFIFO address or number of entries.
    Gpfifo,
    /// An invalid USERD address.
    Userd,
    /// An invalid interrupt vector.
    Vector,
    /// A time slice outside of 100 us to 1 s.
    Timeslice,
    /// An invalid budget of engine time.
    Budget,
    /// Invalid quotas.
    Quotas,
    /// An invalid [`ClientSpec`](mdev_core::gpu::ClientSpec).
    Spec,
    /// A range outside of the GPU's virtual addresses.
    VaRange,
    /// A range outside of the partition or the imported memory.
    Backing,
    /// An address that is already mapped.
    Overlap(GpuVa),
    /// A writable mapping of read-only memory.
    ReadOnly,
    /// An unknown vGPU.
    NoVgpu,
    /// An unknown import.
    NoMemory,
    /// An address that is not mapped.
    NoMapping,
    /// An unknown channel.
    NoChannel,
    /// A vGPU that is already admitted.
    VgpuExists,
    /// Not enough video memory.
    VramLimit,
    /// Too many vGPUs.
    VgpuLimit,
    /// Too many channels.
    ChannelLimit,
    /// Too many imported bytes or imports.
    ImportLimit,
    /// Too many page tables.
    PageTableLimit,
    /// An error of the operating system, as an errno.
    Os(i32),
    /// A function that the device does not have.
    Unsupported,
    /// No contiguous range of free video memory is large enough.
    Fragmented {
        /// Requested MiB.
        wanted_mib: u32,
        /// MiB that VMs of removed vGPUs still have mapped.
        outlived_mib: u32,
    },
    /// An unknown address space.
    NoSpace,
    /// Too many address spaces.
    SpaceLimit,
    /// A group whose channels have another engine or address space.
    Group,
    /// A vGPU that is not paused.
    NotPaused,
    /// A saved state that no guest can cause.
    State,
}

impl From<Refusal> for GpuError {
    fn from(refusal: Refusal) -> Self {
        use Refusal as R;
        match refusal {
            R::Message => Self::Invalid("request"),
            R::Version => Self::Unsupported("the protocol version of the GPU process"),
            R::Alignment => Self::Invalid("address or length is not a multiple of the page size"),
            R::Descriptor => {
                Self::Invalid("file descriptor (memory must be a memfd, tmpfs or hugetlbfs file)")
            }
            R::Gpfifo => Self::Invalid("GPFIFO address or entries"),
            R::Userd => Self::Invalid("USERD address"),
            R::Vector => Self::Invalid("interrupt vector"),
            R::Timeslice => Self::Invalid("time slice (100 us to 1 s)"),
            R::Budget => {
                Self::Invalid("budget of engine time (must be less than its period of 1 to 30 ms)")
            }
            R::Quotas => Self::Invalid("quotas (time limits must be 10 ms to 1 day)"),
            R::Spec => Self::Invalid("sizes of the vGPU"),
            R::VaRange => Self::OutOfRange("GPU virtual address"),
            R::Backing => Self::OutOfRange("range of the memory to map"),
            R::Overlap(va) => Self::Overlap(va),
            R::ReadOnly => Self::Invalid("writable mapping of read-only memory"),
            R::NoVgpu => Self::NotFound("vGPU"),
            R::NoMemory => Self::NotFound("imported memory"),
            R::NoMapping => Self::NotFound("mapping"),
            R::NoChannel => Self::NotFound("channel"),
            R::VgpuExists => Self::Invalid("the vGPU is already admitted"),
            R::VramLimit => Self::Limit("video memory"),
            R::VgpuLimit => Self::Limit("vGPUs"),
            R::ChannelLimit => Self::Limit("channels"),
            R::ImportLimit => Self::Limit("imported guest memory"),
            R::PageTableLimit => Self::Limit("page tables"),
            R::Os(errno) => Self::Io(io::Error::from_raw_os_error(errno)),
            R::Fragmented { wanted_mib, outlived_mib } => {
                Self::Fragmented { wanted_mib, outlived_mib }
            }
            R::NoSpace => Self::NotFound("address space"),
            R::SpaceLimit => Self::Limit("address spaces"),
            R::Group => Self::Invalid("engine or address space of the channel's group"),
            R::NotPaused => Self::Invalid("the vGPU is not paused"),
            R::State => Self::Invalid("saved state of a channel or address space"),
            R::Unsupported => {
                Self::Unsupported("an engine, memory or screen that the device does not have")
            }
        }
    }
}

impl From<ChannelSpecError> for Refusal {
    fn from(error: ChannelSpecError) -> Self {
        use ChannelSpecError as E;
        match error {
            E::Engine => Self::Unsupported,
            E::GpfifoEntries | E::GpfifoAlignment | E::GpfifoRange => Self::Gpfifo,
            E::UserdAlignment => Self::Userd,
            E::Vector => Self::Vector,
        }
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::Os(error.raw_os_error().unwrap_or(libc::EIO))
    }
}
