//! Memory that processes of one vGPU share, as CUDA's IPC does.
//!
//! A process lets others use a memory object (`NV_ESC_RM_SHARE`) and passes the handles of its client
//! and of the object to them. They make an object of their own of it (`NV_ESC_RM_DUP_OBJECT`). All
//! processes of a vGPU belong to its owner, so each of them may use what one has shared.

use super::FrontEnd;
use super::call::{Call, Stop};
use super::objects::{Kind, Object};
use crate::nvidia::sys::numbers::status;

impl FrontEnd {
    /// Carries out `NV_ESC_RM_SHARE`.
    pub(super) fn rm_share(&mut self, call: &mut Call<'_>) -> Result<(), Stop> {
        let file = self.files.control_of(call.file())?;
        self.clients.share(file, call.u32(0)?, call.u32(4)?)?;
        call.set_u32(20, status::OK)
    }

    /// Carries out `NV_ESC_RM_DUP_OBJECT`.
    pub(super) fn rm_dup_object(&mut self, call: &mut Call<'_>) -> Result<(), Stop> {
        let file = self.files.control_of(call.file())?;
        let (root, parent, handle) = (call.u32(0)?, call.u32(4)?, call.u32(8)?);
        let (other, source) = (call.u32(12)?, call.u32(16)?);
        call.set_u32(24, status::OK)?;
        self.clients.check_new(file, root, parent, handle)?;
        let object = self.clients.accessible(file, other, source)?;
        let (class, &Kind::Memory(store)) = (object.class, &object.kind) else {
            return Err(Stop::Status(status::NOT_SUPPORTED));
        };
        self.memories.retain(store)?;
        self.clients.insert(root, handle, Object { parent, class, kind: Kind::Memory(store) });
        Ok(())
    }
}
