//! Control queue: CUDA programs in a VM. Requests of a driver in the guest become calls of a
//! [`FrontEnd`], which is the same as for programs of the host.
//!
//! Everything in guest memory is read once and checked. What a guest does wrong costs its own vGPU:
//! an invalid request is answered with an error, and an invalid ring or buffer stops the queue.
//!
//! * `ring`: submissions and completions; `buffer`: of a request
//! * [`journal`]: state for a process that adopts the queue
//! * `messages`: requests and replies; `memory_list`: pages that come with them

mod buffer;
pub mod journal;
mod memory_list;
mod messages;
mod ring;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use cuda_socket::{FileId, MapRequest, Node};
use mdev_core::abi::queue::{
    self, Completion, DONE, Failure, MAX_BYTES, Request, Submission, completion, mapped, op,
};
use mdev_core::gpu::{Client, Pending};
use mdev_core::ids::GuestPa;
use mdev_core::mem::SharedGuestMemory;
use nix::errno::Errno;
use serde::{Deserialize, Serialize};
use zerocopy::FromBytes;

use self::buffer::Buffer;
use self::ring::Ring;
use crate::front_end::{FrontEnd, GuestOutcome, Mapped, Opener};
use crate::guest_memory::{FreedPages, GivenMemory};

/// Maximum number of ranges of all memories.
const MAX_RANGES: usize = 1 << 20;

/// Page of doorbells, which programs ring without a look whether the engine sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum DoorbellPage {
    /// Programs have the page.
    Given,
    /// The guest was asked to withdraw it.
    Asked,
    /// No program has it: the next access wakes the engine.
    Withdrawn,
}

/// Answer to a request. It replaces the request in guest memory, so it is written once the request
/// will not be carried out again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Answer {
    buffer: Buffer,
    #[serde(with = "serde_bytes")]
    reply: Vec<u8>,
    /// Number of completions that tell the guest of the answer, or earlier ones.
    completions: usize,
    /// It is in guest memory.
    #[serde(skip)]
    written: bool,
}

/// A running control queue.
#[derive(Debug)]
pub struct ControlQueue {
    memory: SharedGuestMemory,
    front_end: Box<dyn FrontEnd>,
    ring: Ring,
    last_file: u64,
    open: BTreeSet<FileId>,
    /// Memories of the guest that are in use, with their numbers of ranges.
    memories: BTreeMap<u64, usize>,
    freed: FreedPages,
    /// Completions for which there was no room yet.
    backlog: VecDeque<Completion>,
    /// Answer to the last request, until the guest knows of it.
    answer: Option<Answer>,
    /// Files with an event that is in `backlog`.
    events: BTreeSet<FileId>,
    doorbell: DoorbellPage,
    generation: u64,
}

impl ControlQueue {
    /// Starts a queue at `base`, with a front end that nothing has used.
    pub fn start(
        mut front_end: Box<dyn FrontEnd>,
        memory: SharedGuestMemory,
        base: GuestPa,
        slots: u32,
    ) -> Result<Self, Failure> {
        front_end.set_guest(memory.clone());
        Ok(Self {
            ring: Ring::new(memory.clone(), base, slots)?,
            memory,
            front_end,
            last_file: 0,
            open: BTreeSet::new(),
            memories: BTreeMap::new(),
            freed: FreedPages::default(),
            backlog: VecDeque::new(),
            answer: None,
            events: BTreeSet::new(),
            doorbell: DoorbellPage::Given,
            generation: 0,
        })
    }

    /// Returns whether there is a submission.
    pub fn has_work(&self) -> Result<bool, Failure> {
        self.ring.next().map(|next| next.is_some())
    }

    /// Prepares the service of requests: programs see how much of the engine the vGPU uses.
    pub fn update_utilization(&mut self, gpu: &mut dyn Client) {
        self.front_end.update_utilization(gpu);
    }

    /// Carries out a request, if there is one. Returns whether there was one. [`Self::flush`] tells
    /// the guest of the answer: until then, the request is in guest memory.
    pub fn serve(&mut self, gpu: &mut dyn Client) -> Result<bool, Failure> {
        self.write_answer()?;
        let Some(submission) = self.ring.next()? else { return Ok(false) };
        let (buffer, request) = Buffer::open(&self.memory, &submission)?;
        self.ring.advance();
        let reply = self.answer(gpu, &request, buffer.capacity());
        // What a program relies on after its request comes before the completion.
        self.note_freed(&BTreeSet::new());
        let Submission { cookie, .. } = submission;
        self.push(completion::DONE, cookie, reply.len() as u32);
        let completions = self.backlog.len();
        self.answer = Some(Answer { buffer, reply, completions, written: false });
        Ok(true)
    }

