//! Requests of the host to checkpoint the guest's programs.

use std::os::fd::BorrowedFd;
use std::sync::Mutex;

use foreign_fds::ForeignFd;

use super::*;
use crate::abi::control::{CHECKPOINT_REASON_BYTES, CheckpointState};
use crate::abi::queue::State;
use crate::device::{ControlQueue, SaveError};
use crate::gpu::Pending;

/// A queue whose state is that of its control register.
#[derive(Debug)]
struct Queue {
    event: OwnedFd,
    state: Mutex<State>,
}

impl ControlQueue for Queue {
    fn start(&mut self, _: GuestPa, _: u32) {
        *self.state.lock().unwrap() = State::Running;
    }

    fn stop(&mut self) {
        *self.state.lock().unwrap() = State::Off;
    }

    fn notify(&mut self) {}

    fn woken(&mut self, _: bool) {}

    fn status(&self) -> (State, u32) {
        let state = *self.state.lock().unwrap();
        (state, state as u32)
    }

    fn reset(&mut self) {
        self.stop();
    }

    fn set_interrupt(&mut self, _: Option<ForeignFd>) {}

    fn event(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.event.as_fd()
    }

    fn take_pending(&mut self) -> (Pending, Pending) {
        (Pending::empty(), Pending::empty())
    }
}

impl Guest {
    /// Returns a guest whose driver has started the queue.
    fn with_queue() -> Self {
        let mut guest = Self::with(false);
        let queue = Queue { event: event().1, state: Mutex::new(State::Off) };
        guest.function.add_queue(Box::new(queue));
        guest.write32(CONTROL, reg::QUEUE_CONTROL, 1);
        guest.write32(CONTROL, reg::INTR_ENABLE, Pending::QUEUE.bits());
        guest
    }

    fn answer(&mut self, state: CheckpointState) {
        self.write32(CONTROL, reg::CHECKPOINT_STATE, state as u32);
    }

    fn asked(&mut self) -> u32 {
        self.read32(CONTROL, reg::CHECKPOINT_REQUEST)
    }
}

#[test]
fn a_guest_without_an_agent_refuses_unless_its_queue_is_off() {
    let mut guest = Guest::with_queue();
    assert!(matches!(guest.function.checkpoint(), Err(SaveError::NoAgent)));
    assert_eq!(guest.asked(), 0, "nothing is asked");
    guest.write32(CONTROL, reg::QUEUE_CONTROL, 0);
    assert!(guest.function.checkpoint().unwrap());
}

#[test]
fn an_agent_is_asked_until_the_queue_is_off_and_told_of_the_end() {
    let mut guest = Guest::with_queue();
    let (interrupt, fd) = event();
    guest.set_triggers(IrqIndex::Msi, vec![Some(fd)]);
    guest.write16(CONFIG, 0x4a, 1);
    guest.answer(CheckpointState::Ready);
    for _ in 0..3 {
        assert!(!guest.function.checkpoint().unwrap());
    }
    assert_eq!((guest.asked() & 1, signals(&interrupt)), (1, 1), "asked once");
    assert!(matches!(guest.function.check_saveable(), Err(SaveError::Programs)));
    guest.answer(CheckpointState::Done);
    assert!(!guest.function.checkpoint().unwrap(), "programs can still use it");
    guest.write32(CONTROL, reg::QUEUE_CONTROL, 0);
    assert!(guest.function.checkpoint().unwrap());
    guest.write32(VRAM, 0x2000, 7);
    guest.function.pause().unwrap();
    assert_eq!(guest.read32(VRAM, 0x2000), 0, "what programs have left is not saved");
    let saved = guest.function.save_vgpu().unwrap();
    let warned = guest.function.warnings().concat();
    assert!(warned.contains("CUDA programs are checkpointed"), "{warned}");
    let before = guest.asked();
    guest.function.resume().unwrap();
    guest.function.resume().unwrap();
    assert_eq!(guest.asked(), before + 1, "told once");
    assert!(!guest.function.warnings().concat().contains("checkpointed"));

    // An answer to an earlier request is none to the next.
    assert!(!guest.function.checkpoint().unwrap());
    // A restored vGPU has no request: its guest restores the programs.
    guest.function.restore_vgpu(&saved).unwrap();
    assert_eq!(guest.asked(), 0);
}

#[test]
fn a_refusal_comes_with_its_reason_and_ends_with_the_request() {
    let mut guest = Guest::with_queue();
    guest.answer(CheckpointState::Ready);
    assert!(!guest.function.checkpoint().unwrap());
    for word in "process 7: \u{1b}no".as_bytes().chunks(4) {
        let mut bytes = [0; 4];
        bytes[..word.len()].copy_from_slice(word);
        guest.write32(CONTROL, reg::CHECKPOINT_REASON, u32::from_le_bytes(bytes));
    }
    guest.answer(CheckpointState::Refused);
    let refused = guest.function.checkpoint().unwrap_err().to_string();
    assert!(refused.ends_with(": process 7: \u{1b}no"), "{refused}");
    assert_eq!(guest.asked() & 1, 0, "the request has ended");
    assert!(!guest.function.checkpoint().unwrap(), "asked anew");

    // A guest that goes on and on.
    (0..1000).for_each(|_| guest.write32(CONTROL, reg::CHECKPOINT_REASON, 0x4141_4141));
    guest.answer(CheckpointState::Refused);
    let Err(SaveError::Refused(reason)) = guest.function.checkpoint() else { panic!() };
    assert_eq!(reason.len(), CHECKPOINT_REASON_BYTES);
}
