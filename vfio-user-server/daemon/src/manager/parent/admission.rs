//! Start of a vGPU on its parent, and release of the resources that it holds there.

use std::io;

use mdev_core::gpu::GpuError;
use mdev_core::ids::VgpuId;

use vendor_backends::backend::Opener;

use super::Parent;
use crate::manager::Result;
use crate::manager::cgroups::{Limits, Member};
use crate::manager::environment::Environment;
use crate::manager::run_dir;
use crate::manager::vgpu::{Vgpu, worker};
use crate::{vgpu_names, worker_client};
use vgpud_api::{ErrorCode, ErrorDetail};

impl Parent {
    /// Starts a vGPU: reserves its partition, admits it on the GPU and starts its worker.
    pub fn start_vgpu(&mut self, env: &Environment, vgpu: Vgpu) -> Result<()> {
        self.require_ready()?;
        self.partitions
            .admit(vgpu.id, vgpu.profile.vram_bytes)
            .map_err(|error| ErrorDetail::new(ErrorCode::NoRoom, error))?;
        if let Err(error) = self.scheduling.check(vgpu.settings.share) {
            self.partitions.release(vgpu.id);
            return Err(error);
        }
        let id = vgpu.id;
        self.vgpus.insert(id, vgpu);
        self.launch(env, id).inspect_err(|_| self.remove(env, id))
    }

    /// Admits a vGPU in state Starting on the GPU, schedules it and starts its worker. Quotas and
    /// slices are in force before the guest can use the GPU.
    pub(super) fn launch(&mut self, env: &Environment, id: VgpuId) -> Result<()> {
        env.reserve.spend(|| self.launch_with_reserve(env, id))?
    }

    fn launch_with_reserve(&mut self, env: &Environment, id: VgpuId) -> Result<()> {
        let Some(vgpu) = self.vgpus.get(&id) else { return Ok(()) };
        let spec = self.client_spec(vgpu);
        let (quotas, share) = (vgpu.settings.quotas, vgpu.settings.share);
        let max_instances = vgpu.profile.max_instances;
        let admission = self.call_gpu(|gpu| gpu.admit(&spec))?;
        self.set_quotas(id, &quotas)?;
        self.schedule(id, share, max_instances)?;
        let Some(vgpu) = self.vgpus.get_mut(&id) else { return Ok(()) };
        vgpu.launch(env, &admission).map_err(|error| {
            let code =
                if is_shortage(&error) { ErrorCode::Unavailable } else { ErrorCode::Internal };
            ErrorDetail::new(
                code,
                format!("Cannot start a worker in {}: {error}", env.run_dir.vgpu(id).display()),
            )
        })?;
        self.place_worker(env, id);
        Ok(())
    }

    /// Moves a vGPU's worker into a control group of its own.
    pub(super) fn place_worker(&self, env: &Environment, id: VgpuId) {
        let Some(vgpu) = self.vgpus.get(&id) else { return };
        let Some(worker) = vgpu.state().worker() else { return };
        let pins = !matches!(self.config.source.opener(), Opener::Process(_));
        let limits = Limits::worker(&self.client_spec(vgpu), worker::MAX_THREADS, pins);
        env.cgroups.place(Member::Worker(id), worker.process.pid(), limits);
        // An anchor that has moved starts workers in its group. One may have been started before.
        if let Some(pid) = worker.process.child() {
            env.cgroups.place(Member::Worker(id), pid, limits);
        }
    }

    /// Removes a vGPU: its worker, its resources on the GPU and its folder.
    pub(super) fn remove(&mut self, env: &Environment, id: VgpuId) {
        self.release(id);
        self.forget(id);
        let Some(vgpu) = self.vgpus.remove(&id) else { return };
        let waiters = vgpu.end();
        worker_client::passed_files::forget(&env.run_dir.worker_socket(id));
        run_dir::remove(&env.run_dir.vgpu(id));
        log::info!("vGPU {id} is stopped");
        // A definition, if there is one, has the name of its own.
        vgpu_names::set(id, None);
        self.replace_foreign();
        for waiter in waiters {
            // The request may have been cancelled.
            let _ = waiter.send(Ok(()));
        }
    }

    /// Releases a vGPU's resources: its channels and memory mappings, its partition, its share.
    pub(super) fn release(&mut self, id: VgpuId) {
        self.evict(id);
        self.partitions.release(id);
        self.unschedule(id);
    }

    /// Removes a vGPU's client from the GPU, with its channels and memory mappings.
    pub(super) fn evict(&mut self, id: VgpuId) {
        if !self.is_ready() {
            return;
        }
        let evicted = self.call_gpu(|gpu| match gpu.evict(id) {
            // The GPU evicts a client by itself when its connection closes.
            Err(GpuError::NotFound(_)) => Ok(()),
            other => other,
        });
        if let Err(error) = evicted {
            log::warn!("Cannot evict vGPU {id}: {error}");
        }
    }

    /// Discards the memory contents that the GPU keeps for a vGPU's next start: another VM may use
    /// the vGPU then.
    fn forget(&mut self, id: VgpuId) {
        if self.is_ready()
            && let Err(error) = self.call_gpu(|gpu| gpu.forget(id))
        {
            log::warn!("vGPU {id} may keep its memory: {error}");
        }
    }
}

/// Returns whether an operation failed for want of resources, and can succeed later.
fn is_shortage(error: &io::Error) -> bool {
    let shortages = [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::ENOBUFS, libc::EAGAIN];
    error.raw_os_error().is_some_and(|errno| shortages.contains(&errno))
}