    /// Writes the answer to the last request, and gives its slot back.
    fn write_answer(&mut self) -> Result<(), Failure> {
        if let Some(answer) = &mut self.answer
            && !answer.written
        {
            answer.buffer.write(&self.memory, &answer.reply)?;
            self.ring.give_slots_back()?;
            answer.written = true;
        }
        Ok(())
    }

    fn push(&mut self, kind: u32, value: u64, bytes: u32) {
        self.backlog.push_back(Completion { kind, bytes, value, reserved: [0; 2] });
    }

    /// Writes the answer to the last request, and completions as there is room. Returns whether
    /// there are new ones for the guest.
    pub fn flush(&mut self) -> Result<bool, Failure> {
        self.write_answer()?;
        if self.backlog.is_empty() {
            return Ok(false);
        }
        let written = self.ring.complete(self.backlog.iter())?;
        for completion in self.backlog.drain(..written) {
            if completion.kind == completion::EVENT {
                self.events.remove(&FileId(completion.value));
            }
        }
        self.note_completed(written);
        Ok(written > 0)
    }

    /// Notes that the guest knows of so many completions more.
    fn note_completed(&mut self, count: usize) {
        if let Some(answer) = &mut self.answer {
            answer.completions = answer.completions.saturating_sub(count);
            if answer.completions == 0 {
                self.answer = None;
            }
        }
    }

