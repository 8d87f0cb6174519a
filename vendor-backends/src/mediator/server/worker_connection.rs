//! One worker's connection.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread;

use foreign_fds::ForeignFd;
use ipc::seqpacket::SeqPacket;
use mdev_core::gpu::GpuDescription;
use mdev_core::ids::MemoryId;

use super::answered::{Answered, Repeat, digest};
use super::clients::ClientEntry;
use super::packet::{Received, receive, send};
use super::request_budget::RequestBudget;
use crate::mediator::context_process::turns::Turns;
use crate::mediator::emulation::EmulatedGpu;
use crate::mediator::emulation::clock::{now_ns, thread_ns};
use crate::mediator::emulation::vgpu::{Vgpu, WorkerFds};
use crate::mediator::saved_state;
use crate::mediator::wire::{self, ClientReply, ClientRequest, Numbered, Refusal, WithoutWaits};

/// A worker's connection.
#[derive(Debug)]
pub struct WorkerConnection {
    gpu: Arc<EmulatedGpu>,
    vgpu: Arc<Vgpu>,
    socket: SeqPacket,
    fds: WorkerFds,
    /// Entry in the list of a GPU process.
    _entry: Option<ClientEntry>,
    /// Turns of a context, to which it passes its counters.
    turns: Option<Arc<Turns>>,
}

impl WorkerConnection {
    /// Serves a vGPU of a GPU process.
    pub(super) fn new(
        gpu: Arc<EmulatedGpu>,
        vgpu: Arc<Vgpu>,
        fds: WorkerFds,
        socket: SeqPacket,
        entry: ClientEntry,
    ) -> Self {
        Self { gpu, vgpu, socket, fds, _entry: Some(entry), turns: None }
    }

    /// Serves the vGPU of a context.
    pub fn of_context(
        gpu: Arc<EmulatedGpu>,
        vgpu: Arc<Vgpu>,
        fds: WorkerFds,
        socket: SeqPacket,
        turns: Arc<Turns>,
    ) -> Self {
        Self { gpu, vgpu, socket, fds, _entry: None, turns: Some(turns) }
    }

    /// Serves until the connection ends, then evicts the vGPU.
    pub fn serve(mut self) {
        // None before the first hello.
        let mut answered = None;
        let mut budget = RequestBudget::new(thread_ns(), now_ns());
        while self.serve_next(&mut answered) {
            if let Some(pause) = budget.charge(thread_ns(), now_ns()) {
                thread::sleep(pause);
            }
        }
        log::debug!("vGPU {}: worker disconnected", self.vgpu.id());
    }

    /// Answers one request. Returns false at the end of the connection.
    fn serve_next(&mut self, answered: &mut Option<Answered>) -> bool {
        match receive(&self.socket) {
            Received::Request(request, fds) => self.serve_request(answered, request, fds),
            Received::Nothing => true,
            Received::Refused(refusal) => self.refuse(answered, refusal),
            Received::End => false,
        }
    }

    fn serve_request(
        &mut self,
        answered: &mut Option<Answered>,
        request: Numbered<ClientRequest>,
        fds: Vec<ForeignFd>,
    ) -> bool {
        let Numbered { number, recorded, body } = request;
        let answered = match (answered, &body) {
            (answered, ClientRequest::Hello { adopts: false, .. }) => {
                answered.insert(Answered::default())
            }
            (answered, ClientRequest::Hello { .. }) => answered.get_or_insert_default(),
            (Some(answered), _) => answered,
            (answered @ None, _) => return self.refuse(answered, Refusal::Message),
        };
        answered.forget(recorded);
        let digest = digest(&body);
        let answer = match answered.find(number, digest) {
            Repeat::New => {
                let answer = self.answer(&body, fds);
                answered.add(digest, &answer.reply);
                answer
            }
            Repeat::EachTime => self.answer(&body, fds),
            Repeat::Known(reply) => self.repeat(*reply, &body),
            Repeat::Unknown => Refusal::Message.into(),
        };
        if let Some(turns) = &self.turns {
            turns.count(&self.vgpu.usage());
        }
        self.send(number, &answer)
    }

