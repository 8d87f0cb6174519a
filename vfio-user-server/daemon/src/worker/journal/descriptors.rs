//! Descriptors that the anchor keeps for the adopting worker.
//!
//! The worker has a socket to its anchor. It sends each descriptor before it records a state that
//! needs it, and drops one after it has recorded a state that does not.

use std::collections::BTreeMap;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use foreign_fds::ForeignFd;
use ipc::seqpacket::SeqPacket;
use mdev_core::device::Descriptor;
use mdev_core::gpu::AnchoredDescriptor;
use pci_registers::interrupts::IrqEvent;

/// Limit of kept descriptors. A vGPU has either a VM, with its memory, or programs.
pub const MAX_DESCRIPTORS: usize = mdev_core::mem::MAX_MAPS + 64 + MAX_OF_CLIENT;
/// Limit of descriptors of the host's programs: connections, open files and memory.
pub const MAX_OF_PROGRAMS: usize = mdev_core::mem::MAX_MAPS;
/// Descriptors of a client of the GPU: of each channel, and of guest memory that it has imported.
const MAX_OF_CLIENT: usize = 1024 + 256;

/// Name of a kept descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key(u64);

/// Bit at which the kind of a key begins. Guest-physical pages have fewer bits.
const KIND: u32 = 56;

impl Key {
    /// Connection of the VM.
    pub const SESSION: Self = Self(1 << KIND);

    /// Returns the key of a client's eventfd.
    pub const fn event(event: IrqEvent) -> Self {
        let number = match event {
            IrqEvent::Intx => 0,
            IrqEvent::Unmask => 1,
            IrqEvent::Msi(vector) => 2 + vector as u64,
        };
        Self(2 << KIND | number)
    }

    /// Returns the key of the guest memory at an address.
    pub const fn memory(address: u64) -> Self {
        Self(3 << KIND | address >> 12)
    }

    /// Returns the key of a descriptor of the device.
    pub const fn of(what: Descriptor) -> Self {
        match what {
            Descriptor::Memory(address) => Self::memory(address.0),
            Descriptor::Event(event) => Self::event(event),
        }
    }

    /// Returns the key of a connection of the manager.
    pub const fn control(number: u32) -> Self {
        Self(4 << KIND | number as u64)
    }

    /// Returns the number of a connection of the manager.
    pub const fn control_number(self) -> Option<u32> {
        self.number_of(4)
    }

    /// Program of the next worker, from the manager to the anchor.
    pub const PROGRAM: Self = Self(5 << KIND);

    /// Returns the key of a descriptor of the GPU's client, by its number.
    pub const fn client(number: u64) -> Self {
        Self(6 << KIND | number & ((1 << KIND) - 1))
    }

    /// Records of the control queue's thread.
    pub const QUEUE: Self = Self(7 << KIND);

    /// Records of the host's programs.
    pub const PROGRAMS: Self = Self(8 << KIND);

    /// Returns the key of the connection of a program of the host.
    pub const fn connection(number: u32) -> Self {
        Self(9 << KIND | number as u64)
    }

    /// Returns the key of an open file of a program of the host.
    pub const fn file(number: u32) -> Self {
        Self(10 << KIND | number as u64)
    }

    /// Returns the key of a file of memory of the host's programs.
    pub const fn program_memory(number: u32) -> Self {
        Self(11 << KIND | number as u64)
    }

    /// Returns the key of a descriptor of the last reply to a program of the host.
    pub const fn of_reply(index: usize) -> Self {
        Self(12 << KIND | index as u64)
    }

    /// Socket whose other end shows when the anchor has closed what has lower keys.
    pub const PROBE: Self = Self((13 << KIND) - 1);
    /// Keys of the last reply to a program of the host, and the probe.
    pub const OF_REPLY: RangeInclusive<Self> = Self(12 << KIND)..=Self::PROBE;

    /// Returns the number in a key of one kind.
    const fn number_of(self, kind: u64) -> Option<u32> {
        if self.0 >> KIND == kind { Some(self.0 as u32) } else { None }
    }

