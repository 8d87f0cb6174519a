//! Workers of a parent's vGPUs: restart, stop and end.

use std::time::Instant;

use mdev_core::ids::VgpuId;
use tokio::sync::oneshot;

use super::Parent;
use crate::manager::environment::Environment;
use crate::manager::run_dir;
use crate::manager::vgpu::lifecycle::State;
use crate::manager::vgpu::{AfterDeath, Vgpu};
use crate::manager::watcher::Generation;

impl Parent {
    /// Handles the end of a worker.
    pub fn worker_exited(&mut self, env: &Environment, id: VgpuId, generation: Generation) {
        let vgpu = self.vgpus.get_mut(&id).filter(|vgpu| vgpu.has_generation(generation));
        match vgpu.map(Vgpu::worker_died) {
            Some(AfterDeath::Stopped) => self.remove(env, id),
            Some(AfterDeath::Restarting) => self.evict(id),
            Some(AfterDeath::GivenUp) => self.release(id),
            Some(AfterDeath::FailedBefore) | None => {}
        }
    }

    /// Restarts and kills the workers for which that is due.
    pub fn update_workers(&mut self, env: &Environment, now: Instant) {
        let due = self.vgpus().filter(|vgpu| vgpu.state().deadline().is_some_and(|at| at <= now));
        let due: Vec<_> = due.map(|vgpu| vgpu.id).collect();
        for id in due {
            let Some(vgpu) = self.vgpus.get_mut(&id) else { continue };
            match vgpu.state() {
                State::Stopping { .. } => vgpu.kill(),
                State::Restarting { .. } => self.restart(env, id),
                _ => {}
            }
        }
    }

    fn restart(&mut self, env: &Environment, id: VgpuId) {
        let Some(vgpu) = self.vgpus.get_mut(&id) else { return };
        vgpu.begin_restart();
        // The GPU knows nothing of the slices of its former client.
        self.unschedule(id);
        if let Err(error) = self.launch(env, id) {
            if let Some(vgpu) = self.vgpus.get_mut(&id) {
                vgpu.give_up(&error.message);
            }
            self.release(id);
        }
    }

    /// Begins to stop a vGPU. `done` is notified when the vGPU is removed.
    pub fn stop_vgpu(&mut self, env: &Environment, id: VgpuId, done: oneshot::Sender<()>) {
        let Some(vgpu) = self.vgpus.get_mut(&id) else { return };
        if !vgpu.begin_stop(done) {
            self.remove(env, id);
        }
    }

    /// Waits until `deadline` for workers that were told to exit, kills the others, and removes all
    /// vGPUs' folders.
    pub fn end_workers(&mut self, env: &Environment, deadline: Instant) {
        for (id, vgpu) in std::mem::take(&mut self.vgpus) {
            vgpu.end(deadline.saturating_duration_since(Instant::now()));
            run_dir::remove(&env.run_dir.vgpu(id));
        }
    }
}
