//! The manager's client of a GPU process.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::Duration;

use ipc::seqpacket::SeqPacket;
use mdev_core::gpu::{
    Admission, ClientSpec, Contexts, Gpu, GpuCapabilities, GpuDescription, GpuError,
    PhysicalScreen, Quotas, ScreenStatus, UsageReport, Waits,
};
use mdev_core::ids::VgpuId;
use mdev_core::sched::Budget;

use super::connection::{self, Connection};
use super::wire::{self, AdminReply, AdminRequest, Refusal};

/// Least time between two readings of the waits, which are longer than the other counters.
const WAITS_INTERVAL_NS: u64 = 100_000_000;

/// A connection to the admin socket of a GPU process.
///
/// Dropping the connection does not affect the process or its vGPUs. A new connection finds them
/// again.
#[derive(Debug)]
pub struct MediatedGpu {
    connection: Connection,
    description: GpuDescription,
    /// Waits of the vGPUs, as last read.
    waits: BTreeMap<VgpuId, Waits>,
    /// Time from which the next reading reads the waits.
    next_waits_ns: u64,
}

impl MediatedGpu {
    /// Connects to the admin socket at `path`.
    pub fn connect(path: &Path) -> Result<Self, GpuError> {
        Self::open(SeqPacket::connect(path)?)
    }

    /// Uses an open connection to an admin socket.
    pub fn open(socket: SeqPacket) -> Result<Self, GpuError> {
        let mut connection = Connection::new(socket)?;
        let reply = connection.request(&AdminRequest::Hello { version: wire::VERSION }, &[]);
        if reply.is_err() && connection.is_undecodable() {
            return Err(Refusal::Version.into());
        }
        match reply?.0 {
            AdminReply::Hello { version, gpu } if wire::is_spoken(version) => {
                let waits = BTreeMap::new();
                Ok(Self { connection, description: gpu, waits, next_waits_ns: 0 })
            }
            AdminReply::Refused(refusal) => Err(refusal.into()),
            _ => Err(Refusal::Version.into()),
        }
    }

    fn send(&mut self, request: &AdminRequest) -> Result<(), GpuError> {
        match self.connection.request(request, &[])?.0 {
            AdminReply::Done => Ok(()),
            AdminReply::Refused(refusal) => Err(refusal.into()),
            _ => Err(self.connection.unexpected_reply()),
        }
    }

    /// Completes a report with the waits, which are read if the last reading of them is old.
    fn add_waits(&mut self, report: &mut UsageReport) -> Result<(), GpuError> {
        if report.now_ns >= self.next_waits_ns {
            self.next_waits_ns = report.now_ns.saturating_add(WAITS_INTERVAL_NS);
            let ids: Vec<_> = report.vgpus.iter().map(|(id, _)| *id).collect();
            self.waits.clear();
            for ids in ids.chunks(wire::MAX_WAITS) {
                match self.connection.request(&AdminRequest::Waits(ids.to_vec()), &[])?.0 {
                    AdminReply::Waits(waits) => self.waits.extend(waits),
                    AdminReply::Refused(refusal) => return Err(refusal.into()),
                    _ => return Err(self.connection.unexpected_reply()),
                }
            }
        }
        for (id, usage) in &mut report.vgpus {
            usage.waits = self.waits.get(id).copied().unwrap_or_default();
        }
        Ok(())
    }
}

impl Gpu for MediatedGpu {
    fn describe(&self) -> &GpuDescription {
        &self.description
    }

    fn admit(&mut self, spec: &ClientSpec) -> Result<Admission, GpuError> {
        match self.connection.request(&AdminRequest::Admit(spec.clone()), &[]) {
            Ok((AdminReply::Admitted, fds)) if !fds.is_empty() => {
                let fd = fds.into_iter().next();
                Ok(Admission { backend: super::BACKEND, spec: spec.clone(), fd })
            }
            Ok((AdminReply::Refused(refusal), _)) => Err(refusal.into()),
            Ok(_) => Err(self.connection.unexpected_reply()),
            Err(error) => {
                // The vGPU is admitted, but its connection was lost for want of a descriptor here.
                if connection::is_out_of_descriptors(&error) {
                    self.evict(spec.vgpu)?;
                }
                Err(error)
            }
        }
    }

