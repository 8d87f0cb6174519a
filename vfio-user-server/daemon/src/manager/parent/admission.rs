//! Start of a vGPU on its parent, and release of the resources that it holds there.

use std::io;
use std::os::fd::AsFd;

use mdev_core::gpu::{Admission, ClientSpec, GpuError};
use mdev_core::ids::VgpuId;

use vendor_backends::backend::Opener;

use super::Parent;
use crate::manager::Result;
use crate::manager::cgroups::{Limits, Member};
use crate::manager::environment::Environment;
use crate::manager::run_dir;
use crate::manager::vgpu::context::{self, Context, Started};
use crate::manager::vgpu::{Vgpu, worker};
use crate::{vgpu_names, worker_client};
use vgpud_api::{ErrorCode, ErrorDetail};
use vgpud_host::users::Account;

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
        let (admission, user) = self.admit(env, &spec)?;
        self.set_quotas(id, &quotas)?;
        self.schedule(id, share, max_instances)?;
        let Some(vgpu) = self.vgpus.get_mut(&id) else { return Ok(()) };
        vgpu.launch(env, &admission, user).map_err(|error| not_started(env, id, &error))?;
        self.place_worker(env, id);
        Ok(())
    }

    /// Admits a vGPU on the GPU, with a new context if the GPU has contexts. Returns the user of
    /// the worker, too.
    fn admit(&mut self, env: &Environment, spec: &ClientSpec) -> Result<(Admission, Account)> {
        self.require_ready()?;
        let id = spec.vgpu;
        let failed = |error: io::Error| not_started(env, id, &error);
        if !self.has_contexts() {
            let user = env.worker_users.choose().map_err(failed)?;
            return Ok((self.call_gpu(|gpu| gpu.admit(spec))?, user));
        }
        let Started { context, worker, user } =
            Context::start(env, &self.config, spec).map_err(failed)?;
        if let Some(vgpu) = self.vgpus.get_mut(&id) {
            vgpu.context = Some(context);
        }
        self.admit_context(env, spec)?;
        let backend = self.config.source.backend().admission();
        let admission = Admission { backend, spec: spec.clone(), fd: Some(worker.into()) };
        Ok((admission, user))
    }

    /// Connects the GPU with the context of a vGPU.
    fn admit_context(&mut self, env: &Environment, spec: &ClientSpec) -> Result<()> {
        let link = context::connect(&env.run_dir, spec.vgpu)
            .map_err(|error| not_started(env, spec.vgpu, &error))?;
        let context = self.vgpus.get(&spec.vgpu).and_then(|vgpu| vgpu.context.as_ref());
        let schedstat = context.and_then(|context| context.process.schedstat().ok());
        self.call_gpu(|gpu| match gpu.contexts() {
            Some(contexts) => {
                contexts.admit(spec, link.as_fd(), schedstat.as_ref().map(AsFd::as_fd))
            }
            None => Err(GpuError::Unsupported("contexts")),
        })
    }

    /// Gives the contexts of an earlier GPU process to this one.
    pub(super) fn readmit_contexts(&mut self, env: &Environment) {
        let with_context = self.vgpus.values().filter(|vgpu| vgpu.context.is_some());
        let ids: Vec<_> = with_context.map(|vgpu| vgpu.id).collect();
        for id in ids {
            if let Err(error) = self.readmit_context(env, id) {
                log::error!("vGPU {id} does not continue on its new GPU process: {error}");
                self.fail_for_lost_gpu(id);
            }
        }
    }

    /// Gives a vGPU's context, which continues, to a GPU process that does not know it.
    pub(super) fn readmit_context(&mut self, env: &Environment, id: VgpuId) -> Result<()> {
        let Some(vgpu) = self.vgpus.get(&id) else { return Ok(()) };
        let spec = self.client_spec(vgpu);
        let (quotas, share) = (vgpu.settings.quotas, vgpu.settings.share);
        let (vram_bytes, max_instances) = (vgpu.profile.vram_bytes, vgpu.profile.max_instances);
        // The partition of an adopted vGPU is reserved before.
        if let Err(error) = self.partitions.admit(id, vram_bytes) {
            log::debug!("vGPU {id}: {error}");
        }
        self.admit_context(env, &spec)?;
        self.set_quotas(id, &quotas)?;
        self.schedule(id, share, max_instances)
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
        // A context that its tenant holds does not end by itself.
        if let Some(context) = self.vgpus.get_mut(&id).and_then(|vgpu| vgpu.context.take()) {
            context.process.kill();
        }
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

/// Explains why a vGPU has no process.
fn not_started(env: &Environment, id: VgpuId, error: &io::Error) -> ErrorDetail {
    let code = if is_shortage(error) { ErrorCode::Unavailable } else { ErrorCode::Internal };
    let folder = env.run_dir.vgpu(id);
    ErrorDetail::new(code, format!("Cannot start a worker in {}: {error}", folder.display()))
}

/// Returns whether an operation failed for want of resources, and can succeed later.
fn is_shortage(error: &io::Error) -> bool {
    let shortages = [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::ENOBUFS, libc::EAGAIN];
    error.raw_os_error().is_some_and(|errno| shortages.contains(&errno))
}
