//! The manager's handle of a GPU.

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use foreign_fds::ForeignFd;
use serde::{Deserialize, Serialize};

use super::budget::Budget;
use super::{GpuDescription, GpuError, PhysicalScreen, Quotas, UsageReport};
use crate::ids::VgpuId;

/// Resources of one vGPU at its admission.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientSpec {
    /// The vGPU.
    pub vgpu: VgpuId,
    /// Size of the partition of video memory in bytes, a multiple of 1 MiB; 0 on a GPU without
    /// video memory.
    pub vram_bytes: u64,
    /// Length of the framebuffer aperture in bytes; 0 without a display head.
    pub framebuffer_bytes: u64,
    /// Maximum number of channels.
    pub max_channels: u32,
    /// Maximum size of imported guest memory in bytes.
    pub max_import_bytes: u64,
}

/// Permission to open one client of a GPU, passed from the manager to a worker.
#[derive(Debug)]
pub struct Admission {
    /// Backend that opens the client (`soft`, `nvidia`, `vfio`).
    pub backend: &'static str,
    /// Granted resources.
    pub spec: ClientSpec,
    /// Connection to the GPU process, if the backend has one.
    pub fd: Option<ForeignFd>,
}

/// The manager's handle of one physical GPU.
pub trait Gpu: Send + fmt::Debug {
    /// Returns the description, which is constant.
    fn describe(&self) -> &GpuDescription;

    /// Reserves the resources of one vGPU. Closing the admission's connection or [`Gpu::evict`]
    /// releases them.
    fn admit(&mut self, spec: &ClientSpec) -> Result<Admission, GpuError>;

    /// Registers a vGPU that an earlier manager admitted and whose worker still runs. If the
    /// backend controls vGPUs through their workers, returns the worker's end of a new connection,
    /// for [`Client::attach_manager`].
    ///
    /// [`Client::attach_manager`]: super::Client::attach_manager
    fn readmit(&mut self, _spec: &ClientSpec) -> Result<Option<OwnedFd>, GpuError> {
        Ok(None)
    }

    /// Releases all resources of a vGPU, also while the vGPU works.
    fn evict(&mut self, vgpu: VgpuId) -> Result<(), GpuError>;

    /// Discards the state of a stopped vGPU that the backend keeps for a restart of its worker.
    fn forget(&mut self, _vgpu: VgpuId) -> Result<(), GpuError> {
        Ok(())
    }

    /// Sets the runlist's time slice of the vGPU's channel groups, from the next slice on.
    fn set_timeslice(&mut self, vgpu: VgpuId, slice: Duration) -> Result<(), GpuError>;

    /// Opens or closes the vGPU's gate. A gated group keeps its work and gets no engine time.
    fn set_gate(&mut self, vgpu: VgpuId, open: bool) -> Result<(), GpuError>;

    /// Sets or removes the budget of the vGPU's channel groups in each period
    /// ([`crate::sched::Meter`]), at once.
    ///
    /// For GPUs with [`GpuCapabilities::BUDGETS`]; on other GPUs, the manager enforces caps with
    /// gates.
    ///
    /// [`GpuCapabilities::BUDGETS`]: super::GpuCapabilities::BUDGETS
    fn set_budget(&mut self, _vgpu: VgpuId, _budget: Option<Budget>) -> Result<(), GpuError> {
        Err(GpuError::Unsupported("budgets of engine time"))
    }

    /// Sets the vGPU's quotas at once. For GPUs with [`GpuCapabilities::QUOTAS`].
    ///
    /// [`GpuCapabilities::QUOTAS`]: super::GpuCapabilities::QUOTAS
    fn set_quotas(&mut self, _vgpu: VgpuId, _quotas: &Quotas) -> Result<(), GpuError> {
        Err(GpuError::Unsupported("quotas"))
    }

    /// Resets the vGPU's channel groups. Each channel reports an error to the guest.
    fn reset_group(&mut self, vgpu: VgpuId) -> Result<(), GpuError>;

    /// Returns the usage counters of all admitted vGPUs.
    fn usage(&mut self) -> Result<UsageReport, GpuError>;

    /// Returns the contexts of a GPU whose vGPUs have a process each.
    fn contexts(&mut self) -> Option<&mut dyn Contexts> {
        None
    }

    /// Returns the physical screen of a GPU with [`GpuCapabilities::SCANOUT`].
    ///
    /// [`GpuCapabilities::SCANOUT`]: super::GpuCapabilities::SCANOUT
    fn physical_screen(&mut self) -> Option<&mut dyn PhysicalScreen> {
        None
    }
}

/// A GPU of which each vGPU has a context: a process with its memory and its engine.
pub trait Contexts {
    /// Admits a vGPU, in place of [`Gpu::admit`]. `link` is a connection to its context: a new one,
    /// or one of an earlier GPU process, which continues. `schedstat` is the kernel's count of the
    /// context's delays (`/proc/PID/schedstat`), if the kernel has it.
    fn admit(
        &mut self,
        spec: &ClientSpec,
        link: BorrowedFd<'_>,
        schedstat: Option<BorrowedFd<'_>>,
    ) -> Result<(), GpuError>;
}
