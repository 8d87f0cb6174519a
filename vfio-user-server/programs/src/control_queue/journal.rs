//! State of a control queue in a journal, for a process that adopts the queue.
//!
//! Each request has its effect once. A process carries a request out, which is still in guest
//! memory, and records the state with the answer. Then it writes the answer over the request, and
//! tells the guest by a completion. A process that adopts the state before carries the
//! request out again. From the state after, it writes the answer, unless the guest's ring shows
//! that the guest knows of the answer: then the buffer is the guest's again.

use std::collections::VecDeque;

use cuda_socket::FileId;
use mdev_core::abi::queue::{Completion, Failure, completion};
use mdev_core::gpu::{Client, Pending};
use mdev_core::ids::GuestPa;
use mdev_core::mem::SharedGuestMemory;
use serde::{Deserialize, Serialize};

use super::ring::Ring;
use super::{Answer, ControlQueue, DoorbellPage};
use crate::front_end::FrontEnd;
use crate::guest_memory::FreedPages;

/// State of a control queue without its [front end](FrontEnd).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueState {
    base: u64,
    slots: u32,
    /// Submissions that were read, and completions that were written.
    indices: (u32, u32),
    last_file: u64,
    /// Kind, length and value of completions.
    backlog: Vec<(u32, u32, u64)>,
    answer: Option<Answer>,
    doorbell: DoorbellPage,
    generation: u64,
}

impl ControlQueue {
    /// Returns the state.
    pub fn state(&self) -> QueueState {
        let (base, slots) = self.ring.place();
        QueueState {
            base,
            slots,
            indices: self.ring.indices(),
            last_file: self.last_file,
            backlog: self.backlog.iter().map(|one| (one.kind, one.bytes, one.value)).collect(),
            answer: self.answer.clone(),
            doorbell: self.doorbell,
            generation: self.generation,
        }
    }

    /// Returns what has changed of the front end since the last call, if something has.
    pub fn take_changes(&mut self) -> Option<Vec<u8>> {
        self.front_end.take_changes().map(|changes| changes.bytes)
    }

    /// Returns all of the front end's state.
    pub fn all(&self) -> Vec<u8> {
        self.front_end.all().bytes
    }

    /// Adopts the queue and the programs of another process. Nothing may have used the front end.
    /// `changes` are those of the programs, in order.
    ///
    /// # Errors
    ///
    /// Fails if the state is damaged, or the guest has taken the rings away.
    pub fn adopt(
        mut front_end: Box<dyn FrontEnd>,
        changes: &[Vec<u8>],
        state: QueueState,
        memory: SharedGuestMemory,
    ) -> Result<Self, Failure> {
        front_end.set_guest(memory.clone());
        let freed = FreedPages::default();
        front_end.adopt(changes, &freed, &mut |_| None).map_err(|_| Failure::Host)?;
        let QueueState { base, slots, indices, answer, doorbell, generation, .. } = state;
        let (ring, written) =
            Ring::adopt(memory.clone(), GuestPa(base), slots, indices, state.backlog.len())?;
        let completion = |(kind, bytes, value)| Completion { kind, bytes, value, reserved: [0; 2] };
        let mut backlog: VecDeque<_> = state.backlog.into_iter().map(completion).collect();
        backlog.drain(..written);
        let events = backlog.iter().filter(|one| one.kind == completion::EVENT);
        let mut queue = Self {
            last_file: state.last_file,
            open: front_end.open_files().into_iter().collect(),
            memories: front_end.guest_pages().into_iter().collect(),
            events: events.map(|one| FileId(one.value)).collect(),
            // It may not have been written, or in part.
            answer,
            ring,
            memory,
            front_end,
            freed,
            backlog,
            doorbell,
            generation,
        };
        queue.note_completed(written);
        // What was read and is answered already.
        queue.ring.give_slots_back()?;
        Ok(queue)
    }

    /// Passes all conditions on that the process before may have taken and not passed on.
    pub fn repeat_gpu_events(&mut self, gpu: &mut dyn Client) -> Result<(), Failure> {
        self.on_gpu_event(gpu, Pending::NONSTALL | Pending::CHANNEL_ERROR)
    }
}