    /// Keys of all guest memory.
    pub const ALL_MEMORY: RangeInclusive<Self> = Self(3 << KIND)..=Self((4 << KIND) - 1);
    /// Keys of everything that belongs to a VM.
    pub const OF_VM: RangeInclusive<Self> = Self(1 << KIND)..=Self((4 << KIND) - 1);
}

/// Message between a worker and its anchor, or between a manager and an anchor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// The attached descriptor has this key.
    Keep(Key),
    /// To the anchor: the descriptors with these keys are not needed. To the worker: all were sent,
    /// if the range is empty.
    Drop(Key, Key),
}

impl Message {
    /// Tells the worker that it has all descriptors.
    pub const END: Self = Self::Drop(Key(1), Key(0));
    /// Tells the anchor, or the manager, that the worker works.
    pub const WORKS: Self = Self::Drop(Key(2), Key(0));
    /// Tells the manager that no worker of its program has begun to work.
    pub const FAILED: Self = Self::Drop(Key::PROGRAM, Key::PROGRAM);
    /// Length in bytes.
    pub const BYTES: usize = 16;

    /// Returns the bytes of the message.
    pub fn encode(self) -> [u8; Self::BYTES] {
        let (first, last) = match self {
            Self::Keep(key) => (key.0, u64::MAX),
            Self::Drop(first, last) => (first.0, last.0),
        };
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&first.to_le_bytes());
        bytes[8..].copy_from_slice(&last.to_le_bytes());
        bytes
    }

    /// Returns the message in a packet.
    pub fn decode(packet: &[u8]) -> Option<Self> {
        let (first, last) = packet.split_first_chunk()?;
        let key = Key(u64::from_le_bytes(*first));
        Some(match u64::from_le_bytes(last.try_into().ok()?) {
            u64::MAX => Self::Keep(key),
            last => Self::Drop(key, Key(last)),
        })
    }
}

/// Descriptors by key.
#[derive(Debug, Default)]
pub struct Descriptors(BTreeMap<Key, ForeignFd>);

impl Descriptors {
    /// Carries out a worker's message. Returns false if it is not allowed.
    pub fn apply(&mut self, message: Message, fd: Option<ForeignFd>) -> bool {
        match (message, fd) {
            (Message::Keep(key), Some(fd)) => {
                let has_room = self.0.len() < MAX_DESCRIPTORS || self.0.contains_key(&key);
                if has_room {
                    self.0.insert(key, fd);
                }
                has_room
            }
            (Message::Drop(first, last), None) => {
                self.0.retain(|key, _| !(first..=last).contains(key));
                true
            }
            _ => false,
        }
    }

    /// Sends all descriptors to a new worker.
    pub fn send(&self, socket: &SeqPacket) -> io::Result<()> {
        for (key, fd) in &self.0 {
            socket.send(&Message::Keep(*key).encode(), &[fd.as_fd()])?;
        }
        socket.send(&Message::END.encode(), &[])
    }

    /// Receives all descriptors from the anchor.
    pub fn receive(socket: &SeqPacket) -> io::Result<Self> {
        let mut kept = Self::default();
        let mut buffer = [0; Message::BYTES];
        loop {
            let packet = socket.recv_with_fds(&mut buffer)?.ok_or(io::ErrorKind::UnexpectedEof)?;
            let message = Message::decode(&buffer[..packet.len]);
            let message = message.ok_or(io::ErrorKind::InvalidData)?;
            if message == Message::END {
                return Ok(kept);
            }
            if !kept.apply(message, packet.fds.into_iter().next()) {
                return Err(io::ErrorKind::InvalidData.into());
            }
        }
    }

    /// Takes a descriptor, to use it as what the key says.
    pub fn take(&mut self, key: Key) -> Option<OwnedFd> {
        self.0.remove(&key).map(ForeignFd::into_trusted)
    }

    fn take_where(&mut self, is_taken: impl Fn(Key) -> bool) -> Vec<(Key, OwnedFd)> {
        let keys: Vec<Key> = self.keys().filter(|key| is_taken(*key)).collect();
        keys.into_iter().filter_map(|key| Some((key, self.take(key)?))).collect()
    }

