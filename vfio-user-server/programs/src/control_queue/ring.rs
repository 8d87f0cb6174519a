//! Rings of submissions and completions in guest memory.

use mdev_core::abi::queue::{
    COMPLETIONS_PER_SLOT, Completion, Failure, MAX_SLOTS, MIN_SLOTS, PAGE_BYTES, SUBMISSIONS,
    Submission, index,
};
use mdev_core::ids::GuestPa;
use mdev_core::mem::{DmaAccess, SharedGuestMemory, Unreachable};
use mdev_core::units::is_aligned;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Rings of a queue.
#[derive(Debug)]
pub struct Ring {
    memory: SharedGuestMemory,
    base: u64,
    slots: u32,
    /// Submissions that were read.
    submit_head: u32,
    /// Completions that were written.
    complete_tail: u32,
}

fn ring_access(_: Unreachable) -> Failure {
    Failure::Config
}

impl Ring {
    /// Starts with empty rings at `base`.
    pub fn new(memory: SharedGuestMemory, base: GuestPa, slots: u32) -> Result<Self, Failure> {
        let ring = Self::at_indices(memory, base, slots, (0, 0))?;
        ring.store(index::SUBMIT_HEAD, 0)?;
        ring.store(index::COMPLETE_TAIL, 0)?;
        Ok(ring)
    }

    /// Adopts the rings of another process, which may have written up to `pending` more
    /// completions. Returns the number of these that it has written.
    pub fn adopt(
        memory: SharedGuestMemory,
        base: GuestPa,
        slots: u32,
        (head, tail): (u32, u32),
        pending: usize,
    ) -> Result<(Self, usize), Failure> {
        let mut ring = Self::at_indices(memory, base, slots, (head, tail))?;
        let written = ring.load(index::COMPLETE_TAIL)?.wrapping_sub(tail) as usize;
        if written > pending {
            return Err(Failure::Ring);
        }
        ring.complete_tail = tail.wrapping_add(written as u32);
        Ok((ring, written))
    }

    fn at_indices(
        memory: SharedGuestMemory,
        base: GuestPa,
        slots: u32,
        (submit_head, complete_tail): (u32, u32),
    ) -> Result<Self, Failure> {
        let valid = (MIN_SLOTS..=MAX_SLOTS).contains(&slots) && slots.is_power_of_two();
        if !valid || !is_aligned(base.0, PAGE_BYTES as u64) {
            return Err(Failure::Config);
        }
        let ring = Self { memory, base: base.0, slots, submit_head, complete_tail };
        let len = SUBMISSIONS
            + u64::from(slots) * size_of::<Submission>() as u64
            + u64::from(ring.completions()) * size_of::<Completion>() as u64;
        base.0.checked_add(len).ok_or(Failure::Config)?;
        let access = DmaAccess::READ | DmaAccess::WRITE;
        ring.memory.lock().check(base, len, access).map_err(ring_access)?;
        Ok(ring)
    }

    /// Returns base and number of slots.
    pub fn place(&self) -> (u64, u32) {
        (self.base, self.slots)
    }

    /// Returns the numbers of submissions that were read, and of completions that were written.
    pub fn indices(&self) -> (u32, u32) {
        (self.submit_head, self.complete_tail)
    }

    fn load(&self, offset: u64) -> Result<u32, Failure> {
        self.memory.lock().load_u32(self.at(offset)).map_err(ring_access)
    }

    fn store(&self, offset: u64, value: u32) -> Result<(), Failure> {
        self.memory.lock().store_u32(self.at(offset), value).map_err(ring_access)
    }

    fn at(&self, offset: u64) -> GuestPa {
        GuestPa(self.base.wrapping_add(offset))
    }

    fn completions(&self) -> u32 {
        self.slots * COMPLETIONS_PER_SLOT
    }

    fn submission(&self, index: u32) -> GuestPa {
        let slot = u64::from(index % self.slots);
        self.at(SUBMISSIONS + slot * size_of::<Submission>() as u64)
    }

    fn completion(&self, index: u32) -> GuestPa {
        let first = SUBMISSIONS + u64::from(self.slots) * size_of::<Submission>() as u64;
        let slot = u64::from(index % self.completions());
        self.at(first + slot * size_of::<Completion>() as u64)
    }

    /// Returns the next submission, if there is one. [`Self::advance`] goes on to the one after it.
    pub fn next(&self) -> Result<Option<Submission>, Failure> {
        let mut memory = self.memory.lock();
        let tail = memory.load_u32(self.at(index::SUBMIT_TAIL)).map_err(ring_access)?;
        match tail.wrapping_sub(self.submit_head) {
            0 => Ok(None),
            waiting if waiting > self.slots => Err(Failure::Ring),
            _ => {
                let mut submission = Submission::new_zeroed();
                let from = self.submission(self.submit_head);
                memory.read(from, submission.as_mut_bytes()).map_err(ring_access)?;
                Ok(Some(submission))
            }
        }
    }

    /// Goes on to the submission after the last one. Its slot is the guest's again with
    /// [`Self::give_slots_back`].
    pub fn advance(&mut self) {
        self.submit_head = self.submit_head.wrapping_add(1);
    }

    /// Gives the slots of all submissions that were read back.
    pub fn give_slots_back(&self) -> Result<(), Failure> {
        self.store(index::SUBMIT_HEAD, self.submit_head)
    }

    /// Writes as many completions as there is room for. Returns their number.
    pub fn complete<'a>(
        &mut self,
        completions: impl Iterator<Item = &'a Completion>,
    ) -> Result<usize, Failure> {
        let mut memory = self.memory.lock();
        let head = memory.load_u32(self.at(index::COMPLETE_HEAD)).map_err(ring_access)?;
        let waiting = self.complete_tail.wrapping_sub(head);
        let room = self.completions().checked_sub(waiting).ok_or(Failure::Ring)?;
        let (mut tail, mut written) = (self.complete_tail, 0);
        for completion in completions.take(room as usize) {
            memory.write(self.completion(tail), completion.as_bytes()).map_err(ring_access)?;
            tail = tail.wrapping_add(1);
            written += 1;
        }
        if written > 0 {
            memory.store_u32(self.at(index::COMPLETE_TAIL), tail).map_err(ring_access)?;
        }
        drop(memory);
        self.complete_tail = tail;
        Ok(written)
    }
}

/// Reads a structure of guest memory.
pub fn read<T: FromZeros + FromBytes + IntoBytes>(
    memory: &SharedGuestMemory,
    address: u64,
) -> Result<T, Unreachable> {
    let mut value = T::new_zeroed();
    memory.lock().read(GuestPa(address), value.as_mut_bytes())?;
    Ok(value)
}
