//! Collection of all parents, with lookup by name and by vGPU.

use mdev_core::ids::VgpuId;

use super::Result;
use super::parent::Parent;
use super::vgpu::Vgpu;
use vgpud_api::{ErrorCode, ErrorDetail};

/// Parents in the order of the command line.
#[derive(Debug)]
pub struct Parents(Vec<Parent>);

impl Parents {
    /// Collects parents.
    pub fn new(parents: Vec<Parent>) -> Self {
        Self(parents)
    }

    /// Returns all parents.
    pub fn iter(&self) -> impl Iterator<Item = &Parent> {
        self.0.iter()
    }

    /// Returns all parents.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Parent> {
        self.0.iter_mut()
    }

    /// Returns the parent of that name.
    pub fn get(&self, name: &str) -> Result<&Parent> {
        self.0.iter().find(|parent| parent.name() == name).ok_or_else(|| self.not_found(name))
    }

    /// Returns the parent of that name.
    pub fn get_mut(&mut self, name: &str) -> Result<&mut Parent> {
        match self.0.iter().position(|parent| parent.name() == name) {
            Some(index) => Ok(&mut self.0[index]),
            None => Err(self.not_found(name)),
        }
    }

    fn not_found(&self, name: &str) -> ErrorDetail {
        let names: Vec<_> = self.0.iter().map(Parent::name).collect();
        ErrorDetail::new(
            ErrorCode::NotFound,
            format!("There is no parent {name:?}; there are {}", names.join(", ")),
        )
    }

    /// Returns all started vGPUs, by parent and UUID.
    pub fn vgpus(&self) -> impl Iterator<Item = &Vgpu> {
        self.0.iter().flat_map(Parent::vgpus)
    }

    /// Returns the number of started vGPUs.
    pub fn vgpu_count(&self) -> usize {
        self.vgpus().count()
    }

    /// Returns a started vGPU.
    pub fn vgpu(&self, id: VgpuId) -> Option<&Vgpu> {
        self.0.iter().find_map(|parent| parent.vgpu(id))
    }

    /// Returns the parent of a started vGPU.
    pub fn of_vgpu(&self, id: VgpuId) -> Option<&Parent> {
        self.0.iter().find(|parent| parent.vgpu(id).is_some())
    }

    /// Returns the parent of a started vGPU.
    pub fn of_vgpu_mut(&mut self, id: VgpuId) -> Option<&mut Parent> {
        self.0.iter_mut().find(|parent| parent.vgpu(id).is_some())
    }
}
