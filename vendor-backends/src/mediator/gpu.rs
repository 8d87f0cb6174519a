//! The manager's side.

use std::path::Path;
use std::time::Duration;

use mdev_core::gpu::{
    Admission, ClientSpec, Gpu, GpuDescription, GpuError, PhysicalScreen, Quotas, UsageReport,
};
use mdev_core::ids::VgpuId;
use mdev_core::sched::Budget;

use super::connection::Connection;
use super::wire::{self, AdminReply, AdminRequest, Refusal};
use crate::seqpacket::SeqPacket;

/// A connection to the admin socket of a device's owner.
///
/// Dropping it leaves the process and its vGPUs as they are; a new one finds them again.
#[derive(Debug)]
pub struct MediatedGpu {
    connection: Connection,
    description: GpuDescription,
    /// What both sides speak.
    version: u32,
}

impl MediatedGpu {
    /// Connects to the admin socket at `path`.
    pub fn connect(path: &Path) -> Result<Self, GpuError> {
        Self::open(SeqPacket::connect(path)?)
    }

    /// Takes over a connection to an admin socket.
    pub fn open(socket: SeqPacket) -> Result<Self, GpuError> {
        let mut connection = Connection::new(socket)?;
        let told = connection.ask(&AdminRequest::Hello { version: wire::VERSION }, &[]);
        if told.is_err() && connection.is_garbled() {
            return Err(Refusal::Version.into());
        }
        match told?.0 {
            AdminReply::Hello { version, gpu } if wire::is_spoken(version) => {
                Ok(Self { connection, description: gpu, version })
            }
            AdminReply::Refused(refusal) => Err(refusal.into()),
            _ => Err(Refusal::Version.into()),
        }
    }

    fn order(&mut self, request: &AdminRequest) -> Result<(), GpuError> {
        match self.connection.ask(request, &[])?.0 {
            AdminReply::Done => Ok(()),
            AdminReply::Refused(refusal) => Err(refusal.into()),
            _ => Err(self.connection.confused()),
        }
    }
}

impl Gpu for MediatedGpu {
    fn describe(&self) -> &GpuDescription {
        &self.description
    }

    fn admit(&mut self, spec: &ClientSpec) -> Result<Admission, GpuError> {
        let (reply, mut fds) = self.connection.ask(&AdminRequest::Admit(spec.clone()), &[])?;
        match (reply, fds.pop()) {
            (AdminReply::Admitted, Some(fd)) => {
                Ok(Admission { backend: super::BACKEND, spec: spec.clone(), fd: Some(fd) })
            }
            (AdminReply::Refused(refusal), _) => Err(refusal.into()),
            _ => Err(self.connection.confused()),
        }
    }

    fn evict(&mut self, vgpu: VgpuId) -> Result<(), GpuError> {
        self.order(&AdminRequest::Evict(vgpu))
    }

    fn forget(&mut self, vgpu: VgpuId) -> Result<(), GpuError> {
        // An older owner keeps nothing.
        if self.version < wire::WITH_FORGET {
            Ok(())
        } else {
            self.order(&AdminRequest::Forget(vgpu))
        }
    }

    fn set_timeslice(&mut self, vgpu: VgpuId, slice: Duration) -> Result<(), GpuError> {
        self.order(&AdminRequest::SetTimeslice(vgpu, slice))
    }

    fn set_gate(&mut self, vgpu: VgpuId, open: bool) -> Result<(), GpuError> {
        self.order(&AdminRequest::SetGate(vgpu, open))
    }

    fn set_budget(&mut self, vgpu: VgpuId, budget: Option<Budget>) -> Result<(), GpuError> {
        self.order(&AdminRequest::SetBudget(vgpu, budget))
    }

    fn set_quotas(&mut self, vgpu: VgpuId, quotas: &Quotas) -> Result<(), GpuError> {
        self.order(&AdminRequest::SetQuotas(vgpu, *quotas))
    }

    fn reset_group(&mut self, vgpu: VgpuId) -> Result<(), GpuError> {
        self.order(&AdminRequest::Reset(vgpu))
    }

    fn focus(&mut self, vgpu: VgpuId) -> Result<Duration, GpuError> {
        match self.connection.ask(&AdminRequest::Focus(vgpu), &[])?.0 {
            AdminReply::Focused(took) => Ok(took),
            AdminReply::Refused(refusal) => Err(refusal.into()),
            _ => Err(self.connection.confused()),
        }
    }

    fn rotate(&mut self, every: Option<Duration>) -> Result<(), GpuError> {
        self.order(&AdminRequest::Rotate(every))
    }

    fn screen(&mut self) -> Result<PhysicalScreen, GpuError> {
        match self.connection.ask(&AdminRequest::Screen, &[])?.0 {
            AdminReply::Screen(screen) => Ok(screen),
            AdminReply::Refused(refusal) => Err(refusal.into()),
            _ => Err(self.connection.confused()),
        }
    }

    fn usage(&mut self) -> Result<UsageReport, GpuError> {
        match self.connection.ask(&AdminRequest::Usage, &[])?.0 {
            AdminReply::Usage(report) => Ok(report),
            AdminReply::Refused(refusal) => Err(refusal.into()),
            _ => Err(self.connection.confused()),
        }
    }
}