    /// Takes the connections of the manager, with their numbers.
    pub fn take_control(&mut self) -> Vec<(u32, OwnedFd)> {
        let control = self.take_where(|key| key.control_number().is_some());
        control.into_iter().filter_map(|(key, fd)| Some((key.control_number()?, fd))).collect()
    }

    /// Takes what the host's programs have.
    pub fn take_programs(&mut self) -> ProgramDescriptors {
        let mut take = |kind| -> BTreeMap<u32, OwnedFd> {
            let found = self.take_where(|key| key.number_of(kind).is_some());
            found.into_iter().filter_map(|(key, fd)| Some((key.number_of(kind)?, fd))).collect()
        };
        let (connections, files, memory) = (take(9), take(10), take(11));
        let reply = take(12).into_values().collect();
        ProgramDescriptors { connections, files, memory, reply }
    }

    /// Returns the keys.
    pub fn keys(&self) -> impl Iterator<Item = Key> {
        self.0.keys().copied()
    }
}

/// Descriptors of the host's programs, by their numbers.
#[derive(Debug, Default)]
pub struct ProgramDescriptors {
    /// Connections.
    pub connections: BTreeMap<u32, OwnedFd>,
    /// Open files.
    pub files: BTreeMap<u32, OwnedFd>,
    /// Memory.
    pub memory: BTreeMap<u32, OwnedFd>,
    /// Descriptors of the last reply, in order.
    pub reply: Vec<OwnedFd>,
}

impl ProgramDescriptors {
    /// Returns the keys, except for those of the reply.
    pub fn keys(&self) -> impl Iterator<Item = Key> {
        let connections = self.connections.keys().map(|number| Key::connection(*number));
        let files = self.files.keys().map(|number| Key::file(*number));
        let memory = self.memory.keys().map(|number| Key::program_memory(*number));
        connections.chain(files).chain(memory)
    }
}

/// A worker's socket to its anchor.
#[derive(Debug)]
pub struct Anchor {
    socket: Arc<SeqPacket>,
    /// Keys to drop once the next state is recorded.
    dropped: Vec<(Key, Key)>,
    is_lost: bool,
}

impl Anchor {
    /// Wraps the socket.
    pub fn new(socket: SeqPacket) -> Self {
        Self { socket: Arc::new(socket), dropped: Vec::new(), is_lost: false }
    }

    /// Returns the socket for another recorder, whose states are others.
    #[must_use]
    pub fn share(&self) -> Self {
        Self { socket: self.socket.clone(), dropped: Vec::new(), is_lost: self.is_lost }
    }

    /// Passes a descriptor on before a state needs it.
    pub fn keep(&mut self, key: Key, fd: BorrowedFd<'_>) {
        self.send(Message::Keep(key), &[fd]);
    }

    /// Passes on what the client of the GPU keeps, and drops later what it needs no longer.
    ///
    /// An NVIDIA client has a file for each of its channels. Closing its own files, eventfds and
    /// memory never waits, so they do not count as files that cannot be closed.
    pub fn keep_for_client(&mut self, kept: Vec<AnchoredDescriptor>) {
        for AnchoredDescriptor { number, fd } in kept {
            let key = Key::client(number);
            match fd {
                Some(fd) => self.keep(key, fd.as_fd()),
                None => self.drop_later(key..=key),
            }
        }
    }

    /// Drops descriptors once the next state is recorded.
    pub fn drop_later(&mut self, keys: RangeInclusive<Key>) {
        self.dropped.push((*keys.start(), *keys.end()));
    }

    /// Does not drop the descriptor with a key once the next state is recorded: it is another one.
    pub fn cancel_drop(&mut self, key: Key) {
        self.dropped.retain(|keys| *keys != (key, key));
    }

    /// Drops descriptors that no state needs.
    pub fn drop_now(&mut self, keys: RangeInclusive<Key>) {
        self.send(Message::Drop(*keys.start(), *keys.end()), &[]);
    }

    /// Notes that a state was recorded.
    pub fn recorded(&mut self) {
        for (first, last) in std::mem::take(&mut self.dropped) {
            self.send(Message::Drop(first, last), &[]);
        }
    }

    /// Tells the anchor that the worker works.
    pub fn works(&mut self) {
        self.send(Message::WORKS, &[]);
    }

