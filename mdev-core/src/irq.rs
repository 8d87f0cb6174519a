//! Interrupts: INTx and MSI, delivered by eventfd.

/// VFIO's interrupt indexes of a PCI device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqIndex {
    /// The INTx pin.
    Intx,
    /// MSI vectors.
    Msi,
    /// MSI-X vectors: there are none.
    Msix,
    /// Error notification: there is none.
    Err,
    /// Device request: there is none.
    Req,
}

impl IrqIndex {
    /// The index with VFIO's number.
    pub const fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            0 => Self::Intx,
            1 => Self::Msi,
            2 => Self::Msix,
            3 => Self::Err,
            4 => Self::Req,
            _ => return None,
        })
    }
}

/// What a client learns about an interrupt index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IrqInfo {
    /// Interrupts of the index; 0 where there are none.
    pub count: u32,
    /// They are delivered by eventfd.
    pub eventfd: bool,
    /// They can be masked.
    pub maskable: bool,
    /// Delivery masks them until they are unmasked.
    pub automasked: bool,
    /// The set of vectors in use cannot grow without disabling the index first.
    pub no_resize: bool,
}

/// Why interrupts could not be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IrqError {
    /// Vectors beyond the index.
    #[error("No interrupts {start} to {end} of {index:?}")]
    OutOfRange {
        /// The index.
        index: IrqIndex,
        /// First vector asked for.
        start: u32,
        /// One past the last.
        end: u64,
    },
    /// The index does not have this action.
    #[error("{0:?} interrupts cannot be masked")]
    NotMaskable(IrqIndex),
}
