//! Guest memory that comes and goes with DMA maps.

use bitflags::bitflags;

use crate::ids::GuestPa;

bitflags! {
    /// What the device may do with a range of guest memory.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct DmaAccess: u32 {
        /// Loads.
        const READ = 1 << 0;
        /// Stores.
        const WRITE = 1 << 1;
    }
}

/// Why a map or unmap was refused.
#[derive(Debug, thiserror::Error)]
pub enum MemError {
    /// Empty, not page-aligned, or beyond the address space.
    #[error("Bad range: {size:#x} bytes at {:#x}", iova.0)]
    BadRange {
        /// Start.
        iova: GuestPa,
        /// Bytes.
        size: u64,
    },
    /// It overlaps a map that is there.
    #[error("{size:#x} bytes at {:#x} overlap an existing map", iova.0)]
    Overlap {
        /// Start.
        iova: GuestPa,
        /// Bytes.
        size: u64,
    },
    /// No map has exactly this range.
    #[error("Nothing is mapped as {size:#x} bytes at {:#x}", iova.0)]
    NotMapped {
        /// Start.
        iova: GuestPa,
        /// Bytes.
        size: u64,
    },
    /// Too many maps.
    #[error("More than {0} maps")]
    TooMany(usize),
    /// The operating system refused to map the file.
    #[error("Cannot map guest memory: {0}")]
    Map(std::io::Error),
}
