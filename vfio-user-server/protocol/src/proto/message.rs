//! Requests: the payload after the header, decoded into types.
//!
//! Decoding checks what a message alone shows: sizes, flags and overflowing ranges.

mod decode;
mod encode;

use zerocopy::FromBytes;

pub use crate::device_feature::{Feature, FeatureAccess};
use crate::dma::DmaUnmap;
use crate::errno::Errno;
use crate::irq::IrqAction;
use crate::proto::header::Command;
use crate::proto::wire;

/// Granularity of DMA mappings in bytes.
pub const DMA_PAGE: u64 = 4096;

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// VERSION.
    Version {
        /// Major version of the protocol.
        major: u16,
        /// Minor version of the protocol.
        minor: u16,
        /// Encoded [`Capabilities`](crate::proto::caps::Capabilities).
        data: &'a [u8],
    },
    /// DMA_MAP, with a descriptor if the client shares the memory.
    DmaMap {
        /// DMA address.
        address: u64,
        /// Length in bytes.
        size: u64,
        /// Offset in the file.
        offset: u64,
        /// True if the device may read the range.
        readable: bool,
        /// True if the device may write the range.
        writable: bool,
    },
    /// DMA_UNMAP.
    DmaUnmap(DmaUnmap),
    /// DMA_UNMAP of a range, with a request for its dirty bitmap.
    DmaUnmapDirty {
        /// DMA address.
        address: u64,
        /// Length in bytes.
        size: u64,
        /// Bytes per bit of the bitmap, a power of two.
        page_size: u64,
        /// Length of the bitmap in bytes: sufficient, and at most
        /// [`MAX_DATA`](crate::proto::header::MAX_DATA).
        bitmap: u32,
    },
    /// DEVICE_GET_INFO.
    GetInfo,
    /// DEVICE_GET_REGION_INFO.
    GetRegionInfo {
        /// Region index.
        index: u32,
        /// Room for the reply in bytes.
        argsz: u32,
    },
    /// DEVICE_GET_REGION_IO_FDS.
    GetRegionIoFds {
        /// Region index.
        index: u32,
        /// Room for the reply in bytes.
        argsz: u32,
    },
    /// DEVICE_GET_IRQ_INFO.
    GetIrqInfo {
        /// Interrupt index.
        index: u32,
    },
    /// DEVICE_SET_IRQS.
    SetIrqs(SetIrqs<'a>),
    /// REGION_READ.
    RegionRead(Access),
    /// REGION_WRITE, with `count` bytes of data.
    RegionWrite(Access, &'a [u8]),
    /// REGION_WRITE_MULTI.
    RegionWriteMulti(MultiWrites<'a>),
    /// DEVICE_RESET.
    Reset,
    /// DEVICE_FEATURE.
    Feature {
        /// Room for the reply in bytes.
        argsz: u32,
        /// Feature, access and data.
        feature: Feature<'a>,
    },
    /// MIG_DATA_READ of this many bytes, at most [`MAX_DATA`](crate::proto::header::MAX_DATA).
    MigDataRead(u32),
    /// MIG_DATA_WRITE.
    MigDataWrite(&'a [u8]),
}

/// Range of bytes in a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Region index.
    pub region: u32,
    /// Offset in the region.
    pub offset: u64,
    /// Length in bytes, at most [`MAX_DATA`](crate::proto::header::MAX_DATA).
    pub count: u32,
}

/// Request DEVICE_SET_IRQS. `start + count` does not overflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetIrqs<'a> {
    /// Interrupt index.
    pub index: u32,
    /// First interrupt.
    pub start: u32,
    /// Number of interrupts; 0 only to disable the index.
    pub count: u32,
    /// Action on the interrupts.
    pub action: IrqAction,
    /// Data of the request.
    pub data: IrqData<'a>,
}

/// Data of DEVICE_SET_IRQS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqData<'a> {
    /// No data: the action applies to all interrupts.
    None,
    /// A byte per interrupt: the action applies to interrupts with a nonzero byte.
    Bool(&'a [u8]),
    /// Eventfds, among the message's descriptors.
    EventFd,
}

/// Writes of REGION_WRITE_MULTI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MultiWrites<'a>(&'a [u8]);

impl<'a> MultiWrites<'a> {
    /// Returns the number of writes.
    pub const fn len(&self) -> usize {
        self.0.len() / wire::MultiWrite::SIZE
    }

    /// Returns true if there are no writes.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Iterates over the writes. Writes of more than 8 bytes are errors.
    pub fn iter(&self) -> impl Iterator<Item = Result<(Access, &'a [u8]), Errno>> + use<'a> {
        self.0.chunks_exact(wire::MultiWrite::SIZE).map(|bytes| {
            let (write, _) =
                wire::RegionAccess::read_from_prefix(bytes).map_err(|_| Errno::EINVAL)?;
            let data = bytes[wire::RegionAccess::SIZE..].get(..write.count as usize);
            Ok((decode::access(write)?, data.ok_or(Errno::EINVAL)?))
        })
    }
}

impl Request<'_> {
    /// Returns the command of the request.
    pub const fn command(&self) -> Command {
        match self {
            Self::Version { .. } => Command::Version,
            Self::DmaMap { .. } => Command::DmaMap,
            Self::DmaUnmap(_) | Self::DmaUnmapDirty { .. } => Command::DmaUnmap,
            Self::GetInfo => Command::GetInfo,
            Self::GetRegionInfo { .. } => Command::GetRegionInfo,
            Self::GetRegionIoFds { .. } => Command::GetRegionIoFds,
            Self::GetIrqInfo { .. } => Command::GetIrqInfo,
            Self::SetIrqs(_) => Command::SetIrqs,
            Self::RegionRead(_) => Command::RegionRead,
            Self::RegionWrite(..) => Command::RegionWrite,
            Self::RegionWriteMulti(_) => Command::RegionWriteMulti,
            Self::Reset => Command::Reset,
            Self::Feature { .. } => Command::Feature,
            Self::MigDataRead(_) => Command::MigDataRead,
            Self::MigDataWrite(_) => Command::MigDataWrite,
        }
    }

    /// Returns true if the request can be carried out again: it only asks for something.
    pub const fn is_repeatable(&self) -> bool {
        matches!(
            self,
            Self::Version { .. }
                | Self::GetInfo
                | Self::GetRegionInfo { .. }
                | Self::GetRegionIoFds { .. }
                | Self::GetIrqInfo { .. }
                | Self::RegionRead(_)
                | Self::Feature { .. }
        )
    }
}

impl Access {
    /// Returns the fixed structure for requests and replies.
    pub const fn wire(&self) -> wire::RegionAccess {
        wire::RegionAccess { offset: self.offset, region: self.region, count: self.count }
    }
}
