//! Finding what an earlier manager left running, and clearing away what it left dead.
//!
//! A vGPU that ran stays a vGPU that runs: a worker that answers is adopted, with the VM that is attached to it, and
//! one that is gone is started again. One of a release that is not understood keeps its VM, and is left alone until it is
//! stopped. (After a reboot the run directory is empty, and only `auto` definitions start.)

use std::io;
use std::time::Duration;

use mdev_core::gpu::GpuError;
use mdev_core::ids::VgpuId;

use super::parent::Adoption;
use super::vgpu::{self, Vgpu};
use super::{Manager, ask, folders};
use crate::private::WorkerStatus;
use crate::spawn::Process;

/// What is to be done with what was found in a vGPU's folder.
enum Found {
    /// Its worker answers.
    Alive(Box<Vgpu>, Process, Box<WorkerStatus>),
    /// Its worker is of another release. Whether its GPU is there is what the manager knows itself.
    Foreign(Box<Vgpu>, Process, bool),
    /// It ran, and does not any more.
    Dead(Box<Vgpu>),
}

impl Manager {
    /// Brings up parents and what ran before.
    pub(super) fn begin(&mut self) {
        self.clear_other_parents();
        let mut adopted = Vec::new();
        for index in 0..self.parents.len() {
            let found = self.parents[index].adopt(&self.folders);
            adopted.push(found != Adoption::Nothing);
            match found {
                Adoption::Nothing => self.start_parent(index),
                Adoption::Foreign => self.watch_parent(index),
                Adoption::Adopted => {
                    log::info!("Adopted parent {}", self.parents[index].name());
                    self.watch_parent(index);
                }
            }
        }
        let found: Vec<_> = folders::names(&self.folders.vgpus())
            .iter()
            .filter_map(|name| self.look_into(name, &adopted))
            .collect();
        let mut dead = Vec::new();
        for found in found {
            match found {
                Found::Alive(vgpu, process, status) => self.take_in(*vgpu, process, &status),
                Found::Foreign(vgpu, process, gpu) => self.leave_alone(*vgpu, process, gpu),
                Found::Dead(vgpu) => dead.push(vgpu),
            }
        }
        self.evict_strangers();
        let names: Vec<_> = self.parents.iter().map(|parent| parent.name().to_owned()).collect();
        for name in names {
            self.replace_foreign(&name);
        }
        for vgpu in dead {
            let id = vgpu.id;
            match self.start_vgpu(*vgpu) {
                Ok(()) => log::info!("vGPU {id} ran before, and is started again"),
                Err(error) => log::error!("vGPU {id} ran before, and cannot be started: {error}"),
            }
        }
    }

    /// Ends the software GPUs of parents that are not configured any more.
    fn clear_other_parents(&self) {
        for name in folders::names(&self.folders.parents()) {
            if self.parent_index(&name).is_err() {
                log::info!("Parent {name} is not configured any more; ending it");
                super::parent::end_recorded(&self.folders.parent(&name));
            }
        }
    }

    /// What there is behind a name among the vGPUs' folders. What is of no use is ended and removed.
    fn look_into(&self, name: &str, adopted: &[bool]) -> Option<Found> {
        let folder = self.folders.vgpus().join(name);
        let id = name.parse::<VgpuId>().ok().filter(|id| id.to_string() == name);
        let run = folders::read_run::<vgpu::Run>(&folder);
        let (Some(id), Some(run)) = (id, run) else {
            // A worker that was started and not yet written down cannot have a VM that matters.
            if let Err(error) = ask::stop(&folder.join("control.sock")) {
                log::debug!("{}: {error}", folder.display());
            }
            folders::remove(&folder);
            return None;
        };
        let process = Process::find(run.process);
        let mut vgpu = match self.vgpu(id, &run.parent, &run.definition) {
            Ok(vgpu) => vgpu,
            // Its GPU cannot say what it is. The worker ends with its VM, since it has no manager.
            Err(error) if self.is_on_foreign(&run.parent) && process.is_some() => {
                log::error!("vGPU {id} goes on for its VM, and is nobody's: {error}");
                return None;
            }
            Err(error) => {
                log::error!("vGPU {id} ran before, and is ended: {error}");
                if let Some(process) = process {
                    process.end(Duration::ZERO);
                }
                folders::remove(&folder);
                return None;
            }
        };
        let its_gpu = self.parent_index(&run.parent).is_ok_and(|index| adopted[index]);
        if let Some(process) = process {
            match ask::status(&self.folders.worker_socket(id)) {
                Ok(status) if status.client.is_some() || (its_gpu && status.gpu_ok) => {
                    return Some(Found::Alive(Box::new(vgpu), process, Box::new(status)));
                }
                Ok(_) => log::info!("vGPU {id} lost its GPU; starting it again"),
                // What it serves must not pay for an upgrade.
                Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                    log::warn!("vGPU {id} goes on in process {}, unasked: {error}", process.pid());
                    vgpu.foreign = Some(error.to_string());
                    return Some(Found::Foreign(Box::new(vgpu), process, its_gpu));
                }
                Err(error) => log::warn!("Replacing the worker of vGPU {id}: {error}"),
            }
            process.end(Duration::ZERO);
        }
        folders::remove(&folder);
        Some(Found::Dead(Box::new(vgpu)))
    }

    fn is_on_foreign(&self, parent: &str) -> bool {
        self.parent_index(parent).is_ok_and(|index| self.parents[index].is_foreign())
    }

    fn take_in(&mut self, vgpu: Vgpu, process: Process, status: &WorkerStatus) {
        let id = vgpu.id;
        let vm =
            status.client.map_or_else(String::new, |vm| format!(", used by process {}", vm.pid));
        log::info!("Adopted vGPU {id} in process {}{vm}", process.pid());
        let gpu_ok = status.gpu_ok;
        self.adopt_vgpu(vgpu, process, status.client.is_some());
        if !gpu_ok {
            self.fail_for_lost_gpu(id);
        }
    }

    /// Counts in a vGPU whose worker cannot be asked anything. It has its place and its share; its VM goes on.
    fn leave_alone(&mut self, vgpu: Vgpu, process: Process, gpu_ok: bool) {
        let id = vgpu.id;
        self.adopt_vgpu(vgpu, process, true);
        if !gpu_ok {
            self.fail_for_lost_gpu(id);
        }
    }

    /// Frees what vGPUs that are not there any more hold on GPUs that were adopted.
    fn evict_strangers(&mut self) {
        for index in 0..self.parents.len() {
            if !self.parents[index].is_ready() {
                continue;
            }
            let Ok(report) = self.with_gpu(index, |gpu| gpu.usage()) else { continue };
            for (id, _) in report.vgpus {
                if self.vgpus.contains_key(&id) {
                    continue;
                }
                let evicted = self.with_gpu(index, |gpu| match gpu.evict(id) {
                    Err(GpuError::NotFound(_)) => Ok(()),
                    other => other,
                });
                if let Err(error) = evicted {
                    log::warn!("Cannot evict vGPU {id}, which has no worker: {error}");
                }
            }
        }
    }
}
