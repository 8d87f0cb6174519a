//! Memory that processes of one vGPU share, as CUDA's IPC does.
//!
//! A process lets others use a memory object (`NV_ESC_RM_SHARE`) and passes the handles of its
//! client and of the object to them. They make an object of their own of it
//! (`NV_ESC_RM_DUP_OBJECT`). [`share_policy`](super::share_policy) has the rules.
//!
//! The process and user of a client are those that opened its control file: of the host as the
//! kernel says for the program's connection, of a VM as the guest's driver says.

use nvidia_rm::abi::{DupObject, Share, SharePolicy};
use nvidia_rm::numbers::status;

use super::NvidiaFrontEnd;
use super::call::{Call, Stop};
use super::control::Control;
use super::objects::{Kind, Object};
use super::share_policy::Change;

impl NvidiaFrontEnd {
    /// Carries out `NV_ESC_RM_SHARE`.
    pub(super) fn rm_share(&mut self, call: &mut Call<'_>) -> Result<(), Stop> {
        let file = self.files.control_of(call.file())?;
        let Share { root, object, policy, .. } = call.read()?;
        self.clients.share(file, root, object, &Change::try_from(policy)?)
    }

    /// `NV0000_CTRL_CMD_CLIENT_SET_INHERITED_SHARE_POLICY`: of all objects of a client that have no
    /// policies of their own.
    pub(super) fn share_client(&mut self, control: &Control) -> Result<(), Stop> {
        let change = Change::try_from(control.read::<SharePolicy>())?;
        self.clients.share(control.file, control.root, control.root, &change)
    }

    /// Carries out `NV_ESC_RM_DUP_OBJECT`.
    pub(super) fn rm_dup_object(&mut self, call: &mut Call<'_>) -> Result<(), Stop> {
        let file = self.files.control_of(call.file())?;
        let argument: DupObject = call.read()?;
        let DupObject { root, parent, object: handle, source_root, source, .. } = argument;
        self.clients.check_new(file, root, parent, handle)?;
        let object = self.clients.accessible(&self.files, root, source_root, source)?;
        let (class, &Kind::Memory(store)) = (object.class, &object.kind) else {
            return Err(Stop::Status(status::NOT_SUPPORTED));
        };
        self.memories.retain(store)?;
        self.clients.insert(root, handle, Object { parent, class, kind: Kind::Memory(store) });
        Ok(())
    }
}
