//! Change of the set of vGPUs, of a share or of a setting.

use crate::ids::VgpuId;

/// Subject of a change.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Change {
    /// All vGPUs.
    All,
    /// A vGPU that started or requests another share.
    One {
        /// The vGPU.
        id: VgpuId,
        /// Part of the GPU that the vGPU had before the change.
        part_before: f64,
    },
    /// A vGPU that stopped.
    Removed {
        /// Part of the GPU that the vGPU had.
        part_before: f64,
    },
}
