//! Persistent definitions of vGPUs.

use std::path::Path;

use mdev_core::definition::store::Scan;
use mdev_core::definition::{Definition, Start, Store, StoreError, VgpuName};
use mdev_core::ids::VgpuId;

use super::Result;
use crate::vgpu_names;
use vgpud_api::{ErrorCode, ErrorDetail};

/// Definition of a vGPU together with its parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedDefinition {
    /// UUID of the vGPU.
    pub id: VgpuId,
    /// Name of the parent.
    pub parent: String,
    /// Type, start policy and attributes.
    pub definition: Definition,
}

/// Definitions on disk.
#[derive(Debug)]
pub struct Definitions {
    store: Store,
}

fn store_error(error: StoreError) -> ErrorDetail {
    let code = match error {
        StoreError::Parent(_) => ErrorCode::Invalid,
        _ => ErrorCode::Internal,
    };
    ErrorDetail::new(code, error)
}

impl Definitions {
    /// Opens the directory of definitions.
    pub fn open(dir: &Path) -> anyhow::Result<Self> {
        let store = Store::open(dir)
            .map_err(|error| anyhow::anyhow!("{error}; name another with --config-dir"))?;
        Ok(Self { store })
    }

    /// Reads all definitions, by parent and UUID. Files that cannot be read are logged.
    pub fn all(&self) -> Result<Vec<PlacedDefinition>> {
        let scan = self.scan()?;
        for problem in &scan.problems {
            log::warn!("{}", problem.error);
        }
        let placed = scan.definitions.into_iter().map(|stored| PlacedDefinition {
            id: stored.vgpu,
            parent: stored.parent,
            definition: stored.definition,
        });
        Ok(placed.collect())
    }

    /// Reads the definition of a vGPU.
    pub fn find(&self, id: VgpuId) -> Result<Option<PlacedDefinition>> {
        let scan = self.scan()?;
        let found = scan.definitions.into_iter().find(|stored| stored.vgpu == id);
        Ok(found.map(|stored| PlacedDefinition {
            id,
            parent: stored.parent,
            definition: stored.definition,
        }))
    }

    /// Lists the vGPUs with a definition, with their names.
    pub fn names(&self) -> Result<Vec<(VgpuId, Option<VgpuName>)>> {
        let scan = self.scan()?;
        Ok(scan
            .definitions
            .iter()
            .map(|found| (found.vgpu, found.definition.attrs.name()))
            .collect())
    }

    /// Reads the directory, and records the names of its vGPUs.
    fn scan(&self) -> Result<Scan> {
        let scan = self.store.scan().map_err(store_error)?;
        for stored in &scan.definitions {
            vgpu_names::set(stored.vgpu, stored.definition.attrs.name());
        }
        Ok(scan)
    }

    /// Writes a definition. It is on disk when this returns.
    pub fn save(&self, placed: &PlacedDefinition) -> Result<()> {
        let definition = &placed.definition;
        self.store.save(&placed.parent, placed.id, definition).map_err(store_error)?;
        vgpu_names::set(placed.id, definition.attrs.name());
        Ok(())
    }

    /// Removes a definition.
    pub fn remove(&self, placed: &PlacedDefinition) -> Result<()> {
        self.store.remove(&placed.parent, placed.id).map_err(store_error)?;
        vgpu_names::set(placed.id, None);
        Ok(())
    }

    /// Lists the vGPUs with start policy `auto`, by parent and UUID. If the directory cannot be
    /// read, none is listed.
    pub fn auto_start(&self) -> Vec<VgpuId> {
        let all = self.all().unwrap_or_else(|error| {
            log::error!("No vGPU is started: {error}");
            Vec::new()
        });
        let auto = all.into_iter().filter(|placed| placed.definition.start == Start::Auto);
        auto.map(|placed| placed.id).collect()
    }
}
