//! Requests about parents: their types, schedulers, screens and statistics.

use mdev_core::ids::VgpuId;
use vgpud_api::{
    ErrorCode, ErrorDetail, Focused, ModifyScheduler, ParentStats, PhysicalScreen,
    SchedulerDecision,
};

use super::Measured;
use crate::manager::parent::Parent;
use crate::manager::{Manager, Result};

impl Manager {
    /// Lists the parents.
    pub fn parents(&mut self) -> Vec<vgpud_api::Parent> {
        self.refresh_screens();
        self.parents.iter().map(Parent::describe).collect()
    }

    /// Lists the types of all parents.
    pub fn types(&self) -> Vec<vgpud_api::ParentTypes> {
        self.parents.iter().map(Parent::types).collect()
    }

    /// Lists the schedulers of all parents.
    pub fn schedulers(&self) -> Vec<vgpud_api::Scheduler> {
        self.parents.iter().map(Parent::scheduler).collect()
    }

    /// Describes the scheduler of a parent.
    pub fn scheduler(&self, parent: &str) -> Result<vgpud_api::Scheduler> {
        Ok(self.parents.get(parent)?.scheduler())
    }

    /// Changes the scheduler's settings of a parent, at once and for later managers.
    pub fn modify_scheduler(
        &mut self,
        parent: &str,
        change: &ModifyScheduler,
    ) -> Result<vgpud_api::Scheduler> {
        self.parents.get_mut(parent)?.modify_scheduler(change)
    }

    /// Lists the last decisions of a parent's scheduler, oldest first.
    pub fn scheduler_log(&self, parent: &str) -> Result<Vec<SchedulerDecision>> {
        Ok(self.parents.get(parent)?.scheduler_log())
    }

    /// Returns the statistics of started vGPUs, by UUID, and of parents.
    pub fn stats(&mut self) -> (Vec<Measured>, Vec<ParentStats>) {
        let parents = self.parents.iter_mut().map(Parent::statistics).collect();
        let mut vgpus = Vec::new();
        for parent in self.parents.iter() {
            vgpus.extend(parent.vgpus().map(|vgpu| Measured {
                stats: parent.vgpu_statistics(vgpu),
                control: vgpu.control(&self.env.run_dir),
                owner: vgpu.owner(),
            }));
        }
        vgpus.sort_by_key(|measured| measured.stats.uuid);
        (vgpus, parents)
    }

    /// Reads the status of all physical screens.
    pub(super) fn refresh_screens(&mut self) {
        for parent in self.parents.iter_mut() {
            parent.refresh_screen();
        }
    }

    /// Shows a vGPU on its parent's physical screen and ends the rotation.
    pub fn focus(&mut self, id: VgpuId) -> Result<Focused> {
        // Refuses a vGPU without a display head.
        self.screen(id)?;
        match self.parents.of_vgpu_mut(id) {
            Some(parent) => parent.focus(id),
            None => Err(ErrorDetail::new(ErrorCode::Conflict, format!("vGPU {id} is not running"))),
        }
    }

    /// Rotates a parent's physical screen among its vGPUs, or ends the rotation.
    pub fn rotate(&mut self, parent: &str, seconds: Option<u64>) -> Result<PhysicalScreen> {
        self.parents.get_mut(parent)?.rotate(seconds)
    }
}
