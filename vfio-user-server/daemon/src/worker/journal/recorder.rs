//! Recording of a worker's state in its journal.

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::BorrowedFd;

use mdev_core::device::VirtualFunction;
use vfio_user_server::journal::{SessionRecord, Standing};
use vgpud_api::AttachedClient;

use super::descriptors::{Anchor, Key};
use super::layout::{Journal, Kind};
use super::programs_recorder::{ProgramState, ProgramsRecorder};
use super::queue_recorder::Recorded;
use super::state::{ProgramsState, QueueState, State};
use crate::worker::queue_thread::QueueRecords;

/// Journal of a worker with its socket to the anchor.
#[derive(Debug)]
pub struct Recorder {
    journal: Journal,
    anchor: Anchor,
    /// VM that is attached.
    client: Option<AttachedClient>,
    session: SessionRecord,
    /// Number of the record of guest memory, and the generation of what it holds.
    memory: (u64, Option<u64>),
    /// A part of a message is in this process alone.
    session_torn: bool,
    /// The journal holds another session than that of the VM.
    session_given_up: bool,
    /// The device is used in a way that cannot be recorded, such as by a request of the manager
    /// that takes several steps.
    blocked: bool,
    /// [`VirtualFunction::read_effects`] at the last record.
    read_effects: u64,
    /// Position of the client at the last record.
    position: Option<u64>,
    /// Records of the control queue's thread, if there is one.
    queue: Option<QueueRecords>,
    /// Recorder of the host's programs.
    programs: ProgramsRecorder,
    buffer: Vec<u8>,
}

impl Recorder {
    /// Creates the recorder of a worker, which continues after the record of guest memory with the
    /// number `memory`.
    pub fn new(
        journal: Journal,
        anchor: Anchor,
        memory: u64,
        queue: Option<QueueRecords>,
        programs: ProgramsRecorder,
    ) -> Self {
        Self {
            journal,
            anchor,
            client: None,
            session: SessionRecord::default(),
            memory: (memory, None),
            session_torn: false,
            session_given_up: false,
            blocked: false,
            read_effects: u64::MAX,
            position: None,
            queue,
            programs,
            buffer: Vec::new(),
        }
    }

    /// Adopts the session of an earlier worker.
    pub fn adopt_session(&mut self, client: AttachedClient, session: SessionRecord) {
        (self.client, self.session) = (Some(client), session);
    }

    /// Begins with the session of a VM.
    pub fn begin_session(&mut self, client: AttachedClient) {
        self.record_session(client, SessionRecord::default(), 0, 0);
    }

    fn record_session(
        &mut self,
        client: AttachedClient,
        session: SessionRecord,
        finished: u64,
        in_socket: usize,
    ) {
        self.journal.begin_session(finished, in_socket);
        (self.client, self.session) = (Some(client), session);
        (self.session_torn, self.session_given_up) = (false, false);
        self.release_queue();
        // A handover puts other guest memory in its place, whose generations begin anew.
        self.memory.1 = None;
    }

    /// Returns to a session in whose place another one had begun, once no other worker can continue
    /// with that. The caller then keeps its descriptors anew.
    pub fn return_to_session(&mut self, client: AttachedClient, standing: Standing) {
        let Standing { record, finished, in_socket } = standing;
        self.anchor.drop_now(Key::OF_VM);
        self.record_session(client, record, finished, in_socket);
    }

    /// Returns true if another worker can continue.
    pub fn is_adoptable(&self) -> bool {
        self.journal.is_adoptable()
    }

    /// Lets no other worker continue with this session.
    pub fn give_session_up(&mut self) {
        self.session_given_up = true;
        self.journal.set_adoptable(false);
    }

    /// Ends the session, if there is one.
    pub fn end_session(&mut self) {
        if self.client.take().is_some() {
            (self.session_torn, self.session_given_up) = (false, false);
            self.release_queue();
            self.drop_later(Key::OF_VM);
        }
    }

    /// Passes a descriptor to the anchor before a state needs it.
    pub fn keep(&mut self, key: Key, fd: BorrowedFd<'_>) {
        self.anchor.keep(key, fd);
    }

    /// Drops descriptors at the anchor once the next state is recorded.
    pub fn drop_later(&mut self, keys: RangeInclusive<Key>) {
        self.anchor.drop_later(keys);
    }

    /// Drops descriptors at the anchor that no state needs.
    pub fn drop_now(&mut self, keys: RangeInclusive<Key>) {
        self.anchor.drop_now(keys);
    }

    /// Sets whether the device is used in a way that cannot be recorded. If so, no other worker
    /// continues.
    pub fn set_blocked(&mut self, blocked: bool) {
        self.blocked = blocked;
        if blocked {
            self.journal.set_adoptable(false);
        }
    }

    /// Records the state of the device and of its session.
    pub fn commit(&mut self, function: &VirtualFunction) {
        let blocked = self.blocked || self.session_given_up || self.programs.is_lost();
        self.read_effects = function.read_effects();
        let recorded = !blocked
            && match self.of_thread(function) {
                Some(of_thread) => self.write_of_thread(function, of_thread),
                None => self.write_own(function),
            };
        if recorded {
            self.anchor.recorded();
            self.programs.recorded();
        }
        let torn = self.session_torn || self.anchor.is_lost();
        self.journal.set_adoptable(recorded && !torn);
    }

    /// Returns what the control queue's thread has recorded of the client, while the thread uses
    /// it.
    fn of_thread(&self, function: &VirtualFunction) -> Option<Recorded> {
        let queue = self.queue.as_ref().filter(|_| function.queue_runs())?;
        if queue.is_held() { None } else { Some(*queue.recorded.lock()) }
    }

