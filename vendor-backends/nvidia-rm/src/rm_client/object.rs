//! Objects of the resource manager. An object is freed when it is dropped, after its children.

use std::fmt;
use std::sync::Arc;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::RmClient;
use crate::controls::params_bytes;
use crate::rm::RmError;

/// GPU virtual address space, and its range for mappings.
#[derive(Debug)]
pub struct AddressSpace {
    // Freed in this order.
    /// Range that contains all addresses.
    pub range: Arc<Object>,
    /// Page tables.
    pub space: Arc<Object>,
    /// Device of the address space.
    pub device: Arc<Object>,
}

/// Object of the resource manager. A reference to the parent ensures that children are freed first.
pub struct Object {
    rm_client: Arc<RmClient>,
    parent: Option<Arc<Object>>,
    handle: u32,
}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Object({:#x})", self.handle)
    }
}

impl Object {
    pub(super) fn new(
        rm_client: Arc<RmClient>,
        parent: Option<Arc<Self>>,
        handle: u32,
    ) -> Arc<Self> {
        Arc::new(Self { rm_client, parent, handle })
    }

    /// Returns the object's handle.
    pub fn handle(&self) -> u32 {
        self.handle
    }

    /// Returns the object below which this one is, unless that is the client.
    pub fn parent(&self) -> Option<&Arc<Self>> {
        self.parent.as_ref()
    }

    /// Calls a control of the object.
    pub fn control<P: IntoBytes + FromBytes + Immutable>(
        &self,
        command: u32,
        params: &mut P,
    ) -> Result<(), RmError> {
        self.control_bytes(command, params.as_mut_bytes())
    }

    /// Calls a control whose parameters may be shorter in the driver's series.
    pub fn control_in_series<P: IntoBytes + FromBytes + Immutable>(
        &self,
        command: u32,
        params: &mut P,
    ) -> Result<(), RmError> {
        let params = params.as_mut_bytes();
        let bytes = params_bytes(command, self.rm_client.layout()).unwrap_or(params.len());
        let len = params.len().min(bytes);
        self.control_bytes(command, &mut params[..len])
    }

    /// Calls a control with parameters of a size that depends on the driver's series.
    pub fn control_bytes(&self, command: u32, params: &mut [u8]) -> Result<(), RmError> {
        self.rm_client.control(self.handle, command, params)
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        if !self.rm_client.frees_objects() {
            return;
        }
        let parent = self.parent.as_ref().map_or(self.rm_client.root(), |parent| parent.handle);
        if let Err(error) = self.rm_client.free(parent, self.handle) {
            log::debug!("{error}");
        }
    }
}
