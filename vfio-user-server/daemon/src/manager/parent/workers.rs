//! Workers of a parent's vGPUs: restart, stop and end.

use std::time::Instant;

use mdev_core::ids::VgpuId;

use super::Parent;
use crate::manager::environment::Environment;
use crate::manager::vgpu::lifecycle::State;
use crate::manager::vgpu::{AfterDeath, StopWaiter, Vgpu};
use crate::manager::watcher::Generation;
use vgpud_api::ErrorCode;

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
                State::Stopping { .. } => vgpu.kill(self.scheduling.usage(id).imported_bytes),
                State::Killed { .. } => self.give_up_stop(id),
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
            let is_pause = self.is_ready() || self.has_contexts();
            if error.code == ErrorCode::Unavailable && is_pause {
                self.evict(id);
                if let Some(vgpu) = self.vgpus.get_mut(&id) {
                    vgpu.postpone(&error.message);
                }
                return;
            }
            if let Some(vgpu) = self.vgpus.get_mut(&id) {
                vgpu.give_up(&error.message);
            }
            self.release(id);
        }
    }

    /// Stops waiting for a killed worker that does not end. A GPU process gives the vGPU's
    /// resources back all the same; without one, the driver frees them when the worker ends.
    fn give_up_stop(&mut self, id: VgpuId) {
        if let Some(vgpu) = self.vgpus.get_mut(&id) {
            vgpu.give_up_stop();
        }
        if self.connection.process().is_some() {
            self.release(id);
        }
    }

    /// Begins to stop a vGPU. `done` is notified when the vGPU is removed, or cannot be.
    pub fn stop_vgpu(&mut self, env: &Environment, id: VgpuId, done: StopWaiter) {
        let ending = self.vgpus.values().filter(|vgpu| vgpu.state().is_ending()).count();
        let Some(vgpu) = self.vgpus.get_mut(&id) else { return };
        if !vgpu.begin_stop(done, ending) {
            self.remove(env, id);
        }
    }

    /// Takes all vGPUs out, whose workers were told to exit.
    pub fn take_vgpus(&mut self) -> Vec<Vgpu> {
        std::mem::take(&mut self.vgpus).into_values().collect()
    }
}