    /// Refuses a packet that is no request, or a request before a hello.
    fn refuse(&self, answered: &mut Option<Answered>, refusal: Refusal) -> bool {
        let answer = Answer::from(refusal);
        // The number of the packet is not known, but can only be the next.
        let number = answered.as_mut().map(|answered| answered.add_next(&answer.reply));
        self.send(number.unwrap_or(Numbered::NONE), &answer)
    }

    fn send(&self, number: u64, answer: &Answer) -> bool {
        let reply = Numbered { number, recorded: 0, body: answer.reply.clone() };
        let refuse = |refusal| Numbered { body: ClientReply::Refused(refusal), ..reply.clone() };
        send(&self.socket, &reply, &answer.fds(&self.fds), refuse)
    }

    fn answer(&mut self, request: &ClientRequest, fds: Vec<ForeignFd>) -> Answer {
        let answer = match *request {
            ClientRequest::Hello { version, .. } => Ok(self.hello(wire::agreed(version))),
            ClientRequest::Renew => self.renew(),
            ClientRequest::Save => self.save(),
            ClientRequest::LogWrites(memory) => self.log_writes(memory),
            _ => self.handle(request, fds).map(Answer::from),
        };
        answer.unwrap_or_else(Answer::from)
    }

    /// Returns a reply again, with its descriptors.
    fn repeat(&self, reply: ClientReply, request: &ClientRequest) -> Answer {
        match (&reply, request) {
            // The state of a paused vGPU is the same as before.
            (ClientReply::Saved, ClientRequest::Save) => self.save().unwrap_or_else(Answer::from),
            // What another worker has not recorded is lost with it.
            (ClientReply::Logged, ClientRequest::LogWrites(memory)) => {
                self.log_writes(*memory).unwrap_or_else(Answer::from)
            }
            (ClientReply::Renewed { vram_offset }, _) => {
                Answer { attached: Attached::Renewed(vram_offset.is_some()), reply }
            }
            _ => reply.into(),
        }
    }

    fn hello(&self, version: u32) -> Answer {
        let gpu: GpuDescription = self.gpu.describe().clone();
        let reply = ClientReply::Hello {
            version,
            gpu,
            spec: self.vgpu.spec().clone(),
            vram_offset: self.fds.vram.as_ref().map(|(_, offset)| *offset),
        };
        Answer { reply, attached: Attached::Hello }
    }

    fn renew(&mut self) -> Result<Answer, Refusal> {
        let renewed = self.vgpu.renew()?;
        let vram_offset = renewed.vram.as_ref().map(|(_, offset)| *offset);
        self.fds.replace(renewed);
        let reply = ClientReply::Renewed { vram_offset };
        Ok(Answer { reply, attached: Attached::Renewed(vram_offset.is_some()) })
    }

    fn save(&self) -> Result<Answer, Refusal> {
        let file = saved_state::write(&self.vgpu.save()?)?;
        Ok(Answer { reply: ClientReply::Saved, attached: Attached::File(file) })
    }

    fn log_writes(&self, memory: MemoryId) -> Result<Answer, Refusal> {
        let file = self.vgpu.log_writes(memory)?;
        Ok(Answer { reply: ClientReply::Logged, attached: Attached::File(file) })
    }

