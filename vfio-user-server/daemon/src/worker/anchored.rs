//! A worker with an anchor: beginning anew, or adopting what an earlier worker left.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use ipc::seqpacket::SeqPacket;
use mdev_core::device::VirtualFunction;
use mdev_core::mem::DmaAccess;
use programs::front_end::FrontEndSpec;
use vfio_user_server::dma::DmaMap;
use vfio_user_server::journal::{FirstMessage, ReplyPhase};
use vfio_user_server::session::Session;
use vgpud_api::AttachedClient;

use super::journal::descriptors::{Anchor, Descriptors, Key, ProgramDescriptors};
use super::journal::{
    Journal, Journaled, JournaledPrograms, ProgramRecords, ProgramsRecorder, QueueRecorder,
    Recorder,
};
use super::queue_thread::QueueRecords;

/// Limit of attempts to continue with one message: workers may also be killed during one that takes
/// long. A message at which workers die costs its VM the device, and a request its program the
/// vGPU.
pub(super) const MAX_ATTEMPTS: u64 = 6;

/// What a worker gets from its anchor.
#[derive(Debug)]
pub struct Anchored {
    journal: Journal,
    anchor: Anchor,
    kept: Descriptors,
    journaled: Option<Journaled>,
    /// Records of the control queue's thread, if there is one.
    queue: Option<QueueRecords>,
}

/// What an earlier worker left, besides the device.
#[derive(Debug)]
pub struct Adopted {
    /// Recorder of the state from now on.
    pub recorder: Recorder,
    /// Session of the VM that is attached.
    pub session: Option<(Session, AttachedClient)>,
    /// Whether the answer to the last mailbox request may not have been written.
    pub rewrites_answer: bool,
    /// Connections of the manager, by number.
    pub control: Vec<(u32, SeqPacket)>,
    /// Programs of the host.
    pub programs: AdoptedPrograms,
}

/// Programs of the host that an earlier worker served.
#[derive(Debug, Default)]
pub struct AdoptedPrograms {
    /// What is recorded of them, if there are any.
    pub recorded: Option<JournaledPrograms>,
    /// Their descriptors, and those of a connection that is not recorded.
    pub kept: ProgramDescriptors,
    /// What was last to be served, or 0.
    pub served: u64,
}

impl Anchored {
    /// Opens the journal, and receives the descriptors that the anchor keeps.
    ///
    /// # Errors
    ///
    /// Fails if an earlier worker has left a state from which none can continue.
    pub fn open(journal: &OwnedFd, socket: OwnedFd) -> Result<Self> {
        let journal = Journal::open(journal.as_fd()).context("The journal cannot be opened")?;
        let socket = SeqPacket::from(socket);
        let mut kept =
            Descriptors::receive(&socket).context("The anchor's descriptors are missing")?;
        let journaled = journal.is_used().then(|| Journaled::read(&journal, &mut kept));
        let (journaled, anchor) = (journaled.transpose()?, Anchor::new(socket));
        Ok(Self { journal, anchor, kept, journaled, queue: None })
    }

    /// Returns the position of the client of the GPU, to continue.
    pub fn position(&self) -> Option<u64> {
        self.journaled.as_ref().map(|journaled| journaled.position)
    }

    /// Takes a descriptor of the client of the GPU, by its number.
    pub fn take_of_client(&mut self, number: u64) -> Option<OwnedFd> {
        self.kept.take(Key::client(number))
    }

    /// Adopts the device.
    pub fn adopt_function(&mut self, function: &mut VirtualFunction) -> Result<()> {
        let Some(journaled) = &self.journaled else { return Ok(()) };
        let kept = &mut self.kept;
        let take = |what| kept.take(Key::of(what));
        function
            .adopt(&journaled.state()?.function, &journaled.memory, take)
            .context("The device cannot continue")
    }

    /// Adopts the control queue of the device, whose thread works once the connections are
    /// adopted.
    pub fn adopt_queue(
        &mut self,
        mut queue: QueueRecords,
        function: &VirtualFunction,
        front_end: &FrontEndSpec,
    ) -> Result<()> {
        let mut file = None;
        if let Some(journaled) = &mut self.journaled {
            file = journaled.queue_file.take();
            let (client, memory) = function.share();
            let orders = std::mem::take(&mut journaled.orders);
            let left = journaled.queue.take();
            *queue.recorded.lock() = journaled.recorded();
            queue.adopt(orders, left, front_end, &client, &memory)?;
        }
        let recorder = QueueRecorder::new(self.anchor.share(), file, queue.recorded.clone());
        queue.begin(recorder);
        self.queue = Some(queue);
        Ok(())
    }

    /// Adopts the connections.
    pub fn adopt_connections(mut self) -> Result<Adopted> {
        self.anchor.works();
        let control = self.kept.take_control();
        let control = control.into_iter().map(|(id, fd)| (id, SeqPacket::from(fd))).collect();
        let (programs_recorder, programs) = self.adopt_programs();
        let Some(journaled) = &self.journaled else {
            let recorder =
                Recorder::new(self.journal, self.anchor, 0, self.queue, programs_recorder);
            let (session, rewrites_answer) = (None, false);
            return Ok(Adopted { recorder, session, rewrites_answer, control, programs });
        };
        let state = journaled.state()?;
        let socket = self.kept.take(Key::SESSION);
        let (mut session, mut rewrites_answer) = (None, false);
        if let (Some(client), Some(socket)) = (state.client, socket) {
            self.journal.complete(socket.as_fd()).context("The VM's connection is lost")?;
            let finished = self.journal.finished();
            let is_executed = state.session.message == finished.saturating_add(1);
            let first = FirstMessage {
                executed: is_executed.then(|| state.session.result()),
                reply: self.journal.reply(),
            };
            // Later the VM may have the next request in the page.
            rewrites_answer = is_executed && first.reply == ReplyPhase::None;
            let mappings = journaled.memory.maps.iter().map(|map| DmaMap {
                address: map.address.0,
                size: map.size,
                offset: map.offset.unwrap_or_default(),
                readable: map.access.contains(DmaAccess::READ),
                writable: map.access.contains(DmaAccess::WRITE),
                fd: None,
            });
            let adopted = Session::adopt(socket, state.session, finished, first, mappings);
            let adopted = adopted.context("The VM's connection is lost")?;
            if adopted.has_input() {
                let attempts = self.journal.count_attempt();
                ensure!(attempts <= MAX_ATTEMPTS, "Workers die at the same message of the VM");
            }
            session = Some((adopted, client));
        }
        for key in self.kept.keys() {
            self.anchor.drop_later(key..=key);
        }
        let memory = journaled.memory_number;
        let mut recorder =
            Recorder::new(self.journal, self.anchor, memory, self.queue, programs_recorder);
        if let Some((_, client)) = &session {
            recorder.adopt_session(*client, state.session);
        }
        Ok(Adopted { recorder, session, rewrites_answer, control, programs })
    }

    /// Returns a recorder of the host's programs, and those of an earlier worker.
    fn adopt_programs(&mut self) -> (ProgramsRecorder, AdoptedPrograms) {
        let kept = self.kept.take_programs();
        let (mut file, mut recorded) = (None, None);
        if let Some(journaled) = &mut self.journaled {
            (file, recorded) = (journaled.programs_file.take(), journaled.programs.take());
        }
        let served = file.as_ref().map_or(0, ProgramRecords::served);
        let mut recorder = ProgramsRecorder::new(self.anchor.share(), file);
        recorder.adopt(recorded.as_ref(), kept.keys());
        (recorder, AdoptedPrograms { recorded, kept, served })
    }
}