    /// Returns whether completions wait for room.
    pub fn is_blocked(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// Tells the guest which memories are no longer used, except for those that it is to give
    /// again.
    fn note_freed(&mut self, again: &BTreeSet<u64>) {
        for id in self.freed.take() {
            self.memories.remove(&id);
            if !again.contains(&id) {
                self.push(completion::MEMORY, id, 0);
            }
        }
    }

    fn answer(&mut self, gpu: &mut dyn Client, request: &[u8], capacity: usize) -> Vec<u8> {
        let answered = match Request::read_from_prefix(request) {
            Ok((Request { reserved: 0, opcode, file }, _)) => {
                let file = FileId(file);
                match opcode {
                    op::HELLO => messages::welcome(&self.front_end.welcome(), capacity)
                        .filter(|_| request.len() == size_of::<Request>())
                        .ok_or(Errno::EINVAL),
                    op::OPEN => self.open(request),
                    op::CLOSE => self.close(gpu, file),
                    op::IOCTL => self.ioctl(gpu, request, capacity),
                    op::MAP => self.map(file, request),
                    op::WITHDRAWN => self.withdrawn(request),
                    _ => Err(Errno::ENOSYS),
                }
            }
            _ => Err(Errno::EINVAL),
        };
        answered.unwrap_or_else(|errno| messages::reply(&messages::result(Err(errno))))
    }

    fn open(&mut self, request: &[u8]) -> Result<Vec<u8>, Errno> {
        let request: queue::Open = messages::exact(request)?;
        let process = i32::try_from(request.process).map_err(|_| Errno::EINVAL)?;
        let file = FileId(self.last_file + 1);
        let opener = Opener::new(process, request.user.checked_sub(1));
        self.front_end.open(file, messages::node_of(&request)?, opener)?;
        self.last_file = file.0;
        self.open.insert(file);
        let reply = messages::result(Ok(()));
        Ok(messages::reply(&queue::Opened { reply, file: file.0 }))
    }

    fn close(&mut self, gpu: &mut dyn Client, file: FileId) -> Result<Vec<u8>, Errno> {
        if !self.open.remove(&file) {
            return Err(Errno::EBADF);
        }
        self.front_end.close(gpu, file);
        Ok(messages::reply(&messages::result(Ok(()))))
    }

    fn ioctl(
        &mut self,
        gpu: &mut dyn Client,
        request: &[u8],
        capacity: usize,
    ) -> Result<Vec<u8>, Errno> {
        if capacity < MAX_BYTES {
            return Err(Errno::EINVAL);
        }
        let (request, specs) = messages::ioctl(request)?;
        let given = self.take_memories(&specs)?;
        let ids: BTreeSet<_> = given.iter().map(|one| one.pages.id()).collect();
        match self.front_end.guest_ioctl(gpu, &request, given) {
            GuestOutcome::Fetch(fetch) => {
                self.note_freed(&ids);
                Ok(messages::fetch(&fetch, None))
            }
            GuestOutcome::Allocate(len) => {
                self.note_freed(&ids);
                Ok(messages::fetch(&cuda_socket::Fetch::default(), Some(len)))
            }
            GuestOutcome::Done(done, memory) => messages::done(&done, &memory, capacity)
                .ok_or_else(|| {
                    log::warn!("The result of ioctl {:#x} has no room", request.request);
                    Errno::EIO
                }),
        }
    }

    /// Takes the memories of a request. If one is invalid, the guest gets all of them back.
    fn take_memories(&mut self, specs: &[queue::Memory]) -> Result<Vec<GivenMemory>, Errno> {
        let mut given = Vec::new();
        let mut result = Ok(());
        for spec in specs {
            if spec.id == 0 || spec.reserved != 0 || self.memories.contains_key(&spec.id) {
                result = result.and(Err(Errno::EINVAL));
                continue;
            }
            let used: usize = self.memories.values().sum();
            match memory_list::read(&self.memory, spec, &self.freed) {
                Ok(one) if used + one.pages.ranges_count() <= MAX_RANGES => {
                    self.memories.insert(spec.id, one.pages.ranges_count());
                    given.push(one);
                }
                Ok(_) => result = result.and(Err(Errno::ENOMEM)),
                Err(errno) => {
                    self.push(completion::MEMORY, spec.id, 0);
                    result = result.and(Err(errno));
                }
            }
        }
        result.map(|()| given)
    }

    fn map(&mut self, file: FileId, request: &[u8]) -> Result<Vec<u8>, Errno> {
        let request: queue::Map = messages::exact(request)?;
        let writable = request.flags & queue::MAP_WRITABLE != 0;
        let (len, offset) = (request.length, request.offset);
        let found = self.front_end.map(&MapRequest { file, len, offset, writable });
        let is_uvm = self.front_end.node(file) == Some(Node::Uvm);
        let (kind, memory) = match found {
            Ok(Mapped::Doorbell) => (mapped::DOORBELL, 0),
            Ok(Mapped::Guest(id)) => (mapped::MEMORY, id),
            Ok(Mapped::File(..)) => return Err(Errno::EIO),
            // An address range, which gets memory later.
            Err(Errno::EINVAL) if is_uvm => (mapped::EMPTY, 0),
            Err(errno) => return Err(errno),
        };
        let reply = messages::result(Ok(()));
        Ok(messages::reply(&queue::Mapped { reply, kind, reserved: 0, memory, offset: 0 }))
    }

    /// Passes conditions of the GPU to the programs that wait for events.
    pub fn on_gpu_event(&mut self, gpu: &mut dyn Client, pending: Pending) -> Result<(), Failure> {
        if pending.contains(Pending::DEVICE_LOST) {
            return Err(Failure::Lost);
        }
        if pending.is_empty() || self.open.is_empty() {
            return Ok(());
        }
        for file in self.front_end.on_gpu_event(gpu, pending) {
            if self.events.insert(file) {
                self.push(completion::EVENT, file.0, 0);
            }
        }
        Ok(())
    }

    /// Asks the guest to withdraw the doorbell page from programs, unless it was asked already.
    pub fn withdraw_doorbell(&mut self) {
        if self.doorbell == DoorbellPage::Given && !self.open.is_empty() {
            self.doorbell = DoorbellPage::Asked;
            self.generation += 1;
            self.push(completion::WITHDRAW, self.generation, 0);
        }
    }

    /// Returns whether a program can have the doorbell page.
    pub fn is_doorbell_given(&self) -> bool {
        self.doorbell != DoorbellPage::Withdrawn && !self.open.is_empty()
    }

    /// Notes that a program has the doorbell page again. An earlier request to withdraw it is void.
    pub fn on_woken(&mut self) {
        self.doorbell = DoorbellPage::Given;
    }

    fn withdrawn(&mut self, request: &[u8]) -> Result<Vec<u8>, Errno> {
        let request: queue::Withdrawn = messages::exact(request)?;
        if self.doorbell == DoorbellPage::Asked && request.generation == self.generation {
            self.doorbell = DoorbellPage::Withdrawn;
        }
        Ok(messages::reply(&messages::result(Ok(()))))
    }

    /// Closes all files.
    pub fn stop(mut self, gpu: &mut dyn Client) {
        for file in std::mem::take(&mut self.open) {
            self.front_end.close(gpu, file);
        }
    }

    /// Returns the video memory that programs have allocated, in bytes, and that of each process,
    /// while a program has a file open.
    pub fn video_bytes(&self) -> Option<(u64, BTreeMap<i32, u64>)> {
        let total = self.front_end.used_video_bytes();
        (!self.open.is_empty()).then(|| (total, self.front_end.video_bytes_by_process()))
    }

    /// Returns a process that has allocated managed memory.
    pub fn process_with_managed(&self) -> Option<i32> {
        self.front_end.process_with_managed()
    }

    /// Returns the number of open files, and of memories in use.
    pub fn counts(&self) -> (usize, usize) {
        (self.open.len(), self.memories.len())
    }
}

const _: () = assert!(DONE == 0);
