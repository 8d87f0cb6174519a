//! Limits besides time. A GPU with the capability QUOTAS enforces and changes them while a vGPU
//! runs. On other GPUs they are fixed at admission, and attributes that the GPU cannot enforce are
//! refused.

use mdev_core::definition::{Attribute, Attrs, Quotas};
use mdev_core::gpu::{ClientSpec, GpuCapabilities};
use mdev_core::ids::VgpuId;

use super::Parent;
use crate::manager::Result;
use crate::manager::vgpu::Vgpu;
use vgpud_api::{ErrorCode, ErrorDetail};

impl Parent {
    fn enforces_quotas(&self) -> bool {
        self.capabilities().contains(GpuCapabilities::QUOTAS)
    }

    /// Refuses attributes that the GPU cannot enforce.
    pub fn check_attrs(&self, attrs: &Attrs) -> Result<()> {
        let needs = |name| Attribute::named(name).map_or(GpuCapabilities::empty(), |one| one.needs);
        match attrs.iter().find(|(name, _)| !self.capabilities().contains(needs(name))) {
            None => Ok(()),
            Some((name, _)) => {
                let what = format!(
                    "Parent {} cannot enforce attribute {name:?}; remove it, or choose another parent",
                    self.name()
                );
                Err(ErrorDetail::new(ErrorCode::Invalid, what))
            }
        }
    }

    /// Returns the specification that a vGPU is admitted with.
    pub(super) fn client_spec(&self, vgpu: &Vgpu) -> ClientSpec {
        let mut spec = vgpu.profile.client_spec(vgpu.id);
        if !self.enforces_quotas() {
            let Quotas { max_channels, max_pinned, .. } = vgpu.settings.quotas;
            spec.max_channels = spec.max_channels.min(max_channels.unwrap_or(u32::MAX));
            spec.max_import_bytes = spec.max_import_bytes.min(max_pinned.unwrap_or(u64::MAX));
        }
        spec
    }

    /// Refuses a change that takes a new admission.
    pub(super) fn check_quota_change(&self, before: &Quotas, after: &Quotas) -> Result<()> {
        let admitted = |quotas: &Quotas| (quotas.max_channels, quotas.max_pinned);
        if self.enforces_quotas() || admitted(before) == admitted(after) {
            return Ok(());
        }
        let what = format!(
            "Parent {} cannot change \"max_channels\" and \"max_pinned\" while the vGPU runs; stop it first",
            self.name()
        );
        Err(ErrorDetail::new(ErrorCode::Conflict, what))
    }

    /// Sets a vGPU's quotas on a GPU that enforces them.
    pub(super) fn set_quotas(&mut self, id: VgpuId, quotas: &Quotas) -> Result<()> {
        if !self.enforces_quotas() {
            return Ok(());
        }
        let quotas = quotas.for_gpu(self.hang_timeout());
        self.call_gpu(|gpu| gpu.set_quotas(id, &quotas))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn quotas_that_a_gpu_cannot_enforce_are_refused() {
        // A parent that was never connected has no capabilities.
        let parent = Parent::new("soft:soft0".parse().unwrap(), Path::new("/nowhere"));
        let attrs = [("submissions".to_owned(), "1000".to_owned())].into_iter().collect();
        let refused = parent.check_attrs(&attrs).unwrap_err().message;
        assert!(refused.starts_with("Parent soft0 cannot enforce attribute"), "{refused}");
        let before = Quotas::default();
        let after = Quotas { max_channels: Some(3), ..before };
        parent.check_quota_change(&before, &before).unwrap();
        let refused = parent.check_quota_change(&before, &after).unwrap_err().message;
        assert!(refused.starts_with("Parent soft0 cannot change \"max_channels\""), "{refused}");
    }
}
