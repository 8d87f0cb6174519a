//! One worker's connection.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread;

use mdev_core::gpu::{GpuDescription, MapRequest};
use mdev_core::ids::SpaceId;

use super::clients::ClientEntry;
use super::packet::{Received, receive, send};
use super::request_budget::RequestBudget;
use crate::mediator::emulation::EmulatedGpu;
use crate::mediator::emulation::clock::{now_ns, thread_ns};
use crate::mediator::emulation::vgpu::{Vgpu, WorkerFds};
use crate::mediator::saved_state;
use crate::mediator::wire::{self, ClientReply, ClientRequest, Refusal};
use crate::seqpacket::SeqPacket;

/// A worker's connection.
pub(super) struct WorkerConnection {
    pub gpu: Arc<EmulatedGpu>,
    pub vgpu: Arc<Vgpu>,
    pub socket: SeqPacket,
    pub fds: WorkerFds,
    pub _entry: ClientEntry,
}

impl WorkerConnection {
    /// Serves until the connection ends, then evicts the vGPU.
    pub fn serve(mut self) {
        let mut greeted = false;
        let mut budget = RequestBudget::new(thread_ns(), now_ns());
        while self.answer(&mut greeted) {
            if let Some(pause) = budget.charge(thread_ns(), now_ns()) {
                thread::sleep(pause);
            }
        }
        log::debug!("vGPU {}: worker disconnected", self.vgpu.id());
    }

    /// Answers one request. Returns false at the end of the connection.
    fn answer(&mut self, greeted: &mut bool) -> bool {
        let (request, fds) = match receive(&self.socket) {
            Received::Request(request, fds) => (request, fds),
            Received::Nothing => return true,
            Received::Refused(refusal) => {
                return self.reply(&ClientReply::Refused(refusal), &[]);
            }
            Received::End => return false,
        };
        if let ClientRequest::Hello { version } = request {
            *greeted = true;
            return self.hello(wire::agreed(version));
        }
        if *greeted && request == ClientRequest::Renew {
            return self.renew();
        }
        if *greeted && request == ClientRequest::Save {
            return self.save();
        }
        let reply = if *greeted { self.handle(&request, fds) } else { Err(Refusal::Message) };
        self.reply(&reply.unwrap_or_else(ClientReply::Refused), &[])
    }

    fn reply(&self, reply: &ClientReply, fds: &[BorrowedFd<'_>]) -> bool {
        send(&self.socket, reply, fds, ClientReply::Refused)
    }

    fn hello(&self, version: u32) -> bool {
        let gpu: GpuDescription = self.gpu.describe().clone();
        let WorkerFds { vram, doorbell, status, event, wakeups } = &self.fds;
        let reply = ClientReply::Hello {
            version,
            gpu,
            spec: self.vgpu.spec().clone(),
            vram_offset: vram.as_ref().map(|(_, offset)| *offset),
        };
        let shared = [doorbell, status, event, &wakeups.socket, &wakeups.event];
        let fds: [BorrowedFd<'_>; wire::HELLO_FDS] = shared.map(AsFd::as_fd);
        let mut fds = fds.to_vec();
        fds.extend(vram.as_ref().map(|(file, _)| file.as_fd()));
        self.reply(&reply, &fds)
    }

    fn renew(&mut self) -> bool {
        let renewed = match self.vgpu.renew() {
            Ok(renewed) => renewed,
            Err(refusal) => return self.reply(&ClientReply::Refused(refusal), &[]),
        };
        let reply =
            ClientReply::Renewed { vram_offset: renewed.vram.as_ref().map(|(_, offset)| *offset) };
        let shared: [BorrowedFd<'_>; wire::RENEWED_FDS] =
            [renewed.doorbell.as_fd(), renewed.event.as_fd()];
        let mut fds = shared.to_vec();
        fds.extend(renewed.vram.as_ref().map(|(file, _)| file.as_fd()));
        let sent = self.reply(&reply, &fds);
        self.fds.replace(renewed);
        sent
    }

    fn save(&self) -> bool {
        let saved = self.vgpu.save().and_then(|saved| Ok(saved_state::write(&saved)?));
        match saved {
            Ok(file) => self.reply(&ClientReply::Saved, &[file.as_fd()]),
            Err(refusal) => self.reply(&ClientReply::Refused(refusal), &[]),
        }
    }

    fn handle(&self, request: &ClientRequest, fds: Vec<OwnedFd>) -> Result<ClientReply, Refusal> {
        let vgpu = &self.vgpu;
        let mut fds = fds.into_iter();
        match *request {
            ClientRequest::Hello { .. } | ClientRequest::Renew | ClientRequest::Save => {
                return Err(Refusal::Message);
            }
            ClientRequest::Import { offset, len, writable } => {
                let fd = fds.next().ok_or(Refusal::Descriptor)?;
                return Ok(ClientReply::Imported(vgpu.import(&fd, offset, len, writable)?));
            }
            ClientRequest::Release(memory) => vgpu.release(memory)?,
            ClientRequest::Map { va, len, backing, writable } => {
                vgpu.map(&MapRequest { writable, ..MapRequest::new(va, len, backing) })?;
            }
            ClientRequest::Unmap { va, len } => vgpu.unmap(SpaceId::DEFAULT, va, len)?,
            ClientRequest::CreateChannel(spec) => {
                return Ok(ClientReply::Created(vgpu.create_channel(&spec.into())?));
            }
            ClientRequest::CreateSpace => {
                return Ok(ClientReply::SpaceCreated(vgpu.create_space()?));
            }
            ClientRequest::DestroySpace(space) => vgpu.destroy_space(space)?,
            ClientRequest::MapIn(ref request) => vgpu.map(request)?,
            ClientRequest::UnmapIn { space, va, len } => vgpu.unmap(space, va, len)?,
            ClientRequest::CreateChannelIn(ref spec) => {
                return Ok(ClientReply::Created(vgpu.create_channel(spec)?));
            }
            ClientRequest::DestroyChannel(id) => vgpu.destroy_channel(id)?,
            ClientRequest::QueryChannel(id) => {
                return Ok(ClientReply::Status(vgpu.query_channel(id)?));
            }
            ClientRequest::SetInterrupt(vector) => vgpu.set_interrupt(vector, fds.next())?,
            ClientRequest::Reset => vgpu.reset()?,
            ClientRequest::Usage => return Ok(ClientReply::Usage(vgpu.usage())),
            ClientRequest::SetScanout(ref scanout) => {
                self.gpu.hardware().set_scanout(vgpu.id(), scanout)?;
            }
            ClientRequest::Pause => vgpu.pause()?,
            ClientRequest::Resume => vgpu.resume()?,
            ClientRequest::RestoreSpace(space) => vgpu.restore_space(space)?,
            ClientRequest::RestoreChannel(ref channel) => vgpu.restore_channel(channel)?,
            ClientRequest::Scrub => self.gpu.hardware().scrub(vgpu.id())?,
        }
        Ok(ClientReply::Done)
    }
}

impl Drop for WorkerConnection {
    fn drop(&mut self) {
        self.gpu.evict(&self.vgpu);
    }
}
