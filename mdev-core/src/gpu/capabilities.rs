//! Description and capabilities of a GPU.

use std::time::Duration;

use bitflags::bitflags;
use serde::{Deserialize, Serialize};

bitflags! {
    /// Capabilities of a backend. A vGPU type that needs others is not offered on it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
    pub struct GpuCapabilities: u32 {
        /// CPU mappings of the partition's video memory (BAR 4).
        const VRAM_APERTURE = 1 << 0;
        /// Scanout of the start of video memory (BAR 0, a display head).
        const FRAMEBUFFER = 1 << 1;
        /// Copy-class channels.
        const COPY = 1 << 2;
        /// Compute-class channels.
        const COMPUTE = 1 << 3;
        /// Guest mappings of the doorbell page.
        const DOORBELL_MAPPED = 1 << 4;
        /// Wake-up of idle channels by a trapped write (see [`crate::abi::userd::NEED_WAKEUP`]).
        const NEED_WAKEUP = 1 << 5;
        /// Preemption of a running kernel within the time slice.
        const PREEMPTION = 1 << 6;
        /// Enforcement of budgets of engine time by the GPU ([`Gpu::set_budget`]).
        ///
        /// [`Gpu::set_budget`]: super::Gpu::set_budget
        const BUDGETS = 1 << 7;
        /// Enforcement of [`Quotas`].
        ///
        /// [`Quotas`]: super::Quotas
        const QUOTAS = 1 << 8;
        /// The built-in kernels of [`crate::abi::program`]. Without this and
        /// [`Self::FIXED_FUNCTION`], programs are machine code of the GPU.
        const SOFT_PROGRAMS = 1 << 9;
        /// Faults that end one channel only. Without this, a fault ends all channels of the vGPU on
        /// the same [`EngineKind`].
        ///
        /// [`EngineKind`]: super::EngineKind
        const CHANNEL_FAULTS = 1 << 10;
        /// A physical screen that shows one vGPU at a time ([`Gpu::physical_screen`]).
        ///
        /// [`Gpu::physical_screen`]: super::Gpu::physical_screen
        const SCANOUT = 1 << 11;
        /// Exact shares by time slices alone: an overrun is charged to the vGPU's next slices.
        /// Slices are too long for a reading of the usage counters to show shares.
        const EXACT_SLICES = 1 << 12;
        /// Fixed functions with ids that the device defines
        /// ([`crate::abi::program::Kernel::FixedFunction`]).
        const FIXED_FUNCTION = 1 << 13;
        /// CUDA programs on vGPUs without a display head, through the device files of NVIDIA's
        /// driver.
        const PROGRAMS = 1 << 14;
        /// Pausing, saving and restoring of clients ([`Saving::pause`]).
        ///
        /// [`Saving::pause`]: super::Saving::pause
        const SAVE = 1 << 15;
        /// Imports pin their pages, and others wait for the driver meanwhile. Large mappings of
        /// guest memory are imported in parts.
        const PINS = 1 << 16;
        /// A process for each vGPU, with its memory and its engine ([`Gpu::contexts`]).
        ///
        /// [`Gpu::contexts`]: super::Gpu::contexts
        const CONTEXTS = 1 << 17;
    }
}

impl GpuCapabilities {
    /// Returns whether video memory is saved and restored through staging memory
    /// ([`Saving::stages_memory`]), because no process can map it.
    ///
    /// [`Saving::stages_memory`]: super::Saving::stages_memory
    #[must_use]
    pub fn stages_memory(self) -> bool {
        self.contains(Self::SAVE) && !self.contains(Self::VRAM_APERTURE)
    }
}

/// Description of a physical GPU by its backend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuDescription {
    /// Name of the parent: `soft0`, or a PCI address.
    pub parent: String,
    /// Model, the prefix of type names: `SOFT`, `H100`.
    pub model: String,
    /// Display name: "Tessera software GPU".
    pub name: String,
    /// Video memory for vGPUs, in bytes.
    pub vram_bytes: u64,
    /// Capabilities.
    pub capabilities: GpuCapabilities,
    /// Maximum number of vGPUs of any size.
    pub max_vgpus: u32,
    /// Maximum number of channels of one vGPU.
    pub max_channels: u32,
    /// Maximum size of the guest memory that one vGPU imports, in bytes.
    pub max_import_bytes: u64,
    /// Default time slice of a channel group.
    pub default_timeslice: Duration,
    /// Default hang limit: engine time of one kernel or transfer. `None` if each ends by itself, or
    /// if the backend has no hang limit.
    pub hang_timeout: Option<Duration>,
}