    /// Records the state with the present position of the client.
    fn write_own(&mut self, function: &VirtualFunction) -> bool {
        let position = function.position();
        if position.is_some() && position != self.position {
            self.keep_for_client(function);
            self.position = position;
        }
        let mut queue = QueueState::default();
        if let Some(records) = &self.queue {
            let recorded = *records.recorded.lock();
            if recorded.is_lost && function.queue_runs() {
                return false;
            }
            queue.number = recorded.number;
            queue.runs = function.queue_runs();
            queue.orders = records.orders();
        }
        let written = position.is_some_and(|position| self.write(function, position, queue));
        if let Some(records) = &self.queue {
            let mut recorded = records.recorded.lock();
            if written {
                (recorded.position, recorded.by_thread) = (position, false);
            } else {
                recorded.position = None;
            }
        }
        if written {
            function.recorded();
        }
        written
    }

    /// Records the state with the position of the client that the control queue's thread has
    /// recorded.
    fn write_of_thread(&mut self, function: &VirtualFunction, of_thread: Recorded) -> bool {
        let Recorded { position: Some(position), number, by_thread, is_lost: false } = of_thread
        else {
            return false;
        };
        let orders = self.queue.as_ref().map(QueueRecords::orders).unwrap_or_default();
        let queue = QueueState { number, has_position: by_thread, runs: number > 0, orders };
        self.write_state(function, position, queue)
    }

    /// Passes on what a process needs that continues with the client.
    fn keep_for_client(&mut self, function: &VirtualFunction) {
        self.anchor.keep_for_client(function.take_descriptors());
    }

    fn write(&mut self, function: &VirtualFunction, position: u64, queue: QueueState) -> bool {
        let generation = Some(function.memory_generation());
        if self.memory.1 != generation {
            let number = self.memory.0.wrapping_add(1);
            let memory = postcard::to_stdvec(&function.journaled_memory());
            let Ok(memory) = memory else { return false };
            if !self.journal.write(Kind::Memory, number, &memory) {
                return false;
            }
            self.memory = (number, generation);
        }
        self.write_state(function, position, queue)
    }

    fn write_state(
        &mut self,
        function: &VirtualFunction,
        position: u64,
        queue: QueueState,
    ) -> bool {
        let Self { client, session, memory: (memory, _), .. } = *self;
        let function = function.journaled();
        let programs = ProgramsState { number: self.programs.number() };
        let state = State { function, position, memory, client, session, queue, programs };
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        let Ok(buffer) = postcard::to_extend(&state, buffer) else { return false };
        let done = self.journal.commit(&buffer);
        self.buffer = buffer;
        done
    }

    /// Returns the recorder of the host's programs. [`Self::commit`] brings its record into force.
    pub fn programs(&mut self) -> &mut ProgramsRecorder {
        &mut self.programs
    }

    /// Records the host's programs and the device, if they have changed. `programs` is none without
    /// programs.
    pub fn commit_programs(
        &mut self,
        function: &VirtualFunction,
        programs: Option<&mut dyn ProgramState>,
    ) {
        let changed = match programs {
            Some(programs) => self.programs.record(programs),
            None => self.programs.end(),
        };
        if changed || function.position() != self.position {
            self.commit(function);
        }
    }

    /// Begins a message that changes guest memory, or what the GPU has of it: waits for the request
    /// of the control queue that is under way. The next ones wait for the message's record.
    pub fn hold_queue(&mut self, function: &VirtualFunction) {
        if let Some(queue) = &mut self.queue
            && function.queue_runs()
        {
            queue.hold();
        }
    }

    /// Records a message that was carried out. One that changed nothing and `is_repeatable` needs
    /// no record.
    pub fn commit_message(
        &mut self,
        function: &VirtualFunction,
        session: SessionRecord,
        is_repeatable: bool,
    ) {
        if is_repeatable && self.read_effects == function.read_effects() {
            return;
        }
        self.session = session;
        self.commit(function);
        self.release_queue();
    }

    /// Lets the control queue's thread work again, if [`Self::hold_queue`] holds it off.
    fn release_queue(&mut self) {
        if let Some(queue) = &mut self.queue {
            queue.release();
        }
    }

    /// Lets the control queue's thread record what has changed without it.
    pub fn notify_queue(&self, function: &VirtualFunction) {
        if let Some(queue) = &self.queue
            && function.queue_runs()
        {
            queue.notify();
        }
    }

    /// Lets the control queue's thread work, after an earlier worker's. `has_message` tells whether
    /// a message of the VM is at hand.
    pub fn begin_queue(&mut self, has_message: bool) {
        if let Some(queue) = &mut self.queue {
            queue.begin_work(has_message);
        }
    }

    /// Records that the reply to the message at hand is sent, or about to be.
    pub fn begin_reply(&mut self) {
        self.journal.begin_reply();
    }

    /// Records that the message at hand, of `bytes` bytes in the socket, is finished.
    pub fn finish(&mut self, bytes: usize) {
        self.journal.finish(bytes);
    }

    /// Removes the finished messages from the socket.
    pub fn remove(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.journal.remove(socket)
    }

    /// Records whether a part of a message is in this process alone.
    pub fn set_session_torn(&mut self, torn: bool) {
        self.session_torn = torn;
        let lost = self.blocked || self.session_given_up || self.anchor.is_lost();
        self.journal.set_adoptable(!torn && !lost);
    }
}
