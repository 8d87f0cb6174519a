//! Persistent definitions of vGPUs.

use std::path::Path;

use mdev_core::definition::{Definition, Start, Store, StoreError};
use mdev_core::ids::VgpuId;

use super::Result;
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
        let scan = self.store.scan().map_err(store_error)?;
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
        let scan = self.store.scan().map_err(store_error)?;
        let found = scan.definitions.into_iter().find(|stored| stored.vgpu == id);
        Ok(found.map(|stored| PlacedDefinition {
            id,
            parent: stored.parent,
            definition: stored.definition,
        }))
    }

    /// Writes a definition. It is on disk when this returns.
    pub fn save(&self, placed: &PlacedDefinition) -> Result<()> {
        self.store.save(&placed.parent, placed.id, &placed.definition).map_err(store_error)
    }

    /// Removes a definition.
    pub fn remove(&self, placed: &PlacedDefinition) -> Result<()> {
        self.store.remove(&placed.parent, placed.id).map(drop).map_err(store_error)
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
