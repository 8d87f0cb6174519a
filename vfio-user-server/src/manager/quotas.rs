//! Limits besides time. A GPU that keeps quotas is told them when a vGPU is admitted and whenever they change; on others a
//! vGPU is admitted with no more, and what cannot be kept at all is refused.

use mdev_core::definition::{Attribute, Attrs, Quotas};
use mdev_core::gpu::{ClientSpec, GpuCapabilities};
use mdev_core::ids::VgpuId;

use super::parent::Parent;
use super::vgpu::Vgpu;
use super::{Manager, Result};
use crate::api::model::{ErrorCode, ErrorDetail};

impl Parent {
    /// Whether it is one that keeps quotas.
    pub fn keeps_quotas(&self) -> bool {
        self.capabilities().contains(GpuCapabilities::QUOTAS)
    }

    /// Refuses attributes that it could not keep.
    pub fn check_attrs(&self, attrs: &Attrs) -> Result<()> {
        let needs = |name| Attribute::named(name).map_or(GpuCapabilities::empty(), |one| one.needs);
        match attrs.iter().find(|(name, _)| !self.capabilities().contains(needs(name))) {
            None => Ok(()),
            Some((name, _)) => {
                let what = format!(
                    "Parent {} cannot keep attribute {name:?}; remove it, or choose another parent",
                    self.name()
                );
                Err(ErrorDetail::new(ErrorCode::Invalid, what))
            }
        }
    }

    /// What a vGPU is admitted with.
    pub fn client_spec(&self, vgpu: &Vgpu) -> ClientSpec {
        let mut spec = vgpu.profile.client_spec(vgpu.id);
        if !self.keeps_quotas() {
            let Quotas { max_channels, max_pinned, .. } = vgpu.settings.quotas;
            spec.max_channels = spec.max_channels.min(max_channels.unwrap_or(u32::MAX));
            spec.max_import_bytes = spec.max_import_bytes.min(max_pinned.unwrap_or(u64::MAX));
        }
        spec
    }

    /// Refuses what it could change only by admitting a vGPU anew.
    pub fn check_change(&self, before: &Quotas, after: &Quotas) -> Result<()> {
        let admitted = |quotas: &Quotas| (quotas.max_channels, quotas.max_pinned);
        if self.keeps_quotas() || admitted(before) == admitted(after) {
            return Ok(());
        }
        let what = format!(
            "Parent {} cannot change \"max_channels\" and \"max_pinned\" while the vGPU runs; stop it first",
            self.name()
        );
        Err(ErrorDetail::new(ErrorCode::Conflict, what))
    }
}

impl Manager {
    /// Tells a GPU that keeps quotas those of a vGPU. In force when this returns.
    pub(super) fn set_quotas(&mut self, index: usize, id: VgpuId, quotas: &Quotas) -> Result<()> {
        let parent = &self.parents[index];
        if !parent.keeps_quotas() {
            return Ok(());
        }
        let quotas = quotas.of_silicon(parent.hang_timeout());
        self.with_gpu(index, |gpu| gpu.set_quotas(id, &quotas))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::knobs::Knobs;
    use super::super::screens::Rotation;
    use super::*;

    #[test]
    fn what_a_gpu_cannot_keep_is_refused() {
        // One that has not said what it can do can do nothing.
        let nowhere = Path::new("/nowhere");
        let (knobs, rotation) = (Knobs::load(nowhere, "soft0"), Rotation::load(nowhere, "soft0"));
        let parent = Parent::new("soft:soft0".parse().unwrap(), knobs, rotation);
        let attrs = [("submissions".to_owned(), "1000".to_owned())].into_iter().collect();
        let refused = parent.check_attrs(&attrs).unwrap_err().message;
        assert!(refused.starts_with("Parent soft0 cannot keep attribute"), "{refused}");
        let before = Quotas::default();
        let after = Quotas { max_channels: Some(3), ..before };
        parent.check_change(&before, &before).unwrap();
        let refused = parent.check_change(&before, &after).unwrap_err().message;
        assert!(refused.starts_with("Parent soft0 cannot change \"max_channels\""), "{refused}");
    }
}
