//! Memory that processes of one vGPU share, as CUDA's IPC does.
//!
//! A process lets others use a memory object (`NV_ESC_RM_SHARE`) and passes the handles of its
//! client and of the object to them. They make an object of their own of it
//! (`NV_ESC_RM_DUP_OBJECT`). All processes of a vGPU belong to its owner, so each of them may use
//! what one has shared.

use nvidia_rm::abi::{DupObject, Share};
use nvidia_rm::numbers::status;

use super::NvidiaFrontEnd;
use super::call::{Call, Stop};
use super::objects::{Kind, Object};

impl NvidiaFrontEnd {
    /// Carries out `NV_ESC_RM_SHARE`.
    pub(super) fn rm_share(&mut self, call: &mut Call<'_>) -> Result<(), Stop> {
        let file = self.files.control_of(call.file())?;
        let Share { root, object, .. } = call.read()?;
        self.clients.share(file, root, object)
    }

    /// Carries out `NV_ESC_RM_DUP_OBJECT`.
    pub(super) fn rm_dup_object(&mut self, call: &mut Call<'_>) -> Result<(), Stop> {
        let file = self.files.control_of(call.file())?;
        let argument: DupObject = call.read()?;
        let DupObject { root, parent, object: handle, source_root, source, .. } = argument;
        self.clients.check_new(file, root, parent, handle)?;
        let object = self.clients.accessible(file, source_root, source)?;
        let (class, &Kind::Memory(store)) = (object.class, &object.kind) else {
            return Err(Stop::Status(status::NOT_SUPPORTED));
        };
        self.memories.retain(store)?;
        self.clients.insert(root, handle, Object { parent, class, kind: Kind::Memory(store) });
        Ok(())
    }
}
