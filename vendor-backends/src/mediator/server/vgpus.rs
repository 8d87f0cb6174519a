//! The vGPUs of a GPU process, as the manager's requests see them.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use ipc::seqpacket::SeqPacket;
use mdev_core::gpu::{ClientSpec, Quotas, UsageReport, Waits};
use mdev_core::ids::VgpuId;
use mdev_core::sched::Budget;

use super::clients::Clients;
use super::worker_connection::WorkerConnection;
use crate::mediator::arbiter::Arbiter;
use crate::mediator::emulation::EmulatedGpu;
use crate::mediator::emulation::vgpu::{MANAGER_WAIT, Vgpu};
use crate::mediator::wire::Refusal;

/// The vGPUs of a GPU process.
#[derive(Debug)]
pub(super) enum Vgpus {
    /// In this process, whose engine runs their work.
    Here(Here),
    /// In contexts, which get turns.
    InContexts(Arbiter),
}

impl Vgpus {
    pub fn are_none(&self) -> bool {
        match self {
            Self::Here(here) => here.clients.are_none(),
            Self::InContexts(arbiter) => arbiter.is_empty(),
        }
    }

    /// Admits a vGPU. Returns its worker's connection.
    pub fn admit(&self, spec: &ClientSpec) -> Result<OwnedFd, Refusal> {
        match self {
            Self::Here(here) => here.admit(spec),
            Self::InContexts(_) => Err(Refusal::Unsupported),
        }
    }

    /// Admits a vGPU with a context.
    pub fn admit_context(
        &self,
        spec: &ClientSpec,
        link: OwnedFd,
        schedstat: Option<OwnedFd>,
    ) -> Result<(), Refusal> {
        match self {
            Self::Here(_) => Err(Refusal::Unsupported),
            Self::InContexts(arbiter) => arbiter.admit(spec, link, schedstat),
        }
    }

    pub fn evict(&self, id: VgpuId) -> Result<(), Refusal> {
        match self {
            Self::Here(here) => {
                here.evict(&here.gpu.find(id)?);
                here.clients.hang_up(id);
                Ok(())
            }
            Self::InContexts(arbiter) => arbiter.evict(id),
        }
    }

    pub fn set_timeslice(&self, id: VgpuId, slice: Duration) -> Result<(), Refusal> {
        match self {
            Self::Here(here) => {
                here.gpu.find(id)?.set_timeslice(slice);
                Ok(())
            }
            Self::InContexts(arbiter) => arbiter.set_timeslice(id, slice),
        }
    }

    pub fn set_budget(&self, id: VgpuId, budget: Option<Budget>) -> Result<(), Refusal> {
        match self {
            Self::Here(here) => {
                here.gpu.find(id)?.set_budget(budget);
                Ok(())
            }
            Self::InContexts(arbiter) => arbiter.set_budget(id, budget),
        }
    }

    pub fn set_quotas(&self, id: VgpuId, quotas: &Quotas) -> Result<(), Refusal> {
        match self {
            Self::Here(here) => here.gpu.find(id)?.set_quotas(quotas),
            Self::InContexts(arbiter) => arbiter.set_quotas(id, quotas),
        }
    }

    pub fn set_gate(&self, id: VgpuId, is_open: bool) -> Result<(), Refusal> {
        match self {
            Self::Here(here) => {
                here.gpu.find(id)?.set_gate(is_open);
                Ok(())
            }
            Self::InContexts(arbiter) => arbiter.set_gate(id, is_open),
        }
    }

    pub fn reset(&self, id: VgpuId) -> Result<(), Refusal> {
        match self {
            Self::Here(here) => here.gpu.find(id)?.reset_channels(),
            Self::InContexts(arbiter) => arbiter.reset(id),
        }
    }

    pub fn usage(&self) -> UsageReport {
        match self {
            Self::Here(here) => here.gpu.usage(),
            Self::InContexts(arbiter) => arbiter.usage(),
        }
    }

    pub fn waits(&self, id: VgpuId) -> Result<Waits, Refusal> {
        match self {
            Self::Here(here) => Ok(here.gpu.find(id)?.waits()),
            Self::InContexts(arbiter) => arbiter.waits(id),
        }
    }
}

/// vGPUs in this process.
#[derive(Debug)]
pub(super) struct Here {
    gpu: Arc<EmulatedGpu>,
    /// Connections of workers.
    clients: Clients,
}

impl Here {
    pub fn new(gpu: EmulatedGpu) -> Self {
        Self { gpu: Arc::new(gpu), clients: Clients::default() }
    }

    /// Evicts a vGPU. Does not wait long if the engine sleeps in the guest's memory: the eviction
    /// ends when the engine wakes up, and until then the vGPU counts as admitted.
    fn evict(&self, vgpu: &Arc<Vgpu>) {
        let (done, evicted) = mpsc::channel();
        let (gpu, again) = (Arc::clone(&self.gpu), Arc::clone(vgpu));
        let evict = move || {
            gpu.evict(&again);
            let _ = done.send(());
        };
        let name = "gpu-evict".into();
        if thread::Builder::new().name(name).stack_size(256 << 10).spawn(evict).is_err() {
            self.gpu.evict(vgpu);
        } else if evicted.recv_timeout(MANAGER_WAIT) == Err(RecvTimeoutError::Timeout) {
            log::warn!("vGPU {}: the GPU still uses its memory: eviction delayed", vgpu.id());
        }
    }

    /// Admits a vGPU and starts the thread that serves its worker.
    fn admit(&self, spec: &ClientSpec) -> Result<OwnedFd, Refusal> {
        // The thread of a worker that has just died may not have noticed yet.
        if self.clients.has_hung_up(spec.vgpu)
            && let Ok(vgpu) = self.gpu.find(spec.vgpu)
        {
            self.evict(&vgpu);
        }
        let (vgpu, fds) = self.gpu.admit(spec)?;
        let started = SeqPacket::pair().and_then(|(ours, theirs)| {
            let entry = self.clients.add(&vgpu, &ours)?;
            let (gpu, vgpu) = (Arc::clone(&self.gpu), Arc::clone(&vgpu));
            let connection = WorkerConnection::new(gpu, vgpu, fds, ours, entry);
            let name = "gpu-client".into();
            let builder = thread::Builder::new().name(name).stack_size(256 << 10);
            builder.spawn(move || connection.serve())?;
            Ok(theirs.into())
        });
        started.map_err(|error| {
            self.gpu.evict(&vgpu);
            Refusal::from(error)
        })
    }
}
