//! Handover of the vGPU from one process of its VM to another.
//!
//! The old process stays connected, and its messages wait, until the new one has taken over. So a
//! handover that fails leaves the old process with its vGPU.

use std::os::fd::OwnedFd;

use anyhow::{Context, Result, bail, ensure};
use event_manager::EventOps;

use super::control_events::done;
use super::{Worker, event_set, source, unwatch, watch};
use crate::worker_protocol::{WorkerReply, WorkerRequest};

impl Worker {
    /// Returns the reply to a request about a handover.
    pub(super) fn answer_handover(
        &mut self,
        request: &WorkerRequest,
        ops: &mut EventOps,
    ) -> Result<(WorkerReply, Vec<OwnedFd>)> {
        // What the process has sent before the request comes first.
        self.drive_session(ops);
        match request {
            WorkerRequest::BeginHandover => self.begin_handover(ops)?,
            WorkerRequest::Adopt => {
                let config = self.finish_handover()?;
                return Ok((WorkerReply::Adopted { config }, Vec::new()));
            }
            WorkerRequest::AbandonHandover => self.abandon_handover(ops)?,
            _ => bail!("This is no request about a handover"),
        }
        Ok(done())
    }

    fn begin_handover(&mut self, ops: &mut EventOps) -> Result<()> {
        self.check_programs()?;
        self.block();
        ensure!(self.outgoing.is_none(), "Another process of the VM is taking over already");
        ensure!(self.attached.is_some(), "It has no VM");
        self.function.handover = Some(self.function.inner_mut().begin_handover()?);
        self.function.note_unmask_event();
        self.outgoing = self.attached.take();
        if let Some(outgoing) = &self.outgoing {
            unwatch(ops, &outgoing.session);
        }
        self.watch_unmask(ops);
        Ok(())
    }

    fn finish_handover(&mut self) -> Result<Vec<mdev_core::device::ConfigWrite>> {
        ensure!(self.attached.is_some(), "No other process of its VM has attached");
        let handover = self.function.handover.take().context("No process is taking over")?;
        let adopted = self.function.inner_mut().finish_handover(&handover);
        self.function.handover = Some(handover);
        self.adopted = adopted.is_ok();
        Ok(adopted?)
    }

    fn abandon_handover(&mut self, ops: &mut EventOps) -> Result<()> {
        let handover = self.function.handover.take().context("No process is taking over")?;
        if let Some(new) = self.attached.take() {
            unwatch(ops, &new.session);
            let pid = new.client.pid;
            log::info!("Process {pid} is cut off: the VM stays with its old process");
        }
        self.adopted = false;
        let restored = self.function.inner_mut().abandon_handover(handover);
        self.function.note_unmask_event();
        self.attached = self.outgoing.take();
        if let Some(attached) = self.attached.take() {
            self.return_to_session(&attached);
            self.attached = Some(attached);
        }
        if let Some(attached) = &self.attached {
            watch(ops, &attached.session, source::SESSION, event_set(attached.interest));
        }
        self.watch_unmask(ops);
        Ok(restored?)
    }

    /// Ends a handover before the vGPU continues: with the new process if it has the vGPU, or else
    /// with the old one.
    pub(super) fn end_handover(&mut self, ops: &mut EventOps) -> Result<()> {
        if self.outgoing.is_none() {
            return Ok(());
        }
        self.drive_session(ops);
        if self.attached.is_none() || !self.adopted {
            return self.abandon_handover(ops);
        }
        self.adopted = false;
        self.function.handover = None;
        if let (Some(old), Some(new)) = (self.outgoing.take(), &self.attached) {
            let (old, new) = (old.client.pid, new.client.pid);
            log::info!("Process {new} has taken the vGPU over from process {old}");
        }
        Ok(())
    }
}
