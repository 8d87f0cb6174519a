//! Checks of definitions against a parent.

use mdev_core::definition::{Attribute, Attrs, Definition};
use mdev_core::ids::VgpuId;

use super::Parent;
use crate::manager::Result;
use crate::manager::run_dir::RunDir;
use crate::manager::vgpu::{Vgpu, settings};
use crate::vgpu_names;
use vgpud_api::{ErrorCode, ErrorDetail};
use vgpud_host::users::Account;

impl Parent {
    /// Builds the vGPU of a definition, and refuses a definition that cannot be started. `owner`
    /// applies to definitions without that attribute.
    pub fn build(&self, id: VgpuId, definition: &Definition, owner: Account) -> Result<Vgpu> {
        let profile = self.profile(&definition.mdev_type)?;
        let parent = self.name().to_owned();
        let vgpu = Vgpu::new(id, parent, profile, definition.clone(), owner)?;
        self.check_attrs(&definition.attrs)?;
        Ok(vgpu)
    }

    /// Refuses new attributes that cannot be set while a vGPU runs.
    pub fn check_live_change(&self, vgpu: &Vgpu, definition: &Definition) -> Result<()> {
        check_live_attrs(&vgpu.definition.attrs, &definition.attrs)?;
        let settings = settings(definition)?;
        self.check_attrs(&definition.attrs)?;
        self.check_quota_change(&vgpu.settings.quotas, &settings.quotas)
    }

    /// Applies new attributes, which were checked, to a running vGPU.
    pub fn change_live(
        &mut self,
        run_dir: &RunDir,
        id: VgpuId,
        definition: Definition,
    ) -> Result<()> {
        let settings = settings(&definition)?;
        self.reschedule(id, settings.share)?;
        self.set_quotas(id, &settings.quotas)?;
        if let Some(vgpu) = self.vgpus.get_mut(&id) {
            vgpu.definition = definition;
            vgpu.settings = settings;
            vgpu_names::set(id, vgpu.name());
            if let Err(error) = vgpu.write_record(run_dir) {
                log::warn!("A later manager will not know vGPU {id}'s change: {error}");
            }
        }
        Ok(())
    }
}

/// Refuses a change of attributes that are fixed while a vGPU runs.
fn check_live_attrs(before: &Attrs, after: &Attrs) -> Result<()> {
    for (name, value) in after.iter().chain(before.iter()) {
        let fixed = Attribute::named(name).is_ok_and(|attribute| !attribute.live);
        if fixed && after.get(name) != before.get(name) {
            let what = format!(
                "Attribute {name:?} cannot change while the vGPU runs ({value:?} now or asked); stop it first"
            );
            return Err(ErrorDetail::new(ErrorCode::Conflict, what));
        }
    }
    Ok(())
}
