//! Start of a manager: running GPU processes and workers of an earlier manager are adopted, the
//! others are started.
//!
//! The run directory is empty after a reboot. Only vGPUs with start policy `auto` start then.

use std::collections::BTreeMap;

use mdev_core::ids::VgpuId;

use super::parent::{discard, end_recorded};
use super::vgpu::Record;
use super::{Manager, run_dir};
use crate::spawn::Process;
use crate::worker_client;

impl Manager {
    /// Starts or adopts the parents, adopts their vGPUs, and starts vGPUs whose worker is gone.
    pub fn begin(&mut self) {
        self.end_removed_parents();
        let mut was_running = BTreeMap::new();
        for parent in self.parents.iter_mut() {
            was_running.insert(parent.name().to_owned(), parent.begin(&self.env));
        }
        let mut dead = Vec::new();
        let recorded = self.recorded_vgpus();
        let sockets: Vec<_> =
            recorded.iter().map(|(id, _)| self.env.run_dir.worker_socket(*id)).collect();
        let statuses = worker_client::statuses(&sockets);
        for ((id, record), status) in recorded.into_iter().zip(statuses) {
            match self.parents.get_mut(&record.parent) {
                Ok(parent) => {
                    let gpu_was_running = was_running[&record.parent];
                    let running = gpu_was_running;
                    dead.extend(parent.adopt_vgpu(&self.env, id, &record, status, running));
                }
                Err(error) => discard(&self.env, id, Process::find(record.process), &error),
            }
        }
        for parent in self.parents.iter_mut() {
            parent.evict_unknown();
            parent.replace_foreign();
        }
        // Processes have ended while there was no manager.
        self.env.cgroups.remove_empty();
        for vgpu in dead {
            let id = vgpu.id;
            let started = match self.parents.get_mut(&vgpu.parent) {
                Ok(parent) => parent.start_vgpu(&self.env, vgpu),
                Err(error) => Err(error),
            };
            match started {
                Ok(()) => log::info!("vGPU {id} ran before, and is started again"),
                Err(error) => log::error!("vGPU {id} ran before, and cannot be started: {error}"),
            }
        }
    }

    /// Ends the GPU processes of parents that are no longer configured.
    fn end_removed_parents(&self) {
        for name in run_dir::names(&self.env.run_dir.parents()) {
            if self.parents.get(&name).is_err() {
                log::info!("Parent {name} is not configured any more; ending it");
                end_recorded(&self.env.run_dir.parent(&name));
            }
        }
    }

    /// Reads the records of vGPUs. Folders without a valid record are removed.
    fn recorded_vgpus(&self) -> Vec<(VgpuId, Record)> {
        let vgpus = self.env.run_dir.vgpus();
        let names = run_dir::names(&vgpus);
        let recorded = names.iter().filter_map(|name| {
            let folder = vgpus.join(name);
            let id = name.parse::<VgpuId>().ok().filter(|id| id.to_string() == *name);
            let record = run_dir::read_record::<Record>(&folder);
            if let (Some(id), Some(record)) = (id, record) {
                return Some((id, record));
            }
            // The record is written right after the worker's start, so no VM can depend on this
            // worker.
            if let Err(error) = worker_client::stop(&folder.join("control.sock")) {
                log::debug!("{}: {error}", folder.display());
            }
            run_dir::remove(&folder);
            None
        });
        recorded.collect()
    }
}
