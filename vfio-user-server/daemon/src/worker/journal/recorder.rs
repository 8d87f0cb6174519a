//! Recording of a worker's state in its journal.

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd};

use mdev_core::device::VirtualFunction;
use mdev_core::gpu::KeptDescriptor;
use vfio_user_server::journal::{SessionRecord, Standing};
use vgpud_api::AttachedClient;

use super::kept::{Anchor, Key};
use super::layout::{Journal, Kind};
use super::state::State;

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
    /// The device is used in a way that cannot be recorded: by CUDA programs, or by a request of the
    /// manager that takes several steps.
    blocked: bool,
    /// [`VirtualFunction::read_effects`] at the last record.
    read_effects: u64,
    /// Position of the client at the last record.
    position: Option<u64>,
    buffer: Vec<u8>,
}

impl Recorder {
    /// Creates the recorder of a worker, which continues after the record of guest memory with the
    /// number `memory`.
    pub fn new(journal: Journal, anchor: Anchor, memory: u64) -> Self {
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
            buffer: Vec::new(),
        }
    }

    /// Continues with the session of an earlier worker.
    pub fn resume_session(&mut self, client: AttachedClient, session: SessionRecord) {
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
    pub fn is_continuable(&self) -> bool {
        self.journal.is_continuable()
    }

    /// Lets no other worker continue with this session.
    pub fn give_session_up(&mut self) {
        self.session_given_up = true;
        self.journal.set_continuable(false);
    }

    /// Ends the session, if there is one.
    pub fn end_session(&mut self) {
        if self.client.take().is_some() {
            (self.session_torn, self.session_given_up) = (false, false);
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

    /// Sets whether the device is used in a way that cannot be recorded. If so, no other worker
    /// continues.
    pub fn set_blocked(&mut self, blocked: bool) {
        self.blocked = blocked;
        if blocked {
            self.journal.set_continuable(false);
        }
    }

    /// Records the state of the device and of its session.
    pub fn commit(&mut self, function: &VirtualFunction) {
        let blocked = self.blocked || self.session_given_up;
        let position = if blocked { None } else { function.position() };
        self.read_effects = function.read_effects();
        if position.is_some() && position != self.position {
            self.keep_for_client(function);
            self.position = position;
        }
        let recorded = position.is_some_and(|position| self.write(function, position));
        if recorded {
            function.recorded();
            self.anchor.recorded();
        }
        let torn = self.session_torn || self.anchor.is_lost();
        self.journal.set_continuable(recorded && !torn);
    }

    /// Passes on what a process needs that continues with the client.
    fn keep_for_client(&mut self, function: &VirtualFunction) {
        for KeptDescriptor { number, fd } in function.take_kept() {
            let key = Key::client(number);
            match fd {
                Some(fd) => {
                    self.keep(key, fd.as_fd());
                    foreign_fds::close(fd);
                }
                None => self.drop_later(key..=key),
            }
        }
    }

    fn write(&mut self, function: &VirtualFunction, position: u64) -> bool {
        let generation = Some(function.memory_generation());
        if self.memory.1 != generation {
            let number = self.memory.0.wrapping_add(1);
            let Ok(memory) = postcard::to_stdvec(&function.running_memory()) else { return false };
            if !self.journal.write(Kind::Memory, number, &memory) {
                return false;
            }
            self.memory = (number, generation);
        }
        let Self { client, session, memory: (memory, _), .. } = *self;
        let function = function.running();
        let state = State { function, position, memory, client, session };
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        let Ok(buffer) = postcard::to_extend(&state, buffer) else { return false };
        let done = self.journal.commit(&buffer);
        self.buffer = buffer;
        done
    }

    /// Records a message that was carried out. One that changed nothing and `is_repeatable` needs no
    /// record.
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
        self.journal.set_continuable(!torn && !lost);
    }
}