    /// Returns true if the anchor does not have all descriptors.
    pub fn is_lost(&self) -> bool {
        self.is_lost
    }

    fn send(&mut self, message: Message, fds: &[BorrowedFd<'_>]) {
        if let Err(error) = self.socket.send(&message.encode(), fds)
            && !std::mem::replace(&mut self.is_lost, true)
        {
            log::error!(
                "The anchor cannot keep a descriptor, so no other worker can continue: {error}"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn descriptors_are_kept_until_they_are_dropped() {
        let mut kept = Descriptors::default();
        let memory = [Key::memory(0), Key::memory(u64::MAX)];
        let event = Key::event(IrqEvent::Msi(3));
        for key in [Key::SESSION, event, memory[0], memory[1], Key::control(u32::MAX)] {
            assert!(kept.apply(Message::Keep(key), Some(file().into())));
        }
        assert!(!kept.apply(Message::Keep(event), None), "without a descriptor");
        assert!(kept.apply(Message::Drop(memory[0], memory[0]), None));
        assert!(kept.take(event).is_some());
        assert!(kept.take(memory[0]).is_none());
        let (first, last) = Key::OF_VM.into_inner();
        assert!(kept.apply(Message::Drop(last, first), None), "an empty range");
        assert!(kept.apply(Message::Drop(first, last), None));
        assert_eq!(kept.keys().collect::<Vec<_>>(), [Key::control(u32::MAX)]);
        assert_eq!(kept.take_control().len(), 1);
    }

    #[test]
    fn what_programs_have_is_taken_by_its_kind() {
        let mut kept = Descriptors::default();
        let keys = [
            Key::connection(7),
            Key::file(7),
            Key::program_memory(u32::MAX),
            Key::of_reply(0),
            Key::of_reply(1),
            Key::PROGRAMS,
        ];
        for key in keys {
            assert!(kept.apply(Message::Keep(key), Some(file().into())));
        }
        let programs = kept.take_programs();
        assert_eq!(programs.connections.keys().collect::<Vec<_>>(), [&7]);
        assert_eq!(programs.files.len(), 1);
        assert_eq!(programs.memory.keys().collect::<Vec<_>>(), [&u32::MAX]);
        assert_eq!(programs.reply.len(), 2);
        assert_eq!(kept.keys().collect::<Vec<_>>(), [Key::PROGRAMS]);
        assert!(Key::OF_REPLY.contains(&Key::of_reply(9)) && Key::of_reply(9) < Key::PROBE);
    }

    #[test]
    fn a_new_worker_gets_all_descriptors() {
        let mut kept = Descriptors::default();
        for number in 0..200 {
            assert!(kept.apply(Message::Keep(Key::memory(number << 12)), Some(file().into())));
        }
        let (anchor, worker) = SeqPacket::pair().unwrap();
        let sent = std::thread::spawn(move || kept.send(&anchor));
        assert_eq!(Descriptors::receive(&worker).unwrap().keys().count(), 200);
        sent.join().unwrap().unwrap();
    }

    #[test]
    fn files_of_a_client_do_not_count_as_files_that_cannot_be_closed() {
        let (socket, other) = SeqPacket::pair().unwrap();
        let anchor = std::thread::spawn(move || Descriptors::receive(&other));
        let mut worker = Anchor::new(socket);
        let kept = |number| AnchoredDescriptor { number, fd: Some(file()) };
        worker.keep_for_client((0..1000).map(kept).collect());
        assert!(!foreign_fds::is_exhausted(), "a VM would be refused");
        worker.send(Message::END, &[]);
        assert_eq!(anchor.join().unwrap().unwrap().keys().count(), 1000);
    }

    #[test]
    fn messages_are_read_as_they_were_written() {
        for message in [
            Message::Keep(Key::SESSION),
            Message::Drop(Key::SESSION, Key::memory(7 << 12)),
            Message::END,
        ] {
            assert_eq!(Message::decode(&message.encode()), Some(message));
        }
        for len in [0, 8, 15, 17] {
            assert_eq!(Message::decode(&vec![1; len]), None);
        }
    }
}
