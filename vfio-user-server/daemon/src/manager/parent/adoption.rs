//! Adoption of vGPUs that an earlier manager started.
//!
//! A worker that answers is adopted together with the VM that is attached to it. A vGPU whose
//! worker is gone is started again. A worker of an unsupported version continues for its VM until
//! the vGPU is stopped. So does a worker that does not answer, because it is stopped or waits in
//! the kernel: a VM may be attached to it. It is asked again with each request.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use mdev_core::ids::VgpuId;

use super::Parent;
use crate::child_logs;
use crate::manager::Result;
use crate::manager::environment::Environment;
use crate::manager::run_dir;
use crate::manager::vgpu::context::{self, Context};
use crate::manager::vgpu::{Found, Record, Vgpu};
use crate::spawn::Process;
use crate::worker_client;
use crate::worker_protocol::WorkerStatus;
use vgpud_api::ErrorDetail;

impl Parent {
    /// Adopts a recorded vGPU if its worker is running. Returns the vGPU if it is to be started
    /// again instead, which takes its folder away. `status` is the worker's answer.
    /// `gpu_was_running` tells whether the GPU was running before this manager.
    pub fn adopt_vgpu(
        &mut self,
        env: &Environment,
        id: VgpuId,
        record: &Record,
        status: io::Result<WorkerStatus>,
        gpu_was_running: bool,
    ) -> Option<Vgpu> {
        let process = Process::find(record.process);
        let context = record.context.and_then(Process::find);
        // What a vGPU loses with its GPU process is in the context, if there is one.
        let gpu_runs = gpu_was_running || context.is_some();
        let kill_context = |context: Option<Process>| context.map(Process::kill);
        let folder = env.run_dir.vgpu(id);
        let vgpu = match self.build(id, &record.definition, env.owner) {
            Ok(vgpu) => vgpu,
            // The types of an unsupported GPU process are unknown. The worker ends with its VM.
            Err(error) if self.is_foreign() && process.is_some() => {
                log::error!("vGPU {id} continues for its VM, without a manager: {error}");
                return None;
            }
            Err(error) => {
                kill_context(context);
                discard(env, id, process, &error);
                return None;
            }
        };
        let Some(process) = process else {
            kill_context(context);
            run_dir::remove(&folder);
            return Some(vgpu);
        };
        match status {
            Ok(status) if status.client.is_some() || (gpu_runs && status.gpu_ok) => {
                let pid = process.pid();
                let user = status.client.map(|vm| format!(", used by process {}", vm.pid));
                log::info!("Adopted vGPU {id} in process {pid}{}", user.unwrap_or_default());
                let found = Found::Answering(status.client);
                self.take_over(env, vgpu, (process, context), found, gpu_was_running);
                if !status.gpu_ok {
                    self.fail_for_lost_gpu(id);
                }
                return None;
            }
            Ok(_) => log::info!("vGPU {id} lost its GPU; starting it again"),
            // An upgrade of vgpud must not end a VM.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                log::warn!("vGPU {id} continues in process {}: {error}", process.pid());
                let found = Found::Foreign(error.to_string());
                self.take_over(env, vgpu, (process, context), found, gpu_was_running);
                if !gpu_runs {
                    self.fail_for_lost_gpu(id);
                }
                return None;
            }
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                log::warn!("vGPU {id} continues in process {}: {error}", process.pid());
                self.take_over(env, vgpu, (process, context), Found::Silent, gpu_was_running);
                if !gpu_runs {
                    self.fail_for_lost_gpu(id);
                }
                return None;
            }
            Err(error) => log::warn!("Replacing the worker of vGPU {id}: {error}"),
        }
        process.end(Duration::ZERO);
        kill_context(context);
        run_dir::remove(&folder);
        Some(vgpu)
    }

    fn take_over(
        &mut self,
        env: &Environment,
        mut vgpu: Vgpu,
        (process, context): (Process, Option<Process>),
        found: Found,
        gpu_was_running: bool,
    ) {
        let id = vgpu.id;
        child_logs::resume(&env.run_dir.context_log(id), context::log_name(id));
        vgpu.context = context.map(|process| Context::watched(env, id, process));
        let answers = !matches!(found, Found::Silent);
        vgpu.adopt(env, process, found);
        if let Err(error) = self.partitions.admit(id, vgpu.profile.vram_bytes) {
            log::error!("vGPU {id}: {error}");
        }
        // A GPU that is not connected keeps its earlier settings.
        if self.is_ready() && (gpu_was_running || vgpu.context.is_none()) {
            self.readmit(env, &vgpu, answers);
            let scheduled = self.schedule(id, vgpu.settings.share, vgpu.profile.max_instances);
            // Attributes that are not given have this manager's defaults, not the earlier
            // manager's.
            let limited = self.set_quotas(id, &vgpu.settings.quotas);
            for error in [scheduled, limited].into_iter().filter_map(Result::err) {
                log::error!("vGPU {id}: {error}");
            }
        }
        let begins = vgpu.context.is_some() && self.is_ready() && !gpu_was_running;
        self.vgpus.insert(id, vgpu);
        self.place_worker(env, id);
        if begins && let Err(error) = self.readmit_context(env, id) {
            log::error!("vGPU {id} does not continue on its new GPU process: {error}");
            self.fail_for_lost_gpu(id);
        }
    }

    /// Passes a new connection to the GPU to the worker of an adopted vGPU, if the backend uses
    /// one. A worker that does not answer takes the connection when it continues, and is not waited
    /// for.
    fn readmit(&mut self, env: &Environment, vgpu: &Vgpu, answers: bool) {
        let (id, spec) = (vgpu.id, vgpu.profile.client_spec(vgpu.id));
        let fd = match self.call_gpu(|gpu| gpu.readmit(&spec)) {
            Ok(Some(fd)) => fd,
            Ok(None) => return,
            Err(error) => return log::error!("vGPU {id} cannot be scheduled: {error}"),
        };
        let control = env.run_dir.worker_socket(id);
        let attach = move || worker_client::attach(&control, fd.as_fd());
        let report = move |attached: io::Result<()>| match attached {
            Ok(()) => {}
            Err(error) if !answers => log::warn!("vGPU {id} is scheduled later: {error}"),
            Err(error) => log::error!("vGPU {id} cannot be scheduled: {error}"),
        };
        if answers {
            report(attach());
        } else if let Err(error) = env.watcher.run_aside("attach", attach, move |_, it| report(it))
        {
            log::error!("vGPU {id} cannot be scheduled: {error}");
        }
    }

    /// Evicts clients of the GPU that have no vGPU.
    pub fn evict_unknown(&mut self) {
        if !self.is_ready() {
            return;
        }
        let Ok(report) = self.call_gpu(|gpu| gpu.usage()) else { return };
        for (id, _) in report.vgpus {
            if !self.vgpus.contains_key(&id) {
                self.evict(id);
            }
        }
    }
}

/// Ends a vGPU that cannot be adopted nor started again.
pub fn discard(env: &Environment, id: VgpuId, process: Option<Process>, error: &ErrorDetail) {
    log::error!("vGPU {id} ran before, and is ended: {error}");
    if let Some(process) = process {
        process.end(Duration::ZERO);
    }
    run_dir::remove(&env.run_dir.vgpu(id));
}