    fn evict(&mut self, vgpu: VgpuId) -> Result<(), GpuError> {
        self.waits.remove(&vgpu);
        self.send(&AdminRequest::Evict(vgpu))
    }

    fn forget(&mut self, vgpu: VgpuId) -> Result<(), GpuError> {
        self.send(&AdminRequest::Forget(vgpu))
    }

    fn set_timeslice(&mut self, vgpu: VgpuId, slice: Duration) -> Result<(), GpuError> {
        self.send(&AdminRequest::SetTimeslice(vgpu, slice))
    }

    fn set_gate(&mut self, vgpu: VgpuId, open: bool) -> Result<(), GpuError> {
        self.send(&AdminRequest::SetGate(vgpu, open))
    }

    fn set_budget(&mut self, vgpu: VgpuId, budget: Option<Budget>) -> Result<(), GpuError> {
        self.send(&AdminRequest::SetBudget(vgpu, budget))
    }

    fn set_quotas(&mut self, vgpu: VgpuId, quotas: &Quotas) -> Result<(), GpuError> {
        self.send(&AdminRequest::SetQuotas(vgpu, *quotas))
    }

    fn reset_group(&mut self, vgpu: VgpuId) -> Result<(), GpuError> {
        self.send(&AdminRequest::Reset(vgpu))
    }

    fn usage(&mut self) -> Result<UsageReport, GpuError> {
        let mut report = match self.connection.request(&AdminRequest::Usage, &[])?.0 {
            AdminReply::Usage(report) => UsageReport::from(report),
            AdminReply::Refused(refusal) => return Err(refusal.into()),
            _ => return Err(self.connection.unexpected_reply()),
        };
        self.add_waits(&mut report)?;
        Ok(report)
    }

    fn contexts(&mut self) -> Option<&mut dyn Contexts> {
        let has_contexts = self.description.capabilities.contains(GpuCapabilities::CONTEXTS);
        has_contexts.then_some(self as &mut dyn Contexts)
    }

    fn physical_screen(&mut self) -> Option<&mut dyn PhysicalScreen> {
        let has_screen = self.description.capabilities.contains(GpuCapabilities::SCANOUT);
        has_screen.then_some(self as &mut dyn PhysicalScreen)
    }
}

impl Contexts for MediatedGpu {
    fn admit(
        &mut self,
        spec: &ClientSpec,
        link: BorrowedFd<'_>,
        schedstat: Option<BorrowedFd<'_>>,
    ) -> Result<(), GpuError> {
        let fds: Vec<_> = [link].into_iter().chain(schedstat).collect();
        match self.connection.request(&AdminRequest::AdmitContext(spec.clone()), &fds)?.0 {
            AdminReply::Done => Ok(()),
            AdminReply::Refused(refusal) => Err(refusal.into()),
            _ => Err(self.connection.unexpected_reply()),
        }
    }
}

impl PhysicalScreen for MediatedGpu {
    fn focus(&mut self, vgpu: VgpuId) -> Result<Duration, GpuError> {
        match self.connection.request(&AdminRequest::Focus(vgpu), &[])?.0 {
            AdminReply::Focused(took) => Ok(took),
            AdminReply::Refused(refusal) => Err(refusal.into()),
            _ => Err(self.connection.unexpected_reply()),
        }
    }

    fn rotate(&mut self, interval: Option<Duration>) -> Result<(), GpuError> {
        self.send(&AdminRequest::Rotate(interval))
    }

    fn status(&mut self) -> Result<ScreenStatus, GpuError> {
        match self.connection.request(&AdminRequest::Screen, &[])?.0 {
            AdminReply::Screen(screen) => Ok(screen),
            AdminReply::Refused(refusal) => Err(refusal.into()),
            _ => Err(self.connection.unexpected_reply()),
        }
    }
}
