//! Names of vGPUs. A name is unique on the host: among all definitions and all started vGPUs.
//!
//! The name of a defined vGPU is that of its definition. It applies to the running vGPU, too.

use mdev_core::definition::{Attrs, VgpuName};
use mdev_core::ids::VgpuId;

use crate::manager::definitions::PlacedDefinition;
use crate::manager::{Manager, Result};
use vgpud_api::{ErrorCode, ErrorDetail};

impl Manager {
    /// Returns the vGPU of a name.
    pub fn named(&self, name: &VgpuName) -> Result<VgpuId> {
        match self.all_named(name)?.as_slice() {
            [id] => Ok(*id),
            [] => {
                let what = format!(
                    "There is no vGPU named {name}; `vgpuctl list` and `vgpuctl list --defined` show \
                     the existing vGPUs"
                );
                Err(ErrorDetail::new(ErrorCode::NotFound, what))
            }
            // Files of definitions can be written by hand.
            several => {
                let ids: Vec<_> = several.iter().map(ToString::to_string).collect();
                let what = format!(
                    "Several vGPUs are named {name}: {}; rename all but one (`vgpuctl modify -u UUID \
                     --name NAME`)",
                    ids.join(", ")
                );
                Err(ErrorDetail::new(ErrorCode::Conflict, what))
            }
        }
    }

    /// Returns the vGPUs of a name: those whose definition has the name, and transient ones.
    fn all_named(&self, name: &VgpuName) -> Result<Vec<VgpuId>> {
        let defined = self.definitions.names()?;
        let transient =
            self.parents.vgpus().filter(|vgpu| defined.iter().all(|(id, _)| *id != vgpu.id));
        let named = transient.filter(|vgpu| vgpu.name().as_ref() == Some(name)).map(|vgpu| vgpu.id);
        let defined = defined.iter().filter(|(_, own)| own.as_ref() == Some(name));
        Ok(defined.map(|(id, _)| *id).chain(named).collect())
    }

    /// Refuses attributes of a vGPU with the name of another vGPU.
    pub(super) fn check_name(&self, id: VgpuId, attrs: &Attrs) -> Result<()> {
        let Some(name) = attrs.name() else { return Ok(()) };
        match self.all_named(&name)?.into_iter().find(|other| *other != id) {
            Some(other) => {
                let what = format!("vGPU {other} has the name {name} already; choose another name");
                Err(ErrorDetail::new(ErrorCode::Exists, what))
            }
            None => Ok(()),
        }
    }

    /// Gives new attributes of a started vGPU the name of its definition. Refuses another name.
    pub(super) fn keep_name(stored: &PlacedDefinition, attrs: &mut Attrs) -> Result<()> {
        let own = stored.definition.attrs.name();
        if attrs.name().is_some_and(|name| own.as_ref() != Some(&name)) {
            let what = format!(
                "The name of vGPU {} is that of its definition; change it there (`vgpuctl modify` \
                 without --live)",
                stored.id
            );
            return Err(ErrorDetail::new(ErrorCode::Conflict, what));
        }
        attrs.set_name(own.as_ref());
        Ok(())
    }

    /// Gives a started vGPU, if it is started, another name.
    pub(super) fn rename_started(&mut self, id: VgpuId, name: Option<&VgpuName>) {
        let started = self.parents.of_vgpu_mut(id).and_then(|parent| parent.vgpu_mut(id));
        if let Some(vgpu) = started.filter(|vgpu| vgpu.name().as_ref() != name) {
            vgpu.rename(&self.env.run_dir, name);
        }
    }
}