    fn handle(&self, request: &ClientRequest, fds: Vec<ForeignFd>) -> Result<ClientReply, Refusal> {
        let vgpu = &self.vgpu;
        let mut fds = fds.into_iter();
        match *request {
            ClientRequest::Hello { .. }
            | ClientRequest::Renew
            | ClientRequest::Save
            | ClientRequest::LogWrites(_) => return Err(Refusal::Message),
            ClientRequest::Import { offset, len, writable } => {
                let fd = fds.next().and_then(ForeignFd::into_memory).ok_or(Refusal::Descriptor)?;
                return Ok(ClientReply::Imported(vgpu.import(&fd, offset, len, writable)?));
            }
            ClientRequest::Release(memory) => vgpu.release(memory)?,
            ClientRequest::CreateSpace => {
                return Ok(ClientReply::SpaceCreated(vgpu.create_space()?));
            }
            ClientRequest::DestroySpace(space) => vgpu.destroy_space(space)?,
            ClientRequest::Map(ref request) => vgpu.map(request)?,
            ClientRequest::Unmap { space, va, len } => vgpu.unmap(space, va, len)?,
            ClientRequest::CreateChannel(ref spec) => {
                return Ok(ClientReply::Created(vgpu.create_channel(spec)?));
            }
            ClientRequest::DestroyChannel(id) => vgpu.destroy_channel(id)?,
            ClientRequest::QueryChannel(id) => {
                return Ok(ClientReply::Status(vgpu.query_channel(id)?));
            }
            ClientRequest::SetInterrupt(vector) => {
                let event = fds.next().map(|fd| fd.into_eventfd().ok_or(Refusal::Descriptor));
                vgpu.set_interrupt(vector, event.transpose()?)?;
            }
            ClientRequest::Reset => vgpu.reset()?,
            ClientRequest::Usage => {
                return Ok(ClientReply::Usage(Box::new(WithoutWaits(vgpu.usage()))));
            }
            ClientRequest::SetScanout(ref scanout) => {
                self.gpu.hardware().set_scanout(vgpu.id(), scanout)?;
            }
            ClientRequest::Pause => vgpu.pause()?,
            ClientRequest::Resume => vgpu.resume()?,
            ClientRequest::RestoreSpace(space) => vgpu.restore_space(space)?,
            ClientRequest::RestoreChannel(ref channel) => vgpu.restore_channel(channel)?,
            ClientRequest::EndLog(memory) => vgpu.end_log(memory)?,
            ClientRequest::Scrub => self.gpu.hardware().scrub(vgpu.id())?,
        }
        Ok(ClientReply::Done)
    }
}

/// Reply, and what is attached to it.
struct Answer {
    reply: ClientReply,
    attached: Attached,
}

/// Descriptors of a reply.
enum Attached {
    None,
    /// Those of a hello.
    Hello,
    /// Those of new memory, with or without video memory.
    Renewed(bool),
    File(OwnedFd),
}

impl Answer {
    fn fds<'a>(&'a self, fds: &'a WorkerFds) -> Vec<BorrowedFd<'a>> {
        let WorkerFds { vram, doorbell, status, event, wakeups } = fds;
        let vram = vram.as_ref().map(|(file, _)| file.as_fd());
        match &self.attached {
            Attached::None => Vec::new(),
            Attached::Hello => {
                let shared = [doorbell, status, event, &wakeups.socket, &wakeups.event];
                let shared: [BorrowedFd<'_>; wire::HELLO_FDS] = shared.map(AsFd::as_fd);
                shared.into_iter().chain(vram).collect()
            }
            Attached::Renewed(has_vram) => {
                let shared: [BorrowedFd<'_>; wire::RENEWED_FDS] =
                    [doorbell.as_fd(), wakeups.event.as_fd()];
                shared.into_iter().chain(vram.filter(|_| *has_vram)).collect()
            }
            Attached::File(file) => vec![file.as_fd()],
        }
    }
}

impl From<ClientReply> for Answer {
    fn from(reply: ClientReply) -> Self {
        Self { reply, attached: Attached::None }
    }
}

impl From<Refusal> for Answer {
    fn from(refusal: Refusal) -> Self {
        ClientReply::Refused(refusal).into()
    }
}

impl Drop for WorkerConnection {
    fn drop(&mut self) {
        self.gpu.evict(&self.vgpu);
    }
}
